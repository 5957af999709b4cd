"""From a fresh machine to the first message, and back: `xmsg install`, the hosts' own dialogs, `xmsg uninstall`.

Nobody but the user confirms Codex's hooks here, with the keys of its own dialog at the start.
"""
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import unittest

from hosts import ClaudeHost, CodexHost, Home, wait_until
from model_server import directive, say, shell
from realcase import per_version, xmsg

STORE = ".local/share/agent-msg"


class UsersCodex(CodexHost):
    """A Codex whose user answers the dialog of new hooks, if it comes, with "Trust all and continue"."""

    was_asked = False

    def is_ready(self):
        if "Hooks need review" in self.screen() and not self.was_asked:
            wait_until(lambda: "Trust all and continue" in self.screen(), "the choices of the dialog")
            self.press("2")
            if not self._left_dialog():
                self.press("Enter")
            self.was_asked = True
        return self.is_idle()

    def _left_dialog(self):
        try:
            wait_until(lambda: "Hooks need review" not in self.screen(), "the end of the dialog", 1)
        except AssertionError:
            return False
        return True


class AMachine(unittest.TestCase):
    """A home of its own for each test. kinds, versions: as in RealCase."""

    kinds, versions = (), None

    def setUp(self):
        base = self.enter(tempfile.TemporaryDirectory(prefix="rh", ignore_cleanup_errors=True))
        self.home = self.enter(Home(base))
        self.home.env["XMSG_LANG"] = "en"
        for kind, folder in (("claude", self.home.claude_config), ("codex", self.home.codex_home)):
            if kind not in self.kinds:
                shutil.rmtree(folder)
        self.link = self.home.home / ".local" / "bin" / "xmsg"

    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def __str__(self):
        hosts = " + ".join("%s %s" % pair for pair in sorted(self.versions.items()))
        return "%s: %s" % (hosts, self._testMethodName.replace("test_", "", 1).replace("_", " "))

    def claude(self, name):
        host = ClaudeHost(self.home, self.versions["claude"], args=["--name", name])
        self.addCleanup(host.stop)
        host.start()
        return host

    def codex(self):
        host = UsersCodex(self.home, self.versions["codex"], trust="the user's own")
        self.addCleanup(host.stop)
        host.start()
        return host

    def tell(self, host, *arguments):
        """The agent of this session runs xmsg, by the link that install made."""
        command = shlex.join([str(self.link), *arguments])
        host.prompt("run it " + directive(shell(command), say("ran")))
        host.wait_idle()

    def outside_the_store(self):
        """{path: content} of the hosts' configuration, and of whatever is called after xmsg anywhere in the home."""
        found = {}
        for folder, folders, files in os.walk(self.home.home):
            if folder == str(self.home.home / STORE):
                folders.clear()
                continue
            for name in files:
                path = os.path.join(folder, name)
                if name in ("settings.json", "hooks.json") or "xmsg" in name:
                    with open(path, "rb") as file:
                        found[path] = file.read()
        return found

    def install(self):
        """`xmsg install` on this machine, for the hosts that it has and no other; what it prints."""
        out = xmsg(self.home, "install")
        for kind, folder in (("claude", self.home.claude_config), ("codex", self.home.codex_home)):
            self.assertEqual(kind in self.kinds, folder.exists(), out)
        return out

    def assert_well(self, *checks):
        """doctor finds these lines right, each for a fact that the real host has made."""
        done = subprocess.run([self.link, "doctor", "--json"], env=self.home.env, cwd=self.home.home,
                              capture_output=True, text=True)
        lines = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
        for check in checks:
            self.assertIs(True, lines[check]["ok"], lines[check])


class WithBothHosts(AMachine):
    kinds = ("claude", "codex")

    def add_another_tools_hook(self):
        path = self.home.codex_home / "hooks.json"
        hooks = json.loads(path.read_text())
        log = self.home.root / "other-tool.log"
        group = {"hooks": [{"type": "command", "command": "echo ran >> '%s'" % log, "timeout": 5}]}
        hooks["hooks"]["Stop"].append(group)
        path.write_text(json.dumps(hooks, indent=2) + "\n")
        return group, lambda: log.read_text().count("ran") if log.exists() else 0

    def test_sessions_write_to_each_other_by_name_and_nothing_stays_but_codexs_records(self):
        before = self.outside_the_store()
        self.assertIn("Hooks need review", self.install())
        other, times_run = self.add_another_tools_hook()
        claude, codex = self.claude("ada"), self.codex()
        self.assertTrue(codex.was_asked)
        self.tell(codex, "name", ".", "bob")
        self.tell(codex, "send", "ada", "from codex")
        claude.wait_seen("from codex")
        claude.wait_idle()
        self.tell(claude, "send", "bob", "from claude")
        codex.prompt("anything new?", wait=False)
        codex.wait_seen("from claude")
        codex.wait_idle()
        self.assertEqual((1, 1), (claude.times_seen("from codex"), codex.times_seen("from claude")))
        self.assert_well("claude hooks", "claude hooks seen", "codex hooks", "codex hooks seen", "codex trust")
        ran = times_run()
        self.assertGreater(ran, 1)
        claude.stop()
        codex.stop()

        out = xmsg(self.home, "uninstall")
        self.assertIn("[hooks.state.", out)
        self.assertIn("[hooks.state.", (self.home.codex_home / "config.toml").read_text())
        self.assertFalse(self.link.parent.exists())
        hooks = self.home.codex_home / "hooks.json"
        self.assertEqual({"hooks": {"Stop": [{"matcher": "xmsg-placeholder", "hooks": []}, other]}},
                         json.loads(hooks.read_text()))
        left = self.outside_the_store()
        left.pop(str(hooks))
        self.assertEqual(before, left)
        codex.was_asked = False
        codex.start()
        self.assertFalse(codex.was_asked, "another tool's hook lost its trust")
        codex.prompt("once more")
        codex.wait_idle()
        self.assertGreater(times_run(), ran)


class WithOneHost(AMachine):
    """A subclass starts two sessions that are called ada and bob, and says how one takes its mail."""

    def test_sessions_write_to_each_other_by_name_and_nothing_stays(self):
        before = self.outside_the_store()
        self.install()
        first, second = self.sessions()
        self.tell(first, "send", "bob", "to the second")
        self.take(second, "to the second")
        self.tell(second, "send", "ada", "to the first")
        self.take(first, "to the first")
        kind = self.kinds[0]
        self.assert_well("%s hooks" % kind, "%s hooks seen" % kind, *["codex trust"] * (kind == "codex"))
        first.stop()
        second.stop()
        xmsg(self.home, "uninstall")
        self.assertEqual(before, self.outside_the_store())
        self.assertFalse(self.link.parent.exists())


class WithClaudeAlone(WithOneHost):
    kinds = ("claude",)

    def sessions(self):
        return self.claude("ada"), self.claude("bob")

    def take(self, host, text):
        host.wait_seen(text)
        host.wait_idle()
        self.assertEqual(1, host.times_seen(text))

    def test_a_probe_tells_the_window_and_how_long_it_took(self):
        self.install()
        host = self.claude("ada")
        out = xmsg(self.home, "doctor", "--probe", "ada")
        self.assertRegex(out, r"\Adelivered by uds-direct after [01]\.\d s, confirmed by its transcript after \d\.\d s\n\Z")
        host.wait_idle()
        self.assertEqual(1, host.times_seen("of `xmsg doctor`; nothing is to be done"))
        self.tell(host, "name", ".", "")
        self.assert_well("sessions", "hosts", "Claude Code")


class WithCodexAlone(WithOneHost):
    kinds = ("codex",)

    def sessions(self):
        first, second = self.codex(), self.codex()
        self.assertEqual((True, False), (first.was_asked, second.was_asked))
        self.tell(first, "name", ".", "ada")
        self.tell(second, "name", ".", "bob")
        return first, second

    def take(self, host, text):
        host.prompt("anything new?", wait=False)
        host.wait_seen(text)
        host.wait_idle()
        self.assertEqual(1, host.times_seen(text))


load_tests = per_version(WithBothHosts, WithClaudeAlone, WithCodexAlone)
