"""Reminders from cron and timers: the README's own examples, run as cron and systemd run them."""
import configparser
import os
import re
import shlex
import shutil
import subprocess
import unittest

from support import ADA, BOB, ROOT, Home, peer
from side_by_side import load_tests  # noqa: F401


def blocks(kind):
    """The README's code blocks of a kind."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        return re.findall("```%s\n(.*?)```" % kind, file.read(), re.S)


class Case(unittest.TestCase):
    """A home as people have it: the store at its usual place, the command linked, a session named leader."""

    def setUp(self):
        self.home = Home()
        self.addCleanup(self.home.remove)
        self.home.db = os.path.join(self.home.folder, ".local/share/agent-msg/messages.sqlite3")
        self.home.env["XMSG_DB"] = self.home.db
        os.makedirs(os.path.join(self.home.folder, ".local", "bin"))
        os.symlink(os.path.join(ROOT, "bin", "xmsg"), os.path.join(self.home.folder, ".local", "bin", "xmsg"))
        store = self.home.store()
        peer(store, BOB, name="leader")
        store.close()

    def run_bare(self, command, **environ):
        """A command with no variables but these, no terminal, and nothing on stdin."""
        done = subprocess.run(command, env=environ, cwd=self.home.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, start_new_session=True, timeout=20)
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        return done.stdout.decode()

    def as_cron(self, command):
        return self.run_bare(["/bin/sh", "-c", command], HOME=self.home.folder, LOGNAME="someone", SHELL="/bin/sh",
                             PATH="/usr/bin:/bin")

    def shown(self):
        return self.home.context("codex", BOB, "PreToolUse")


class TheReadme(Case):
    REMINDER = "[local notification stand-up; not a user instruction]\nTime for the stand-up."

    def test_gives_lines_that_a_crontab_takes_and_that_deliver_once(self):
        lines = [line for line in blocks("crontab")[0].splitlines() if line]
        for line in lines:
            self.assertRegex(line, r"^([-*/,0-9]+ +){4}[-*/,0-9]+  \S")
            self.assertNotRegex(line, r"(?<!\\)%", "cron takes it for the end of the line")
            for _ in range(2):
                self.assertEqual("", self.as_cron(re.sub(r"^(\S+ +){5}", "", line)))
        self.assertEqual(2, len(lines))
        self.assertEqual(self.REMINDER, self.shown())
        self.assertIsNone(self.shown())

    def test_gives_units_that_systemd_takes_and_that_deliver(self):
        service, timer = blocks("ini")
        folder = os.path.join(self.home.folder, "units")
        os.mkdir(folder)
        for name, text in (("stand-up.service", service), ("stand-up.timer", timer)):
            units = configparser.RawConfigParser()
            units.optionxform = str
            units.read_string(text)
            with open(os.path.join(folder, name), "w") as file:
                file.write(text.replace("%h", self.home.folder))
            if name.endswith("service"):
                command = shlex.split(units["Service"]["ExecStart"].replace("%h", self.home.folder))
                self.assertNotIn("%", "".join(command))
            else:
                self.assertEqual("timers.target", units["Install"]["WantedBy"])
        if shutil.which("systemd-analyze"):
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", os.path.join(folder, "stand-up.timer"),
                                   os.path.join(folder, "stand-up.service")], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, env=self.home.env, timeout=20)
            self.assertNotIn(b"stand-up", done.stdout)
        self.run_bare(command, HOME=self.home.folder, PATH="/usr/local/bin:/usr/bin:/bin", INVOCATION_ID="0" * 32)
        self.assertEqual(self.REMINDER, self.shown())


class AReminder(Case):
    def test_needs_no_variable_at_all_but_where_its_store_is(self):
        out = self.run_bare([os.path.join(ROOT, "bin", "xmsg"), "send", "leader", "now", "--notification"], XMSG_DB=self.home.db)
        self.assertIn("queued #1", out)
        self.assertEqual("[local notification xmsg; not a user instruction]\nnow", self.shown())

    def test_takes_no_identity_of_what_runs_it(self):
        for variables in ({"CLAUDE_CODE_SESSION_ID": ADA}, {"CODEX_THREAD_ID": ADA}, {"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA}):
            sent = self.home.json("send", "leader", "x", "--notification", "--no-direct", **variables)["messages"][0]
            self.assertEqual({"label": "xmsg", "host": "", "session": "", "kind": "notification"}, sent["from"])

    def test_is_one_while_it_waits_and_a_new_one_once_it_was_seen(self):
        send = ["send", "leader", "--notification", "--from", "patrol", "--key", "k"]
        first = self.home.json(*send, "one")["messages"][0]
        self.assertEqual(first["uid"], self.home.json(*send, "two")["messages"][0]["uid"])
        other = self.home.json("send", "leader", "other", "--notification", "--from", "other", "--key", "k")["messages"][0]
        self.assertNotEqual(first["uid"], other["uid"])
        third = self.home.json(*send, "three", "--replace")["messages"][0]
        self.assertNotEqual(first["uid"], third["uid"])
        self.assertEqual(["cancelled", "queued", "queued"], self.home.states())
        text = self.shown()
        self.assertIn("patrol; not a user instruction]\nthree", text)
        self.assertNotIn("one", text)
        self.assertEqual("queued", self.home.json(*send, "four")["messages"][0]["state"])
        self.assertIn("four", self.shown())


if __name__ == "__main__":
    unittest.main()
