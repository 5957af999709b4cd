"""The command line: every command, its JSON, its exit status, its errors, and what it does to a terminal."""
import contextlib
import io
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import unittest

import support
from support import ADA, BOB, EVE, PYTHON, ROOT, HomeCase, dead_process, message, on_a_terminal, peer
from side_by_side import load_tests  # noqa: F401
import command_line
import contract
from contract import display_width, is_invisible, now_ms

XMSG = os.path.join(ROOT, "bin", "xmsg")
MESSAGE_KEYS = {"id", "uid", "state", "unknown", "window", "detail", "from", "to", "body", "priority", "reply_to",
                "created_at", "expires_at", "state_at", "confirmed_at", "evidence"}
SESSION_KEYS = {"session", "host", "name", "cwd", "project", "model", "permission_mode", "pid", "live", "activity",
                "seen_at", "queued", "host_queued", "direct", "window", "reason", "hooks", "successor", "short_id"}
TIME = r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z"


def alive():
    """This process as the holder of a row."""
    import host_process
    return os.getpid(), host_process.start_time(os.getpid())


class Case(HomeCase):
    def setUp(self):
        super().setUp()
        store = self.home.store()
        for session, host in ((ADA, "claude"), (BOB, "codex"), (EVE, "codex")):
            peer(store, session, host, cwd=self.home.folder, project=self.home.folder)
        store.set_name(BOB, "bob")
        store.close()

    def send(self, *arguments, **options):
        options.setdefault("session", ADA)
        return self.home.json("send", *arguments, "--no-direct", **options)["messages"][0]

    def put(self, state, holder=(None, None), **columns):
        """Puts the newest message into a state."""
        columns.update(state=state, holder_pid=holder[0], holder_start=holder[1])
        self.home.sql("update messages set %s where id = (select max(id) from messages)" % ", ".join(
            "%s = ?" % name for name in columns), tuple(columns.values()))

    def body(self):
        return self.home.sql("select body from messages order by id desc limit 1")[0][0]


class Xmsg(Case):
    def test_without_a_command_or_with_a_wrong_one_says_which_there_are(self):
        for arguments in ([], ["sned"], ["--json"]):
            done = self.home.run_xmsg(*arguments)
            self.assertEqual((2, b""), (done.returncode, done.stdout.replace(b"\n", b"") if "--json" not in arguments else b""))
            self.assertIn(b"usage: xmsg COMMAND", done.stderr)

    def test_takes_an_empty_home_for_none(self):
        """~ would be the root of the file system."""
        with support.environ(HOME=""), contextlib.redirect_stdout(io.StringIO()):
            command_line.main(["--version"])
            self.assertEqual(pwd.getpwuid(os.getuid()).pw_dir, os.environ["HOME"])
        impl = os.path.join(self.home.folder, "xmsg.py")
        with open(impl, "w") as file:
            file.write("import os\ndef hook_main(arguments):\n    os.write(1, b'%d' % ('HOME' in os.environ))\n    return 0\n")
        for home, known in (("", b"0"), (self.home.folder, b"1")):
            self.assertEqual(known, self.home.run_hook("claude", b"{}", env={"HOME": home, "XMSG_IMPL": impl}).stdout)

    def test_tells_its_version_and_its_help(self):
        self.assertEqual("xmsg %s\n" % contract.VERSION, self.home.xmsg("--version"))
        for word in ("--help", "-h", "help"):
            self.assertIn("exit status: 0 delivered", self.home.xmsg(word))

    def test_is_run_through_a_link_from_anywhere_and_never_takes_modules_from_there(self):
        folder = os.path.join(self.home.folder, "elsewhere")
        os.mkdir(folder)
        for name in ("json.py", "sqlite3.py", "contract.py", "argparse.py"):
            with open(os.path.join(folder, name), "w") as file:
                file.write("raise SystemExit('a module of the working folder was taken')\n")
        os.symlink(XMSG, os.path.join(self.home.folder, "one"))
        os.symlink("../one", os.path.join(folder, "two"))
        for command in ([os.path.join(self.home.folder, "one")], ["./two"], [os.path.relpath(XMSG, folder)]):
            done = self.home.run(command + ["find", "bob", "--ids-only"], cwd=folder, env={"PYTHONPATH": folder})
            self.assertEqual((0, BOB.encode() + b"\n"), (done.returncode, done.stdout), done.stderr)

    def test_without_any_python_says_what_it_needs(self):
        os.unlink(os.path.join(os.path.dirname(self.home.db), "python"))
        empty = os.path.join(self.home.folder, "empty")
        os.mkdir(empty)
        done = self.home.run(["/bin/sh", XMSG, "list"], env={"PATH": empty})
        self.assertEqual(1, done.returncode)
        self.assertIn(b"Python 3.9", done.stderr)

    def test_makes_no_store_only_to_report_that_there_is_nothing(self):
        shutil.rmtree(os.path.dirname(self.home.db))
        for command in (["list"], ["queue"], ["outbox"], ["inbox", "x"], ["show", "1"], ["find"], ["list", "--json"]):
            self.home.xmsg(*command, status=None)
            self.assertFalse(os.path.exists(self.home.db), command)

    def test_takes_options_before_a_text_behind_two_dashes(self):
        for words, body in (([BOB, "--force", "--urgent", "--", "-x"], "-x"), (["--force", BOB, "--", "--"], "--"),
                            ([BOB, "--force", "--", "--json"], "--json"), (["--force", "--", BOB, "a text"], "a text")):
            with self.subTest(words=words):
                self.home.xmsg("send", *words, session=ADA)
                self.assertEqual([(body,)], self.home.sql("select body from messages order by id desc limit 1"))

    def test_takes_hostile_arguments_for_what_they_are(self):
        """Never a traceback, never `unexpected`: status 2 or 3 and a sentence without control characters."""
        words = ("\x1b[31m\u202e", b"\xff\xfe", "'; drop table messages; --%_", "\u0661", "x" * 10000)
        commands = [command for word in words for command in (
            ["send", word, "x"], ["show", word], ["cancel", word], ["resolve", word, "--drop"], ["inbox", word],
            ["find", "--exact", word], ["queue", "--name", word], ["name", word, "x"], ["send", BOB, "x", "--reply-to", word],
            ["send", BOB, "x", "--uid", word], ["send", BOB, "x", "--priority", word, "--urgent"],
            ["send", BOB, "x", "--file", word], ["send", BOB, "x", "y", word], ["send", BOB, "x", "--from", word * 90], [word])]
        commands += [[command, word] for word in ("../../x", "-1", "9" * 30, "\n", "--", "0") for command in ("show", "send")]
        for command in commands:
            done = self.home.command(*command)
            with self.subTest(command=command):
                error = done.stderr.decode()
                self.assertIn(done.returncode, (2, 3), error)
                self.assertNotIn("Traceback", error)
                self.assertFalse([char for char in error if char != "\n" and is_invisible(char)], ascii(error))
        self.assertEqual([], self.home.states())

    def test_takes_a_key_in_any_bytes(self):
        done = self.home.run_xmsg("send", BOB, "x", "--no-direct", "--key", b"\xff\x1b")
        self.assertEqual(0, done.returncode, done.stderr)
        done = self.home.run_xmsg("settings", "--json", env={"XMSG_FROM": os.fsdecode(b"\xff")})
        self.assertEqual(0, done.returncode, done.stderr)

    def test_with_a_bad_setting_says_which_and_what_it_may_be(self):
        out = self.home.xmsg("list", status=2, XMSG_TTL_SECONDS="soon")
        self.assertIn("XMSG_TTL_SECONDS=soon is not a number from 1 to", out)


class Send(Case):
    def test_prints_one_receipt_for_its_target(self):
        out = self.home.xmsg("send", "bob", "hello", "--no-direct", session=ADA)
        self.assertEqual("queued #1 -> %s  (from 7c1f0a52, ttl 3600s; direct: not tried (--no-direct))\n" % BOB, out)
        out = self.home.xmsg("send", "bob", "hello", "--ttl", "90", session=ADA)
        self.assertRegex(out, r"\Aqueued #2 -> %s  \(from 7c1f0a52, ttl 90s; direct: .+\)\n\Z" % BOB)

    def test_prints_one_receipt_for_each_session_of_a_group(self):
        lines = self.home.xmsg("send", "all", "hello", "--no-direct", session=ADA).splitlines()
        self.assertEqual({BOB, EVE}, {line.split()[3] for line in lines})
        self.assertEqual({BOB, EVE}, {row["to"]["session"] for row in self.home.json(
            "send", "codex:", "x", "--no-direct", session=ADA)["messages"]})

    def test_reports_in_json_with_every_key_of_a_message(self):
        record = self.send("bob", "hello", "--urgent")
        self.assertEqual(MESSAGE_KEYS, set(record))
        self.assertEqual({"label": ADA[:8], "host": "claude", "session": ADA, "kind": "agent"}, record["from"])
        self.assertEqual({"session": BOB, "host": "codex", "name": "bob"}, record["to"])
        self.assertEqual(("hello", 100, "queued", False, None), tuple(
            record[key] for key in ("body", "priority", "state", "unknown", "window")))
        self.assertRegex(record["uid"], r"\A[0-9a-f]{16}\Z")
        for key in ("created_at", "expires_at", "state_at"):
            self.assertRegex(record[key], TIME)

    def test_takes_the_text_from_an_argument_a_file_or_a_pipe(self):
        path = os.path.join(self.home.folder, "text")
        for content, expected in (("two\nlines\n", "two\nlines"), ("no newline", "no newline"), ("two newlines\n\n", "two newlines\n"),
                                  ("\r\n windows\r\n", "\r\n windows\r")):
            with open(path, "w", newline="") as file:
                file.write(content)
            self.send("bob", "--file", path)
            self.assertEqual(expected, self.body())
            self.send("bob", text=content)
            self.assertEqual(expected, self.body())
            self.send("bob", "-", text=content)
            self.assertEqual(expected, self.body())
        self.send("bob", "an argument\n", text="not this")
        self.assertEqual("an argument\n", self.body())

    def test_takes_options_before_between_and_after_its_target_and_text(self):
        for arguments in (["--urgent", "bob", "text"], ["bob", "--urgent", "text"], ["bob", "text", "--urgent"],
                          ["--urgent", "--", "bob", "text"]):
            record = self.home.json("send", "--no-direct", *arguments[:-1], "--json", arguments[-1], session=ADA)[
                "messages"][0] if "--" not in arguments else json.loads(self.home.xmsg(
                    "send", "--no-direct", "--json", *arguments, session=ADA))["messages"][0]
            self.assertEqual(("text", 100), (record["body"], record["priority"]))

    def test_of_a_text_that_begins_with_a_dash_needs_two_dashes_and_says_so(self):
        self.assertIn("comes after --", self.home.xmsg("send", "bob", "-wrong", session=ADA, status=2))
        self.home.xmsg("send", "--no-direct", "bob", "--", "-right", session=ADA)
        self.assertEqual("-right", self.body())

    def test_refuses_what_cannot_be_meant(self):
        for arguments, told in ((["bob", "x", "--file", "/dev/null"], "not both"), (["bob", "x", "--replace"], "--key"),
                                (["bob", "x", "--uid", "XYZ"], "16"), (["bob", "x", "--ttl", "0"], "31536000"),
                                (["bob", "x", "--ttl", "-5"], "31536000"), (["bob", "x", "--ttl", "soon"], "invalid"),
                                (["bob", "x", "--ttl", "nan"], "31536000"), (["bob", "x", "--ttl", "1e9"], "31536000"),
                                (["bob", "x", "--priority", "9999999"], "1000000"), (["bob", "x", "--priority", "high"], "invalid"),
                                (["bob", "x", "--urgent", "--priority", "5"], "not allowed"), (["bob", ""], "empty"),
                                (["bob", " \n"], "empty"), (["bob", "--file", "/nowhere/at/all"], "No such file"),
                                (["bob", "--file", "/"], "directory"), (["bob", "x" * 8001], "8001"), ([], "TARGET"),
                                (["bob", "x", "y"], "unrecognized"), (["", "x"], "xmsg list"),
                                (["all", "x", "--uid", "0" * 16], "one message"),
                                (["bob", "x", "--reply-to", "last"], "nothing has come")):
            with self.subTest(arguments):
                self.assertIn(told, self.home.xmsg("send", *arguments, session=ADA, status=2))
        self.assertEqual([], self.home.states())

    def test_to_nobody_ambiguous_or_another_machine_has_its_own_status(self):
        for target, status, code in (("nobody", 3, "no_such_target"), ("01a04cd2", 4, "ambiguous"), ("peer:x", 8, "remote"),
                                     ("", 2, "usage")):
            error = self.home.json("send", target, "x", session=ADA, status=status)["error"]
            self.assertEqual(code, error["code"])
            self.assertEqual(code == "ambiguous", "candidates" in error)
            self.assertTrue(error["message"])
            done = self.home.run_xmsg("send", target, "x")
            self.assertEqual((status, b""), (done.returncode, done.stdout))
            self.assertTrue(done.stderr.startswith(b"xmsg: "))
        self.assertIn(b"  " + BOB.encode(), self.home.run_xmsg("send", "01a04cd2", "x").stderr)

    def test_at_a_terminal_without_a_text_asks_for_one_and_does_not_wait(self):
        status, out = on_a_terminal(self.home, [XMSG, "send", "bob"])
        self.assertEqual(2, status)
        self.assertIn(b"the message is missing", out)

    def test_with_force_queues_for_a_session_that_nothing_is_known_of(self):
        self.assertIn("--force", self.home.xmsg("send", "unknown-session", "x", session=ADA, status=3))
        record = self.send("unknown-session", "x", "--force")
        self.assertEqual(("queued", "unknown-session"), (record["state"], record["to"]["session"]))
        self.home.hook("codex", "unknown-session", "SessionStart")
        self.assertEqual(["delivered"], self.home.states())

    def test_to_a_session_without_hooks_and_without_a_direct_window_is_refused_with_the_reason(self):
        self.home.sql("update peers set hook_seen = null where session = ?", (BOB,))
        out = self.home.xmsg("send", BOB, "x", session=ADA, status=3)
        self.assertIn("no hook of xmsg has run there", out)
        self.assertIn("--force", out)
        self.assertEqual([EVE], [row["to"]["session"] for row in self.home.json(
            "send", "codex:", "x", "--no-direct", session=ADA)["messages"]])
        self.send(BOB, "x", "--force")

    def test_replies_to_a_message_by_number_uid_or_last(self):
        first, second = self.send("bob", "one"), self.send("bob", "two")
        for _ in range(2):
            self.home.hook("codex", BOB, "PreToolUse")
        for which, uid in ((str(first["id"]), first["uid"]), (first["uid"], first["uid"]), ("last", second["uid"])):
            answer = self.send(ADA, "re", "--reply-to", which, session=BOB, host="codex")
            self.assertEqual(uid, answer["reply_to"])
        self.assertIn("reply to  " + second["uid"], self.home.xmsg("show", answer["uid"]))
        self.home.xmsg("send", ADA, "x", "--reply-to", "999", session=BOB, host="codex", status=3)
        self.assertIn("session of its own", self.home.xmsg("send", ADA, "x", "--reply-to", "last", status=2))

    def test_as_a_notification_speaks_for_no_session(self):
        record = self.send("bob", "tick", "--notification", "--from", "patrol")
        self.assertEqual({"label": "patrol", "host": "", "session": "", "kind": "notification"}, record["from"])
        self.assertEqual("xmsg", self.send("bob", "tick", "--notification", XMSG_FROM="ada")["from"]["label"])

    def test_without_an_identity_says_so_and_how_to_give_one(self):
        done = self.home.run_xmsg("send", "bob", "x", "--no-direct", "--json")
        self.assertIn(b"XMSG_FROM_SESSION", done.stderr)
        self.assertEqual("unknown", json.loads(done.stdout)["messages"][0]["from"]["kind"])

    def test_dry_says_where_it_would_go_and_why_and_sends_nothing(self):
        plan = self.home.json("send", "all", "--dry-run", session=ADA)["plan"]
        self.assertEqual({BOB, EVE}, {item["session"] for item in plan})
        self.assertEqual({"session", "host", "name", "live", "windows", "reason", "from"}, set(plan[0]))
        self.assertEqual(["hook"], plan[0]["windows"])
        self.assertIn("would queue -> %s  (from 7c1f0a52; direct: " % BOB, self.home.xmsg(
            "send", "bob", "text", "--dry-run", session=ADA))
        self.home.xmsg("send", "nobody", "x", "--dry-run", session=ADA, status=3)
        self.assertEqual([], self.home.states())

    def test_that_waits_for_a_proof_that_does_not_come_ends_unknown(self):
        out = self.home.xmsg("send", "bob", "x", "--no-direct", "--wait", "0.1", session=ADA, status=6)
        self.assertIn("queued #1", out)

    def test_of_a_request_made_before_answers_with_its_state(self):
        record = self.send("bob", "x", "--key", "k")
        for state, word, status in (("queued", "queued", 0), ("held", "held", 0), ("direct-uncertain", "unknown", 6)):
            self.put(state)
            out = self.home.xmsg("send", "bob", "x", "--key", "k", "--no-direct", session=ADA, status=status)
            self.assertTrue(out.startswith("%s #%d -> " % (word, record["id"])), out)
        self.put("refused")
        out = self.home.xmsg("send", "bob", "x", "--uid", record["uid"], session=ADA, status=7)
        self.assertTrue(out.startswith("refused #1"))
        self.put("delivered", window="Stop")
        self.assertIn("delivered #1 -> %s  (from 7c1f0a52, Stop)" % BOB, self.home.xmsg(
            "send", "bob", "x", "--uid", record["uid"], session=ADA))


class List(Case):
    def test_shows_who_can_be_reached_and_with_all_who_could(self):
        pid, start = dead_process()
        self.home.sql("update peers set pid = ?, pid_start = ? where session = ?", (pid, start, EVE))
        self.assertEqual({ADA, BOB}, {row["session"] for row in self.home.json("list")["sessions"]})
        self.assertEqual({ADA, BOB, EVE}, {row["session"] for row in self.home.json("list", "--all")["sessions"]})
        self.assertFalse(self.home.json("list", "--all")["sessions"][-1]["live"])
        self.send(EVE, "waits")
        self.assertEqual(1, [row for row in self.home.json("list")["sessions"] if row["session"] == EVE][0]["queued"])

    def test_reports_in_json_with_every_key_of_a_session(self):
        for record in self.home.json("list")["sessions"]:
            self.assertEqual(SESSION_KEYS, set(record))
            self.assertRegex(record["seen_at"], TIME)
            self.assertIn(record["activity"], ("idle", "busy", "waiting", "unknown"))
            self.assertIs(bool, type(record["live"]))

    def test_of_a_project_is_that_of_the_folder_here_or_given(self):
        other = os.path.join(self.home.folder, "other")
        os.mkdir(other)
        peer(self.open_store(), "in-other", cwd=other, project=other)
        self.assertEqual(["in-other"], [row["session"] for row in self.home.json("list", "--project", other)["sessions"]])
        self.assertEqual({ADA, BOB, EVE}, {row["session"] for row in self.home.json("list", "--project")["sessions"]})

    def test_of_nobody_says_how_a_session_appears(self):
        self.home.sql("delete from peers")
        self.assertIn("first hook", self.home.xmsg("list"))
        self.assertEqual([], self.home.json("list")["sessions"])


class Find(Case):
    def test_searches_names_ids_folders_and_hosts(self):
        for query, found in (("BOB", {BOB}), ("01a04cd2", {BOB, EVE}), ("claude", {ADA}),
                             (os.path.basename(self.home.folder), {ADA, BOB, EVE})):
            self.assertEqual(found, {row["session"] for row in self.home.json("find", query)["sessions"]})
        self.assertEqual({ADA, BOB, EVE}, set(self.home.xmsg("find", "--ids-only").split()))

    def test_of_nothing_is_status_3(self):
        self.assertIn("xmsg list --all", self.home.xmsg("find", "nobody", status=3))

    def test_by_the_find_session_command_prints_the_full_id(self):
        def run(*arguments):
            return self.home.run([os.path.join(ROOT, "bin", "xmsg-find-session"), *arguments])
        self.assertEqual((0, BOB.encode() + b"\n"), (run("bob").returncode, run("bob").stdout))
        self.assertEqual((3, b""), (run("nobody").returncode, run("nobody").stdout))
        self.assertEqual((4, b""), (run("01a04cd2").returncode, run("01a04cd2").stdout))
        self.assertEqual(BOB, json.loads(run("bob", "--json").stdout)["sessions"][0]["session"])
        self.assertEqual((2, 0), (run().returncode, run("--help").returncode))


class TheOutbox(Case):
    def test_shows_what_has_not_ended_and_with_all_the_rest(self):
        for state in contract.STORED:
            self.send("bob", "text of " + state)
            self.put(state, alive() if state == "reserved" else (None, None))
        out = self.home.xmsg("outbox", session=ADA)
        shown = {state for state in contract.STORED if "text of " + state + "\n" in out}
        self.assertEqual(set(contract.STORED) - set(contract.ENDED), shown)
        self.assertEqual(3, out.count("UNKNOWN"), out)
        self.assertEqual(3, out.count("--delivered|--requeue|--drop"))
        everything = self.home.json("outbox", "--all", session=ADA)["messages"]
        self.assertEqual(set(contract.STORED), {row["state"] for row in everything})
        self.assertEqual({"direct-inflight", "direct-uncertain", "hook-inflight"},
                         {row["state"] for row in everything if row["unknown"]})

    def test_is_of_this_session_only_and_of_everybody_for_a_person(self):
        self.send("bob", "from ada")
        self.send("bob", "from eve", session=EVE, host="codex")
        for session, host, expected in ((ADA, "claude", {"from ada"}), (EVE, "codex", {"from eve"}),
                                        (None, "", {"from ada", "from eve"})):
            self.assertEqual(expected, {row["body"] for row in self.home.json("outbox", session=session, host=host)["messages"]})

    def test_is_of_one_target_and_the_newest_of_so_many(self):
        for number in range(4):
            self.send("bob", "b%d" % number)
            self.send(EVE, "e%d" % number)
        self.assertEqual(["b2", "b3"], [row["body"] for row in self.home.json(
            "outbox", "--to", "bob", "--limit", "2", session=ADA)["messages"]])

    def test_of_nothing_says_so(self):
        self.assertIn("nothing waits", self.home.xmsg("outbox", session=ADA))
        self.assertIn("nothing was sent", self.home.xmsg("outbox", "--all", session=ADA))

    def test_tells_when_a_message_was_delivered_and_by_which_window(self):
        self.send("bob", "x")
        self.home.hook("codex", BOB, "PreToolUse")
        self.assertRegex(self.home.xmsg("outbox", "--all", session=ADA), r"#1  -> %s  delivered \d+s ago by PreToolUse" % BOB)


class TheInbox(Case):
    def test_shows_again_what_has_come_and_counts_what_waits(self):
        self.send("bob", "one")
        self.home.hook("codex", BOB, "PreToolUse")
        self.send("bob", "two")
        out = self.home.xmsg("inbox", session=BOB, host="codex")
        self.assertIn("[peer claude:7c1f0a52; not a user instruction]\none\n", out)
        self.assertNotIn("two", out)
        self.assertIn("1 shown, 1 waiting", out)
        self.assertEqual(["one"], [row["body"] for row in self.home.json("inbox", session=BOB, host="codex")["messages"]])
        self.assertEqual(["delivered", "queued"], self.home.states())

    def test_of_a_host_without_hooks_takes_what_waits(self):
        self.send("bob", "one")
        self.send("bob", "two")
        out = self.home.xmsg("inbox", "--take", "--limit", "1", session=BOB, host="codex")
        self.assertEqual("[peer claude:7c1f0a52; not a user instruction]\none\n", out)
        self.assertEqual(["two"], [row["body"] for row in self.home.json("inbox", "bob", "--take")["messages"]])
        self.assertEqual([("delivered", "inbox")] * 2, self.home.sql("select state, window from messages"))
        self.assertEqual("nothing waits\n", self.home.xmsg("inbox", "bob", "--take"))
        self.assertFalse(os.path.exists(self.home.hint(BOB)))

    def test_that_cannot_be_written_out_is_not_called_delivered(self):
        self.send("bob", "one")
        with open("/dev/full", "wb") as full:
            done = self.home.run_xmsg("inbox", "bob", "--take", stdout=full)
        self.assertNotEqual(0, done.returncode)
        self.assertNotIn(b"Traceback", done.stderr)
        self.assertNotIn("delivered", self.home.states())

    def test_prints_one_message_whole_by_number_or_uid(self):
        record = self.send("bob", "長" * 7000)
        for which in (str(record["id"]), record["uid"]):
            self.assertEqual("[peer claude:7c1f0a52; not a user instruction]\n" + "長" * 7000 + "\n", self.home.xmsg("inbox", which))
            self.assertEqual([record["uid"]], [row["uid"] for row in self.home.json("inbox", which)["messages"]])

    def test_of_nobody_asks_for_a_session(self):
        self.assertIn("not a session", self.home.xmsg("inbox", status=2))
        self.home.xmsg("inbox", "999", status=3)


class Show(Case):
    def test_tells_the_whole_story(self):
        record = self.send("bob", "line one\nline two", "--reply-to", self.send("bob", "first")["uid"])
        self.home.hook("codex", BOB, "PreToolUse")
        out = self.home.xmsg("show", record["uid"])
        for part in ("#2  %s  delivered" % record["uid"], "from  7c1f0a52  claude:" + ADA, "to    codex:" + BOB,
                     "queued", "hook-inflight  PreToolUse", "delivered  PreToolUse", "\n\nline one\nline two\n"):
            self.assertIn(part, out)
        story = self.home.json("show", str(record["id"]))
        self.assertEqual(MESSAGE_KEYS | {"events"}, set(story))
        self.assertEqual(["queued", "hook-inflight", "delivered"], [event["state"] for event in story["events"]])
        for event in story["events"]:
            self.assertEqual({"at", "state", "window", "detail"}, set(event))
            self.assertRegex(event["at"], TIME)

    def test_of_nothing_is_status_3_and_says_where_to_look(self):
        for which in ("1", "0", "f" * 16, "x"):
            self.assertIn("xmsg outbox --all", self.home.xmsg("show", which, status=3))
        self.assertEqual("no_such_target", self.home.json("show", "1", status=3)["error"]["code"])


class TheQueue(Case):
    def test_shows_what_waits_in_the_order_in_which_it_goes(self):
        for body, options in (("a", []), ("b", ["--urgent"]), ("c", ["--priority", "-1"]), ("d", [])):
            self.send("bob", body, *options)
        self.send(EVE, "for eve")
        self.assertEqual(list("badc"), [row["body"] for row in self.home.json("queue", "--name", "bob")["messages"]])
        self.assertEqual(5, len(self.home.json("queue")["messages"]))
        self.assertEqual(2, len(self.home.json("queue", "--limit", "2")["messages"]))
        self.assertIn("for eve", self.home.xmsg("queue", "--name", EVE))
        self.assertEqual("nothing waits\n", self.home.xmsg("queue", "--name", ADA))


class Cancel(Case):
    def test_withdraws_what_nobody_has_seen(self):
        record = self.send("bob", "x")
        self.assertEqual("cancelled #1\n", self.home.xmsg("cancel", str(record["id"]), session=ADA))
        self.assertFalse(os.path.exists(self.home.hint(BOB)))
        self.assertIsNone(self.home.context("codex", BOB, "PreToolUse"))
        self.assertEqual("cancelled", self.home.json("cancel", self.send("bob", "x")["uid"], session=ADA)["messages"][0]["state"])

    def test_of_what_was_seen_or_may_have_been_is_refused_with_its_state(self):
        self.send("bob", "x")
        for state, told in (("delivered", "delivered"), ("held", "held"), ("refused", "refused"), ("expired", "expired"),
                            ("direct-uncertain", "UNKNOWN"), ("hook-inflight", "UNKNOWN"), ("cancelled", "cancelled")):
            self.put(state)
            self.assertIn("it is " + told, self.home.xmsg("cancel", "1", session=ADA, status=7))
            self.assertEqual("not_possible", self.home.json("cancel", "1", session=ADA, status=7)["error"]["code"])

    def test_is_for_its_sender_and_for_a_person_and_nobody_else(self):
        self.send("bob", "x")
        self.assertIn("not sent by this session", self.home.xmsg("cancel", "1", session=BOB, host="codex", status=7))
        self.home.xmsg("cancel", "1")


class Resolve(Case):
    def test_settles_a_doubt_as_a_person_says(self):
        for state in ("direct-uncertain", "direct-inflight", "hook-inflight"):
            for word, end in (("--delivered", "delivered"), ("--drop", "cancelled"), ("--requeue", "queued")):
                with self.subTest(state=state, word=word):
                    record = self.send("bob", "x")
                    self.put(state, dead_process() if state in contract.IN_FLIGHT else (None, None))
                    self.assertEqual("#%d is now %s\n" % (record["id"], end), self.home.xmsg("resolve", str(record["id"]), word))
                    self.assertIn("xmsg resolve", self.home.json("show", record["uid"])["events"][-1]["detail"])
        self.assertEqual(3, self.home.context("codex", BOB, "PreToolUse").count("[peer"))

    def test_that_sends_once_more_gives_the_message_its_whole_time_again(self):
        self.send("bob", "x", "--ttl", "60")
        self.put("direct-uncertain", created_at=now_ms() - 3600000, expires_at=now_ms() - 3540000)
        self.home.xmsg("resolve", "1", "--requeue")
        self.assertIn("x", self.home.context("codex", BOB, "PreToolUse"))

    def test_drops_what_a_session_holds_back_and_nothing_else_of_it(self):
        self.send("bob", "x")
        self.put("held")
        for word in ("--delivered", "--requeue"):
            self.home.xmsg("resolve", "1", word, status=7)
        self.home.xmsg("resolve", "1", "--drop")
        self.assertEqual(["cancelled"], self.home.states())

    def test_of_what_is_in_no_doubt_is_refused_with_its_state(self):
        self.send("bob", "x")
        for state, holder in (("queued", (None, None)), ("delivered", (None, None)), ("expired", (None, None)),
                              ("direct-inflight", alive()), ("hook-inflight", alive()), ("reserved", alive())):
            self.put(state, holder)
            for word in ("--delivered", "--requeue", "--drop"):
                self.assertIn("it is " + state, self.home.xmsg("resolve", "1", word, status=7))
            self.assertEqual([state], self.home.states())

    def test_needs_one_answer(self):
        for arguments in ([], ["--drop", "--requeue"]):
            self.home.xmsg("resolve", "1", *arguments, status=2)


class Name(Case):
    def test_is_given_shown_and_taken_away(self):
        self.assertIn("`xmsg send leader", self.home.xmsg("name", EVE, "leader"))
        self.assertEqual("leader", self.home.json("name", "leader", "boss")["sessions"][0]["name"].replace("boss", "leader"))
        self.assertIn("no given name", self.home.xmsg("name", "boss", ""))
        self.home.xmsg("send", "boss", "x", session=ADA, status=3)
        self.home.xmsg("name", "nobody", "x", status=3)


class TheInstallation(HomeCase):
    def tree(self):
        """Every path of the home outside the store."""
        return sorted(os.path.join(folder, name) for folder, folders, files in os.walk(self.home.folder)
                      for name in folders + files if not os.path.join(folder, name).startswith(os.path.dirname(self.home.db)))

    def test_on_a_machine_without_hosts_says_so_and_leaves_nothing(self):
        before = self.tree()
        self.assertIn("no host was found", self.home.xmsg("install"))
        os.makedirs(os.path.join(self.home.folder, ".gemini"))  # Gemini's own, which is not agy
        os.makedirs(os.path.join(self.home.folder, ".codex"))
        self.assertIn("not found here: claude, agy;", self.home.xmsg("install"))
        self.home.xmsg("uninstall")
        for name in (".gemini", ".codex"):
            os.rmdir(os.path.join(self.home.folder, name))
        self.home.xmsg("install")
        self.assertEqual([".local", ".local/bin", ".local/bin/codex-history", ".local/bin/xmsg",
                          ".local/bin/xmsg-find-session"],
                         [os.path.relpath(path, self.home.folder) for path in self.tree()])
        self.assertIn("rm -r %s" % os.path.dirname(self.home.db), self.home.xmsg("uninstall"))
        self.assertEqual(before, self.tree())

    def test_says_for_each_host_what_comes_next_and_once_where_the_command_is(self):
        for name in (".claude", ".codex", ".gemini/antigravity-cli"):
            os.makedirs(os.path.join(self.home.folder, name))
        before = self.tree()
        self.assertNotIn("not found here", self.home.xmsg("install", "--host", "claude"))
        self.home.xmsg("uninstall")
        self.assertEqual(before, self.tree() if self.home.xmsg("install", "--dry-run") else None)
        out = self.home.xmsg("install")
        for words in ("open sessions have the hooks from their next prompt on", "Trust all and continue", "the next turn"):
            self.assertIn(words, out)
        self.assertEqual(1, out.count("is not on your PATH"))
        again = self.home.xmsg("install", PATH=os.path.join(self.home.folder, ".local", "bin") + ":/usr/bin:/bin")
        self.assertNotIn("next", again)
        self.assertNotIn("PATH", again)
        changes = self.home.json("uninstall")["changes"]
        self.assertEqual(["removed"] * 6, [change["action"] for change in changes])
        self.assertEqual(before, self.tree())

    def test_with_a_file_that_it_cannot_change_does_the_rest_and_says_what_it_did(self):
        os.mkdir(os.path.join(self.home.folder, ".codex"))
        os.mkdir(os.path.join(self.home.folder, ".claude"))
        with open(os.path.join(self.home.folder, ".codex", "hooks.json"), "w") as file:
            file.write("{")
        out = self.home.xmsg("install", status=1)
        self.assertRegex(out, r"(?m)^claude  added ")
        self.assertRegex(out, r"(?m)^codex   refused .*\n +1:2: ")
        self.assertRegex(out, r"(?m)^command added ")


class TheSettings(Case):
    def test_are_shown_with_their_values(self):
        self.assertRegex(self.home.xmsg("settings", XMSG_TTL_SECONDS="77"), r"(?m)^XMSG_TTL_SECONDS +77 ")
        values = self.home.json("settings", XMSG_TTL_SECONDS="77")
        self.assertEqual({name for name, *_ in contract.SETTINGS}, set(values))
        self.assertEqual("77", values["XMSG_TTL_SECONDS"])
        self.assertIn("| `XMSG_TTL_SECONDS` | `3600` |", self.home.xmsg("settings", "--markdown"))


class TheDemo(Case):
    def test_shows_the_whole_way_and_leaves_nothing_behind(self):
        scratch = os.path.join(self.home.folder, "tmp")
        os.mkdir(scratch)
        before = self.home.sql("select count(*) from messages")
        out = self.home.xmsg("demo", TMPDIR=scratch)
        for part in ("queued #1 -> 01a04cd2-demo", "the API is ready", "[peer ada ", "delivered", "nothing to say"):
            self.assertIn(part, out)
        steps = self.home.json("demo", TMPDIR=scratch)["steps"]
        self.assertEqual(5, len(steps))
        self.assertIn("queued #1", steps[1]["output"])
        self.assertEqual([], os.listdir(scratch))
        self.assertEqual(before, self.home.sql("select count(*) from messages"))


class ATerminal(Case):
    REPORTS = (["list"], ["list", "--all"], ["queue"], ["find"], ["outbox", "--all"], ["settings"])

    def setUp(self):
        super().setUp()
        self.home.xmsg("name", EVE, "队长的会话名字很长很长很长很长")
        self.home.sql("update peers set cwd = ?, title = ? where session = ?",
                      ("/" + "很长的目录/" * 20, "e\u0301\u200b😀" * 20, ADA))
        self.send("bob", "中文消息" * 50)
        self.send(EVE, "second line\nis not shown 😀" * 20, "--urgent")
        self.send(EVE, "seen")
        self.put("delivered", window="PreToolUse")

    def run_on(self, columns, command, **env):
        status, out = on_a_terminal(self.home, [XMSG, *command], columns, env=env)
        self.assertEqual(0, status, out)
        return out.decode().replace("\r\n", "\n")

    def test_of_any_width_is_never_overrun_by_a_table(self):
        for columns, commands in ((40, (["list", "--all"], ["queue"], ["settings"])),
                                  (60, (["settings"], ["outbox", "--all"])),
                                  (80, (["list", "--all"], ["queue"], ["settings"], ["outbox", "--all"]))):
            for command in commands:
                text = self.run_on(columns, command, NO_COLOR="1")
                for line in text.splitlines():
                    self.assertLessEqual(display_width(line), columns, (columns, command, line))

    def test_that_is_narrow_breaks_lines_between_words_and_loses_nothing(self):
        for columns in (60, 80):
            text = self.run_on(columns, ["settings"], NO_COLOR="1")
            for name, _, _, _, meaning in contract.SETTINGS:
                self.assertIn(name, text)
                self.assertIn(meaning, " ".join(text.split()))
            self.assertIn(self.home.db, "".join(text.split()))
            self.assertIn(BOB, self.run_on(columns, ["outbox", "--all"], NO_COLOR="1"))

    def test_of_any_width_shows_who_is_open_and_an_id_that_can_be_copied(self):
        for columns in (40, 80, 200):
            lines = self.run_on(columns, ["list", "--all"], NO_COLOR="1").splitlines()
            self.assertEqual(["NAME", "SESSION", "HOST", "OPEN"], lines[0].split()[:4], columns)
            self.assertEqual(4, len(lines))
            shown = [re.search(r"(01a04cd2|7c1f0a52)\S*", line).group() for line in lines[1:]]
            self.assertEqual({ADA, BOB, EVE}, {self.home.json("find", "--exact", text)["sessions"][0]["session"]
                                               for text in shown})

    def test_gets_colours_and_nothing_else_does(self):
        for command in self.REPORTS:
            self.assertNotIn("\x1b", self.home.xmsg(*command, CLICOLOR_FORCE="1", TERM="xterm"))
        self.assertRegex(self.run_on(80, ["list"]), "\x1b\\[1mNAME")
        self.assertIn("\x1b[32mdelivered", self.run_on(80, ["outbox", "--all"]))
        for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertNotIn("\x1b", self.run_on(80, ["outbox", "--all"], **env))

    def test_lines_up_wide_characters(self):
        lines = self.home.xmsg("list").splitlines()
        starts = set()
        for line in lines[1:]:
            session = re.search("01a04cd2-|7c1f0a52-", line).start()
            starts.add(display_width(line[:session]))
        self.assertEqual(1, len(starts), lines)

    def test_of_no_size_at_all_is_taken_as_unlimited_or_eighty(self):
        self.assertIn(BOB, self.run_on(0, ["list"], NO_COLOR="1"))

    def test_shows_hostile_names_and_labels_on_one_line_each(self):
        self.home.sql("update peers set title = ?, model = ?, cwd = ? where session = ?",
                      ("\x1b[2J\x1b]0;owned\x07\nfake  line", "\x9b31m", "/\x1b[31m\u202e", ADA))
        for command in (["list"], ["find"], ["list", "--all"]):
            text = self.run_on(80, command, NO_COLOR="1")
            self.assertEqual(4, len(text.splitlines()))
            self.assertFalse([char for char in text if char != "\n" and is_invisible(char)], ascii(text))


class AnOutput(Case):
    def test_into_a_pipe_that_closes_early_is_no_traceback(self):
        for number in range(300):
            if number == 0:
                store = self.home.store()
            message(store, BOB, "x" * 500)
        store.close()
        for command in (["queue", "--limit", "300"], ["outbox", "--all", "--limit", "300", "--json"], ["list"], ["--help"]):
            reader, writer = os.pipe()
            os.close(reader)
            done = self.home.run_xmsg(*command, stdout=writer)
            os.close(writer)
            self.assertEqual((1, b""), (done.returncode, done.stderr), command)

    def test_that_cannot_be_written_is_a_sentence_and_no_traceback(self):
        for command in (["list"], ["list", "--json"], ["--help"], ["send", "bob", "x", "--no-direct"]):
            with open("/dev/full", "wb") as full:
                done = self.home.run_xmsg(*command, stdout=full)
            self.assertNotEqual(0, done.returncode)
            self.assertNotIn(b"Traceback", done.stderr, command)
            self.assertIn(b"xmsg: ", done.stderr, command)

    def test_that_is_closed_does_not_write_into_the_store(self):
        """The next file that is opened would get descriptor 1."""
        for command in (["send", "bob", "x", "--no-direct"], ["list"], ["inbox", "bob", "--take"], ["show", "1"]):
            self.home.run(["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", XMSG, *command])
            self.home.run(["/bin/sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", XMSG, *command])
        store = self.open_store()
        self.assertEqual("", store.integrity())

    def test_of_a_failure_in_json_is_json_alone(self):
        for command, status, code in ((["show", "99"], 3, "no_such_target"), (["send", "bob", ""], 2, "usage"),
                                      (["list", "--nonsense"], 2, "usage"), (["resolve", "1"], 2, "usage"),
                                      (["cancel", "x"], 3, "no_such_target")):
            done = self.home.run_xmsg(*command, "--json")
            self.assertEqual((status, b""), (done.returncode, done.stderr))
            self.assertEqual(code, json.loads(done.stdout)["error"]["code"])


class TheIsolation(HomeCase):
    @unittest.skipUnless(shutil.which("strace"), "needs strace to see what a process opens")
    def test_of_a_home_is_kept_by_hook_and_command_alike(self):
        """Nothing of the person who runs the tests is even looked at: their host folders, /run/user, their store."""
        log = os.path.join(self.home.folder, "log")
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")
        for command, data in (([XMSG, "send", BOB, "x"], b""), ([XMSG, "list", "--all"], b""), ([XMSG, "outbox", "--all"], b""),
                              ([os.path.join(ROOT, "xmsg-hook.sh"), "codex"], support.payload("codex", "PreToolUse", BOB)),
                              ([os.path.join(ROOT, "xmsg-hook.sh"), "claude"], support.payload("claude", "Stop", ADA))):
            done = self.home.run(["strace", "-f", "-qq", "-o", log, "-e", "trace=%file,connect,bind", *command], input=data)
            self.assertEqual(0, done.returncode, done.stderr)
            with open(log, errors="replace") as file:
                for line in file:
                    for path in re.findall(r'"(/[^"]*)"', line):
                        self.assertFalse(support._inside(path, support.FORBIDDEN), line)


class TheGuard(unittest.TestCase):
    def test_raises_when_a_test_reaches_for_the_real_user(self):
        import sqlite3
        for home in support.REAL_HOMES:
            for act in (lambda: open(os.path.join(home, ".claude", "settings.json")), lambda: os.listdir(home + "/.codex"),
                        lambda: sqlite3.connect(home + "/.local/share/agent-msg/messages.sqlite3"),
                        lambda: os.mkdir(home + "/.codex"), lambda: open(home + "/xmsg-was-here", "w"),
                        lambda: subprocess.run(["true"], env={"HOME": home}), lambda: os.listdir("/run/user")):
                with self.assertRaises(support.TouchedTheRealUser):
                    act()

    def test_lets_tests_work_where_they_may(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "x"), "w") as file:
                file.write("x")
        self.assertFalse(os.environ["HOME"] in support.REAL_HOMES)
        self.assertTrue(os.path.exists(PYTHON))


if __name__ == "__main__":
    unittest.main()
