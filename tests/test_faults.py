"""Kill, full disk and I/O error at every system call of send and hook; then the promises are checked from outside.

`strace -e inject` does it to the real process, by (name, ordinal). Without strace a wrapper around os and sqlite3 does it
by ordinal. A default run samples the ordinals; XMSG_FULL=1 takes them all.
"""
import collections
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import unittest

from support import ADA, BOB, PATIENCE, ROOT, Home
from side_by_side import load_tests  # noqa: F401

FULL = os.environ.get("XMSG_FULL") == "1"
EVERY = 1 if FULL else 10
# The calls that change something outside of the process, or that a promise hangs on.
CALLS = ("openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "ftruncate", "utimensat", "fcntl", "mkdir",
         "fchmod", "close")
SEND = "import sys; sys.path.append(%r); from command_line import main; sys.exit(main(%r))"
HOOK = "import sys; sys.path.append(%r); from xmsg import hook_main; sys.exit(hook_main(%r))"


class Fault:
    """Runs Python code of the product with a fault at the n-th call of a name; says whether it was reached."""

    def __init__(self, home):
        self.home = home

    def python(self, code, data=b"", inject=None, env=()):
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", code]
        log = os.path.join(self.home.folder, "strace.log")
        if inject:
            command = ["strace", "-qq", "-o", log, "-e", "trace=" + inject.split(":")[0], "-e", "inject=" + inject] + command
        done = subprocess.run(command, input=data, env=dict(self.home.env, **dict(env)), cwd=self.home.folder,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30 * PATIENCE)
        if inject:
            with open(log, errors="replace") as file:
                done.reached = "(INJECTED)" in file.read() or done.returncode in (-9, 137)
        return done

    def calls(self, code, data=b"", env=()):
        """{name: how often} of the calls from the first touch of the store on, with the ordinal of the first."""
        log = os.path.join(self.home.folder, "count.log")
        subprocess.run(["strace", "-qq", "-f", "-o", log, "-e", "trace=" + ",".join(CALLS),
                        os.path.realpath(sys.executable), "-I", "-S", "-c", code], input=data, cwd=self.home.folder,
                       env=dict(self.home.env, **dict(env)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       timeout=30 * PATIENCE)
        counts, first = collections.Counter(), {}
        touched = False
        with open(log, errors="replace") as file:
            for line in file:
                name = re.match(r"\d+ +(\w+)\(", line)
                if not name:
                    continue
                counts[name[1]] += 1
                touched = touched or os.path.dirname(self.home.db) in line
                if touched:
                    first.setdefault(name[1], counts[name[1]])
        return [(name, ordinal) for name in first for ordinal in range(first[name], counts[name] + 1)]


@unittest.skipUnless(shutil.which("strace"), "TheFallback runs these cases where there is no strace")
class AFault(unittest.TestCase):
    def setUp(self):
        self.home = Home()
        self.addCleanup(self.home.remove)
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")
        self.fault = Fault(self.home)

    def check_store(self):
        """The file is whole, and a queued row has its mail hint."""
        with sqlite3.connect(self.home.db) as database:
            self.assertEqual("ok", database.execute("pragma integrity_check").fetchone()[0])
            rows = database.execute("select id, uid, state, target, body from messages order by id").fetchall()
        for number, _, state, target, _ in rows:
            if state == "queued":
                self.assertTrue(os.path.exists(self.home.db + ".hints/mail/" + target), "#%d has no hint" % number)
        return rows

    def empty(self):
        with sqlite3.connect(self.home.db) as database:
            database.execute("delete from messages")
            database.execute("delete from events")
        for name in os.listdir(self.home.db + ".hints/mail"):
            os.unlink(self.home.db + ".hints/mail/" + name)

    def send_code(self, uid):
        return SEND % (ROOT, ["send", BOB, "text of " + uid, "--no-direct", "--uid", uid])

    def each(self, calls, kinds):
        for step, (name, ordinal) in enumerate(calls):
            if step % EVERY == 0:
                # SQLite tries a lock that fails for some 10 s; the hook's own alarm is what ends that.
                for kind in kinds[:1] if name == "fcntl" else kinds:
                    yield "%s:%s:when=%d%s" % (name, kind, ordinal, "" if "signal" in kind else "+")

    def test_in_send_leaves_no_receipt_without_a_row(self):
        environ = {"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA}
        calls = self.fault.calls(self.send_code("0" * 16), env=environ)
        self.assertGreater(len(calls), 20)
        reached = 0
        for number, inject in enumerate(self.each(calls, ("signal=KILL", "error=ENOSPC"))):
            uid = "%016x" % (number + 1)
            done = self.fault.python(self.send_code(uid), inject=inject, env=environ)
            reached += done.reached
            known = {row[1]: row for row in self.check_store()}
            if b"queued #" in done.stdout:
                self.assertIn(uid, known, "%s: a receipt without a row" % inject)
            if done.returncode == 5:
                self.assertNotIn(b"queued #", done.stdout)
                self.assertIn(b"xmsg: ", done.stderr, inject)
            self.home.json("send", BOB, "text of " + uid, "--no-direct", "--uid", uid, session=ADA)
            self.assertEqual(1, [row[1] for row in self.check_store()].count(uid), inject)
            self.empty()
        self.assertGreater(reached, number // 2)

    def test_in_a_hook_shows_nothing_twice_and_loses_nothing(self):
        payload = json.dumps({"session_id": BOB, "hook_event_name": "PreToolUse", "permission_mode": "default"}).encode()
        code = HOOK % (ROOT, ["codex", ""])
        self.home.json("send", BOB, "counted", "--no-direct", session=ADA)
        calls = self.fault.calls(code, payload)
        self.assertGreater(len(calls), 20)
        reached = 0
        for number, inject in enumerate(self.each(calls, ("signal=KILL", "error=EIO"))):
            text = "text number %d." % number
            sent = self.home.json("send", BOB, text, "--no-direct", session=ADA)["messages"][0]
            done = self.fault.python(code, payload, inject=inject)
            reached += done.reached
            shown = done.stdout.decode(errors="replace").count(text)
            self.check_store()
            state = self.home.json("show", sent["uid"])
            for _ in range(3):
                later = self.home.raw_hook(["codex"], payload)
                shown += json.dumps(later).count(text)
            final = self.home.json("show", sent["uid"])
            self.assertLessEqual(shown, 1, "%s: shown twice" % inject)
            if shown == 0:
                self.assertTrue(final["unknown"], "%s: lost, and shown as %s" % (inject, final["state"]))
            if "KILL" in inject and state["state"] == "hook-inflight":
                self.assertTrue(state["unknown"], inject)
            self.check_store()
            self.empty()
        self.assertGreater(reached, number // 2)


class TheFallback(unittest.TestCase):
    """The same cases by ordinal of os.write, os.fsync, ... and SQLite statements, without strace."""

    WRAP = """
import os, sys, sqlite3, signal
steps = [0]
def step():
    steps[0] += 1
    if steps[0] == %d:
        os.kill(os.getpid(), signal.SIGKILL)
for name in ("write", "fsync", "open", "utime", "unlink", "rename", "close"):
    def wrap(real):
        def call(*arguments, **options):
            step()
            return real(*arguments, **options)
        return call
    setattr(os, name, wrap(getattr(os, name)))
class Connection(sqlite3.Connection):
    def execute(self, *arguments):
        step()
        return super().execute(*arguments)
connect = sqlite3.connect
sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
"""

    def test_kills_a_hook_at_each_step_and_nothing_is_shown_twice_or_lost(self):
        home = Home()
        self.addCleanup(home.remove)
        home.hook("claude", ADA, "SessionStart")
        home.hook("codex", BOB, "SessionStart")
        payload = json.dumps({"session_id": BOB, "hook_event_name": "PreToolUse", "permission_mode": "default"}).encode()
        fault, step, killed = Fault(home), 1, 0
        while True:
            sent = home.json("send", BOB, "text %d." % step, "--no-direct", session=ADA)["messages"][0]
            done = fault.python(self.WRAP % step + HOOK % (ROOT, ["codex", ""]), payload)
            shown = done.stdout.decode().count("text %d." % step)
            shown += sum(json.dumps(home.raw_hook(["codex"], payload)).count("text %d." % step) for _ in range(2))
            final = home.json("show", sent["uid"])
            self.assertLessEqual(shown, 1, step)
            self.assertTrue(shown == 1 or final["unknown"], (step, final["state"]))
            if done.returncode != -9:
                break
            killed, step = killed + 1, step + EVERY
        self.assertGreater(killed, 20 // EVERY)


if __name__ == "__main__":
    unittest.main()
