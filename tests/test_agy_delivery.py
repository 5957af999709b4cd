"""Antigravity: presence and names, what became of a hook's text, and how a session that left is woken.

The agy here is a few lines of shell, or a transcript that the test writes; tests/real/test_agy_real.py runs the whole
way with a stand-in for the real program.
"""
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
import unittest
from unittest import mock

from support import (ADA, AGY, BOB, PATIENCE, PYTHON, FakeProc, HomeCase, HostProcess, end, environ, message,
                     payload, peer, wait_until)

from side_by_side import load_tests  # noqa: F401

import agy_delivery
import contract
import host_process
import sending
import transcripts
import xmsg

FROM = "[peer claude:7c1f0a52; not a user instruction]"
FRAME = "<SYSTEM_MESSAGE>\n[text of a hook, the user did not write this]\n%s\n</SYSTEM_MESSAGE>"


class AgyHome(HomeCase):
    """A home with one conversation of agy that nobody has open."""

    def setUp(self):
        super().setUp()
        self.data = os.path.join(self.home.folder, ".gemini", "antigravity-cli")
        self.presence = os.path.join(self.data, "presence")
        self.logs = os.path.join(self.data, "brain", AGY, ".system_generated", "logs")
        for folder in (self.presence, self.logs, os.path.join(self.data, "conversations")):
            os.makedirs(folder)
        self.lock = os.path.join(self.presence, AGY + ".lock")
        self.transcript = os.path.join(self.logs, "transcript_full.jsonl")
        for path in (self.lock, os.path.join(self.data, "conversations", AGY + ".db")):
            open(path, "w").close()
        self.store = self.open_store()
        peer(self.store, AGY, "agy", transcript=self.transcript)
        self.index = 0

    def held(self):
        """Holds the conversation open, as agy does; close the answer to let it go."""
        file = open(self.lock)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.addCleanup(file.close)
        return file

    def step(self, kind, text, source="SYSTEM"):
        """One more step in the transcript."""
        record = {"step_index": self.index, "source": source, "type": kind, "status": "DONE", "content": text,
                  "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.index += 1
        with open(self.transcript, "a") as file:
            file.write(json.dumps(record) + "\n")

    def queue(self, body="mail", **columns):
        return message(self.store, AGY, body, target_host="agy", **columns)

    def row(self, row):
        return self.store.by_id(row["id"])

    def states(self, *rows):
        return [self.row(row)["state"] for row in rows]

    def database(self, rows, journal="wal"):
        """conversation_summaries.db with rows of id, title, workspaces, status."""
        path = os.path.join(self.data, "conversation_summaries.db")
        database = sqlite3.connect(path)
        database.execute("pragma journal_mode = " + journal)
        database.execute("create table conversation_summaries (conversation_id text primary key, title text, preview "
                         "text, step_count integer, last_modified_time text, workspace_uris text, status text)")
        database.executemany("insert into conversation_summaries (conversation_id, title, workspace_uris, status) "
                             "values (?, ?, ?, ?)", rows)
        database.commit()
        return database


class Presence(AgyHome):
    def test_is_who_holds_the_lock_and_nobody_once_it_is_free(self):
        self.assertEqual(0, agy_delivery.presence(self.presence, AGY))
        file = self.held()
        self.assertEqual(os.getpid(), agy_delivery.presence(self.presence, AGY))
        file.close()
        self.assertEqual(0, agy_delivery.presence(self.presence, AGY))

    def test_is_told_by_the_inode_whatever_path_leads_there(self):
        other = os.path.join(self.home.folder, "elsewhere")
        os.symlink(os.path.join(self.home.folder, ".gemini"), other)
        self.held()
        self.assertEqual(os.getpid(), agy_delivery.presence(other + "/antigravity-cli/presence", AGY))
        self.assertEqual([{"session": AGY, "pid": os.getpid(), "pid_start": host_process.start_time(os.getpid()),
                           "title": "", "cwd": ""}],
                         agy_delivery.open_sessions(other + "/antigravity-cli/presence", self.data))

    def test_is_unknown_without_a_lock_file_or_where_the_system_does_not_tell(self):
        self.assertIsNone(agy_delivery.presence(self.presence, "c0ffee00-other"))
        proc = FakeProc()
        self.addCleanup(proc.remove)
        with environ(XMSG_PROC_ROOT=proc.folder):
            self.assertIsNone(agy_delivery.presence(self.presence, AGY), "no list of locks")
            self.assertEqual([], agy_delivery.open_sessions(self.presence, self.data))
            status = os.stat(self.lock)
            device = "%02x:%02x" % (os.major(status.st_dev), os.minor(status.st_dev))
            for line, expected in (
                    ("1: FLOCK  ADVISORY  WRITE 77 %s:%d 0 EOF" % (device, status.st_ino), 77),
                    ("1: FLOCK  ADVISORY  READ 77 %s:%d 0 EOF" % (device, status.st_ino), 0),
                    ("1: POSIX  ADVISORY  WRITE 77 %s:%d 0 EOF" % (device, status.st_ino), 0),
                    ("1: -> FLOCK  ADVISORY  WRITE 77 %s:%d 0 EOF" % (device, status.st_ino), 0),
                    ("1: FLOCK  ADVISORY  WRITE 77 %s:%d 0 EOF" % (device, status.st_ino + 1), 0),
                    ("nonsense\n\n1: FLOCK", 0)):
                with open(proc.folder + "/locks", "w") as file:
                    file.write(line + "\n")
                self.assertEqual(expected, agy_delivery.presence(self.presence, AGY), line)
            # btrfs and overlayfs list another device than stat tells.
            with open(proc.folder + "/locks", "w") as file:
                file.write("1: FLOCK  ADVISORY  WRITE 77 ff:ff:%d 0 EOF\n" % status.st_ino)
            self.assertIsNone(agy_delivery.presence(self.presence, AGY), "a holder that does not let us see")
            proc.add(77, ["agy"])
            os.mkdir(proc.folder + "/77/fd")
            self.assertEqual(0, agy_delivery.presence(self.presence, AGY), "a holder of another file")
            os.symlink(self.lock, proc.folder + "/77/fd/5")
            self.assertEqual(77, agy_delivery.presence(self.presence, AGY))

    def test_is_no_less_told_where_the_system_passes_over_a_line_of_a_long_list(self):
        """As /proc/locks does between two pages, if a lock before them is let go: here of three readings one is whole."""
        status, proc = os.stat(self.lock), FakeProc()
        self.addCleanup(proc.remove)
        held = b"1: FLOCK  ADVISORY  WRITE 77 %02x:%02x:%d 0 EOF\n" % (
            os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
        other = b"2: POSIX  ADVISORY  WRITE 5 00:01:3 0 EOF\n"
        locks, read = proc.folder + "/locks", os.read
        open(locks, "w").close()
        pages = iter((other, other, b"", other, held, b"", other, other, b""))

        def page_by_page(descriptor, size):
            if os.path.samestat(os.fstat(descriptor), os.stat(locks)):
                return next(pages)
            return read(descriptor, size)
        with environ(XMSG_PROC_ROOT=proc.folder), mock.patch("os.read", page_by_page):
            self.assertEqual(77, agy_delivery.presence(self.presence, AGY))

    def test_is_the_same_from_a_list_that_was_asked_for_ahead(self):
        with open(self.lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for block in (contextlib.nullcontext(), mock.patch("_thread.start_new_thread", side_effect=RuntimeError)):
                with block:
                    read_locks = host_process.flock_holders_ahead()
                self.assertEqual([AGY], [conversation["session"] for conversation in agy_delivery.open_sessions(
                    self.presence, self.data, read_locks)])
                self.assertEqual(os.getpid(), host_process.flock_holder(self.lock, read_locks()))

    def test_is_found_out_without_disturbing_the_lock(self):
        stop = threading.Event()

        def look():
            while not stop.is_set():
                agy_delivery.presence(self.presence, AGY)
                agy_delivery.open_sessions(self.presence, self.data)
        thread = threading.Thread(target=look)
        thread.start()
        try:
            for _ in range(300):
                with open(self.lock) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            stop.set()
            thread.join()

    def test_begins_with_the_process_that_was_started_for_the_conversation(self):
        proc = FakeProc()
        self.addCleanup(proc.remove)
        open(proc.folder + "/locks", "w").close()
        with environ(XMSG_PROC_ROOT=proc.folder):
            self.assertEqual(0, agy_delivery.attached(self.presence, AGY))
            self.assertEqual(0, agy_delivery.attached(self.presence, "no-lock-file"), "no agy runs at all")
            proc.add(70, ["/usr/bin/tool", "--conversation", AGY])
            proc.add(71, ["agy", "--conversation", BOB])
            self.assertEqual(0, agy_delivery.attached(self.presence, AGY))
            self.assertIsNone(agy_delivery.attached(self.presence, "no-lock-file"), "that agy may have it open")
            for pid, words in ((72, ["/x/agy", "--conversation", AGY]), (73, ["python3", "/x/agy", "--conversation=" + AGY])):
                proc.add(pid, words, executable="/usr/bin/python3" if words[0] == "python3" else "/x/agy")
                self.assertEqual(pid, agy_delivery.attached(self.presence, AGY))
                proc.end(pid)

    def test_cannot_be_told_while_one_that_goes_on_with_the_last_conversation_holds_no_lock(self):
        proc, other = FakeProc(), os.path.join(self.presence, BOB + ".lock")
        self.addCleanup(proc.remove)
        open(self.lock, "w").close()
        open(other, "w").close()
        status = os.stat(other)
        for word in ("-c", "--continue"):
            with environ(XMSG_PROC_ROOT=proc.folder):
                open(proc.folder + "/locks", "w").close()
                proc.add(80, ["agy", word])
                self.assertIsNone(agy_delivery.attached(self.presence, AGY), word)
                with open(proc.folder + "/locks", "w") as file:
                    file.write("1: FLOCK  ADVISORY  WRITE 80 %02x:%02x:%d 0 EOF\n" % (
                        os.major(status.st_dev), os.minor(status.st_dev), status.st_ino))
                self.assertEqual(0, agy_delivery.attached(self.presence, AGY), "it has gone on with another one")
                proc.end(80)
                self.assertEqual(0, agy_delivery.attached(self.presence, AGY))

    def test_decides_what_list_and_is_live_say(self):
        self.database([(AGY, "Mend the parser", json.dumps(["file://" + self.home.folder + "/a%20b"]),
                        "CASCADE_RUN_STATUS_RUNNING")]).close()
        with environ(HOME=self.home.folder):
            self.assertFalse(xmsg.is_live(self.store, self.store.peer(AGY), contract.now_ms()))
        self.held()
        found = self.home.json("list")["sessions"]
        self.assertEqual([(AGY, "agy", "Mend the parser", self.home.folder + "/a b", "busy", os.getpid(), True)],
                         [tuple(record[key] for key in ("session", "host", "name", "cwd", "activity", "pid", "live"))
                          for record in found])
        other = "c0ffee00-4444-4000-8000-00000000000d"  # no hook has ever told of this one
        with open(os.path.join(self.presence, other + ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual({AGY, other}, {record["session"] for record in self.home.json("list")["sessions"]})
            self.assertIn("agy is running", self.home.xmsg("send", other, "its next turn has the hooks", session=ADA))
            self.store._execute("update peers set hook_seen = null")
            self.assertIn("no hook of xmsg has run there", self.home.xmsg("send", other, "x", session=ADA, status=3))


class Names(AgyHome):
    ROWS = [(AGY, "Mend the parser", '["file:///w"]', "CASCADE_RUN_STATUS_IDLE"), ("b" * 8, None, "{", "?")]

    def titles(self):
        return {session: facts["title"] for session, facts in agy_delivery.conversations(self.data).items()}

    def test_come_from_the_summaries_while_agy_writes_them(self):
        database = self.database(self.ROWS)
        self.addCleanup(database.close)
        self.assertEqual({AGY: "Mend the parser", "b" * 8: ""}, self.titles())
        self.assertEqual({"title": "Mend the parser", "cwd": "/w", "activity": "idle"},
                         agy_delivery.conversations(self.data, [AGY])[AGY])
        self.assertEqual({}, agy_delivery.conversations(self.data, ["other"]))

    def test_come_without_a_shm_and_nothing_is_left_beside_the_file(self):
        self.database(self.ROWS).close()
        before = sorted(os.listdir(self.data))
        self.assertNotIn("conversation_summaries.db-shm", before)
        self.assertEqual("Mend the parser", self.titles()[AGY])
        self.assertEqual(before, sorted(os.listdir(self.data)))

    def test_are_none_where_the_file_is_missing_broken_or_foreign(self):
        self.assertEqual({}, self.titles())
        path = os.path.join(self.data, "conversation_summaries.db")
        for content in (b"", b"no database", b"SQLite format 3\0" + os.urandom(4096)):
            with open(path, "wb") as file:
                file.write(content)
            self.assertEqual({}, self.titles())
        os.unlink(path)
        database = sqlite3.connect(path)
        database.execute("create table conversation_summaries (conversation_id text)")
        database.execute("insert into conversation_summaries values (?)", (AGY,))
        database.commit()
        database.close()
        self.assertEqual({AGY: ""}, self.titles(), "an older one")

    def test_of_a_workspace_are_decoded_and_hostile_ones_are_nothing(self):
        for uris, expected in (('["file:///a%20b/%E9%95%BF"]', "/a b/长"), ("[]", ""), (None, ""), ("[7]", ""), ('"x"', ""),
                               ('["http://x/y"]', ""), ('["file://host/x"]', ""), ("[" * 100000, ""), (7, "")):
            self.assertEqual(expected, agy_delivery._workspace(uris), uris)

    def test_reach_the_registry_with_a_hook_and_lead_to_a_session_that_left(self):
        self.database(self.ROWS).close()
        self.home.hook("agy", AGY, "Stop", transcriptPath=self.transcript, workspacePaths=[])
        self.assertEqual(("Mend the parser", "/w"), tuple(self.store.peer(AGY)[key] for key in ("title", "cwd")))
        self.home.xmsg("send", "mend the parser", "hi", "--no-direct", session=ADA)
        self.home.xmsg("name", AGY, "parser")
        self.home.xmsg("send", "parser", "ho", "--no-direct", session=ADA)
        self.assertEqual([AGY, AGY], [row["target"] for row in self.store.queued()])


    def test_lead_to_a_conversation_that_no_hook_has_told_of_while_agy_keeps_it(self):
        other = "d00dfeed-3333-4000-8000-00000000000d"
        self.database([(other, "Old work", '["file:///w"]', "CASCADE_RUN_STATUS_IDLE"), ("d00dfeed-gone", "Gone", "", "")]).close()
        open(os.path.join(self.data, "conversations", other + ".db"), "w").close()
        for word in ("old work", other, other[:8], "agy:old work"):
            plan = self.home.json("send", word, "x", "--dry-run", session=ADA)["plan"]
            self.assertEqual([(other, "Old work", False)], [(one["session"], one["name"], one["live"]) for one in plan], word)
        for word in ("gone", "codex:old work", "d00"):
            self.home.xmsg("send", word, "x", "--dry-run", session=ADA, status=3)


class AVersion(AgyHome):
    def test_is_what_the_running_program_itself_says(self):
        folder = self.home.folder
        script = os.path.join(folder, "agy")
        with open(script, "w") as file:
            file.write("import sys, os\nprint(os.environ['SAYS']) if '--version' in sys.argv else sys.stdin.read()\n")
        process = subprocess.Popen([PYTHON, script], stdin=subprocess.PIPE)
        self.addCleanup(end, process)
        wait_until(lambda: host_process.arguments(process.pid)[1:] == [script], "the process")
        self.addCleanup(setattr, agy_delivery, "VERSION_SECONDS", agy_delivery.VERSION_SECONDS)
        agy_delivery.VERSION_SECONDS = 10 * PATIENCE
        for says, expected in (("1.2.9", "1.2.9"), ("1.3.0-rc1", "1.3.0-rc1"), ("agy 1.3", ""), ("", ""), ("1" * 100, "")):
            with environ(SAYS=says):
                self.assertEqual(expected, agy_delivery.version(process.pid), says)
        self.assertEqual("", agy_delivery.version(0))
        self.assertEqual("", agy_delivery.version(os.getpid()), "no agy")

    def test_is_not_waited_for_longer_than_a_hook_may(self):
        host = HostProcess(self.home, "agy")  # a copy of bash, which the test replaces by something slow
        self.addCleanup(host.end)
        self.assertEqual("", agy_delivery.version(host.pid), "bash says something else")
        script = os.path.join(self.home.folder, "agy")
        with open(script, "w") as file:
            file.write("import time\ntime.sleep(60)\n")
        process = subprocess.Popen([PYTHON, script])
        self.addCleanup(end, process)
        wait_until(lambda: host_process.arguments(process.pid)[1:] == [script], "the process")
        begin, agy_delivery.VERSION_SECONDS = time.monotonic(), 0.2
        self.addCleanup(setattr, agy_delivery, "VERSION_SECONDS", 1.0)
        self.assertEqual("", agy_delivery.version(process.pid))
        self.assertLess(time.monotonic() - begin, 2)


class ARefusal(unittest.TestCase):
    """was_refused() over what a transcript may hold after a hook."""

    HEADS = [FROM]
    MODEL = (5, "MODEL", "PLANNER_RESPONSE", "ok")
    USER = (5, "USER_EXPLICIT", "USER_INPUT", "go on")

    def check(self, expected, steps, shape="systemMessage", first=5):
        self.assertEqual(expected, agy_delivery.was_refused(steps, first, shape, self.HEADS), steps)

    def test_is_a_later_step_of_the_model_without_the_text(self):
        for shape in contract.AGY_STEPS:
            self.check(True, [self.MODEL], shape)
            self.check(True, [(5, "SYSTEM", "SYSTEM_MESSAGE", "another tool's"), (6,) + self.MODEL[1:]], shape)

    def test_is_nothing_that_came_before_or_in_another_turn_or_from_nobody(self):
        self.check(False, [])
        self.check(False, [(4,) + self.MODEL[1:]])
        self.check(False, [self.USER, (6,) + self.MODEL[1:]])
        self.check(False, [(5, "MODEL", "RUN_COMMAND", "out")])
        self.check(False, [(5, "SYSTEM", "PLANNER_RESPONSE", "ok")])

    def test_is_never_said_if_the_text_stands_there_in_whatever_dress(self):
        for text in (FRAME % FROM, "> [peer claude : 7c1f0a52;\n not a user\tinstruction]", FROM.replace("[", "\\[")):
            for kind in ("SYSTEM_MESSAGE", "EPHEMERAL_MESSAGE", "USER_INPUT", "SOMETHING_NEW"):
                self.check(False, [(5, "SYSTEM", kind, text), (6,) + self.MODEL[1:]])
        self.check(True, [(5, "MODEL", "PLANNER_RESPONSE", "I saw " + FROM)])

    def test_at_a_stop_is_the_next_turn_and_no_step_of_the_model(self):
        self.check(True, [self.USER], "continue")
        self.check(False, [self.MODEL], "continue")
        self.check(False, [self.MODEL, (6,) + self.USER[1:]][:1], "continue")
        self.check(False, [(5, "SYSTEM", "SYSTEM_MESSAGE", FROM), (6,) + self.USER[1:]], "continue")


class AnInjection(AgyHome):
    """Hooks below a real process called agy; the test writes what that agy would put into its transcript."""

    def setUp(self):
        super().setUp()
        self.agy = self.host()

    def host(self):
        host = HostProcess(self.home, "agy")
        self.addCleanup(host.end)
        return host

    def hook(self, event="PreInvocation", host=None, **fields):
        return (host or self.agy).hook("agy", AGY, event, **dict({"transcriptPath": self.transcript}, **fields))

    def invoke(self, number=0, host=None, **fields):
        """PreInvocation's (shape, text), (None, None) if it injects nothing."""
        out = self.hook(host=host, **dict({"initialNumSteps": self.index, "invocationNum": number}, **fields))
        if out is None:
            return None, None
        (shape, text), = out["injectSteps"][0].items()
        return shape, text["systemMessage"] if shape == "systemMessage" else text

    def takes(self, version=""):
        return json.loads(self.store.meta("agy-takes:" + version) or "{}")

    def test_stays_in_flight_until_the_next_hook_finds_its_trace(self):
        self.step("USER_INPUT", "hello", "USER_EXPLICIT")
        row = self.queue()
        shape, text = self.invoke()
        self.assertEqual(("systemMessage", FROM + "\nmail"), (shape, text))
        held = self.row(row)
        self.assertEqual(("hook-inflight", "PreInvocation", self.agy.pid, self.agy.start),
                         tuple(held[key] for key in ("state", "window", "holder_pid", "holder_start")))
        self.assertIn("hook-inflight", self.home.xmsg("outbox", session=ADA))
        self.step("SYSTEM_MESSAGE", FRAME % text)
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertIsNone(self.hook("Stop", executionNum=0))
        done = self.row(row)
        self.assertEqual(("delivered", "PreInvocation"), (done["state"], done["window"]))
        self.assertTrue(done["confirmed_at"] and done["evidence"])
        self.assertEqual({"systemMessage": True}, self.takes())
        self.assertEqual((None, None), self.invoke(), "and it is shown once")

    def test_is_traced_by_the_name_that_it_was_shown_under_whatever_its_sender_is_called_by_then(self):
        peer(self.store, ADA, "claude", name="ada")
        for event in ("PreInvocation", "Stop"):
            row = self.queue("from ada at " + event, sender_label="ada")
            out = self.hook(event, initialNumSteps=self.index, executionNum=0)
            self.assertIn("[peer ada · claude:7c1f0a52;", json.dumps(out, ensure_ascii=False))
            text = out["reason"] if event == "Stop" else out["injectSteps"][0]["systemMessage"]["systemMessage"]
            peer(self.store, BOB, name="ada")  # the name is somebody else's now, and the source line leaves it out
            self.step("SYSTEM_MESSAGE", FRAME % text)
            self.step("PLANNER_RESPONSE", "ok", "MODEL")
            self.assertEqual((None, None), self.invoke(1), "shown once")
            self.assertEqual(["delivered"], self.states(row))
            self.store.set_name(BOB, "")

    def test_that_another_hook_shows_again_meanwhile_is_no_business_of_who_read_the_transcript_before(self):
        self.agy.end()
        self.agy.hook = self.home.hook  # of an agy whose process cannot be told
        row, texts, read = self.queue(), [], transcripts.agy_steps_since
        self.invoke()
        self.step("PLANNER_RESPONSE", "a tool call", "MODEL")

        def read_slowly(path, offset):
            steps = read(path, offset)
            texts.append(self.invoke(1)[1])
            return steps
        with mock.patch.object(transcripts, "agy_steps_since", read_slowly):  # as `outbox` does
            xmsg.settle_injections(self.store, {"session": AGY, "transcript": self.transcript}, contract.now_ms())
        self.assertEqual(["hook-inflight"], self.states(row), self.store.events(row["id"]))
        self.step("EPHEMERAL_MESSAGE", texts[0])
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertEqual((None, None), self.invoke(2), "shown once")
        self.assertEqual(["delivered"], self.states(row))

    def test_that_the_model_went_on_without_goes_by_the_other_shape_and_that_is_remembered(self):
        row = self.queue()
        self.assertEqual("systemMessage", self.invoke()[0])
        self.step("PLANNER_RESPONSE", "a tool call", "MODEL")
        self.assertEqual(("ephemeralMessage", FROM + "\nmail"), self.invoke(1))
        self.assertEqual({"systemMessage": False}, self.takes())
        self.step("EPHEMERAL_MESSAGE", FROM + "\nmail")
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertIsNone(self.hook("Stop", executionNum=0))
        self.assertEqual(["delivered"], self.states(row))
        second = self.queue("more")
        self.assertEqual("ephemeralMessage", self.invoke()[0])
        self.assertEqual(["hook-inflight"], self.states(second))
        self.assertIn("agy ? went on without this systemMessage",
                      [event["detail"] for event in self.store.events(row["id"])])

    def test_goes_at_the_stop_of_a_build_that_dropped_it_before(self):
        row = self.queue()
        self.invoke()
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        out = self.hook("Stop", executionNum=0)
        self.assertEqual({"decision": "continue", "reason": "\n\n%s\nmail" % FROM}, out)
        self.step("SYSTEM_MESSAGE", FRAME % ("Stop hook blocked termination: " + out["reason"].strip()))
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertIsNone(self.hook("Stop", executionNum=1))
        self.assertEqual(("delivered", "Stop"), (self.row(row)["state"], self.row(row)["window"]))

    def test_without_a_trace_and_without_a_refusal_is_unknown_and_never_shown_again(self):
        row = self.queue()
        self.invoke()
        self.step("USER_INPUT", "the turn was cancelled; another one", "USER_EXPLICIT")
        self.assertEqual((None, None), self.invoke())
        self.assertIn("UNKNOWN", self.home.xmsg("outbox", session=ADA))
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertIsNone(self.hook("Stop", executionNum=0))
        self.assertEqual(["hook-inflight"], self.states(row))
        self.home.xmsg("resolve", str(row["id"]), "--requeue")
        self.assertEqual("systemMessage", self.invoke()[0])

    def test_whose_model_call_failed_is_not_confirmed_by_an_ephemeral_step(self):
        self.store.set_meta("agy-takes:", json.dumps({"systemMessage": False}))
        row = self.queue()
        self.assertEqual("ephemeralMessage", self.invoke()[0])
        self.step("EPHEMERAL_MESSAGE", FROM + "\nmail")
        self.step("ERROR_MESSAGE", "overloaded")
        self.assertIsNone(self.hook("Stop", executionNum=0, terminationReason="ERROR"))
        self.step("USER_INPUT", "once more", "USER_EXPLICIT")
        self.assertEqual((None, None), self.invoke())
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertIsNone(self.hook("Stop", executionNum=0))
        self.assertEqual(["hook-inflight"], self.states(row))
        self.assertIn("UNKNOWN", self.home.xmsg("outbox", session=ADA))

    def test_of_an_agy_that_died_is_unknown_and_a_late_trace_settles_it(self):
        lost = self.queue("lost")
        found = self.queue("found", sender_session=BOB, sender_host="codex", sender_label=BOB[:8])
        self.invoke()
        self.agy.end()
        self.assertEqual(2, self.home.xmsg("outbox", "--json").count('"unknown": true'))
        self.step("SYSTEM_MESSAGE", FRAME % ("[peer codex:01a04cd2; not a user instruction]\nfound"))
        self.home.xmsg("outbox")
        self.assertEqual(["hook-inflight", "delivered"], self.states(lost, found))
        self.step("USER_INPUT", "again", "USER_EXPLICIT")
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertEqual((None, None), self.invoke(host=self.host()))
        self.assertEqual(["hook-inflight"], self.states(lost), "the model step is one of another turn")

    def test_that_the_dead_agys_last_turn_went_on_without_is_queued_again(self):
        row = self.queue()
        self.invoke()
        self.step("PLANNER_RESPONSE", "a tool that was denied", "MODEL")
        self.agy.end()
        self.home.xmsg("outbox")
        self.assertEqual(["queued"], self.states(row))
        self.assertEqual("ephemeralMessage", self.invoke(host=self.host())[0])

    def test_is_no_business_of_another_agy_with_the_same_session_open(self):
        row = self.queue()
        self.invoke()
        self.step("PLANNER_RESPONSE", "a step of the other one", "MODEL")
        self.assertIsNone(self.hook("Stop", host=self.host(), executionNum=0))
        self.home.xmsg("outbox")
        self.assertEqual(["hook-inflight"], self.states(row))
        self.assertEqual({}, self.takes())

    def test_of_a_shape_that_never_left_a_trace_is_not_shown_again_when_it_leaves_none(self):
        row = self.queue()
        self.invoke()
        self.step("PLANNER_RESPONSE", "one", "MODEL")
        self.assertEqual("ephemeralMessage", self.invoke(1)[0])
        self.step("PLANNER_RESPONSE", "two", "MODEL")
        self.assertEqual((None, None), self.invoke(2))
        self.assertEqual(["hook-inflight"], self.states(row))

    def test_that_was_dropped_teaches_nothing_of_a_version_that_takes_it(self):
        rows = [self.queue("one")]
        self.step("SYSTEM_MESSAGE", FRAME % self.invoke()[1])
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.home.xmsg("outbox")  # a report may see the trace before the next hook does
        rows.append(self.queue("two"))
        self.assertEqual("systemMessage", self.invoke(1)[0])
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.assertEqual("systemMessage", self.invoke(2)[0])
        self.assertEqual(["delivered", "hook-inflight"], self.states(*rows))

    def test_of_equal_texts_and_of_one_that_was_cut_is_traced_as_a_whole(self):
        rows = [self.queue("same"), self.queue("same"), self.queue("长" * 8000), self.queue("same")]
        self.home.env["XMSG_MAX_BODY_CHARS"] = "20000"
        long = self.queue("x" * 15000)
        shape, text = self.invoke()
        self.assertIn("xmsg inbox %d" % long["id"], text)
        self.step("SYSTEM_MESSAGE", FRAME % text)
        self.home.xmsg("outbox")
        self.assertEqual(["delivered"] * 5, self.states(*rows, long))
        traces = [self.row(row)["evidence"] for row in rows]
        self.assertEqual(4, len(set(traces)), "one occurrence for one row")

    def test_at_a_stop_that_the_host_would_not_honour_waits_and_one_that_it_did_not_comes_back(self):
        self.queue("one")
        self.step("SYSTEM_MESSAGE", FRAME % ("x: " + self.hook("Stop", executionNum=0)["reason"]))
        row = self.queue("two")
        for fields in ({"terminationReason": "ERROR", "error": "x"}, {"fullyIdle": False}, {"executionNum": 3}):
            self.assertIsNone(self.hook("Stop", **dict({"executionNum": 1}, **fields)))
        self.assertEqual("continue", self.hook("Stop", executionNum=1)["decision"])
        self.step("USER_INPUT", "the host had stopped all the same", "USER_EXPLICIT")
        self.assertEqual(("systemMessage", FROM + "\ntwo"), self.invoke())
        self.assertEqual(["hook-inflight"], self.states(row))

    def test_is_traced_where_agy_keeps_its_transcripts_if_no_payload_tells(self):
        self.store._execute("update peers set transcript = ''")
        row = self.queue()
        self.step("USER_INPUT", "hello", "USER_EXPLICIT")
        text = self.invoke(transcriptPath=None)[1]
        self.step("SYSTEM_MESSAGE", FRAME % text)
        self.assertIsNone(self.hook("Stop", executionNum=0, transcriptPath=None))
        self.assertEqual(["delivered"], self.states(row))

    def test_leaves_zero_fields_to_be_absent(self):
        self.queue()
        self.assertEqual("systemMessage", self.invoke(initialNumSteps=None, invocationNum=None, workspacePaths=None)[0])
        self.queue("more")
        self.assertEqual("continue", self.hook("Stop", executionNum=None, error=None, workspacePaths=None)["decision"])

    def test_is_kept_beside_what_another_hook_of_the_session_has_shown_meanwhile(self):
        row, other, written = self.queue(), {"rows": [77], "shape": "continue"}, []

        def meanwhile(pid):
            with self.store.transaction():
                self.store.set_meta("agy:" + AGY, json.dumps({"shown": [other]}))
            return "1.3.0"
        self.addCleanup(setattr, agy_delivery, "version", agy_delivery.version)
        agy_delivery.version = meanwhile
        call = xmsg.parse_call("agy", "PreInvocation", payload("agy", "PreInvocation", AGY))
        xmsg.show_to_agy(self.store, dict(call, process=[self.agy.pid, self.agy.start]), contract.now_ms(), written.append)
        shown = json.loads(self.store.meta("agy:" + AGY))["shown"]
        self.assertEqual(([[77], [row["id"]]], 1), ([entry["rows"] for entry in shown], len(written)))

    def test_can_be_answered_before_the_next_hook(self):
        row = self.queue()
        self.invoke()
        done = self.agy.xmsg("send", ADA, "answer", "--reply-to", "last", "--force", "--json",
                             env={"ANTIGRAVITY_CONVERSATION_ID": AGY})
        sent = json.loads(done.stdout)["messages"][0]
        self.assertEqual((row["uid"], "agy", AGY), (sent["reply_to"], sent["from"]["host"], sent["from"]["session"]))

    def test_of_a_hook_that_died_before_its_output_is_settled_like_any_other(self):
        row, now = self.queue(), contract.now_ms()
        with self.store.transaction():  # what the claim leaves
            self.store.set_meta("agy:" + AGY, json.dumps({"process": [None, None], "shown": [
                {"process": [None, None], "version": "", "shape": "systemMessage", "first": 0, "at": 0,
                 "claimed": now, "rows": [row["id"]], "heads": [FROM]}]}))
        gone = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        holder = gone.pid, host_process.start_time(gone.pid)
        self.store.claim(AGY, now, 10, len, "PreInvocation", holder)
        self.step("PLANNER_RESPONSE", "ok", "MODEL")
        self.home.xmsg("outbox")
        self.assertEqual(["hook-inflight"], self.states(row), "the hook is still at work")
        end(gone)
        self.assertEqual("ephemeralMessage", self.invoke(1)[0])


class ARoute(unittest.TestCase):
    def test_to_agy_wakes_only_who_is_surely_away(self):
        facts = {"holder": 0, "inside": False, "wake": True, "known": True, "program": "/x/agy"}
        for change, windows, words in (
                ({}, ["agy-wake"], None), ({"inside": True}, ["agy-wake"], None), ({"holder": 7}, [], "is running"),
                ({"holder": 7, "inside": True}, ["agy-message"], None), ({"holder": None}, [], "cannot be told"),
                ({"holder": None, "inside": True}, [], "cannot be told"), ({"wake": False}, [], "XMSG_WAKE=off"),
                ({"known": False}, [], "keeps none"), ({"program": None}, [], "XMSG_AGY_BIN")):
            found, reason = xmsg.route({"host": "agy", "direct": True, "inbox_fault": None, "agy": dict(facts, **change)})
            self.assertEqual(windows, found, change)
            self.assertIn(words, reason) if words else self.assertIsNone(reason)
        self.assertEqual([], xmsg.route({"host": "agy", "direct": False, "inbox_fault": None})[0])


# An agy of a few lines: it says who it is, takes its lock, runs its hooks as agy would, and does what the test says.
SHELL_AGY = """#!/bin/bash
echo "$@" >> "$HOME/argv"
env > "$HOME/env"
exec 9>>"$HOME/.gemini/antigravity-cli/presence/%s.lock"
flock -n 9
[ ! -f "$HOME/do" ] || . "$HOME/do"
echo '{"conversationId":"%s","transcriptPath":"%s"}' | "%s/xmsg-hook.sh" agy PreInvocation 9>&- > "$HOME/hook.out"
[ ! -f "$HOME/then" ] || . "$HOME/then"
"""


class AWake(AgyHome):
    def setUp(self):
        super().setUp()
        self.home.env.update(XMSG_AGY_WAKE_COOLDOWN="0.2", PATH=os.path.dirname(self.program()) + ":/usr/bin:/bin")
        self.log = os.path.join(self.home.folder, "store", "agy-wake.log")

    def program(self):
        folder = os.path.join(self.home.folder, "bin")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "agy")
        if shutil.which("flock") is None:
            self.skipTest("flock(1) is missing")
        with open(path, "w") as file:
            file.write(SHELL_AGY % (AGY, AGY, self.transcript, self.home.root))
        os.chmod(path, 0o755)
        return path

    def do(self, text, name="do"):
        with open(os.path.join(self.home.folder, name), "w") as file:
            file.write(text + "\n")

    def read(self, name):
        try:
            with open(os.path.join(self.home.folder, name)) as file:
                return file.read()
        except OSError:
            return ""

    def wakes(self):
        return len(self.read("argv").splitlines())

    def send(self, text, *options, **env):
        return self.home.xmsg("send", AGY, text, *options, session=ADA, **env)

    def wait_quiet(self):
        """Until no courier holds the session any more."""
        path = xmsg.waiter_path(self.store, AGY)
        wait_until(lambda: os.path.exists(path) and not host_process.flock_holder(path), "the end of the wake")

    def test_brings_the_mail_of_one_who_left_and_its_own_hook_takes_it(self):
        self.assertRegex(self.send("the secret body"), r"queued #1 .*agy-wake by process \d+")
        wait_until(lambda: "the secret body" in self.read("hook.out"), "the hook of the woken agy")
        self.wait_quiet()
        argv = self.read("argv").rstrip("\n")
        self.assertEqual("--conversation %s --print-timeout 600s -p %s" % (AGY, contract.PHRASES["kick"][0]), argv)
        self.assertNotIn("secret", argv)
        self.assertNotIn("skip-permissions", argv)
        details = [event["detail"] or "" for event in self.store.events(1)]
        self.assertRegex(details[1], r"^agy-wake started: pid \d+, log %s$" % self.log)
        self.assertEqual(0o600, os.stat(self.log).st_mode & 0o777)

    def test_is_what_a_dry_run_promises(self):
        self.assertIn("direct: agy-wake; it is woken, and its hook shows it",
                      self.home.xmsg("send", AGY, "x", "--dry-run", session=ADA))
        self.assertEqual("", self.read("argv"))

    def test_carries_no_identity_but_its_own_and_all_configuration(self):
        self.send("x", CLAUDE_CODE_SESSION_ID="c", CLAUDECODE="1", CODEX_THREAD_ID="t", ANTIGRAVITY_CSRF_TOKEN="s",
                  AI_AGENT="a", XMSG_FROM="label", CODEX_HOME="/c", CLAUDE_CONFIG_DIR="/d", XMSG_TTL_SECONDS="60")
        wait_until(lambda: self.read("hook.out"), "the hook")
        names = {line.partition("=")[0] for line in self.read("env").splitlines()}
        self.assertEqual(set(), names & {"CLAUDE_CODE_SESSION_ID", "CLAUDECODE", "CODEX_THREAD_ID", "AI_AGENT", "XMSG_FROM",
                                         "XMSG_FROM_TOOL", "XMSG_FROM_SESSION", "ANTIGRAVITY_CSRF_TOKEN"})
        self.assertLessEqual({"HOME", "PATH", "XMSG_DB", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "XMSG_TTL_SECONDS"}, names)
        self.wait_quiet()

    def test_has_its_workspace_its_duration_and_the_arguments_that_were_asked_for(self):
        peer(self.store, AGY, "agy", cwd=self.home.folder)
        self.send("x", XMSG_AGY_WAKE_TIMEOUT="20", XMSG_AGY_WAKE_ARGS="--model 'big one' --dangerously-skip-permissions")
        wait_until(lambda: self.read("hook.out"), "the hook")
        self.wait_quiet()
        self.assertTrue(self.read("argv").startswith(
            "--conversation %s --print-timeout 20s --add-dir %s --model big one --dangerously-skip-permissions -p "
            % (AGY, self.home.folder)), self.read("argv"))

    def test_with_a_duration_that_is_none_is_refused_before_anything_is_started(self):
        for bad in ("10 minutes", "-5s", "0", "5x", "99999h"):
            self.assertIn("is not a duration", self.home.xmsg("send", AGY, "x", status=2, session=ADA, XMSG_AGY_WAKE_TIMEOUT=bad))
        self.assertIn("cannot be split", self.home.xmsg("send", AGY, "x", status=2, session=ADA, XMSG_AGY_WAKE_ARGS="'"))
        self.assertEqual([], self.store.queued())
        self.assertEqual("", self.read("argv"))

    def test_is_none_for_who_is_there_or_unknown_or_where_it_is_not_wanted(self):
        file = self.held()
        self.assertIn("agy is running: its next PreInvocation takes it", self.send("one"))
        self.assertIn("agy is running, next PreInvocation", self.home.xmsg("outbox", session=ADA))
        file.close()
        self.assertIn("XMSG_WAKE=off", self.send("two", XMSG_WAKE="off"))
        self.assertIn("--no-direct", self.send("three", "--no-direct"))
        os.unlink(os.path.join(self.data, "conversations", AGY + ".db"))
        self.assertIn("keeps none of this id", self.send("four"))
        self.assertEqual("", self.read("argv"))

    def test_without_a_program_is_a_clear_outcome(self):
        nowhere = os.path.join(self.home.folder, "nowhere")
        self.assertIn("set XMSG_AGY_BIN", self.send("one", XMSG_AGY_BIN=nowhere))
        self.assertIn("set XMSG_AGY_BIN", self.send("two", PATH="/usr/bin:/bin"))
        self.assertIn("set XMSG_AGY_BIN", self.home.xmsg("outbox", session=ADA, PATH="/usr/bin:/bin"))
        self.assertIn("a further message to it wakes it", self.home.xmsg("outbox", session=ADA))
        os.makedirs(os.path.join(self.home.folder, ".local", "bin"))
        os.rename(os.path.join(self.home.folder, "bin", "agy"), os.path.join(self.home.folder, ".local", "bin", "agy"))
        self.assertIn("agy-wake by process", self.send("three", PATH="/usr/bin:/bin"))
        self.wait_quiet()
        self.assertEqual(1, self.wakes())

    def test_of_a_stranger_is_refused_where_nothing_can_wake_it(self):
        self.store._execute("update peers set hook_seen = null where session = ?", (AGY,))
        out = self.home.xmsg("send", AGY, "x", status=3, session=ADA, PATH="/usr/bin:/bin")
        self.assertIn("no program `agy`", out)

    def test_is_one_for_ten_racing_senders(self):
        self.do('until [ -e "$HOME/go" ]; do sleep 0.02; done')
        env = dict(self.home.env, XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=ADA)
        senders = [subprocess.Popen([os.path.join(self.home.root, "bin", "xmsg"), "send", AGY, "n%d" % number], env=env,
                                    stdout=subprocess.PIPE) for number in range(10)]
        for sender in senders:
            self.assertIn(b"queued", sender.communicate()[0])
        self.do("", "go")
        wait_until(lambda: not self.store.queued(AGY), "the mail to be taken")
        self.wait_quiet()
        self.assertEqual(1, self.wakes())
        self.assertEqual(10, self.read("hook.out").count("; not a user instruction]"))

    def test_after_a_fruitless_one_comes_no_sooner_than_it_may(self):
        row = self.queue()
        self.store._execute("update messages set created_at = created_at - 10000")
        lock = xmsg.waiter_lock(self.store, AGY)
        self.addCleanup(os.close, lock)
        with environ(HOME=self.home.folder):
            command, now = ["agy"], contract.now_ms()
            for failed, pause, least, most in (("", 600, 0, 0.3), ("%d " % now, 0.4, 0.3, 3), ("0 ", 600, 0, 0.3),
                                               ("%d " % (now + 10 ** 9), 0.4, 0.3, 3), ("garbage ", 600, 0, 0.3),
                                               ("%d another" % now, 600, 0, 0.3)):
                os.ftruncate(lock, 0)
                os.pwrite(lock, failed.encode() + (sending._mark(command) if failed[-1:] == " " else b""), 0)
                self.store.settings.agy_wake_cooldown, begin = pause, time.monotonic()
                self.assertTrue(sending._may_wake(self.store, AGY, lock, command))
                took = time.monotonic() - begin
                self.assertTrue(least <= took < most * PATIENCE, (failed, took))
            with self.store.transaction():
                self.store.move(row, "cancelled", contract.now_ms())
            self.store.settings.agy_wake_cooldown = 600
            self.assertFalse(sending._may_wake(self.store, AGY, lock, []), "nothing waits any more")

    def test_waits_for_the_rest_of_a_burst_but_not_long(self):
        self.queue()
        lock = xmsg.waiter_lock(self.store, AGY)
        self.addCleanup(os.close, lock)
        took = []
        with environ(HOME=self.home.folder):
            for late in (0, 10 ** 6):
                begin = time.monotonic()
                self.assertTrue(sending._may_wake(self.store, AGY, lock, []))
                took.append(time.monotonic() - begin)
                self.store._execute("update messages set created_at = created_at + ?", (late,))
            self.assertGreater(took[0], 0.2)
            self.assertLess(took[1], 0.2 * PATIENCE)
            self.store._execute("update messages set created_at = created_at + ?", (10 ** 6,))  # a clock that was put back
            self.addCleanup(setattr, sending, "LONGEST_BURST", sending.LONGEST_BURST)
            sending.LONGEST_BURST = 0.1
            self.assertTrue(sending._may_wake(self.store, AGY, lock, []))

    def test_is_had_again_for_mail_that_comes_just_after_or_at_its_end(self):
        self.home.env["XMSG_AGY_WAKE_COOLDOWN"] = "600"
        self.send("one")
        wait_until(lambda: "one" in self.read("hook.out"), "the first wake")
        self.wait_quiet()
        self.do('echo > "$HOME/hooked"; until [ -e "$HOME/go" ]; do sleep 0.02; done', "then")
        self.assertIn("agy-wake by process", self.send("two"))
        wait_until(lambda: self.read("hooked"), "the second wake's only hook")
        self.assertIn("agy is running", self.send("three"))
        self.do("", "go")
        wait_until(lambda: "three" in self.read("hook.out"), "one more wake when that one ends")
        self.wait_quiet()
        self.assertEqual(3, self.wakes())

    def test_that_took_nothing_says_so_waits_and_tries_once_more(self):
        self.do("echo 'AGY_ERROR: no quota'; exit 3")
        self.send("one")
        wait_until(lambda: "agy-wake failed: it left with status 3 and took no mail: AGY_ERROR: no quota; log"
                   in self.home.xmsg("outbox", session=ADA), "the failure to be told")
        wait_until(lambda: self.wakes() == 2, "one more")
        self.wait_quiet()
        self.assertEqual(2, self.wakes())
        self.assertEqual(["queued"], self.home.states())

    def test_that_failed_says_why_and_when_the_next_one_comes_and_yields_to_corrected_arguments(self):
        self.home.env["XMSG_AGY_WAKE_COOLDOWN"] = "600"
        self.do("case \"$*\" in *--good*) ;; *) echo 'flag provided but not defined: -bad'; echo 'Usage of agy:'; "
                "echo '  -p string'; exit 2;; esac")
        self.send("one", XMSG_AGY_WAKE_ARGS="--bad")
        wait_until(lambda: "not defined: -bad; log" in self.home.xmsg("outbox", session=ADA), "the failure to be told")
        self.assertRegex(self.send("two", XMSG_AGY_WAKE_ARGS="--bad"), "agy-wake is under way, in [56].. s, since the last one failed")
        self.assertEqual(2, self.home.xmsg("outbox", session=ADA).count("one more follows"))
        self.assertRegex(self.send("three", XMSG_AGY_WAKE_ARGS="--good"), r"agy-wake by process \d+; its PreInvocation")
        wait_until(lambda: "three" in self.read("hook.out"), "the wake by other arguments")
        self.wait_quiet()
        self.assertEqual([], self.store.queued(AGY))
        self.assertEqual(2, self.wakes())

    def test_holds_no_output_of_who_sent(self):
        self.do('until [ -e "$HOME/go" ]; do sleep 0.02; done')
        done = self.home.run_xmsg("send", AGY, "x", env={"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA})
        self.assertEqual(0, done.returncode)  # run() reads both pipes to their ends
        wait_until(self.wakes, "the wake")
        self.do("", "go")
        self.wait_quiet()

    def test_prints_no_more_into_its_log_than_the_log_holds(self):
        self.do("head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last words; exit 1")
        self.send("one")
        wait_until(lambda: "last words" in (self.store.by_id(1)["detail"] or ""), "the failure")
        sizes = [os.path.getsize(self.log + ending) for ending in ("", ".old") if os.path.exists(self.log + ending)]
        self.assertLessEqual(sum(sizes), 4 * contract.LOG_BYTES)
        with self.store.transaction():
            self.store.move(self.store.by_id(1), "cancelled", contract.now_ms())
        self.wait_quiet()

    def test_needs_no_log(self):
        os.mkdir(self.log)
        self.send("mail")
        wait_until(lambda: "mail" in self.read("hook.out"), "the hook of the woken agy")
        self.wait_quiet()
        self.assertEqual("", self.home.faults())
        self.assertNotIn("failed", " ".join(event["detail"] or "" for event in self.store.events(1)))

    def test_is_over_when_agy_is_though_a_child_holds_its_output_and_ends_with_its_time(self):
        said = []
        for script, seconds, status, last in (("sleep 30 & echo $!; echo done", 10 * PATIENCE, 0, "done"),
                                              ("echo hangs; exec sleep 30", 0.3, -15, "hangs"),
                                              ("while :; do echo spam; done", 0.3, -15, None)):
            begin = time.monotonic()
            result = agy_delivery.run_wake(["/bin/sh", "-c", script], {}, "/", said.append,
                                           seconds - agy_delivery.GRACE_SECONDS, lambda pid: None)
            self.assertEqual((status, last or result[1]), result)
            self.assertLess(time.monotonic() - begin, 5 * PATIENCE)
        os.kill(int(said[0].split()[0]), signal.SIGTERM)
        with self.assertRaises(OSError):
            agy_delivery.run_wake([self.home.folder + "/none"], {}, "/", said.append, 1, lambda pid: None)

    def test_that_was_cut_off_is_no_promise(self):
        self.do('until [ -e "$HOME/go" ]; do sleep 0.02; done; exit 0')
        self.send("one")
        courier = wait_until(lambda: self.wakes() and host_process.flock_holder(xmsg.waiter_path(self.store, AGY)), "a wake")
        wait_until(lambda: "started" in (self.store.by_id(1)["detail"] or ""), "the word of it")
        self.assertIn("agy-wake started: pid", self.home.xmsg("outbox", session=ADA))
        os.kill(courier, signal.SIGKILL)
        self.assertIn("agy is running", self.send("two"), "the agy that it left behind")
        self.do("", "go")
        wait_until(lambda: not agy_delivery.presence(self.presence, AGY), "its end")
        wait_until(lambda: "agy-wake was cut off" in self.home.xmsg("outbox", session=ADA), "the truth")


if __name__ == "__main__":
    unittest.main()
