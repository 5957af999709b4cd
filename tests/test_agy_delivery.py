"""Antigravity: presence and names, what became of a hook's text, and how a session that left is woken.

The agy here is a few lines of shell, or a transcript that the test writes; tests/real/test_agy_real.py runs the whole
way with a stand-in for the real program.
"""
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

from support import (ADA, AGY, BOB, PATIENCE, PYTHON, FakeProc, HomeCase, HostProcess, end, environ, message, peer,
                     wait_until)

from side_by_side import load_tests  # noqa: F401

import agy_delivery
import contract
import host_process
import xmsg


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


if __name__ == "__main__":
    unittest.main()
