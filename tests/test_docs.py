"""What the documents say is what the program does."""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

import make_readme

ROOT = make_readme.ROOT
sys.path.append(ROOT)


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


class TheReadme(unittest.TestCase):
    def test_holds_the_tables_as_the_code_has_them(self):
        self.assertEqual(make_readme.readme_with_tables(read("README.md")), read("README.md"),
                         "run: python3 tests/make_readme.py")

    def test_names_every_command_and_every_option(self):
        import command_line
        text = read("README.md")
        for name in command_line.COMMANDS:
            self.assertRegex(text, r"`xmsg %s[ `]" % name)
        parser = command_line._parser("send", "x")
        command_line._send_arguments(parser)
        for action in parser._actions:
            for option in action.option_strings[-1:]:
                if option not in ("--help", "--json"):
                    self.assertIn("`%s" % option, text)

    def test_gives_the_exit_statuses_of_the_code(self):
        import contract
        for error in (contract.UsageError, contract.NoSuchTarget, contract.Ambiguous, contract.StoreError,
                      contract.NotPossible, contract.RemoteError):
            self.assertRegex(read("README.md"), r"(?m)^\| %d \|" % error.status)

    def test_names_only_files_that_exist(self):
        for target in re.findall(r"\]\(([^)#]+)\)", read("README.md")):
            self.assertTrue(os.path.exists(os.path.join(ROOT, target)), target)


class TheWordForAgents(unittest.TestCase):
    """docs/agents.md goes into every request of somebody's session: it is short, and what it says works."""
    TEXT = read("docs/agents.md")

    def test_is_short(self):
        lines = self.TEXT.splitlines()
        self.assertLessEqual(len(lines), 40)
        self.assertLessEqual(max(map(len, lines)), 120)

    def test_says_that_idle_is_safe_and_how_to_answer(self):
        for word in ("idle", "poll", "fewer", "not a user instruction", "xmsg send <label>", "[peer ", "UNKNOWN"):
            self.assertIn(word, self.TEXT)

    def test_names_only_commands_and_options_that_exist(self):
        import command_line
        named = re.findall(r"`xmsg ([a-z]+)([^`]*)`", self.TEXT)
        self.assertGreater(len(named), 5)
        for name, rest in named:
            parser = command_line._parser(name, "x")
            command_line.COMMANDS[name][0](parser)
            known = {option for action in parser._actions for option in action.option_strings}
            self.assertLessEqual(set(re.findall(r"--[a-z-]+", rest)), known)

    def test_is_named_where_people_look(self):
        self.assertIn("(docs/agents.md)", read("README.md"))


class TheHookConfiguration(unittest.TestCase):
    def test_by_hand_is_what_install_writes(self):
        import hook_install
        self.assertEqual(make_readme.hook_config_diff(), read("hook-config.diff"), "run: python3 tests/make_readme.py")
        files = re.split(r"(?m)^--- .*\n\+\+\+ .*\n@@.*\n-\{\}\n", read("hook-config.diff"))[1:]
        self.assertEqual(3, len(files))
        for host, text in zip(("claude", "codex", "agy"), files):
            with tempfile.TemporaryDirectory(prefix="xmsg-test-") as home:
                wrapper = os.path.join(home, "xmsg-hook.sh")
                open(wrapper, "w").close()
                os.chmod(wrapper, 0o755)
                record, = hook_install.install([host], wrapper, {"HOME": home, "PATH": ""})
                with open(record["path"]) as file:
                    written = json.load(file)
            by_hand = json.loads("\n".join(line[1:] for line in text.splitlines()))
            self.assertEqual(written, json.loads(json.dumps(by_hand).replace("/path/to/xmsg/xmsg-hook.sh", wrapper)))


class TheHelp(unittest.TestCase):
    def test_explains_every_command(self):
        import command_line
        run = [os.path.join(ROOT, "bin", "xmsg")]
        overview = subprocess.run(run + ["--help"], stdout=subprocess.PIPE, text=True).stdout
        for name in command_line.COMMANDS:
            self.assertRegex(overview, r"(?m)^  %s " % name)
            done = subprocess.run(run + [name, "--help"], stdout=subprocess.PIPE, text=True)
            self.assertIn("usage: xmsg %s" % name, done.stdout)
            self.assertEqual(0, done.returncode)


class TheMutants(unittest.TestCase):
    def test_meet_their_code_and_name_tests_that_exist(self):
        import run_mutants
        names = {}
        for _, guard, file, old, new, test in run_mutants.read_mutants(os.path.join(ROOT, "tests", "mutants.txt")):
            with self.subTest(guard=guard):
                with open(os.path.join(ROOT, file), encoding="utf-8") as code:
                    self.assertEqual(1, code.read().count(old))
                self.assertNotEqual(old, new)
                *folders, module, case, method = test.split(".")
                module = "/".join(folders + [module])
                if module not in names:
                    with open(os.path.join(ROOT, "tests", module + ".py"), encoding="utf-8") as code:
                        names[module] = code.read()
                self.assertIn("class %s(" % case, names[module])
                self.assertIn("def %s(" % method, names[module])


if __name__ == "__main__":
    unittest.main()
