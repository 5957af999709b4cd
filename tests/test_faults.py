"""Death, a full disk and I/O errors at every step of send, hook and /clear; then the promises are checked from outside.

`strace -e inject` does it to the real process, by (system call, ordinal), from the first touch of the store on. A
preamble that wraps what Python calls does the same by (call, ordinal), where there is no strace and beside it: it is
cheaper, and it can also hold a process at a step while another one goes on. A default run samples strace's system
calls that change something; XMSG_FULL=1 takes all.
"""
import collections
import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import unittest

from support import ADA, BOB, PATIENCE, PYTHON, ROOT, HomeCase, HostProcess, end, message, payload

from side_by_side import side_by_side

import contract
import store as product_store

FULL = os.environ.get("XMSG_FULL") == "1"
SAMPLE = 1 if FULL else 7
KILL, FULL_DISK, IO_ERROR, STOP = "KILL", "ENOSPC", "EIO", "STOP"
SENDER = {"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA}
SEND = "import sys; sys.path.append(%r); from command_line import main; sys.exit(main(%%r))" % ROOT
HOOK = "import sys; sys.path.append(%r); from xmsg import hook_main; sys.exit(hook_main(%%r))" % ROOT

# Hooks of many sessions in one process, with what each of them prints; faults are swallowed as hook_main does it.
LATER = """
import os, sys
sys.path.append(%r)
from contract import Settings
from xmsg import run_hook
for line in sys.stdin.buffer:
    host, payload = line.split(b" ", 1)
    try:
        run_hook(Settings(os.environ), host.decode(), "", payload)
    except Exception as error:
        sys.stderr.write("%%r\\n" %% error)
""" % ROOT


class Strace:
    """Faults by system call."""

    # Those that change what others see. A death at any other one is the same as at the next of these.
    CHANGES = ("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "unlink", "rename", "utimensat", "mkdir", "openat", "fcntl")
    # A lock that cannot be had is no fault but a reason to wait; the others can fail.
    FAIL = tuple(set(CHANGES) - {"fcntl", "unlink"})

    def __init__(self, case):
        self.log = os.path.join(case.home.folder, "strace.log")
        self.base = ["strace", "-f", "-qq", "-o", self.log]
        # Half as slow, but strace 6.1 then injects no signals.
        quick = self.base[:2] + ["--seccomp-bpf"] + self.base[2:]
        able = subprocess.run(quick + ["-e", "trace=mkdir", "true"], stderr=subprocess.DEVNULL).returncode == 0
        self.quick = quick if able else self.base

    def command(self, code, fault=None):
        if fault is None:
            return self.quick + ["-e", "trace=" + ("all" if FULL else ",".join(self.CHANGES)), PYTHON, "-I", "-S", "-c", code]
        name, ordinal, kind = fault
        what = "%s:signal=KILL:when=%d" % (name, ordinal) if kind == KILL else "%s:error=%s:when=%d+" % (name, kind, ordinal)
        return (self.base if kind == KILL else self.quick) + [
            "-e", "trace=" + name, "-e", "inject=" + what, PYTHON, "-I", "-S", "-c", code]

    def steps(self, folder):
        """[(name, ordinal)] of the run that was just traced, from the first touch of the store on."""
        counts, steps, touched = collections.Counter(), [], False
        with open(self.log, errors="replace") as file:
            for line in file:
                name = re.match(r"\d+ +(\w+)\(", line)
                if name:
                    counts[name[1]] += 1
                    touched = touched or folder in line
                    changes = name[1] in self.CHANGES and (name[1] != "openat" or "O_CREAT" in line)
                    if touched and (FULL or changes) and name[1] not in ("execve", "exit_group"):
                        steps.append((name[1], counts[name[1]]))
        return steps

    def happened(self, status):
        with open(self.log, errors="replace") as file:
            return status in (-9, 137) or "INJECTED" in file.read()

    def faults(self, steps, kinds):
        for number, (name, ordinal) in enumerate(steps):
            for kind in kinds:
                # Of a kind that lasts the first and the last call matter as much as each other: the same sample.
                if (number + len(kind)) % SAMPLE == 0 and (kind == KILL or name in self.FAIL):
                    yield name, ordinal, kind


class Preamble:
    """Faults by Python's own calls: `os` functions and SQL statements. STOP holds the process until it is continued."""

    CODE = """
import errno, os, signal, sqlite3, sys
NAME, ORDINAL, KIND, LOG = %r
counts, log = {}, LOG and os.open(LOG, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
kill, write = os.kill, os.write
def step(name):
    counts[name] = counts.get(name, 0) + 1
    if log:
        write(log, name.encode() + b"\\n")
    if name == NAME and (counts[name] == ORDINAL or KIND[0] == "E" and counts[name] > ORDINAL):
        if not log:
            os.close(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600))
        if KIND in ("KILL", "STOP"):
            kill(os.getpid(), getattr(signal, "SIG" + KIND))
        elif " " in name:
            raise sqlite3.OperationalError("database or disk is full" if KIND == "ENOSPC" else "disk I/O error")
        else:
            raise OSError(getattr(errno, KIND), os.strerror(getattr(errno, KIND)))
def wrap(name, real):
    def call(*arguments, **options):
        step(name)
        return real(*arguments, **options)
    return call
for name in ("write", "fsync", "utime", "unlink", "rename", "mkdir"):
    setattr(os, name, wrap(name, getattr(os, name)))
opened = os.open
def open_(path, flags, *rest, **options):
    if flags & os.O_CREAT and path != sys.argv[1]:
        step("open")
    return opened(path, flags, *rest, **options)
os.open = open_
class Connection(sqlite3.Connection):
    def execute(self, sql, *values):
        step("sql " + sql.split()[0])
        return super().execute(sql, *values)
connect = sqlite3.connect
sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
"""

    def __init__(self, case):
        self.log, self.mark = case.home.folder + "/steps.log", case.home.folder + "/happened"

    def command(self, code, fault=None):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.mark)
        values = fault + ("",) if fault else ("", 0, "KILL", self.log)
        return [PYTHON, "-I", "-S", "-c", self.CODE % (values,) + code, self.mark]

    def steps(self, folder):
        counts = collections.Counter()
        with open(self.log) as file:
            for name in file.read().splitlines():
                counts[name] += 1
                yield name, counts[name]

    def happened(self, status):
        return os.path.exists(self.mark)

    def faults(self, steps, kinds):
        for number, (name, ordinal) in enumerate(steps):
            for kind in kinds:
                # A statement that only reads changes nothing, so death there is death at the next one.
                if kind == KILL and (FULL or name not in ("sql select", "sql pragma")):
                    yield name, ordinal, kind
                elif kind != KILL and (number + len(kind)) % SAMPLE == 0 and name != "sql rollback":
                    yield name, ordinal, kind


class FaultCase(HomeCase):
    def setUp(self):
        super().setUp()
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")
        self.store = self.open_store()
        self.count = 0
        # strace first: what it does not sample, the preamble takes.
        self.ways = [Strace(self)] if shutil.which("strace") else []
        self.ways.append(Preamble(self))

    def session(self, letter="f", host="codex", **columns):
        """A registered session that no other case has used."""
        self.count += 1
        session = "%s%07x-0000-7000-8000-%012x" % (letter, self.count, self.count)
        values = dict({"cwd": "", "pid": None, "pid_start": None, "name": ""}, **columns)
        with self.store.transaction():
            self.store._execute("insert into peers (session, host, cwd, pid, pid_start, name, name_key, first_seen, last_seen, "
                                "hook_seen) values (?, ?, ?, ?, ?, ?, ?, 1, 1, 1)",
                                (session, host, values["cwd"], values["pid"], values["pid_start"], values["name"], values["name"]))
        return session

    def pay(self, session, host="codex", event="PreToolUse", **fields):
        return payload(host, event, session, cwd=self.home.folder, **fields)

    def check_store(self, why):
        """The file is whole, and while nobody else holds the lock a queued row implies its mail hint."""
        self.assertEqual("", self.store.integrity(), why)
        with self.store.transaction():
            for target in self.store.queued_counts():
                self.assertTrue(os.path.exists(self.home.hint(target)), "%s: mail of %s without its hint" % (why, target))

    def later_hooks(self, calls, times=2):
        """What later hooks show: one text. calls: (host, payload)."""
        lines = b"".join(host.encode() + b" " + data.replace(b"\n", b"") + b"\n" for host, data in calls)
        done = self.home.run([PYTHON, "-I", "-S", "-c", LATER], input=lines * times, seconds=60)
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        return done.stdout.decode()

    def reports(self):
        """uid -> the record that a sender reads."""
        records = self.home.json("outbox", "--all", "--limit", "100000", session=ADA)["messages"]
        return {record["uid"]: record for record in records}

    def check_books(self, sent, shown):
        """sent: uid -> text; shown: all that hooks ever printed. Nothing twice; what nobody saw is UNKNOWN."""
        reports = self.reports()
        for uid, (text, why) in sent.items():
            times, report = shown.count(text), reports[uid]
            self.assertLessEqual(times, 1, "%s: shown twice" % (why,))
            self.assertEqual(report["state"] == "hook-inflight", report["unknown"], (why, report))
            if times:
                self.assertIn(report["state"], ("delivered", "hook-inflight"), why)
            else:
                self.assertTrue(report["unknown"], "%s: shown to nobody, and it says %s" % (why, report["state"]))


class AFault(FaultCase):
    def run_all(self, way, faults, job):
        """Yields (fault, what job() told of it, how it ended). job(fault) -> (what it is about, code, input)."""
        def jobs():
            for fault in faults:
                it, code, data = job(fault)
                own = copy.copy(way)
                own.log, own.mark = way.log + str(self.count), own.log + ".happened"
                yield (fault, it, own), {"args": own.command(code, fault), "input": data, "cwd": self.home.folder,
                                          "env": dict(self.home.env, **SENDER)}
        happened = total = 0
        for (fault, it, own), done in side_by_side(jobs()):
            happened, total = happened + own.happened(done.returncode), total + 1
            self.check_store(fault)
            yield fault, it, done
        self.assertGreater(happened, total * 3 // 4, "the faults do not reach the process")

    def test_in_send_leaves_no_receipt_without_a_row_and_no_row_without_its_hint(self):
        def send(fault=None):
            uid, target = os.urandom(8).hex(), self.session()
            return (uid, target), SEND % (["send", target, "text %s." % uid, "--no-direct", "--uid", uid],), b""

        for way in self.ways:
            with self.subTest(type(way).__name__):
                self.assertEqual(0, self.home.run(way.command(send()[1]), env=SENDER, seconds=60).returncode)
                steps = list(way.steps(os.path.dirname(self.home.db)))
                self.assertGreater(len(steps), 12)
                sent = {}
                for fault, (uid, target), done in self.run_all(way, way.faults(steps, (KILL, FULL_DISK, IO_ERROR)), send):
                    sent[uid], row = target, self.store.by_uid(uid)
                    if done.stdout.startswith(b"queued #"):
                        self.assertIsNotNone(row, "%s: a receipt without a row" % (fault,))
                    elif fault[2] != KILL and row is None:
                        self.assertEqual(5, done.returncode, (fault, done))
                        self.assertRegex(done.stderr.decode(), r"^xmsg: .", fault)
                        self.assertNotIn("Traceback", done.stderr.decode(), fault)
                    elif fault[2] != KILL:  # the receipt itself could not be written
                        self.assertEqual("write", fault[0], "%s: refused, and queued: %r" % (fault, done))
                shown = self.later_hooks([("codex", self.pay(target)) for target in sent.values()])
                for uid in sent:
                    self.assertEqual(int(self.store.by_uid(uid) is not None), shown.count("text %s." % uid))

    def test_in_a_hook_shows_nothing_twice_and_hides_nothing(self):
        def hook(fault=None):
            session = self.session()
            row = message(self.store, session, "text %d." % self.count)
            return (session, row), HOOK % (["codex", ""],), self.pay(session)

        for way in self.ways:
            with self.subTest(type(way).__name__):
                (_, row), code, data = hook()
                self.assertIn(row["body"].encode(), self.home.run(way.command(code), input=data, seconds=60).stdout)
                steps = list(way.steps(os.path.dirname(self.home.db)))
                self.assertGreater(len(steps), 15)
                sent, shown, calls = {}, "", []
                for fault, (session, row), done in self.run_all(way, way.faults(steps, (KILL, FULL_DISK, IO_ERROR)), hook):
                    sent[row["uid"]] = (row["body"], fault)
                    if fault[2] != KILL:
                        self.assertEqual((0, b""), (done.returncode, done.stderr), fault)
                    if done.stdout:
                        json.loads(done.stdout)
                    shown += done.stdout.decode()
                    calls.append(("codex", self.pay(session)))
                shown += self.later_hooks(calls)
                self.check_books(sent, shown)
                self.check_store("after later hooks")

    def test_in_a_clear_loses_no_mail_of_either_session(self):
        # The shell in between swallows what bash says of a killed child.
        host = HostProcess(self.home, "claude", between=["/bin/sh", "-c", '"$@"; exit $?', "sh"])
        self.addCleanup(host.end)
        for way in self.ways:
            with self.subTest(type(way).__name__):
                def clear(old, new, fault=None):
                    self.store._execute("update peers set pid = null where pid is not null")
                    self.store._execute("update peers set pid = ?, pid_start = ? where session = ?", (host.pid, host.start, old))
                    code = HOOK % (["claude", ""],)
                    data = self.pay(new, "claude", "SessionStart", source="clear", model=None)
                    return host.run(way.command(code, fault), data)

                def mail(fault):
                    old = self.session("0", "claude", name="n%d" % self.count)
                    rows = [message(self.store, old, "text %d %s." % (self.count, letter)) for letter in "ab"]
                    sent.update((row["uid"], (row["body"], fault)) for row in rows)
                    return old, "1" + old[1:]

                happened, sent, shown, calls = 0, {}, "", []
                old, new = mail("nothing")
                shown += clear(old, new).stdout.decode()
                self.assertEqual(new, self.store.successor(old))
                steps = list(way.steps(os.path.dirname(self.home.db)))
                self.assertGreater(len(steps), 20)
                for fault in way.faults(steps, (KILL, IO_ERROR) if FULL else (KILL,)):
                    old, new = mail(fault)
                    done = clear(old, new, fault)
                    happened += way.happened(done.returncode)
                    shown += done.stdout.decode()
                    self.check_store(fault)
                    if self.store.successor(old) != old:
                        self.assertEqual([], self.store.queued(old), fault)
                        self.assertEqual(["", old[1:]], [self.store.peer(old)["name"], self.store.successor(old)[1:]])
                    # The new session goes on; the old one may be resumed.
                    calls += [("claude", self.pay(new, "claude")), ("claude", self.pay(old, "claude"))]
                self.assertGreater(happened, len(sent) // 2 * 3 // 4 - 1, "the faults do not reach the process")
                shown += self.later_hooks(calls)
                self.check_books(sent, shown)


class APause(FaultCase):
    """One process is held at a step, while another one goes its way as far as the lock lets it."""

    def hold_at_each_step(self, code, data, prepare, meanwhile, after, names):
        """prepare() -> what the step is about; meanwhile(it) while the process is held; after(it, its output)."""
        way = Preamble(self)
        it = prepare()
        self.assertEqual(0, self.home.run(way.command(code(it)), input=data(it), env=SENDER).returncode)
        after(it, b"")
        steps = [step for step in way.steps("") if step[0] in names]
        self.assertGreater(len(steps), 4)
        went = 0
        for name, ordinal in steps:
            it = prepare()
            process = subprocess.Popen(way.command(code(it), (name, ordinal, STOP)), stdin=subprocess.PIPE, cwd=self.home.folder,
                                       stdout=subprocess.PIPE, env=dict(self.home.env, **SENDER))
            self.addCleanup(end, process)
            process.stdin.write(data(it))
            process.stdin.close()
            self.assertTrue(os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), (name, ordinal))
            try:
                went += meanwhile(it, (name, ordinal))
            finally:
                os.kill(process.pid, signal.SIGCONT)
            out = process.stdout.read()
            process.stdout.close()
            self.assertEqual(0, process.wait(20 * PATIENCE), (name, ordinal))
            self.check_store(("held at", name, ordinal))
            after(it, out)
        self.assertGreater(went, len(steps) // 5, "the lock is held nearly always")

    def test_of_a_hook_at_any_step_hides_no_mail_that_comes_in_between(self):
        hasty = self.home.store(busy_seconds=0)
        self.addCleanup(hasty.close)

        def prepare():
            session = self.session()
            message(self.store, session, "before %d." % self.count)
            return session

        def meanwhile(session, step):
            try:
                message(hasty, session, "between %s." % session)
            except contract.StoreBusy:
                return False  # the hook holds the lock: a sender would wait until it is done
            self.check_store(step)
            return True

        def after(session, out):
            later = self.later_hooks([("codex", self.pay(session))], 1) if self.store.waiting(session) else ""
            self.assertLessEqual((out.decode() + later).count("between %s." % session), 1)
            self.assertEqual([], [row for row in self.store.messages(session) if row["state"] != "delivered"])

        self.hold_at_each_step(lambda session: HOOK % (["codex", ""],), self.pay, prepare, meanwhile, after,
                               ("sql begin", "sql commit", "sql rollback", "sql update", "unlink", "write"))

    def test_of_a_send_at_any_step_shows_no_row_without_its_hint(self):
        """The lock is free at some of these steps: then a queued row has its hint, however far the sender is."""
        def meanwhile(session, step):
            try:
                with product_store.Transaction(hasty):
                    rows = hasty.queued(session)
            except contract.StoreBusy:
                return False
            self.assertTrue(not rows or os.path.exists(self.home.hint(session)), step)
            return True

        hasty = self.home.store(busy_seconds=0)
        self.addCleanup(hasty.close)
        self.hold_at_each_step(lambda session: SEND % (["send", session, "text", "--no-direct"],), lambda session: b"",
                               self.session, meanwhile, lambda session, out: None,
                               ("sql begin", "sql commit", "sql insert", "open", "utime", "fsync"))


if __name__ == "__main__":
    unittest.main()
