"""xmsg-hook.sh: its fast path, the traps of hosts and environments, and the net that lets no fault through."""
import contextlib
import json
import os
import random
import select
import shutil
import socket
import stat
import subprocess
import tempfile
import time
import unittest

from support import (ADA, BOB, EVE, PATIENCE, PYTHON, ROOT, Home, HomeCase, copy_of_product, end, message, payload,
                     permissions_count)
from side_by_side import load_tests  # noqa: F401

HOOK = os.path.join(ROOT, "xmsg-hook.sh")
# With these two, a status of 0 says that the fast path was taken and 2 that Python was wanted.
NO_PYTHON = {"XMSG_IMPL": "/nonexistent/xmsg.py", "XMSG_NO_FAILOPEN": "1"}
FULL = os.environ.get("XMSG_FULL") == "1"

# Stands for xmsg.py: writes down what it got, and does what a test says.
RECORDER = """
import os, sys
def hook_main(arguments):
    head = os.environb.pop(b"XMSG_HOOK_HEAD", b"")
    with open(os.environ["RECORD"], "wb") as file:
        file.write(head + sys.stdin.buffer.read())
    return 0
"""
FACTS = """
import json, os, sys, signal
def hook_main(arguments):
    descriptors = [n for n in range(3, 64) if os.path.lexists("/proc/self/fd/%d" % n)]
    with open(os.environ["RECORD"], "w") as file:
        json.dump({"arguments": arguments, "executable": sys.executable, "isolated": sys.flags.isolated,
                   "no_site": sys.flags.no_site, "site": "site" in sys.modules, "path": sys.path,
                   "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
                   "open": descriptors}, file)
    sys.stdin.buffer.read()
    return 0
"""


class Wrapper(HomeCase):
    """BOB (Codex) and ADA (Claude Code) are registered, and their next tool calls take the fast path."""

    def setUp(self):
        super().setUp()
        self.record = os.path.join(self.home.folder, "record")
        self.home.hook("claude", ADA, "PreToolUse")
        self.home.hook("codex", BOB, "PreToolUse")

    def implementation(self, text):
        """An XMSG_IMPL with this text, as an environment."""
        folder = tempfile.mkdtemp(dir=self.home.folder)
        path = os.path.join(folder, "xmsg.py")
        with open(path, "w") as file:
            file.write(text)
        return {"XMSG_IMPL": path, "RECORD": self.record}

    def recorded(self):
        with open(self.record, "rb") as file:
            return file.read()

    def pay(self, host="codex", event="PreToolUse", session=None, **fields):
        return payload(host, event, session or {"codex": BOB, "claude": ADA}[host], cwd=self.home.folder, **fields)

    def sized(self, size, host="codex"):
        """A PreToolUse payload of exactly so many bytes."""
        short = self.pay(host, tool_input={"command": ""})
        return short.replace(b'{"command":""', b'{"command":"%s"' % (b"x" * (size - len(short))))

    def is_fast(self, data, host="codex", event=""):
        status = subprocess.run([HOOK, host, event], input=data, env=dict(self.home.env, **NO_PYTHON),
                                stderr=subprocess.DEVNULL, timeout=20 * PATIENCE).returncode
        self.assertIn(status, (0, 2))
        return status == 0

    def queue(self, target=BOB, body="mail", **columns):
        store = self.home.store()
        try:
            return message(store, target, body, **columns)
        finally:
            store.close()

    def feed(self, data, arguments=("codex",), kind="pipe", env=(), close=True, seconds=10):
        """Runs the hook as a host does, which notices whether its payload is taken: (status, out, err, taken whole).

        kind: pipe, socket (as under Node). close: False keeps the host's end open for good.
        """
        ours, theirs = socket.socketpair() if kind == "socket" else reversed(os.pipe())
        write = ours.fileno() if kind == "socket" else ours
        os.set_blocking(write, False)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen([HOOK, *arguments], stdin=theirs, stdout=out, stderr=err, cwd=self.home.folder,
                                       env=dict(self.home.env, **dict(env)))
            self.addCleanup(end, process)
            theirs.close() if kind == "socket" else os.close(theirs)
            whole, deadline, rest = True, time.monotonic() + seconds * PATIENCE, memoryview(data)
            while rest:
                if not select.select([], [write], [], max(0, deadline - time.monotonic()))[1]:
                    raise AssertionError("the hook does not read")
                try:
                    rest = rest[os.write(write, rest[:1 << 20]):]
                except OSError:
                    whole = False
                    break
            if close:
                ours.close() if kind == "socket" else os.close(write)
            status = process.wait(max(0.1, deadline - time.monotonic()))
            if not close:
                ours.close() if kind == "socket" else os.close(write)
            out.seek(0), err.seek(0)
            return status, out.read(), err.read(), whole


class ThePayload(Wrapper):
    def test_of_any_size_arrives_whole_at_python_by_pipe_and_by_socket(self):
        generator = random.Random(7)
        env = self.implementation(RECORDER)
        sizes = [1, 2, 15, 16, 1022, 1023, 1024, 1025, 1026, 4096, 65535, 65536, 65537, 200000, 1 << 20]
        sizes += [generator.randrange(1, 200000) for _ in range(100 if FULL else 5)]
        for size in sizes:
            data = bytes(generator.choices(range(1, 256), k=min(size, 5000)))
            data = (data * (size // len(data) + 1))[:size]
            for kind in ("pipe", "socket"):
                self.assertEqual((0, b"", b"", True), self.feed(data, kind=kind, env=env), (kind, size))
                self.assertTrue(data == self.recorded(), "%s of %d: %d arrived" % (kind, size, len(self.recorded())))

    def test_of_64_mib_is_taken_whole_on_the_fast_path_and_by_python(self):
        for host in ("codex", "claude"):
            for kind in ("pipe", "socket"):
                self.assertEqual((0, b"", b"", True), self.feed(self.sized(64 << 20, host), (host,), kind, NO_PYTHON))
        row = self.queue()
        self.assertEqual((0, b"", b"", True), self.feed(self.sized(64 << 20)))
        self.assertEqual([(row["id"], "queued")], self.home.sql("select id, state from messages"))

    def test_of_1_mib_is_no_reason_to_keep_mail_back(self):
        self.queue()
        status, out, _, whole = self.feed(self.sized(1 << 20), kind="socket")
        self.assertEqual((0, True), (status, whole))
        self.assertIn("mail", json.loads(out)["hookSpecificOutput"]["additionalContext"])

    def test_that_is_absent_is_no_fault_of_the_host(self):
        self.queue()
        for stdin in ("null", "closed", "empty pipe", "empty socket"):
            with self.subTest(stdin):
                if stdin.startswith("empty"):
                    done = self.feed(b"", kind=stdin.split()[1])[:3]
                else:
                    run = subprocess.run(["/bin/sh", "-c", 'exec "$0" codex %s' % (
                        "</dev/null" if stdin == "null" else "<&-"), HOOK], env=self.home.env, cwd=self.home.folder,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=10 * PATIENCE)
                    done = run.returncode, run.stdout, run.stderr
                self.assertEqual((0, b"", b""), done)
        self.assertEqual(["queued"], self.home.states())

    def test_that_never_comes_holds_the_host_for_two_seconds_only(self):
        begun = time.monotonic()
        self.assertEqual((0, b"", b"", True), self.feed(b"", close=False))
        self.assertLess(time.monotonic() - begun, 3 * PATIENCE)

    def test_that_never_ends_is_cut_and_claims_nothing(self):
        self.queue()
        data = self.pay(tool_input={"command": "x" * 2000})[:-20]
        self.assertEqual((0, b"", b"", True), self.feed(data, close=False, env={"XMSG_HOOK_TIMEOUT": "0.3"}))
        self.assertEqual(["queued"], self.home.states())

    def test_with_a_nul_byte_anywhere_is_refused_as_it_came(self):
        data = self.sized(6000)
        self.queue(EVE)
        for at in (0, 1, 14, 15, 60, 500, 1022, 1023, 1024, 1025, 3000, 5999, 6000):
            broken = data[:at] + b"\0" + data[at:]
            self.assertEqual((0, b"", b"", True), self.feed(broken), at)
        # Taking the byte out would leave a payload that claims: it must not.
        data = self.pay("codex", session=EVE)
        for at in (0, 1, 20, len(data) - 1):
            self.home.run_hook("codex", data[:at] + b"\0" + data[at:])
            self.assertEqual(["queued"], self.home.states(), at)
        self.assertIn("not JSON", self.home.faults())
        for at in (0, 500, 1023, 1024, 3000):
            broken = b"." + data[:at] + b"\0" + b"x" * 3000 if at else b"\0" + data
            self.feed(broken, env=self.implementation(RECORDER))
            self.assertEqual(broken.replace(b"\0", b"\1") if broken.index(b"\0") < 1024 else broken, self.recorded(), at)


class TheFastPath(Wrapper):
    def test_is_taken_by_exactly_what_was_registered_last(self):
        for host in ("codex", "claude"):
            with self.subTest(host):
                same = self.pay(host)
                self.assertTrue(self.is_fast(same, host))
                self.assertTrue(self.is_fast(self.pay(host, tool_input={"command": "another"}), host))
                for change in ({"permission_mode": "plan"}, {"cwd": "/"}, {"session": EVE},
                               {"turn_id": "t2"} if host == "codex" else {"prompt_id": "p2"}):
                    fields = dict({"cwd": self.home.folder}, **change)
                    session = fields.pop("session", {"codex": BOB, "claude": ADA}[host])
                    self.assertFalse(self.is_fast(payload(host, "PreToolUse", session, **fields), host), change)
                self.assertFalse(self.is_fast(b" " + same, host))

    def test_takes_no_folder_for_a_pattern(self):
        folders = [os.path.join(self.home.folder, name) for name in ("a*", "abc")]
        for folder in folders:
            os.mkdir(folder)
        self.home.run_hook("codex", payload("codex", "PreToolUse", BOB, cwd=folders[0]))
        self.assertTrue(self.is_fast(payload("codex", "PreToolUse", BOB, cwd=folders[0])))
        self.assertFalse(self.is_fast(payload("codex", "PreToolUse", BOB, cwd=folders[1])))

    def test_leaves_out_no_title_since_only_events_that_it_leaves_alone_have_one(self):
        self.home.hook("claude", ADA, "UserPromptSubmit", session_title="the title")
        self.home.hook("claude", ADA, "PreToolUse", permission_mode="plan", session_title="behind the prefix")
        self.assertEqual([("the title",)], self.home.sql("select title from peers where session = ?", (ADA,)))

    def test_needs_the_store_and_its_hints(self):
        for path in (self.home.db, self.home.hints + "/peer/" + BOB, self.home.hints):
            os.rename(path, path + ".away")
            self.assertFalse(self.is_fast(self.pay()), path)
            os.rename(path + ".away", path)
            self.assertTrue(self.is_fast(self.pay()), path)
        with open(self.home.hints + "/peer/" + BOB, "w") as file:
            file.write("\n\n")
        os.utime(self.home.hints + "/peer/" + BOB, (time.time() + 60,) * 2)
        self.assertFalse(self.is_fast(self.pay()), "an empty prefix begins every payload")

    def test_ends_with_mail_and_with_the_deadline(self):
        peer = self.home.hints + "/peer/" + BOB
        self.assertLess(time.time() + 30, os.stat(peer).st_mtime)
        self.assertLess(os.stat(peer).st_mtime, time.time() + 61)
        os.utime(peer, (time.time() - 1,) * 2)
        self.assertFalse(self.is_fast(self.pay()))
        before = self.home.sql("select last_seen from peers where session = ?", (BOB,))
        self.home.sql("update peers set last_seen = last_seen - 60000")
        self.home.hook("codex", BOB, "PreToolUse")
        self.assertLessEqual(before, self.home.sql("select last_seen from peers where session = ?", (BOB,)))
        self.assertTrue(self.is_fast(self.pay()))
        self.queue()
        self.assertFalse(self.is_fast(self.pay()))
        self.assertIn("mail", self.home.context("codex", BOB, "PreToolUse"))
        self.assertTrue(self.is_fast(self.pay()))

    def test_leaves_a_sign_of_life(self):
        live = self.home.hints + "/live/" + BOB
        os.utime(live, (1, 1))
        self.assertTrue(self.is_fast(self.pay()))
        self.assertLess(abs(time.time() - os.stat(live).st_mtime), 5)
        os.unlink(live)
        self.assertTrue(self.is_fast(self.pay()))
        self.assertEqual(0o600, stat.S_IMODE(os.stat(live).st_mode))

    def test_never_misses_a_change_of_the_permission_mode(self):
        generator = random.Random(3)
        for host, session in (("claude", ADA), ("codex", BOB)):
            for _ in range(40 if FULL else 12):
                mode = generator.choice(("default", "plan", "acceptEdits", "bypassPermissions"))
                self.home.hook(host, session, generator.choice(("PreToolUse", "PostToolUse")), permission_mode=mode)
                self.assertEqual([(mode,)], self.home.sql("select permission_mode from peers where session = ?",
                                                          (session,)))

    def test_is_kept_from_events_that_have_something_to_say_every_time(self):
        """After a `cd` Claude Code has forgotten what it watches, and says so with what it has already said."""
        self.home.hook("claude", ADA, "SessionStart", permission_mode="default")
        for event in ("SessionStart", "CwdChanged"):
            for order in (("hook_event_name", "permission_mode"), ("permission_mode", "hook_event_name")):
                values = {"hook_event_name": event, "permission_mode": "default"}
                data = json.dumps(dict({"session_id": ADA, "cwd": "/w"}, **{key: values[key] for key in order}),
                                  separators=(",", ":")).encode()
                for _ in range(2):
                    out = self.home.raw_hook(["claude"], data)
                    self.assertEqual([self.home.hint(ADA)], out["hookSpecificOutput"]["watchPaths"], data)

    def test_means_that_python_would_do_nothing(self):
        """Property: whatever arrives, if the shell alone lets it pass, Python would show, claim and register nothing."""
        generator = random.Random(int(os.environ.get("XMSG_TEST_SEED", "20")))
        fast, slow = 0, 0
        for number in range(3000 if FULL else 160):
            if number % 50 == 0:
                self.home.hook("codex", BOB, "PreToolUse", permission_mode=generator.choice(("default", "plan")))
                self.home.hook("claude", ADA, "PreToolUse", permission_mode=generator.choice(("default", "plan")))
            host, data = hostile_payload(generator, self.home.folder)
            event = generator.choice(("", "", "", "FileChanged"))
            if not self.is_fast(data, host, event):
                slow += 1
                continue
            fast += 1
            before = self.state()
            done = subprocess.run([PYTHON, "-I", "-S", "-c", "import sys; sys.path.append(%r)\nfrom xmsg import hook_main\n"
                                   "sys.exit(hook_main(%r))" % (ROOT, [host, event])], input=data, env=self.home.env,
                                  cwd=self.home.folder, stdout=subprocess.PIPE, timeout=20 * PATIENCE)
            self.assertEqual((0, b""), (done.returncode, done.stdout), (host, event, data[:1500]))
            self.assertEqual(before, self.state(), (host, event, data[:1500]))
        self.assertGreater(fast, 12)
        self.assertGreater(slow, 60)

    def state(self):
        """All that the store says, but for times."""
        columns = [row[1] for row in self.home.sql("pragma table_info(peers)") if not row[1].endswith("_seen")]
        return (self.home.sql("select %s from peers order by session" % ", ".join(columns)),
                self.home.sql("select id, state, target from messages order by id"))


def hostile_payload(generator, folder):
    """(host, bytes): a real payload, changed in up to three ways that could lead the fast path astray."""
    host = generator.choice(("codex", "claude"))
    session = {"codex": BOB, "claude": ADA}[host]
    event = generator.choice(("PreToolUse",) * 6 + ("PostToolUse", "Stop", "UserPromptSubmit", "SessionStart"))
    data = payload(host, event, session, cwd=folder, permission_mode=generator.choice(("default", "plan")))
    other = {"codex": ADA, "claude": BOB}[host]
    pairs = [b'"session_id":"%s"' % EVE.encode(), b'"session_id":"%s"' % other.encode(), b'"permission_mode":"bypass"',
             b'"cwd":"/elsewhere"', b'"agent_id":"a1"', b'"hook_event_name":"Stop"', b'"x":NaN', b'"x":1e999',
             b'"model":"other"', b'"transcript_path":"/t.jsonl"', b'"x":{"x":1,"x":2}', b'"turn_id":"t9"', b'"stop_hook_active":true', b'"source":"clear"']
    for _ in range(generator.choice((0, 0, 1, 1, 2, 3))):
        kind = generator.randrange(12)
        at = generator.randrange(len(data) + 1)
        pair = generator.choice(pairs)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + bytes([generator.randrange(256)]) + data[at:]
        elif kind == 2:
            data = data[:at] + b"\0" + data[at:]
        elif kind == 3:
            data = b"{" + pair + b"," + data[1:]
        elif kind in (4, 5):
            mode = data.find(b'"permission_mode"')
            end_of_mode = data.find(b",", mode) + 1 or 1
            data = data[:end_of_mode] + pair + b"," + data[end_of_mode:]
        elif kind in (6, 7):
            data = data.rstrip()[:-1] + b"," + pair + b"}"
        elif kind == 8:
            data += generator.choice((b"{}", b"\n\n", b"\xef\xbb\xbf", data, b"]", b"\xff"))
        elif kind == 9:
            data = generator.choice((b"\xef\xbb\xbf", b" ", b"\n", b"\0")) + data
        elif kind == 10:
            data = data.replace(b'":"', generator.choice((b'": "', b'" :"', b'":\n"')), generator.randrange(1, 4))
        else:
            old = generator.choice((b"session_id", b"permission_mode", session.encode(), b"cwd", b"default"))
            data = data.replace(old, generator.choice((b"\\u0041", b"../x", b"x\n", b"\\u0000", old.upper())), 1)
    if generator.randrange(4) == 0:
        data = data.replace(b"echo hi", generator.choice((b"x" * 1500, b'\\"session_id\\":\\"' + EVE.encode(), b"\xff\xfe")))
    return host, data


class TheEnvironment(Wrapper):
    def canary(self, *names):
        """A folder of programs that tell of it if they run; (folder, the file that then exists)."""
        folder = tempfile.mkdtemp(dir=self.home.folder)
        trace = os.path.join(folder, "ran")
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "w") as file:
                file.write("#!/bin/sh\necho %s >>'%s'\nexit 2\n" % (name, trace))
            os.chmod(path, 0o755)
        return folder, trace

    def check(self, env, trace):
        """Fast and slow, with and without a drain: nothing of the environment runs, and the hook works."""
        with self.subTest(sorted(env)):
            for data in (self.pay(), self.sized(70000)):
                status, out, _, whole = self.feed(data, env=dict(env, **NO_PYTHON))
                self.assertEqual((0, b"", True), (status, out, whole))
            self.queue()
            status, out, err, whole = self.feed(self.sized(70000), env=env)
            self.assertEqual((0, True), (status, whole), err)
            self.assertIn("mail", json.loads(out)["hookSpecificOutput"]["additionalContext"])
            self.feed(b"{", env=env)
            self.assertFalse(os.path.exists(trace), "code of the environment ran")

    def test_gives_no_code_to_the_shell(self):
        folder, trace = self.canary()
        script = os.path.join(folder, "script")
        with open(script, "w") as file:
            file.write("echo ran >>'%s'\nexit 2\n" % trace)
        body = "() { echo ran >>'%s'; exit 2; }" % trace
        self.check({"BASH_ENV": script, "ENV": script}, trace)
        self.check({"BASH_FUNC_%s%%%%" % name: body for name in (
            "read", "printf", "[", "exec", "cat", "drain", "exit", "type", "local", "take_head", "find_python")}, trace)
        self.check({"SHELLOPTS": "xtrace:noexec:errexit:posix", "PS4": "$(echo ran >>'%s')" % trace, "BASHOPTS": "extdebug",
                    "BASH_XTRACEFD": "1", "PROMPT_COMMAND": "echo ran >>'%s'" % trace}, trace)
        self.check({"IFS": "\"_:/", "CDPATH": folder, "GLOBIGNORE": "*", "POSIXLY_CORRECT": "1", "TMPDIR": "/nonexistent",
                    "HOME": "relative", "host": "agy", "event": "FileChanged", "wakes": "x", "head": "x", "more": "1",
                    "XMSG_HOOK_HEAD": "x"}, trace)

    def test_gives_no_program_of_its_path(self):
        folder, trace = self.canary("cat", "python3", "python", "timeout", "env", "bash", "sh", "dirname", "date")
        self.check({"PATH": folder}, trace)
        self.check({"PATH": folder + ":/usr/bin:/bin"}, trace)
        self.check({"PATH": ""}, trace)

    def test_gives_no_module_to_python(self):
        folder, trace = self.canary()
        for name in ("json", "sqlite3", "contract", "store", "sitecustomize", "usercustomize", "os"):
            with open(os.path.join(folder, name + ".py"), "w") as file:
                file.write("open(%r, 'w').write('ran')\n" % trace)
        self.check({"PYTHONPATH": folder, "PYTHONSTARTUP": folder + "/json.py", "PYTHONHOME": folder,
                    "PYTHONINSPECT": "1", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}, trace)
        self.queue()
        self.assertIn(b"mail", self.home.run_hook("codex", self.pay(), cwd=folder).stdout)
        self.assertFalse(os.path.exists(trace), "a module of the host's folder ran")

    def test_in_a_strange_locale_changes_nothing(self):
        for locale in ("bogus", "C", "POSIX", "C.UTF-8", "en_US.ISO-8859-1", ""):
            self.queue(body="naïve 长")
            env = {"LC_ALL": locale, "LANG": locale, "XMSG_LANG": "en"}
            # The head of 1,024 bytes ends in the middle of a character.
            data = payload("codex", "PreToolUse", BOB, cwd="/naïve/长" * 90)
            out = self.home.raw_hook(["codex"], data, env=env)
            self.assertIn("naïve 长", out["hookSpecificOutput"]["additionalContext"], locale)
            data = payload("codex", "PreToolUse", BOB, cwd="/naïve/长")
            self.home.raw_hook(["codex"], data, env=env)
            done = self.home.run_hook("codex", data, env=dict(env, **NO_PYTHON))
            self.assertEqual(0, done.returncode, locale)

    def test_with_a_home_that_is_no_place_does_no_harm(self):
        done = subprocess.run([HOOK, "codex"], input=self.pay(), env={"PATH": "/usr/bin:/bin", "HOME": "relative"},
                              cwd=self.home.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=10 * PATIENCE)
        self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
        self.assertFalse(os.path.exists(self.home.folder + "/relative"))

    def test_keeps_files_to_the_user_with_any_umask(self):
        for umask in (0, 0o077):
            home = Home()
            self.addCleanup(home.remove)
            shutil.rmtree(home.folder + "/store")
            for event in ("SessionStart", "PreToolUse", "PreToolUse", "Stop"):
                home.hook("claude", ADA, event, umask=umask)
            home.raw_hook(["claude"], b"{", umask=umask)
            home.raw_hook(["claude"], b"{", umask=umask, env=self.implementation("import os; os._exit(3)"))
            found = 0
            for folder, folders, files in os.walk(home.folder + "/store"):
                for name in folders + files + ["."]:
                    mode = os.lstat(os.path.join(folder, name)).st_mode
                    self.assertEqual(0o700 if stat.S_ISDIR(mode) else 0o600, stat.S_IMODE(mode), (umask, folder, name))
                    found += 1
            self.assertGreater(found, 10)
            self.assertTrue(os.path.exists(home.db + ".faults.shell"))


class TheInterpreter(Wrapper):
    def facts(self, env=()):
        done = self.home.run_hook("codex", self.pay(session=EVE), "Ev", env=dict(self.implementation(FACTS), **dict(env)))
        self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
        with open(self.record) as file:
            facts = json.load(file)
        os.unlink(self.record)
        return facts

    def test_is_the_recorded_one_without_site_and_environment(self):
        facts = self.facts()
        self.assertEqual(PYTHON, os.path.realpath(facts["executable"]))
        self.assertEqual((1, 1, False), (facts["isolated"], facts["no_site"], facts["site"]))
        self.assertEqual(["codex", "Ev"], facts["arguments"])
        self.assertEqual([], facts["open"], "descriptors of the wrapper leak")
        self.assertNotIn("", facts["path"])

    def test_is_recorded_as_a_real_program_by_the_first_session(self):
        recorded = os.path.dirname(self.home.db) + "/python"
        shim = os.path.join(self.home.folder, "shim")
        os.symlink(PYTHON, shim)
        with open(recorded, "w") as file:
            file.write("/nonexistent/python\n")
        if os.path.exists("/usr/bin/python3"):  # else nothing is found on this PATH
            self.home.hook("claude", ADA, "SessionStart")
            with open(recorded) as file:
                self.assertEqual(os.path.realpath("/usr/bin/python3") + "\n", file.read())
        os.unlink(recorded)
        done = self.home.run([shim, "-I", "-S", "-c", "import sys; sys.path.append(%r)\nfrom xmsg import hook_main\n"
                              "sys.exit(hook_main(['claude']))" % ROOT], input=self.pay("claude", "SessionStart"))
        self.assertEqual(0, done.returncode)
        with open(recorded) as file:
            self.assertEqual(PYTHON + "\n", file.read())
        self.assertEqual(0o600, stat.S_IMODE(os.stat(recorded).st_mode))

    def test_is_no_relative_foreign_or_missing_one(self):
        recorded = os.path.dirname(self.home.db) + "/python"
        fake = os.path.join(self.home.folder, "fake")
        with open(fake, "w") as file:
            file.write("#!/bin/sh\ntouch '%s'\n" % self.record)
        os.chmod(fake, 0o755)

        def record(text, prepare=None):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(recorded)
            with open(recorded, "w") as file:
                file.write(text)
            if prepare:
                prepare()
            # Whether the fake ran; where no other interpreter is known, nothing else does either.
            self.home.run_hook("codex", b"{")
            ran = os.path.exists(self.record)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.record)
            return ran
        self.assertTrue(record(fake), "without a line end")
        self.assertTrue(record(fake + "\n"))
        self.assertFalse(record("./fake\n"))
        self.assertFalse(record(""))
        self.assertFalse(record("\n" + fake))
        self.assertFalse(record(fake + "\n", lambda: os.chmod(fake, 0o644)))
        os.chmod(fake, 0o755)
        if os.geteuid() == 0:
            self.assertFalse(record(fake + "\n", lambda: os.chown(recorded, 1, 1)), "another user's record")

    def test_is_limited_below_what_hosts_give_whatever_the_setting(self):
        self.assertAlmostEqual(3, self.facts()["alarm"], delta=0.9)
        for text in ("0.5", "4.9", "4.95", "5", "60", "999", "abc", "-1", "0", "0.0", "1e3", " 1", "1;true", "nan",
                     "inf", "4.99999999999999999999"):
            with self.subTest(text):
                alarm = self.facts({"XMSG_HOOK_TIMEOUT": text})["alarm"]
                self.assertGreater(alarm, 0, "no limit at all")
                self.assertLess(alarm, 4.95)


# what an implementation does wrong -> (its text, its own status)
FAULTS = {
    "a syntax error": ("def hook_main(:\n", 1),
    "no entry": ("x = 1\n", 1),
    "an exception": ("def hook_main(a):\n    raise ValueError('boom')\n", 1),
    "an exception at import": ("raise KeyboardInterrupt\n", None),
    "status 2": ("import os\ndef hook_main(a):\n    os._exit(2)\n", 2),
    "sys.exit(2)": ("import sys\nsys.exit(2)\n", 2),
    "a returned 2": ("def hook_main(a):\n    return 2\n", 2),
    "a returned text": ("def hook_main(a):\n    return 'x'\n", 1),
    "text on stderr and 2": ("import os\nos.write(2, b'blocked by xmsg')\nos._exit(2)\n", 2),
    "SIGKILL": ("import os\nos.kill(os.getpid(), 9)\n", 137),
    "SIGSEGV": ("import os\nos.kill(os.getpid(), 11)\n", 139),
    "a hang": ("import time\ntime.sleep(60)\n", 142),
    "a hang that ignores signals": ("import signal, time\nfor n in (1, 2, 3, 13, 15):\n    signal.signal(n, signal.SIG_IGN)\n"
                                    "while True:\n    pass\n", 142),
}
ENTRIES = [("claude",), ("codex",), ("agy", "Stop"), ("agy", "PreInvocation"), ("claude", "Stop"), ("claude", "PreToolUse"),
           ("codex", "FileChanged"), ("agy", "FileChanged"), ("Claude", "FileChanged"), ("claude", "FileChanged "), ("",),
           ("claude", "filechanged")]


class TheNet(Wrapper):
    def test_hides_each_fault_and_is_no_more_than_a_net(self):
        missing = {"missing": {"XMSG_IMPL": "/nonexistent/xmsg.py"}, "a folder": {"XMSG_IMPL": self.home.folder},
                   "without a folder": {"XMSG_IMPL": "xmsg.py"}}
        cases = {what: (self.implementation(text), status) for what, (text, status) in FAULTS.items()}
        cases.update((what, (env, None if what == "a folder" else 2)) for what, env in missing.items())
        data = self.pay("codex", session=EVE, tool_input={"command": "x" * (1 << 20)})
        for what, (env, status) in cases.items():
            with self.subTest(what):
                env = dict(env, XMSG_HOOK_TIMEOUT="0.2")
                done = self.feed(data, env=env)
                self.assertEqual((0, b"", b""), done[:3])
                if "hang" not in what:
                    self.assertTrue(done[3], "the host saw a broken pipe")
                bare = self.feed(data, env=dict(env, XMSG_NO_FAILOPEN="1"))
                self.assertNotEqual(0, bare[0])
                if status is not None:
                    self.assertEqual(status, bare[0])
        with open(self.home.db + ".faults.shell") as file:
            shell = json.load(file)
        self.assertIn("python ended with status", shell["fault"])

    def test_hides_an_implementation_that_may_not_be_read(self):
        env = self.implementation("def hook_main(a):\n    return 0\n")
        os.chmod(env["XMSG_IMPL"], 0)
        data = self.pay("codex", session=EVE)
        done = self.home.run_hook("codex", data, env=env, before=permissions_count)
        self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
        done = self.home.run_hook("codex", data, env=dict(env, XMSG_NO_FAILOPEN="1"), before=permissions_count)
        self.assertEqual(2, done.returncode)

    def test_lets_no_other_status_through_than_0(self):
        """A status of 2 at PreToolUse blocks a person's tool. Only `claude FileChanged` may leave with it."""
        self.queue(EVE)
        env = self.implementation("import os\nos.write(2, b'blocked')\nos.write(1, b'xmsg wakes\\n')\nos._exit(2)\n")
        for entry in ENTRIES:
            for event in ("PreToolUse", "FileChanged"):
                done = self.home.run([HOOK, *entry], input=self.pay("codex", event, session=EVE), env=env)
                self.assertEqual((0, b""), (done.returncode, done.stderr), (entry, event))

    def test_lets_the_waking_entry_leave_with_2_for_marked_text_only(self):
        self.queue(EVE)
        data = self.pay("claude", "FileChanged", session=EVE)
        for text in ("", "xmsg wake", " xmsg wakes\\n", "xmsg wakes\\nx", "garbage\\nxmsg wakes", "xmsg wakes*", "x" * 5000,
                     '{"a": 1}', "\\nxmsg wakes\\n"):
            for status in (0, 2):
                env = self.implementation("import os\nos.write(1, b'%s')\nos._exit(%d)\n" % (text, status))
                done = self.home.run_hook("claude", data, "FileChanged", env=env)
                self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr), (text, status))
        for status in (0, 1, 2, 137):
            leave = "os.kill(os.getpid(), 9)" if status == 137 else "os._exit(%d)" % status
            env = self.implementation("import os\nos.write(3, b'%%s * ` $HOME -n')\nos.write(2, b'noise')\n"
                                      "os.write(1, b'xmsg wakes\\n')\n%s\n" % leave)
            done = self.home.run_hook("claude", data, "FileChanged", env=env)
            self.assertEqual((2, b"", b"%s * ` $HOME -n"), (done.returncode, done.stdout, done.stderr))

    def test_lets_the_waking_entry_leave_with_2_for_claimed_text_only(self):
        wake = ["claude", "FileChanged"]
        data = self.pay("claude", "FileChanged")
        self.queue(EVE)
        cases = {"no mail": {}, "a subagent": {"agent_id": "a1"}}
        for what, fields in cases.items():
            self.assertIsNone(self.home.raw_hook(wake, self.pay("claude", "FileChanged", **fields)), what)
        self.queue(ADA, "expired", ttl=-1)
        self.assertIsNone(self.home.raw_hook(wake, data))
        self.assertEqual(["queued", "expired"], self.home.states())
        self.queue(ADA, "for later")
        for what, env in (("off", {"XMSG_WAKE": "off"}), ("claude -p", {"CLAUDE_CODE_ENTRYPOINT": "sdk-cli"})):
            self.assertIsNone(self.home.raw_hook(wake, data, env=env), what)
        for broken in (b"", b"{", data[:-3], data.replace(b"{", b'{"session_id":"%s",' % EVE.encode(), 1),
                       self.pay("claude", "FileChanged", agent_id="a1")):
            self.assertIsNone(self.home.raw_hook(wake, broken))
        self.assertEqual(["queued", "expired", "queued"], self.home.states())
        blocker = self.open_store()
        with blocker.transaction():
            self.assertIsNone(self.home.raw_hook(wake, data))
        self.assertIsNone(self.home.raw_hook(wake, data, status=2))
        self.assertIn("for later", self.home.stderr)
        self.assertEqual(["queued", "expired", "delivered"], self.home.states())

    def test_cuts_a_hook_that_waits_for_a_locked_store(self):
        self.queue()
        blocker = self.open_store()
        with blocker.transaction():
            begun = time.monotonic()
            done = self.feed(self.pay(), env={"XMSG_HOOK_TIMEOUT": "0.3"})
            self.assertEqual((0, b"", b""), done[:3])
            self.assertLess(time.monotonic() - begun, 0.9 * PATIENCE, "the alarm does not reach into SQLite's waiting")
            begun = time.monotonic()
            self.assertEqual((0, b"", b""), self.feed(self.pay())[:3])
            self.assertLess(time.monotonic() - begun, 3 * PATIENCE)
        self.assertEqual(["queued"], self.home.states())
        self.assertIn("mail", self.home.context("codex", BOB, "PreToolUse"))

    def test_is_silent_where_the_wrapper_alone_was_copied(self):
        folder = copy_of_product(self)
        os.unlink(folder + "/store.py")
        done = subprocess.run([folder + "/xmsg-hook.sh", "codex"], input=self.pay("codex", session=EVE), env=self.home.env,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=10 * PATIENCE)
        self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))


if __name__ == "__main__":
    unittest.main()
