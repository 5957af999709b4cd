"""Senders in a sandbox: what comes out, who takes it, and what is never taken.

The sandbox of these tests is a store that cannot be written, by its modes; tests/real/ has Codex's own.
"""
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
import unittest

from support import (ADA, BOB, EVE, PATIENCE, ROOT, ClaudeStandIn, HomeCase, HostProcess, copy_of_product, dead_process,
                     payload, peer, permissions_count, wait_until)
from side_by_side import load_tests  # noqa: F401
import contract
import spool

TOOL = {"tool_input": {"command": "xmsg send ada hello"}}


class Sandbox(HomeCase):
    """ADA (Claude Code, called ada) and BOB and EVE (Codex) are registered; BOB's shell is in a sandbox."""

    def setUp(self):
        super().setUp()
        self.addCleanup(self.forget_folders)
        self.home.env["TMPDIR"] = os.path.join(self.home.folder, "tmp")
        os.mkdir(self.home.env["TMPDIR"])
        store = self.home.store()
        # A sandbox shows no process of a session, so there ADA's is as good as any.
        pid, start = dead_process()
        peer(store, ADA, "claude", name="ada", cwd=self.home.folder, pid=pid, pid_start=start)
        for session in (BOB, EVE):
            peer(store, session, cwd=self.home.folder)
        store.close()
        spool.make_key(self.home.db + ".key")

    @property
    def folders(self):
        return contract.spool_folders(self.home.db, self.home.env)

    def forget_folders(self):
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(folder)

    def block(self, *folders):
        """Another thing stands where these folders would be."""
        for folder in folders:
            with open(folder, "w"):
                pass

    @contextlib.contextmanager
    def read_only(self):
        """For a while nothing of the store can be written, not even by root without its capability."""
        paths = [os.path.join(folder, name) for folder, folders, files in os.walk(os.path.dirname(self.home.db))
                 for name in folders + files] + [os.path.dirname(self.home.db)]
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in paths]
        for path, mode in zip(paths, modes):
            os.chmod(path, mode & ~0o222)
        try:
            yield
        finally:
            for path, mode in reversed(list(zip(paths, modes))):
                os.chmod(path, mode)

    def inside(self, *arguments, session=BOB, status=0, root=ROOT, **env):
        """`xmsg ARGUMENTS` in the sandbox of a thread, as a CompletedProcess with text."""
        env = dict({"CODEX_THREAD_ID": session, "CODEX_SANDBOX_NETWORK_DISABLED": "1"}, **env)
        with self.read_only():
            done = self.home.run([os.path.join(root, "bin", "xmsg"), *arguments], env=env, before=permissions_count)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        if status is not None:
            self.assertEqual(status, done.returncode, done)
        return done

    def tool(self, session=BOB, event="PostToolUse", **fields):
        """The hook at a tool call of a thread that ran xmsg."""
        return self.home.hook("codex", session, event, **dict(dict(TOOL, tool_response=""), **fields))

    def take(self, **options):
        """What BOB's hook takes, without the rest of a hook."""
        store = self.home.store(**options)
        try:
            return spool.take(store, self.home.env, BOB)
        finally:
            store.close()

    def rows(self):
        return self.home.sql("select body, sender_host, sender_session, target, state from messages order by id")

    def message(self, body="hello", session=BOB, age=0, ttl=3600, **columns):
        now = contract.now_ms() - age * 1000
        return dict({"uid": os.urandom(8).hex(), "created_at": now, "expires_at": now + ttl * 1000,
                     "sender_kind": "agent", "sender_label": session[:13], "sender_host": "codex",
                     "sender_session": session, "target": ADA, "target_host": "claude", "body": body, "priority": 0,
                     "request_key": None, "reply_to": None, "replace": False, "direct": False}, **columns)

    def key(self):
        return spool.read_key(self.home.db + ".key")

    def line(self, *messages):
        return spool.seal(self.key(), list(messages))

    def place(self, content, session=BOB, name=None, base=0):
        """A file as `send` leaves it; its path."""
        folder = os.path.join(self.folders[base], session)
        os.makedirs(folder, 0o700, exist_ok=True)
        os.chmod(self.folders[base], 0o700)
        path = os.path.join(folder, name or os.urandom(8).hex())
        with open(path, "w") as file:
            file.write(content)
        os.chmod(path, 0o600)
        return path

    def let_end(self, *sessions):
        """These sessions were last seen long ago."""
        for session in sessions:
            self.home.sql("update peers set last_seen = 1 where session = ?", (session,))
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self.home.hints, "live", session), (1, 1))


class ASender(Sandbox):
    def test_in_a_sandbox_leaves_a_file_that_its_next_hook_takes_and_the_receiver_sees(self):
        done = self.inside("send", "ada", "hello from inside")
        self.assertRegex(done.stdout, "^spooled [0-9a-f]{16} -> %s  [(]from 01a04cd2-1[^,]*, ttl 3600s; not yet in the "
                         "store" % ADA)
        self.assertEqual("", done.stderr)
        folder = os.path.join(self.folders[0], BOB)
        name, = os.listdir(folder)
        for path, mode in ((self.folders[0], 0o700), (folder, 0o700), (os.path.join(folder, name), 0o600)):
            self.assertEqual(mode, stat.S_IMODE(os.stat(path).st_mode), path)
        self.assertEqual([], self.rows())
        self.tool(event="PreToolUse")
        self.assertEqual([("hello from inside", "codex", BOB, ADA, "queued")], self.rows())
        self.assertFalse(os.path.exists(self.folders[0]))
        self.assertIn("codex:01a04cd2-1; not a user instruction]\nhello from inside",
                      self.home.context("claude", ADA, "PreToolUse"))
        self.assertEqual("", self.home.faults())

    def test_reports_as_json_what_is_not_yet_in_the_store(self):
        sent, = json.loads(self.inside("send", "ada", "hello", "--json").stdout)["messages"]
        self.assertEqual((None, "spooled", None, "not yet in the store"),
                         tuple(sent[key] for key in ("id", "state", "window", "detail")))
        self.assertEqual(({"session": ADA, "host": "claude", "name": "ada"}, BOB, "codex", "agent"),
                         (sent["to"], sent["from"]["session"], sent["from"]["host"], sent["from"]["kind"]))
        self.tool()
        shown = self.home.json("show", sent["uid"])
        self.assertEqual("queued", shown["state"])
        self.assertEqual({key: sent[key] for key in ("uid", "body", "from", "to", "expires_at")},
                         {key: shown[key] for key in ("uid", "body", "from", "to", "expires_at")})

    def test_where_nothing_can_be_written_prints_a_line_that_the_tool_calls_hook_takes(self):
        self.block(*self.folders)
        done = self.inside("send", "ada", "hello", "--json")
        self.assertEqual("spooled", json.loads(done.stdout)["messages"][0]["state"])
        self.tool(tool_response=done.stdout + done.stderr)
        self.assertEqual([("hello", "codex", BOB, ADA, "queued")], self.rows())
        self.tool(tool_response={"output": self.inside("send", "ada", "again").stderr})
        self.assertEqual(2, len(self.rows()))

    def test_whose_output_goes_elsewhere_is_told_that_nothing_was_sent(self):
        self.block(*self.folders)
        with open(os.devnull, "w") as null, self.read_only():
            done = self.home.run_xmsg("send", "ada", "hello", before=permissions_count, stderr=null, env={
                "CODEX_THREAD_ID": BOB, "CODEX_SANDBOX_NETWORK_DISABLED": "1"})
        self.assertEqual((5, b""), (done.returncode, done.stdout))
        long = "".join(chr(0x4e00 + int.from_bytes(os.urandom(2), "big") % 0x5000) for _ in range(4000))
        self.assertIn("too long", self.inside("send", "ada", long, status=5).stderr)

    def test_uses_the_other_folder_where_one_cannot_be_used_and_so_does_the_hook(self):
        for spoil in (lambda: self.block(self.folders[0]), lambda: os.mkdir(self.folders[0], 0o755)):
            spoil()
            self.inside("send", "ada", "hello")
            self.assertTrue(os.path.isdir(os.path.join(self.folders[1], BOB)))
            self.tool()
            self.assertEqual("queued", self.rows()[-1][-1])
            self.forget_folders()

    def test_whose_session_no_hook_has_seen_is_told_the_way_out(self):
        done = self.inside("send", "ada", "hello", session="01a04cd2-9999-7000-8000-000000000099", status=5)
        self.assertIn("no hook of xmsg has run in this session", done.stderr)
        self.assertIn("/hooks", done.stderr)
        error = json.loads(self.inside("send", "ada", "hello", "--json", status=5,
                                       session="01a04cd2-9999-7000-8000-000000000099").stdout)["error"]
        self.assertEqual("store_read_only", error["code"])
        os.unlink(self.home.db + ".key")
        self.assertIn("nothing was sent", self.inside("send", "ada", "hello", status=5).stderr)
        self.assertFalse(os.path.exists(self.folders[0]))
        self.tool()
        self.inside("send", "ada", "hello")

    def test_outside_a_sandbox_keeps_the_error_of_a_store_that_cannot_be_written(self):
        self.assertIn("writable", self.inside("send", "ada", "hello", status=5, CODEX_THREAD_ID="").stderr)
        self.assertIn("writable", self.inside("send", "ada", "hello", status=5,
                                              CODEX_SANDBOX_NETWORK_DISABLED="").stderr)
        bound = ["/usr/bin/setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        # Without a sandbox the session is above its shell; in one that lets the network be used, `codex sandbox` is.
        for word, status in (("", 5), ("sandbox", 0)):
            host = HostProcess(self.home, "codex", word, bound)
            self.addCleanup(host.end)
            with self.read_only():
                done = host.xmsg("send", "ada", "hello", env={"CODEX_THREAD_ID": BOB})
            self.assertEqual(status, done.returncode, done)
            self.assertEqual(status == 0, os.path.exists(self.folders[0]))

    def test_in_a_sandbox_is_told_that_no_other_machine_is_reached(self):
        done = self.inside("send", "peer:bob", "hello", status=5, XMSG_REMOTE="/bin/false")
        self.assertIn("no other machine is reached", done.stderr)
        self.assertFalse(any(os.path.isdir(folder) and os.listdir(folder) for folder in self.folders))

    def test_in_a_sandbox_that_lets_the_store_be_written_queues_as_everybody_does(self):
        done = self.home.run_xmsg("send", "ada", "hello", "--no-direct",
                                  env={"CODEX_THREAD_ID": BOB, "CODEX_SANDBOX_NETWORK_DISABLED": "1"})
        self.assertRegex(done.stdout.decode(), "^queued #1 ")

    def test_is_its_codex_thread_whatever_other_hosts_have_left_in_the_environment(self):
        self.inside("send", "ada", "one", CLAUDE_CODE_SESSION_ID=EVE, CLAUDECODE="1")
        self.inside("send", "ada", "two", CODEX_THREAD_ID="01a04cd2-5555-7000-8000-000000000005", CODEX_SESSION_ID=BOB)
        self.tool()
        self.assertEqual([BOB, BOB], [row[2] for row in self.rows()])
        self.assertIn("Codex thread itself", self.inside("send", "ada", "x", status=5, XMSG_FROM_SESSION=EVE,
                                                         XMSG_FROM_TOOL="codex").stderr)
        self.assertIn("Codex thread itself", self.inside("send", "ada", "x", "--notification", status=5).stderr)

    def test_learns_at_once_what_is_wrong_with_the_target(self):
        self.inside("send", "nobody", "hello", status=3)
        self.inside("send", "01a04cd2", "hello", status=4)
        self.inside("send", BOB, "hello", status=2)
        self.inside("send", "ada", "hello", "--wait", "1", status=6)

    def test_reaches_everybody_whom_it_can_know_to_be_there_in_order_and_once(self):
        self.inside("send", "all", "first")
        self.inside("send", "ada", "second", "--key", "k")
        self.inside("send", "ada", "third", "--key", "k", "--replace")
        self.tool()
        self.assertEqual([("first", EVE, "queued"), ("first", ADA, "queued"), ("second", ADA, "cancelled"),
                          ("third", ADA, "queued")], sorted((row[0],) + row[3:] for row in self.rows()))

    def test_is_no_reason_to_put_off_a_codex_hook_that_has_nothing_to_take(self):
        data = payload("codex", "PostToolUse", BOB, cwd=self.home.folder, tool_response="hi")
        self.home.run_hook("codex", data)
        no_python = {"XMSG_IMPL": "/nonexistent/xmsg.py", "XMSG_NO_FAILOPEN": "1"}

        def is_fast(data):
            return self.home.run_hook("codex", data, env=no_python).returncode == 0
        self.assertTrue(is_fast(data))
        before = data.replace(b"PostToolUse", b"PreToolUse")
        self.home.run_hook("codex", before)
        for event in (data, before):
            self.assertTrue(is_fast(event))
            self.assertFalse(is_fast(event.replace(b"echo hi", b"xmsg send ada hi")))
        for base in (0, 1):
            path = self.place(self.line(self.message("hello")), base=base)
            self.assertFalse(is_fast(data), path)
            self.home.run_hook("codex", data)
            self.assertEqual(base + 1, len(self.rows()))
            self.assertTrue(is_fast(data))
            self.place(self.line(self.message("hello", EVE)), EVE, base=base)
            self.assertTrue(is_fast(data), "the file of another session")


class WhatIsTaken(Sandbox):
    def test_is_no_file_but_a_whole_one_of_this_session_by_this_store(self):
        foreign = spool.seal(b"0" * 64, [self.message("another key")])
        good = self.line(self.message("torn"))
        outside = self.place(self.line(self.message("by link")), EVE)  # EVE is open: nobody else takes it
        for name, spoil in (
                ("another session's", lambda: self.place(self.line(self.message("another's", EVE)))),
                ("another store's", lambda: self.place(foreign)),
                ("torn", lambda: self.place(good[:-1])),
                ("changed", lambda: self.place(good.replace(":", ":e", 1))),
                ("empty", lambda: self.place("")),
                ("binary", lambda: self.place("\0" * 100)),
                ("huge", lambda: os.truncate(self.place(self.line(self.message("huge"))), spool.LARGEST_FILE + 10)),
                ("readable by others", lambda: os.chmod(self.place(self.line(self.message("loose"))), 0o644)),
                ("a link", lambda: os.symlink(outside, self.place("") + "l")),
                ("a pipe", lambda: os.mkfifo(self.place("") + "p", 0o600)),
                ("another user's", lambda: os.geteuid() or os.chown(self.place(self.line(self.message("theirs"))), 65534, 0)),
                ("too old", lambda: self.place(self.line(self.message("old", age=1209601, ttl=1 << 30)))),
                ("of another version", lambda: self.place(self.line(self.message("new", colour="red"))))):
            with self.subTest(name):
                spoil()
                self.place(self.line(self.message("good " + name)))
                self.take()
                self.assertEqual("good " + name, self.rows()[-1][0])
                self.assertEqual([], os.listdir(os.path.join(self.folders[0], BOB))
                                 if os.path.exists(os.path.join(self.folders[0], BOB)) else [])
        self.assertEqual({"good"}, {row[0].split()[0] for row in self.rows()})
        self.assertIn("it speaks for another session", self.home.faults())
        self.assertIn("not made with this store's key", self.home.faults())

    def test_is_nothing_in_a_folder_of_another_user_or_open_to_others(self):
        path = self.place(self.line(self.message()))
        folder = os.path.dirname(path)
        spoils = [(lambda: os.chmod(folder, 0o755), lambda: os.chmod(folder, 0o700)),
                  (lambda: os.chmod(self.folders[0], 0o770), lambda: os.chmod(self.folders[0], 0o700))]
        if os.geteuid() == 0:
            spoils.append((lambda: os.chown(folder, 65534, 0), lambda: os.chown(folder, 0, 0)))
        else:
            self.assertFalse(spool._is_private("/root"))
        for spoil, mend in spoils:
            spoil()
            self.take()
            self.assertEqual([], self.rows())
            mend()
        self.tool()
        self.assertEqual(1, len(self.rows()))

    def test_is_no_line_but_a_whole_one_of_this_session_by_this_store(self):
        good, other = self.line(self.message("good")), self.line(self.message("another's", EVE))
        foreign = spool.seal(b"0" * 64, [self.message("of another machine")])
        document = "# How a message leaves a sandbox\n\n    %s\n\nand so on, `%s`.\n" % (foreign, other)
        self.tool(tool_response=document)
        self.assertEqual([], self.rows())
        cut = self.line(self.message("cut"))
        self.tool(tool_response=cut[:60] + "…1234 tokens truncated…" + cut[-60:] + "\r\n" + document + good + "\r\nbye")
        self.assertEqual(["good"], [row[0] for row in self.rows()])
        self.assertIn("not whole", self.home.faults())

    def test_is_a_printed_line_once_however_often_it_is_printed(self):
        line = self.line(self.message("hello"))
        self.tool(tool_response=line + "\n" + line)
        self.assertIn("hello", self.home.context("claude", ADA, "PreToolUse"))
        for _ in range(2):
            self.tool(tool_response="cat log\n" + line)
        self.place(line)
        self.tool()
        self.assertEqual([("hello", "codex", BOB, ADA, "delivered")], self.rows())
        self.assertIsNone(self.home.hook("claude", ADA, "PreToolUse"))
        self.home.sql("update messages set state_at = 1")
        store = self.open_store()
        store.sweep(contract.now_ms())
        self.assertEqual([], self.rows(), "forgotten")
        old = self.line(self.message("hello", age=1209600, ttl=1 << 30))
        self.tool(tool_response=old)
        self.assertEqual([], self.rows())

    def test_is_a_line_of_a_subagents_tool_call_which_itself_is_shown_nothing(self):
        self.home.xmsg("send", BOB, "for the parent", "--no-direct")
        said = self.tool(tool_response=self.line(self.message("hello")), agent_id=EVE, agent_type="default",
                         cwd="/elsewhere")
        self.assertIsNone(said)
        self.assertEqual([("for the parent", "queued"), ("hello", "queued")], [(row[0], row[-1]) for row in self.rows()])
        self.assertEqual([(self.home.folder,)], self.home.sql("select cwd from peers where session = ?", (BOB,)))

    def test_is_not_what_another_tools_answer_quotes(self):
        line = self.line(self.message("hello"))
        self.home.hook("claude", ADA, "PostToolUse", tool_response={"stdout": line})
        self.tool(event="UserPromptSubmit", prompt=line)
        self.tool(event="PreToolUse", tool_input={"command": "echo " + line}, tool_response=line)
        self.assertEqual([], self.rows())
        self.tool(tool_response=line)
        self.assertEqual(1, len(self.rows()))

    def test_is_late_and_then_ends_as_expired(self):
        self.place(self.line(self.message("late", age=100, ttl=60, direct=True)))
        self.assertEqual([], self.take())
        self.assertEqual([("late", "codex", BOB, ADA, "expired")], self.rows())
        self.assertIsNone(self.home.hook("claude", ADA, "PreToolUse"))
        self.assertIn("its time ran out", self.home.xmsg("outbox", "--all"))

    def test_is_never_a_message_that_changes_another(self):
        first = self.message("first")
        self.place(self.line(first))
        self.tool()
        self.place(self.line(dict(first, body="changed"), self.message("second")))
        self.tool()
        self.assertEqual(["first", "second"], [row[0] for row in self.rows()])
        self.assertIn("that of another message", self.home.faults())

    def test_by_many_hooks_at_once_is_taken_by_one(self):
        for turn in range(2):
            self.place(self.line(self.message("hello %d" % turn)))
            hooks = [subprocess.Popen([os.path.join(ROOT, "xmsg-hook.sh"), "codex"], env=self.home.env,
                                      stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(4)]
            for hook in hooks:
                hook.stdin.write(payload("codex", "PreToolUse", BOB, cwd=self.home.folder))
                hook.stdin.close()
            for hook in hooks:
                self.assertEqual(0, hook.wait(timeout=20 * PATIENCE))
        self.assertEqual(["hello %d" % turn for turn in range(2)], [row[0] for row in self.rows()])

    def test_stays_while_the_store_is_busy_a_printed_line_too(self):
        path = self.place(self.line(self.message("file")))
        printed = self.line(self.message("line"))
        database = self.home.store()
        self.addCleanup(database.close)
        with database.transaction():
            with self.assertRaises(contract.StoreBusy):
                self.take(busy_seconds=0.05)
            self.home.hook("codex", BOB, "PostToolUse", tool_response=printed, **TOOL)
        self.assertTrue(os.path.exists(path))
        self.assertEqual([], self.rows())
        self.tool()
        self.assertEqual({"file", "line"}, {row[0] for row in self.rows()})


class ACallThatIsStillRunning(Sandbox):
    """Codex runs no hook after it; only its rollout holds what it printed."""

    def setUp(self):
        super().setUp()
        self.rollout = os.path.join(self.home.folder, "rollout.jsonl")
        self.write(self.output("call_1", self.line(self.message("an earlier call's"))))

    def write(self, *records):
        with open(self.rollout, "a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))

    def output(self, call, text, running=True):
        head = "Wall time: 1.5 seconds\nProcess running with session ID 7\nOutput:\n" if running else "Exit code: 0\nOutput:\n"
        return {"type": "response_item", "payload": {"type": "function_call_output", "call_id": call, "output": head + text}}

    def item(self, call, text):
        return {"type": "event_msg", "payload": {"type": "item_completed", "item": {
            "type": "CommandExecution", "id": call, "aggregated_output": text}}}

    def begin(self, call="call_1", **fields):
        self.tool(event="PreToolUse", **dict({"tool_use_id": call, "transcript_path": self.rollout}, **fields))

    def notes(self):
        return sorted(name for folder in self.folders if os.path.isdir(folder) for _, _, names in os.walk(folder) for name in names)

    def bodies(self):
        return [row[0] for row in self.rows()]

    def test_has_its_line_taken_from_the_rollout_once_by_whichever_hook_comes_next(self):
        self.begin()
        self.assertEqual(["call.call_1"], self.notes())
        self.assertEqual([], self.bodies())
        line = self.line(self.message("hello"))
        self.write(self.output("call_1", line))
        self.tool(event="Stop", tool_input=None)
        self.assertEqual(["hello"], self.bodies())
        self.assertEqual(["call.call_1"], self.notes(), "it goes on, and may send more")
        self.write(self.output("call_2", "polled: " + self.line(self.message("second"))))
        self.tool(event="UserPromptSubmit", prompt="x")
        self.write(self.item("call_1", line))
        self.tool(event="UserPromptSubmit", prompt="x")
        self.assertEqual((["hello", "second"], []), (self.bodies(), self.notes()))

    def test_that_ended_in_silence_is_found_by_its_completed_item(self):
        self.begin()
        self.write(self.output("call_1", ""), self.item("call_1", self.line(self.message("late"))))
        self.tool(event="Stop", tool_input=None)
        self.assertEqual((["late"], []), (self.bodies(), self.notes()))

    def test_is_no_more_waited_for_once_it_was_answered_whole(self):
        self.begin()
        self.tool(tool_use_id="call_1", tool_response=self.line(self.message("as usual")), transcript_path=self.rollout)
        self.assertEqual((["as usual"], []), (self.bodies(), self.notes()))
        self.begin("call_2")
        self.write(self.output("call_2", "rejected by user", running=False))
        self.tool(event="Stop", tool_input=None)
        self.assertEqual([], self.notes())
        self.begin("call_3")
        self.let_end(BOB)
        self.home.hook("claude", ADA, "UserPromptSubmit", prompt="x")
        self.assertEqual([], self.notes(), "of a session that has ended")

    def test_is_noted_for_commands_that_may_send_only(self):
        self.begin(tool_input={"command": "echo hello"})
        self.begin("../x")
        self.begin(transcript_path=self.home.folder + "/none")
        self.begin(transcript_path=None)
        self.assertEqual([], self.notes())

    def test_is_believed_for_nothing_but_this_sessions_own_lines(self):
        self.begin()
        self.write(self.output("call_1", self.line(self.message("another's", EVE)) + "\n" + spool.seal(b"0" * 64, [
            self.message("forged")])), {"type": "response_item", "payload": {"type": "message", "content": [
                {"text": self.line(self.message("quoted"))}]}}, {"type": "response_item", "payload": {
                    "type": "other", "call_id": "x", "output": self.line(self.message("of another kind"))}}, ["call_1"], {"type": "event_msg", "payload": "call_1"})
        with open(self.rollout, "a") as file:
            file.write('{"call_1": torn')
        for _ in range(2):
            self.tool(event="Stop", tool_input=None)
        self.assertEqual([], self.bodies())
        self.assertEqual(2, self.home.faults().count("is not taken"), "each is told once")

    def test_is_forgotten_with_a_rollout_or_a_note_that_is_none(self):
        for spoil in (lambda path: os.unlink(self.rollout), lambda path: os.truncate(self.rollout, 3),
                      lambda path: (os.unlink(self.rollout), os.mkfifo(self.rollout)),
                      lambda path: os.truncate(path, 5), lambda path: os.chmod(path, 0o644),
                      lambda path: os.utime(path, (1, 1))):
            self.write(self.item("other", "x"))
            self.begin()
            spoil(os.path.join(self.folders[0], BOB, "call.call_1"))
            self.tool(event="Stop", tool_input=None)
            self.assertEqual([], self.notes())
            if not os.path.isfile(self.rollout):
                with contextlib.suppress(OSError):
                    os.unlink(self.rollout)
        self.assertEqual([], self.bodies())


class ADeath(Sandbox):
    def kill_at(self, name, before):
        """A copy of the product that is killed there."""
        return copy_of_product(self, (name, before, "    import signal\n    os.kill(os.getpid(), signal.SIGKILL)\n" + before))

    def test_between_write_and_rename_leaves_no_message_and_nothing_for_good(self):
        root = copy_of_product(self, ("spool.py", "        os.rename(scratch, os.path.join(folder, name))",
                                      "        os.kill(os.getpid(), 9)"))
        done = self.inside("send", "ada", "unfinished", status=None, root=root)
        self.assertEqual((-signal.SIGKILL, ""), (done.returncode, done.stdout))
        name, = os.listdir(os.path.join(self.folders[0], BOB))
        self.inside("send", "ada", "whole")
        self.tool()
        self.assertEqual(["whole"], [row[0] for row in self.rows()])
        self.assertEqual([name], os.listdir(os.path.join(self.folders[0], BOB)))
        past = time.time() - spool.UNFINISHED_SECONDS - 1
        os.utime(os.path.join(self.folders[0], BOB, name), (past, past))
        self.tool()
        self.assertFalse(os.path.exists(self.folders[0]))
        self.assertEqual(["whole"], [row[0] for row in self.rows()])

    def test_between_take_and_unlink_leaves_one_message(self):
        root = self.kill_at("spool.py", "    for path in done:\n")
        self.place(self.line(self.message("hello")))
        hook = os.path.join(root, "xmsg-hook.sh")
        self.home.run([hook, "codex"], payload("codex", "PostToolUse", BOB, cwd=self.home.folder, tool_response=""))
        self.assertEqual(1, len(os.listdir(os.path.join(self.folders[0], BOB))))
        self.assertEqual(["queued"], self.home.states())
        self.assertIn("hello", self.home.context("claude", ADA, "PreToolUse"))
        self.tool()
        self.assertEqual(["delivered"], self.home.states())
        self.assertFalse(os.path.exists(self.folders[0]))


class AnEndedSession(Sandbox):
    def test_has_its_files_taken_by_any_hook_and_an_open_one_by_its_own_only(self):
        self.place(self.line(self.message("of the open one")))
        self.place(self.line(self.message("of the ended one", EVE)), EVE)
        self.tool("01a04cd2-7777-7000-8000-000000000007", "PreToolUse")
        self.assertEqual([], self.rows())
        self.let_end(EVE)
        self.home.hook("claude", ADA, "CwdChanged")
        self.assertEqual([("of the ended one", "codex", EVE, ADA, "queued")], self.rows())
        self.tool()
        self.assertEqual(2, len(self.rows()))

    def test_has_its_files_taken_by_outbox_and_doctor_outside_a_sandbox(self):
        self.let_end(BOB)
        for command in ("outbox", "doctor"):
            self.place(self.line(self.message(command)))
            self.inside("outbox", session=EVE)
            self.assertNotIn(command, [row[0] for row in self.rows()])
            self.home.xmsg(command, status=None)
            self.assertIn(command, [row[0] for row in self.rows()])


class ReportsInside(Sandbox):
    def tree(self):
        found = {}
        for folder, _, files in os.walk(os.path.dirname(self.home.db)):
            for name in files:
                status = os.stat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = status.st_size, status.st_mtime_ns, status.st_mode
        return found

    def test_read_the_store_and_change_nothing_with_a_wal_and_without(self):
        self.home.xmsg("send", ADA, "sent by bob", "--no-direct", session=BOB, host="codex")
        self.home.xmsg("send", BOB, "for bob", "--no-direct", session=ADA)
        self.assertIn("for bob", self.home.context("codex", BOB, "PreToolUse"))
        self.place(self.line(self.message("not to be taken from inside", EVE)), EVE)
        self.let_end(EVE)
        keeper = self.home.store()
        self.addCleanup(keeper.close)
        for wal in (True, False):
            if not wal:
                keeper.close()
                self.home.sql("pragma wal_checkpoint(truncate)")
            self.assertEqual(wal, os.path.exists(self.home.db + "-wal"))
            before = self.tree()
            self.assertRegex(self.inside("outbox").stdout, "#1  -> %s  queued" % ADA)
            self.assertIn("sent by bob", self.inside("show", "1").stdout)
            if not wal:
                self.assertRegex(self.inside("list").stdout, r"(?m)^ada +%s +claude +yes" % ADA)
                self.assertIn("for bob", self.inside("inbox").stdout)
                self.assertEqual(ADA + "\n", self.inside("find", "ada", "--ids-only").stdout)
                self.assertIn("would queue", self.inside("send", "ada", "x", "--dry-run").stdout)
            self.assertEqual(before, self.tree())

    def test_are_all_that_works_inside_besides_sending(self):
        for command in (("name", ".", "bob"), ("cancel", "1"), ("inbox", "--take")):
            self.assertIn("run `xmsg %s` outside" % command[0], self.inside(*command, status=5).stderr)

    def test_leave_a_loose_mode_as_it_is(self):
        os.chmod(self.home.db, 0o644)
        with self.read_only():
            for command in ("list", "outbox"):
                self.home.xmsg(command, CODEX_THREAD_ID=BOB, CODEX_SANDBOX_NETWORK_DISABLED="1")
            self.assertEqual(0o444, stat.S_IMODE(os.stat(self.home.db).st_mode))


class TheDirectWindow(Sandbox):
    def test_is_tried_by_a_process_of_its_own_after_the_hook_and_claims_no_permissions(self):
        config, runtime = (os.path.join(self.home.folder, name) for name in (".claude", "run"))
        os.makedirs(os.path.join(config, "sessions"))
        os.mkdir(runtime)
        session = "9e000000-0000-4000-8000-00000000000e"
        self.home.hook("claude", session, "SessionStart", transcript_path="", permission_mode="bypassPermissions")
        fake = ClaudeStandIn(self, config, runtime, session)
        for body in ("one", "two"):
            self.inside("send", session, body)
        self.inside("send", session, "queued only", "--no-direct")
        self.tool()
        for body in ("one", "two"):
            line = fake.heard("line")["line"]
            self.assertIn(body, json.dumps(line))
            self.assertIn("01a04cd2-1", json.dumps(line))
            self.assertNotIn("bypass", json.dumps(line))
        wait_until(lambda: self.home.states() == ["delivered", "delivered", "queued"], "both delivered, the third not")
        self.assertEqual([("uds-direct",), ("uds-direct",), (None,)], self.home.sql("select window from messages"))


if __name__ == "__main__":
    unittest.main()
