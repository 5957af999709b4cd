"""The queue on disk: files and modes, migrations, damage, the moves of a message, the claim, hints and upkeep."""
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import support
from support import (ADA, BOB, EVE, PYTHON, ROOT, Home, HomeCase, dead_process, message, peer, permissions_count, small_disk,
                     wait_until)
from side_by_side import load_tests  # noqa: F401
import contract
import store as store_module
from contract import (STATES, STORED, StoreBusy, StoreCorrupt, StoreError, StoreReadOnly, StoreRefused,
                      StoreTooNew, now_ms)
from store import holder_lives, is_unknown, myself, note_fault, record_interpreter, shown_state

HOUR, DAY = 3600000, 86400000


def modes(folder):
    """{path: mode} of a folder and all that is in it."""
    found = {}
    for here, folders, files in os.walk(folder):
        for name in folders + files + ["."]:
            path = os.path.join(here, name)
            found[os.path.normpath(path)] = stat.S_IMODE(os.lstat(path).st_mode)
    return found


def put_in(store, row, state, holder=(None, None), **columns):
    """Puts a row into a state, past the table of moves, as a crash or an earlier command would have left it."""
    columns.update(state=state, holder_pid=holder[0], holder_start=holder[1])
    store._execute("update messages set %s where id = :id" % ", ".join("%s = :%s" % (name, name) for name in columns),
                   dict(columns, id=row["id"]))
    return store.by_id(row["id"])


class TheFile(HomeCase):
    def test_and_all_beside_it_is_for_its_user_alone_whatever_the_umask(self):
        for umask in (0, 0o077):
            with self.subTest(oct(umask)):
                home = Home()
                self.addCleanup(home.remove)
                shutil.rmtree(os.path.dirname(home.db))
                code = ("import sys, os; sys.path.insert(0, %r); import support, contract\n"
                        "os.environ.update(%r); os.umask(%d)\n"
                        "from store import *\n"
                        "s = Store(contract.Settings(os.environ)); support.peer(s, %r); support.message(s, %r)\n"
                        "s.remember_prefix(%r, b'x', False); note_fault(s.settings, 'here', ValueError('x'))\n"
                        "record_interpreter(s.settings); s.sweep(now_ms())\n" % (
                            os.path.join(ROOT, "tests"), home.env, umask, BOB, BOB, BOB))
                done = home.run([PYTHON, "-c", code], umask=umask)
                self.assertEqual(0, done.returncode, done.stderr)
                found = modes(os.path.dirname(home.db))
                self.assertGreater(len(found), 9)
                for path, mode in found.items():
                    self.assertEqual(0o700 if os.path.isdir(path) else 0o600, mode, path)

    def test_of_others_mode_is_tightened_when_only_they_could_read_it(self):
        store = self.open_store()
        message(store, BOB)
        paths = [self.home.db, self.home.db + "-wal", self.home.db + "-shm"]
        for path in paths:
            os.chmod(path, 0o644)
        os.chmod(self.home.hints, 0o755)
        self.assertEqual({self.home.hints, *paths}, set(store.loose_modes()))
        self.open_store()
        self.assertEqual([0o600] * 3 + [0o700], [stat.S_IMODE(os.stat(path).st_mode) for path in paths + [self.home.hints]])

    def test_that_others_can_write_is_refused_and_left_alone(self):
        message(self.open_store(), BOB)
        for ending in ("", "-wal", "-shm"):
            for mode in (0o620, 0o602, 0o666):
                with self.subTest(ending, mode=oct(mode)):
                    os.chmod(self.home.db + ending, mode)
                    with self.assertRaisesRegex(StoreRefused, "only you can write"):
                        self.home.store()
                    self.assertEqual(mode, stat.S_IMODE(os.stat(self.home.db + ending).st_mode))
                    os.chmod(self.home.db + ending, 0o600)
        self.open_store()

    def test_that_is_a_link_is_refused_and_its_end_is_not_touched(self):
        victim = os.path.join(self.home.folder, "victim")
        for ending in ("", "-wal", "-shm", "-journal"):
            for exists in (True, False):
                with self.subTest(ending, exists=exists):
                    if exists:
                        with open(victim, "w") as file:
                            file.write("precious")
                    if ending:
                        self.open_store().close()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.home.db + ending)
                    os.symlink(victim, self.home.db + ending)
                    with self.assertRaises(StoreRefused):
                        self.home.store()
                    with contextlib.suppress(StoreError):  # a report may refuse too, or find nothing
                        self.home.store(write=False).close()
                    self.assertEqual(exists, os.path.exists(victim))
                    if exists:
                        with open(victim) as file:
                            self.assertEqual("precious", file.read())
                        os.unlink(victim)
                    os.unlink(self.home.db + ending)

    def test_that_is_no_file_at_all_is_refused(self):
        os.mkdir(self.home.db)
        with self.assertRaises(StoreRefused):
            self.home.store()
        os.rmdir(self.home.db)
        os.mkfifo(self.home.db)
        with self.assertRaises(StoreRefused):
            self.home.store()
        with self.assertRaises(StoreRefused):
            self.home.store(write=False)

    @unittest.skipUnless(os.geteuid() == 0, "only root can make a file that is somebody else's")
    def test_of_somebody_else_is_refused(self):
        self.open_store().close()
        for path in (self.home.db, self.home.hints, os.path.dirname(self.home.db)):
            with self.subTest(path):
                os.chown(path, 65534, 65534)
                with self.assertRaises(StoreRefused):
                    self.home.store()
                os.chown(path, 0, 0)
        os.chown(self.home.db, 65534, 65534)
        with self.assertRaises(StoreRefused):
            self.home.store(write=False)

    def test_in_a_folder_that_others_can_write_is_refused(self):
        folder = os.path.dirname(self.home.db)
        for mode in (0o770, 0o702, 0o1777):
            os.chmod(folder, mode)
            with self.assertRaisesRegex(StoreRefused, "chmod go-w"):
                self.home.store()
        self.assertFalse(os.path.exists(self.home.db))

    def test_whose_hints_are_a_link_or_open_to_others_is_refused(self):
        elsewhere = os.path.join(self.home.folder, "elsewhere")
        os.mkdir(elsewhere, 0o700)
        os.symlink(elsewhere, self.home.hints)
        with self.assertRaises(StoreRefused):
            self.home.store()
        os.unlink(self.home.hints)
        os.mkdir(self.home.hints)
        os.chmod(self.home.hints, 0o777)
        with self.assertRaises(StoreRefused):
            self.home.store()

    def test_makes_its_folders_as_it_needs_them_and_tightens_its_own(self):
        shutil.rmtree(os.path.dirname(self.home.db))
        deep = os.path.join(self.home.folder, "a", "agent-msg", "messages.sqlite3")
        os.makedirs(os.path.dirname(deep))
        os.chmod(os.path.dirname(deep), 0o755)
        self.open_store(XMSG_DB=deep)
        self.assertEqual(0o700, stat.S_IMODE(os.stat(os.path.dirname(deep)).st_mode))

    def test_is_durable_before_a_commit_returns(self):
        store = self.open_store()
        self.assertEqual(("wal", 2), (store._one("pragma journal_mode")[0], store._one("pragma synchronous")[0]))
        reader = self.home.store(write=False)
        self.addCleanup(reader.close)
        message(store, BOB, "seen at once")
        self.assertEqual("seen at once", reader.by_id(1)["body"])


class TheSchema(HomeCase):
    def test_knows_exactly_the_states_and_kinds_of_the_contract(self):
        store = self.open_store()
        row = message(store, BOB)
        for state in STORED:
            put_in(store, row, state)
        for state in ("spooled", "lost", "", "QUEUED"):
            with self.assertRaises(StoreError):
                put_in(store, row, state)
        with self.assertRaises(StoreError):
            message(store, BOB, sender_kind="boss")

    def test_has_the_columns_that_all_parts_agree_on(self):
        self.open_store().close()
        with sqlite3.connect(self.home.db) as database:
            columns = {table: {row[1] for row in database.execute("pragma table_info(%s)" % table)}
                       for table in ("messages", "events", "peers", "meta")}
        self.assertEqual({"id", "uid", "created_at", "expires_at", "state", "state_at", "window", "detail", "holder_pid",
                          "holder_start", "sender_kind", "sender_label", "sender_host", "sender_session", "target",
                          "target_host", "body", "priority", "request_key", "reply_to", "confirmed_at", "evidence",
                          "remote", "far_session", "far_id", "far_state", "far_at", "far_machine"}, columns["messages"])
        self.assertEqual({"message", "at", "state", "window", "detail"}, columns["events"])
        self.assertLessEqual({"session", "host", "name", "cwd", "project", "model", "permission_mode", "pid", "pid_start",
                              "successor", "first_seen", "last_seen", "hook_seen"}, columns["peers"])

    def test_answers_the_questions_of_the_hook_from_indexes_alone(self):
        store = self.open_store()
        asked = []
        store._db.set_trace_callback(asked.append)
        row = message(store, BOB)
        store.claim(BOB, now_ms(), 10, len, "PreToolUse", myself())
        store.lower_hint(BOB)
        store.by_uid(row["uid"])
        store.waiting_before(row)
        store.queued_counts()
        store.peers_named("x")
        store.peers_beginning("01a0")
        store.short_id(BOB)
        store.peers_of_process(1, "1")
        store.sessions_of_label("x")
        store.last_received(BOB)
        store.sweep(now_ms())
        store._db.set_trace_callback(None)
        questions = {text for text in asked if text.split()[0] in ("select", "update", "delete")}
        self.assertGreater(len(questions), 15)
        for text in questions:
            plan = " / ".join(row[3] for row in store._db.execute("explain query plan " + text))
            for table in ("messages", "peers", "events"):
                self.assertNotRegex(plan, r"SCAN (TABLE )?%s(?! USING (COVERING )?INDEX messages_queued)" % table, text)

    def test_number_of_a_deleted_message_is_never_given_again(self):
        store = self.open_store()
        row = message(store, BOB)
        store._execute("delete from messages")
        self.assertGreater(message(store, BOB)["id"], row["id"])


class AMigration(HomeCase):
    def test_makes_a_new_store_once_however_many_begin_together(self):
        shutil.rmtree(self.home.hints, ignore_errors=True)
        code = ("import sys; sys.path.insert(0, %r); import contract, store; sys.stdin.read(1)\n"
                "s = store.Store(contract.Settings(%r)); print(s._one('pragma user_version')[0])" % (ROOT, self.home.env))
        processes = [subprocess.Popen([PYTHON, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, env=self.home.env) for _ in range(8)]
        for process in processes:
            self.addCleanup(support.end, process)
        for process in processes:
            process.stdin.write(b".")
            process.stdin.flush()
        for process in processes:
            out, error = process.communicate(timeout=20 * support.PATIENCE)
            self.assertEqual((0, b"%d\n" % contract.SCHEMA), (process.returncode, out), error)

    def test_that_was_cut_off_is_made_whole_by_the_next_start(self):
        # The file is there, empty or with nothing but the journal mode, as a crash in between leaves it.
        open(self.home.db, "w").close()
        os.chmod(self.home.db, 0o600)
        self.assertEqual([], self.home.store(write=False).peers())
        message(self.open_store(), BOB)
        other = Home()
        self.addCleanup(other.remove)
        database = sqlite3.connect(other.db)
        database.execute("pragma journal_mode = wal")
        database.close()
        os.chmod(other.db, 0o600)
        store = other.store()
        self.addCleanup(store.close)
        message(store, BOB)

    def test_is_never_begun_on_the_store_of_a_newer_xmsg(self):
        message(self.open_store(), BOB)
        with sqlite3.connect(self.home.db) as database:
            database.execute("pragma user_version = %d" % (contract.SCHEMA + 1))
            before = list(database.iterdump())
        for write in (True, False):
            with self.assertRaisesRegex(StoreTooNew, r"newer xmsg \(schema %d, this one knows %d\); update xmsg" % (
                    contract.SCHEMA + 1, contract.SCHEMA)):
                self.home.store(write=write)
        done = self.home.run_xmsg("list")
        self.assertEqual((5, b"", 1), (done.returncode, done.stdout, done.stderr.count(b"\n")), done.stderr)
        done = self.home.run_hook("codex", support.payload("codex", "PreToolUse", BOB))
        self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
        with sqlite3.connect(self.home.db) as database:
            self.assertEqual(before, list(database.iterdump()))


class TheEarlierStore(HomeCase):
    """A store as the xmsg before this one wrote it: no state column, times in seconds, no version."""

    def setUp(self):
        super().setUp()
        database = sqlite3.connect(self.home.db)
        now = now_ms() // 1000
        with database:
            database.execute("create table messages (id integer primary key autoincrement, created_at integer, expires_at "
                             "integer, from_label text, from_tool text, from_session text, to_session text, body text, "
                             "priority integer not null default 0, delivered_at integer, delivered_event text, expired_at "
                             "integer)")
            database.execute("create table peers (session_id text primary key, tool text, cwd text, model text, label "
                             "text, pid integer, pid_start text, first_seen_at integer, last_seen_at integer, "
                             "permission_mode text)")
            database.execute("create table meta (key text primary key, value text)")
            for values in ((None, None, None, "waits"), (now, "PreToolUse", None, "came"), (None, None, now, "too late"),
                           (now, "direct-uncertain", None, "in doubt")):
                database.execute("insert into messages (created_at, expires_at, from_label, from_tool, from_session, "
                                 "to_session, body, delivered_at, delivered_event, expired_at) values (?, ?, 'ada', "
                                 "'claude', ?, ?, ?, ?, ?, ?)", (now - 5, now + 3600, ADA, BOB, values[3]) + values[:3])
            database.execute("insert into peers values (?, 'codex', '/w', 'm', 'bob', 1, '2', ?, ?, '')", (BOB, now, now))
        database.close()
        os.chmod(self.home.db, 0o600)

    def test_is_taken_over_with_its_waiting_mail_names_and_doubts(self):
        store = self.open_store()
        self.assertEqual(["queued", "delivered", "expired", "direct-uncertain"],
                         [row["state"] for row in store.messages()])
        self.assertTrue(os.path.exists(self.home.hint(BOB)))
        self.assertEqual([BOB], [row["session"] for row in store.peers_named("BOB")])
        self.assertEqual(["waits"], [row["body"] for row in store.claim(BOB, now_ms(), 10, len, "Stop", myself())])
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.home.db + ".earlier").st_mode))
        with sqlite3.connect(self.home.db + ".earlier") as database:
            self.assertEqual(4, database.execute("select count(*) from messages where from_label = 'ada'").fetchone()[0])

    def test_is_taken_over_by_a_report_too(self):
        self.assertIn("bob", self.home.xmsg("list"))
        self.assertEqual(["queued", "delivered", "expired", "direct-uncertain"], self.home.states())


class ADamagedStore(HomeCase):
    """Whatever is in the file: a sentence and status 5 from the command line, silence from the hook, the file untouched."""

    def setUp(self):
        super().setUp()
        store = self.home.store()
        peer(store, BOB)
        for number in range(40):
            message(store, BOB, "text %d " % number * 50)
        store._execute("pragma wal_checkpoint(truncate)")
        store.close()
        with open(self.home.db, "rb") as file:
            self.whole = file.read()
        for ending in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.home.db + ending)

    def become(self, content):
        with open(self.home.db, "wb") as file:
            file.write(content)

    def test_is_named_by_the_command_line_passed_over_by_the_hook_and_left_as_it_is(self):
        worlds = {"text": b"this is no database, but something that somebody wrote\n" * 200, "garbage": os.urandom(40960),
                  "encrypted": random.Random(3).randbytes(len(self.whole)) if hasattr(random.Random, "randbytes")
                  else os.urandom(len(self.whole)), "zeros": b"\0" * 8192, "one page": self.whole[:4096],
                  "cut off": self.whole[:len(self.whole) // 3], "cut in a page": self.whole[:5000],
                  "no first page": b"\0" * 4096 + self.whole[4096:],
                  "pages of noise": self.whole[:4096] + os.urandom(len(self.whole) - 4096)}
        for name, content in worlds.items():
            with self.subTest(name):
                self.become(content)
                done = self.home.run_xmsg("send", BOB, "one more", "--no-direct", "--json")
                self.assertEqual(5, done.returncode, done)
                self.assertIn(json.loads(done.stdout)["error"]["code"], ("store_corrupt", "store"))
                self.assertIn("untouched" if json.loads(done.stdout)["error"]["code"] == "store_corrupt" else "store",
                              json.loads(done.stdout)["error"]["message"])
                self.assertNotIn(b"queued #", done.stdout)
                done = self.home.run_hook("codex", support.payload("codex", "PreToolUse", BOB))
                self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
                self.assertIn("StoreCorrupt", self.home.faults())
                with open(self.home.db, "rb") as file:
                    self.assertEqual(content, file.read())
                for ending in (".faults", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.home.db + ending)

    def test_with_any_bytes_turned_never_gives_a_traceback_and_never_a_false_receipt(self):
        pick = random.Random(5)
        for _ in range(120):
            content = bytearray(self.whole)
            for _ in range(pick.choice((1, 8, 400))):
                content[pick.randrange(len(content))] = pick.randrange(256)
            self.become(content)
            try:
                store = self.home.store()
                try:
                    row = message(store, BOB, "new")
                    store.claim(BOB, now_ms(), 10, len, "Stop", myself())
                    store.sweep(now_ms())
                    self.assertIsNotNone(store.by_id(row["id"]))
                finally:
                    store.close()
            except StoreError:
                pass
            except (TypeError, UnicodeDecodeError, sqlite3.OperationalError, ValueError, KeyError) as error:
                self.fail("not typed: %r" % error)
            for ending in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.home.db + ending)

    def test_with_a_damaged_log_loses_what_was_not_yet_checkpointed_at_most(self):
        store = self.home.store()
        message(store, BOB, "in the log only")
        with open(self.home.db + "-wal", "rb") as file:
            log = file.read()
        with open(self.home.db, "rb") as file:
            main = file.read()
        store.close()
        for content in (b"", log[:1000], os.urandom(len(log)), b"\0" * len(log)):
            self.become(main)
            with open(self.home.db + "-wal", "wb") as file:
                file.write(content)
            os.chmod(self.home.db + "-wal", 0o600)
            store = self.home.store()
            self.assertEqual(40, len(store.messages()))
            self.assertEqual("", store.integrity())
            store.close()

    def test_that_holds_something_else_is_corrupt_and_not_ours_to_change(self):
        os.unlink(self.home.db)
        database = sqlite3.connect(self.home.db)
        with database:
            database.execute("create table photos (name text)")
            database.execute("pragma user_version = 1")
        database.close()
        os.chmod(self.home.db, 0o600)
        with self.assertRaisesRegex(StoreCorrupt, "does not hold what xmsg wrote"):
            store = self.home.store()
            self.addCleanup(store.close)
            message(store, BOB)
        with sqlite3.connect(self.home.db) as database:
            self.assertEqual([("photos",)], database.execute("select name from sqlite_master").fetchall())

    def test_is_named_by_the_doctor(self):
        self.become(b"no database" * 1000)
        done = self.home.run_xmsg("doctor", "--json")
        self.assertEqual(1, done.returncode)
        check = next(check for check in json.loads(done.stdout)["checks"] if check["check"] == "store")
        self.assertFalse(check["ok"])
        self.assertIn("move it away", check["advice"])


class AFullDisk(unittest.TestCase):
    def test_gives_no_receipt_and_loses_nothing(self):
        with small_disk("1m") as disk:
            if disk is None:
                self.skipTest("only root can mount a small disk; test_faults gives ENOSPC to every call instead")
            home = Home()
            self.addCleanup(home.remove)
            home.db = home.env["XMSG_DB"] = os.path.join(disk, "messages.sqlite3")
            with open(os.path.join(disk, "python"), "w") as file:
                file.write(PYTHON + "\n")
            home.hook("codex", BOB, "SessionStart")
            home.xmsg("send", BOB, "before", "--no-direct")
            with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler:
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(b"x" * 4096)
                accepted = refused = 0
                while refused < 3 and accepted < 200:
                    done = home.run_xmsg("send", BOB, "more", "--no-direct", "--json")
                    if done.returncode == 0:
                        accepted += 1
                        continue
                    refused += 1
                    error = json.loads(done.stdout)["error"]
                    # On a full tmpfs SQLite sometimes calls it an I/O error.
                    self.assertIn((done.returncode, error["code"]), ((5, "store_full"), (5, "store")), done)
                    if error["code"] == "store_full":
                        self.assertIn("free some space", error["message"])
                self.assertEqual(3, refused)
                done = home.run_hook("codex", support.payload("codex", "PreToolUse", BOB))
                self.assertEqual((0, b""), (done.returncode, done.stdout))
            os.unlink(os.path.join(disk, "filler"))
            self.assertEqual(1 + accepted, len(home.states()))
            self.assertEqual({"queued"}, set(home.states()))
            self.assertIn("before", home.context("codex", BOB, "PreToolUse"))


class AStoreThatCannotBeWritten(HomeCase):
    def setUp(self):
        super().setUp()
        store = self.home.store()
        peer(store, BOB, name="bob")
        message(store, BOB, "waits")
        store.close()

    def run_without_rights(self, *arguments):
        return self.home.run_xmsg(*arguments, before=permissions_count)

    def test_is_refused_with_a_sentence_and_keeps_what_it_has(self):
        folder = os.path.dirname(self.home.db)
        for paths in ([self.home.db], [folder], [self.home.db, folder]):
            with self.subTest(paths):
                for path in paths:
                    os.chmod(path, os.stat(path).st_mode & 0o500)
                try:
                    done = self.run_without_rights("send", BOB, "one more", "--no-direct", "--json")
                    self.assertEqual((5, "store_read_only"), (
                        done.returncode, json.loads(done.stdout or b'{"error": {"code": "none"}}')["error"]["code"]), done)
                    hook = self.home.run_hook("codex", support.payload("codex", "PreToolUse", BOB), before=permissions_count)
                    self.assertEqual((0, b"", b""), (hook.returncode, hook.stdout, hook.stderr))
                finally:
                    for path in (folder, self.home.db):
                        os.chmod(path, 0o700 if path == folder else 0o600)
                self.assertEqual(["queued"], self.home.states())

    def test_is_still_reported_on(self):
        folder = os.path.dirname(self.home.db)
        os.chmod(self.home.db, 0o400)
        os.chmod(folder, 0o500)
        self.addCleanup(os.chmod, folder, 0o700)
        self.assertFalse(os.path.exists(self.home.db + "-wal"))
        for command in (["list", "--all"], ["queue"], ["show", "1"], ["outbox", "--all"], ["find", "bob"],
                        ["inbox", "1"], ["inbox", BOB]):
            done = self.run_without_rights(*command)
            self.assertEqual(0, done.returncode, (command, done))
        self.assertIn(b"waits", self.run_without_rights("inbox", "1").stdout)

    def test_with_a_log_that_is_newer_is_not_read_past_it(self):
        """immutable=1 would not look into the -wal, and would report an older truth."""
        store = self.home.store()
        message(store, BOB, "only in the log")
        copies = {}
        for ending in ("", "-wal"):
            with open(self.home.db + ending, "rb") as file:
                copies[ending] = file.read()
        store.close()
        other = Home()
        self.addCleanup(other.remove)
        for ending, content in copies.items():
            with open(other.db + ending, "wb") as file:
                file.write(content)
            os.chmod(other.db + ending, 0o400)
        folder = os.path.dirname(other.db)
        os.chmod(folder, 0o500)
        self.addCleanup(os.chmod, folder, 0o700)
        done = other.run_xmsg("inbox", "2", before=permissions_count)
        self.assertTrue(b"only in the log" in done.stdout or done.returncode == 5, done)


class ABusyStore(HomeCase):
    def test_makes_a_command_wait_and_then_say_so_and_a_hook_leave_in_time(self):
        store = self.open_store()
        peer(store, BOB)
        message(store, BOB, "waits")
        with store.transaction():
            with self.assertRaisesRegex(StoreBusy, "try again"):
                impatient = self.home.store(busy_seconds=0.05)
                self.addCleanup(impatient.close)
                with impatient.transaction():
                    pass
            done = self.home.run_hook("codex", support.payload("codex", "PreToolUse", BOB))
            self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
            done = self.home.run_xmsg("cancel", "1", "--json")
            self.assertEqual((5, "store_busy"), (done.returncode, json.loads(done.stdout)["error"]["code"]))
        self.assertEqual(["queued"], self.home.states())
        self.assertIn("waits", self.home.context("codex", BOB, "PreToolUse"))

    def test_is_not_busy_for_readers(self):
        store = self.open_store()
        peer(store, BOB)
        with store.transaction():
            self.assertIn(BOB, self.home.xmsg("list"))

    def test_lets_a_transaction_that_fails_leave_nothing_behind(self):
        store = self.open_store()
        with self.assertRaises(ZeroDivisionError):
            with store.transaction():
                store.set_meta("x", "1")
                1 / 0
        self.assertIsNone(store.meta("x"))
        with store.transaction():
            store.set_meta("x", "2")
        self.assertEqual("2", store.meta("x"))


class AMove(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()

    def test_goes_along_the_table_and_nowhere_else(self):
        for old in STORED:
            for new in STATES:
                with self.subTest(old=old, new=new):
                    row = put_in(self.store, message(self.store, BOB), old)
                    events = len(self.store.events(row["id"]))
                    if new in STATES[old][1]:
                        self.assertTrue(self.store.move(row, new, now_ms()))
                        self.assertEqual(new, self.store.by_id(row["id"])["state"])
                        self.assertEqual(new, self.store.events(row["id"])[-1]["state"])
                    else:
                        with self.assertRaises(ValueError):
                            self.store.move(row, new, now_ms())
                        self.assertEqual(old, self.store.by_id(row["id"])["state"])
                        self.assertEqual(events, len(self.store.events(row["id"])))

    def test_that_somebody_else_has_made_is_no_error_and_leaves_no_trace(self):
        row = message(self.store, BOB)
        mine, theirs = self.store.by_id(row["id"]), self.store.by_id(row["id"])
        self.assertTrue(self.store.move(theirs, "cancelled", now_ms()))
        self.assertFalse(self.store.move(mine, "hook-inflight", now_ms(), holder=myself()))
        self.assertEqual(("cancelled", "queued"), (self.store.by_id(row["id"])["state"], mine["state"]))
        self.assertEqual(["queued", "cancelled"], [event["state"] for event in self.store.events(row["id"])])

    def test_tells_the_whole_story_with_times_windows_and_reasons(self):
        row = message(self.store, BOB, now=1000)
        self.store.move(row, "reserved", 2000, holder=(7, "8"))
        self.store.move(row, "direct-inflight", 3000, holder=(7, "8"))
        self.store.move(row, "queued", 4000, detail="no answer")
        self.store.move(row, "hook-inflight", 5000, window="Stop", holder=(9, "10"))
        self.store.move(row, "delivered", 6000, window="Stop", evidence="found")
        self.assertEqual([(1000, "queued", None, None), (2000, "reserved", None, None), (3000, "direct-inflight", None, None),
                          (4000, "queued", None, "no answer"), (5000, "hook-inflight", "Stop", None),
                          (6000, "delivered", "Stop", None)],
                         [tuple(event.values()) for event in self.store.events(row["id"])])
        kept = self.store.by_id(row["id"])
        self.assertEqual((6000, "Stop", None, None, None, "found", 6000), tuple(
            kept[key] for key in ("state_at", "window", "detail", "holder_pid", "holder_start", "evidence", "confirmed_at")))

    def test_back_to_queued_raises_the_hint_before_it_is_committed(self):
        row = put_in(self.store, message(self.store, BOB), "hook-inflight")
        os.unlink(self.home.hint(BOB))
        with self.store.transaction():
            self.store.move(row, "queued", now_ms())
            self.assertTrue(os.path.exists(self.home.hint(BOB)))

    def test_back_to_queued_finds_the_session_that_has_taken_the_place_of_its_target(self):
        peer(self.store, BOB, "claude")
        peer(self.store, EVE, "claude")
        row = put_in(self.store, message(self.store, BOB), "reserved")
        self.store.register({"session": EVE, "host": "codex"}, now_ms(), self.store.peer(BOB))
        self.store.move(row, "queued", now_ms())
        self.assertEqual((EVE, True), (self.store.by_id(row["id"])["target"], os.path.exists(self.home.hint(EVE))))

    def test_by_many_processes_at_once_has_one_winner(self):
        rows = [message(self.store, BOB) for _ in range(20)]
        code = ("import sys; sys.path.insert(0, %r); import contract, store\n"
                "s = store.Store(contract.Settings(%r), busy_seconds=20)\n"
                "rows = s.messages(); print('ready', flush=True); sys.stdin.read(1)\n"
                "won = []\n"
                "for row in rows:\n"
                "    with s.transaction():\n"
                "        if s.move(row, sys.argv[1], store.now_ms()): won.append(row['id'])\n"
                "print(won)" % (ROOT, self.home.env))
        processes = [subprocess.Popen([PYTHON, "-I", "-S", "-c", code, state], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.PIPE, env=self.home.env)
                     for state in ("cancelled", "hook-inflight", "reserved", "expired")]
        for process in processes:
            self.addCleanup(support.end, process)
            process.stdout.readline()
        for process in processes:
            process.stdin.write(".")
            process.stdin.flush()
        won = [json.loads(process.communicate(timeout=30 * support.PATIENCE)[0]) for process in processes]
        self.assertEqual(sorted(row["id"] for row in rows), sorted(sum(won, [])))
        for row in rows:
            self.assertEqual(2, len(self.store.events(row["id"])))


class TheClaim(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.now = now_ms()

    def claim(self, limit=10, choose=len, session=BOB, now=None):
        return self.store.claim(session, now or self.now, limit, choose, "PreToolUse", myself())

    def bodies(self, rows):
        return [row["body"] for row in rows]

    def test_shows_nothing_that_has_expired_however_much_there_is_of_it(self):
        for _ in range(3):
            message(self.store, BOB, "late", ttl=-1)
        with mock.patch.object(store_module, "SWEEP_ROWS", 1):
            self.assertEqual([], self.claim())

    def test_takes_urgent_ones_first_and_then_the_oldest(self):
        for body, priority in (("a", 0), ("b", 100), ("c", -5), ("d", 0), ("e", 100), ("f", 3)):
            message(self.store, BOB, body, priority=priority)
        self.assertEqual(["b", "e", "f", "a", "d", "c"], self.bodies(self.claim()))

    def test_takes_as_many_as_are_asked_for_and_as_fit_and_the_rest_follows(self):
        for number in range(7):
            message(self.store, BOB, str(number))
        self.assertEqual(["0", "1", "2"], self.bodies(self.claim(limit=3)))
        offered = []
        self.assertEqual(["3"], self.bodies(self.claim(choose=lambda rows: offered.extend(rows) or 1)))
        self.assertEqual(["3", "4", "5", "6"], self.bodies(offered))
        self.assertEqual([], self.claim(choose=lambda rows: 0))
        self.assertEqual(["4", "5", "6"], self.bodies(self.claim()))
        self.assertEqual([], self.claim())

    def test_takes_only_what_is_for_this_very_session(self):
        message(self.store, EVE, "for eve")
        message(self.store, BOB[:8], "for a prefix")
        self.assertEqual([], self.claim())
        self.assertEqual(["for eve"], self.bodies(self.claim(session=EVE)))

    def test_marks_each_row_with_its_holder_and_window_before_it_returns(self):
        message(self.store, BOB)
        row, = self.claim()
        kept = self.store.by_id(row["id"])
        self.assertEqual(("hook-inflight", "PreToolUse", os.getpid()), (kept["state"], kept["window"], kept["holder_pid"]))
        self.assertTrue(holder_lives(kept))
        self.assertEqual(kept, row)

    def test_takes_nothing_that_is_not_queued(self):
        for state in set(STORED) - {"queued", "reserved"}:
            put_in(self.store, message(self.store, BOB, state), state)
        self.assertEqual([], self.claim())

    def test_lets_what_is_overdue_expire_and_takes_what_comes_behind(self):
        message(self.store, BOB, "late", now=self.now - HOUR, ttl=60)
        message(self.store, BOB, "in time")
        self.assertEqual(["in time"], self.bodies(self.claim()))
        self.assertEqual(("expired", "its time ran out"), (self.store.by_id(1)["state"], self.store.events(1)[-1]["detail"]))
        message(self.store, BOB, "to the millisecond", now=self.now, ttl=1)
        self.assertEqual([], self.claim(now=self.now + 1000))

    def test_is_not_held_up_by_any_number_of_overdue_rows(self):
        for _ in range(30):
            message(self.store, BOB, "late", now=self.now - HOUR, ttl=60)
        message(self.store, BOB, "in time")
        self.assertEqual(["in time"], self.bodies(self.claim()))

    def test_is_undone_whole_if_choosing_fails(self):
        message(self.store, BOB)
        with self.assertRaises(ZeroDivisionError):
            self.claim(choose=lambda rows: 1 // 0)
        self.assertEqual(1, len(self.claim()))

    def test_by_several_processes_gives_each_message_to_one(self):
        for number in range(60):
            message(self.store, BOB, str(number))
        code = ("import sys; sys.path.insert(0, %r); import contract, store\n"
                "s = store.Store(contract.Settings(%r), busy_seconds=20)\n"
                "print('ready', flush=True); sys.stdin.read(1)\n"
                "got = []\n"
                "while True:\n"
                "    rows = s.claim(%r, store.now_ms(), 3, len, 'Stop', store.myself())\n"
                "    if not rows: break\n"
                "    got += [int(row['body']) for row in rows]\n"
                "print(got)" % (ROOT, self.home.env, BOB))
        processes = [subprocess.Popen([PYTHON, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, env=self.home.env) for _ in range(4)]
        for process in processes:
            self.addCleanup(support.end, process)
            process.stdout.readline()
        for process in processes:
            process.stdin.write(".")
            process.stdin.flush()
        got = [json.loads(process.communicate(timeout=30 * support.PATIENCE)[0]) for process in processes]
        self.assertEqual(list(range(60)), sorted(sum(got, [])))
        for numbers in got:
            self.assertEqual(sorted(numbers), numbers)


class AHolder(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.row = message(self.store, BOB)

    def test_that_is_dead_gives_a_reserved_message_back(self):
        for asks in (lambda: self.store.claim(BOB, now_ms(), 10, len, "Stop", myself()),
                     lambda: self.store.requeue_reserved(now_ms()), lambda: self.store.sweep(now_ms())):
            put_in(self.store, self.row, "reserved", dead_process())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.home.hint(BOB))
            taken = asks()
            row = self.store.by_id(self.row["id"])
            self.assertEqual("hook-inflight" if isinstance(taken, list) else "queued", row["state"])
            self.assertTrue(os.path.exists(self.home.hint(BOB)))
        self.assertIn("its sender ended before any byte left", [event["detail"] for event in self.store.events(1)])

    def test_that_lives_keeps_what_it_holds(self):
        put_in(self.store, self.row, "reserved", myself())
        self.store.requeue_reserved(now_ms())
        self.store.sweep(now_ms() + 30 * DAY)
        self.assertEqual([], self.store.claim(BOB, now_ms(), 10, len, "Stop", myself()))
        self.assertEqual("reserved", self.store.by_id(1)["state"])

    def test_whose_pid_is_somebody_elses_now_is_dead(self):
        put_in(self.store, self.row, "reserved", (os.getpid(), "1"))
        self.store.requeue_reserved(now_ms())
        self.assertEqual("queued", self.store.by_id(1)["state"])

    def test_that_is_a_zombie_or_unknown_is_dead(self):
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        import host_process
        start = host_process.start_time(child.pid)
        self.assertTrue(holder_lives({"holder_pid": child.pid, "holder_start": start}))
        child.stdin.close()
        wait_until(lambda: not holder_lives({"holder_pid": child.pid, "holder_start": start}), "a zombie counts as dead")
        child.wait()
        for holder in ((None, None), (0, "0"), (os.getpid(), None), (os.getpid(), "")):
            self.assertFalse(holder_lives({"holder_pid": holder[0], "holder_start": holder[1]}))

    def test_that_died_with_bytes_on_their_way_leaves_them_unknown_for_ever(self):
        for state in ("direct-inflight", "hook-inflight"):
            row = put_in(self.store, self.row, state, dead_process())
            self.assertEqual((True, "UNKNOWN"), (is_unknown(row), shown_state(row)))
            self.store.sweep(now_ms() + 300 * DAY)
            self.assertEqual([], self.store.claim(BOB, now_ms(), 10, len, "Stop", myself()))
            self.store.requeue_reserved(now_ms())
            self.assertEqual(state, self.store.by_id(1)["state"])

    def test_that_lives_with_bytes_on_their_way_is_no_doubt_yet(self):
        for state in ("direct-inflight", "hook-inflight"):
            row = put_in(self.store, self.row, state, myself())
            self.assertEqual((False, state), (is_unknown(row), shown_state(row)))

    def test_that_needs_none_has_its_state_as_it_is(self):
        self.assertEqual("UNKNOWN", shown_state(put_in(self.store, self.row, "direct-uncertain")))
        for state in ("queued", "reserved", "held", "delivered", "refused", "expired", "cancelled"):
            self.assertEqual(state, shown_state(put_in(self.store, self.row, state)))

    def test_killed_for_real_between_claim_and_output_leaves_unknown(self):
        code = ("import sys, time; sys.path.insert(0, %r); import contract, store\n"
                "s = store.Store(contract.Settings(%r))\n"
                "print(len(s.claim(%r, store.now_ms(), 9, len, 'Stop', store.myself())), flush=True); time.sleep(600)" % (
                    ROOT, self.home.env, BOB))
        process = subprocess.Popen([PYTHON, "-I", "-S", "-c", code], stdout=subprocess.PIPE, env=self.home.env)
        self.addCleanup(support.end, process)
        self.assertEqual(b"1\n", process.stdout.readline())
        self.assertEqual("hook-inflight", shown_state(self.store.by_id(1)))
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: shown_state(self.store.by_id(1)) == "UNKNOWN", "the dead holder is noticed")
        process.wait()


class TheHint(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()

    def up(self, session=BOB):
        return os.path.exists(self.home.hint(session))

    def test_is_raised_before_the_row_is_committed(self):
        with self.store.transaction():
            self.store.add({"uid": "0" * 16, "expires_at": now_ms() + HOUR, "sender_kind": "agent", "sender_label": "x",
                            "sender_host": "", "sender_session": "", "target": BOB, "target_host": "codex", "body": "b",
                            "priority": 0, "request_key": None, "reply_to": None}, now_ms())
            self.assertTrue(self.up())
            self.assertEqual([], self.home.sql("select 1 from messages"))
        self.assertEqual([(1,)], self.home.sql("select 1 from messages"))

    def test_that_cannot_be_raised_keeps_the_message_out(self):
        for spoil, mend in ((lambda: os.rename(self.home.hints + "/mail", self.home.hints + "/away"),
                             lambda: os.rename(self.home.hints + "/away", self.home.hints + "/mail")),
                            (lambda: os.symlink("/etc/hostname", self.home.hint(BOB)), lambda: os.unlink(self.home.hint(BOB))),
                            (lambda: os.mkdir(self.home.hint(BOB)), lambda: os.rmdir(self.home.hint(BOB)))):
            spoil()
            with self.assertRaisesRegex(StoreReadOnly, "mail hint"):
                message(self.store, BOB)
            mend()
            self.assertEqual([], self.store.messages())
        message(self.store, BOB)

    def test_that_exists_gets_a_new_time_for_its_watcher(self):
        message(self.store, BOB)
        os.utime(self.home.hint(BOB), (1, 1))
        message(self.store, BOB)
        self.assertGreater(os.stat(self.home.hint(BOB)).st_mtime, now_ms() / 1000 - 60)

    def test_is_lowered_only_when_nothing_waits(self):
        message(self.store, BOB)
        self.store.lower_hint(BOB)
        self.assertTrue(self.up())
        row, = self.store.claim(BOB, now_ms(), 9, len, "Stop", myself())
        self.assertTrue(self.up(), "the claim itself lowers nothing")
        self.store.lower_hint(BOB)
        self.assertFalse(self.up())
        self.store.lower_hint(BOB)

    def test_stays_up_for_a_reserved_message_whose_sender_may_die(self):
        put_in(self.store, message(self.store, BOB), "reserved", myself())
        self.store.lower_hint(BOB)
        self.assertTrue(self.up())

    def test_is_lowered_under_the_write_lock_alone(self):
        message(self.store, BOB)
        self.store.claim(BOB, now_ms(), 9, len, "Stop", myself())
        other = self.open_store(busy_seconds=0.05)
        with self.store.transaction():
            with self.assertRaises(StoreBusy):
                other.lower_hint(BOB)
            self.assertTrue(self.up())

    def test_survives_a_sender_that_comes_between_the_claim_and_its_lowering(self):
        """The sender commits at any moment around lower_hint; whenever the lock is free, queued implies the hint."""
        sender, stop, broken = self.home.store(busy_seconds=20), threading.Event(), []

        def take():
            taker = self.home.store(busy_seconds=20)
            while not stop.is_set():
                taker.claim(BOB, now_ms(), 9, len, "Stop", myself())
                taker.lower_hint(BOB)
            taker.close()
        thread = threading.Thread(target=take)
        # sqlite3 objects belong to their thread: the taker opens its own.
        thread.start()
        try:
            for _ in range(150):
                row = message(sender, BOB)
                with sender.transaction():
                    if sender.by_id(row["id"])["state"] == "queued" and not self.up():
                        broken.append(row["id"])
        finally:
            stop.set()
            thread.join()
            sender.close()
        self.assertEqual([], broken)

    def test_is_fsynced_with_its_folder_before_the_commit(self):
        synced, real = [], os.fsync

        def fsync(descriptor):
            synced.append(os.readlink("/proc/self/fd/%d" % descriptor) if os.path.isdir("/proc/self/fd") else "?")
            self.assertTrue(self.store._db.in_transaction)
            return real(descriptor)
        os.fsync = fsync
        try:
            message(self.store, BOB)
        finally:
            os.fsync = real
        self.assertIn(synced[0], (self.home.hints + "/mail", "?"))

    def test_of_a_folder_that_cannot_be_synced_keeps_the_message_out(self):
        real = os.fsync

        def fsync(descriptor):
            raise OSError(errno.EIO, "Input/output error")
        os.fsync = fsync
        try:
            with self.assertRaises(StoreError):
                message(self.store, BOB)
        finally:
            os.fsync = real
        self.assertEqual([], self.store.messages())

    def test_is_touched_again_only_while_mail_waits(self):
        self.store.touch_hint(BOB)
        self.assertFalse(self.up())
        message(self.store, BOB)
        os.utime(self.home.hint(BOB), (1, 1))
        self.store.touch_hint(BOB)
        self.assertGreater(os.stat(self.home.hint(BOB)).st_mtime, 1)

    def test_that_was_lost_is_raised_again_by_a_repair(self):
        message(self.store, BOB)
        message(self.store, EVE)
        os.unlink(self.home.hint(BOB))
        self.assertEqual(1, self.store.repair_hints()["missing"])
        self.assertTrue(self.up())
        self.assertEqual({0}, set(self.store.repair_hints().values()))

    def test_of_no_mail_or_a_deadline_that_lies_too_far_ahead_goes_with_a_repair(self):
        self.store.raise_hint(BOB)
        self.store.remember_prefix(BOB, b"{", False)
        self.assertEqual({"missing": 0, "of no mail": 1, "with a deadline too far ahead": 0}, self.store.repair_hints())
        os.utime(os.path.join(self.store.hints, "peer", BOB), (time.time() + 9999,) * 2)
        self.assertEqual({"missing": 0, "of no mail": 0, "with a deadline too far ahead": 1}, self.store.repair_hints())
        self.assertEqual({0}, set(self.store.repair_hints().values()))


class ARequest(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()

    def test_with_a_known_uid_is_the_message_that_it_names(self):
        row = message(self.store, BOB, "one")
        again = message(self.store, BOB, "one", uid=row["uid"])
        self.assertEqual((row["id"], 1), (again["id"], len(self.store.messages())))

    def test_with_a_key_is_the_one_that_has_not_ended_yet(self):
        for state in ("queued", "reserved", "direct-inflight", "direct-uncertain", "hook-inflight", "held"):
            with self.subTest(state):
                row = put_in(self.store, message(self.store, BOB, request_key=state), state)
                self.assertEqual(row["id"], message(self.store, BOB, request_key=state)["id"])
        for state in contract.ENDED:
            with self.subTest(state):
                row = put_in(self.store, message(self.store, BOB, request_key=state), state)
                self.assertNotEqual(row["id"], message(self.store, BOB, request_key=state)["id"])

    def test_with_a_key_is_another_one_for_another_sender_or_target(self):
        row = message(self.store, BOB, request_key="k")
        ids = {row["id"], message(self.store, EVE, request_key="k")["id"], message(self.store, BOB)["id"],
               message(self.store, BOB, request_key="K")["id"],
               message(self.store, BOB, request_key="k", sender_session=EVE)["id"],
               message(self.store, BOB, request_key="k", sender_session="", sender_label="cron")["id"]}
        self.assertEqual(6, len(ids))

    def test_that_replaces_withdraws_what_nobody_has_seen(self):
        row = message(self.store, BOB, "old", request_key="k")
        new = message(self.store, BOB, "new", request_key="k", replace=True)
        self.assertEqual(("cancelled", "queued"), (self.store.by_id(row["id"])["state"], new["state"]))
        self.assertIn("replaced", self.store.events(row["id"])[-1]["detail"])
        put_in(self.store, new, "hook-inflight", myself())
        self.assertEqual(new["id"], message(self.store, BOB, "newer", request_key="k", replace=True)["id"])

    def test_follows_its_target_through_a_clear(self):
        peer(self.store, BOB, "claude")
        peer(self.store, EVE, "claude")
        row = message(self.store, BOB, request_key="k")
        self.store.register({"session": EVE, "host": "codex"}, now_ms(), self.store.peer(BOB))
        self.assertEqual(row["id"], message(self.store, BOB, request_key="k")["id"])
        self.assertEqual(EVE, message(self.store, BOB)["target"])


class Upkeep(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.now = now_ms()

    def state(self, row):
        found = self.store.by_id(row["id"])
        return found and found["state"]

    def test_lets_waiting_messages_expire_in_time_and_nothing_else(self):
        rows = {state: put_in(self.store, message(self.store, BOB, now=self.now - DAY, ttl=60), state,
                              myself() if state in contract.OPEN else (None, None)) for state in STORED}
        fresh = message(self.store, BOB)
        self.store.sweep(self.now)
        self.assertEqual("queued", self.state(fresh))
        for state, row in rows.items():
            self.assertEqual("expired" if state == "queued" else state, self.state(row))

    def test_forgets_ended_messages_after_their_time_with_their_story(self):
        old = self.now - 15 * DAY
        rows = {state: put_in(self.store, message(self.store, BOB, now=old, ttl=60 * DAY / 1000), state, state_at=old)
                for state in STORED}
        kept = put_in(self.store, message(self.store, BOB), "delivered", state_at=self.now - 13 * DAY)
        counts = self.store.sweep(self.now)
        self.assertEqual(4, counts["forgotten"])
        for state, row in rows.items():
            self.assertEqual(state in contract.ENDED, self.state(row) is None, state)
            self.assertEqual(state in contract.ENDED, self.store.events(row["id"]) == [], state)
        self.assertEqual("delivered", self.state(kept))

    def test_forgets_sessions_unseen_for_long_unless_something_of_theirs_is_open(self):
        old = self.now - 31 * DAY
        for session in (ADA, BOB, EVE, "still-here"):
            peer(self.store, session, now=old)
            self.store.remember_prefix(session, b"x", False)
        peer(self.store, "still-here", now=self.now - 29 * DAY)
        message(self.store, BOB)
        put_in(self.store, message(self.store, EVE), "held")
        self.store.set_meta("stops:" + ADA, "t 1")
        counts = self.store.sweep(self.now)
        self.assertEqual((1, {BOB, EVE, "still-here"}), (counts["sessions"], {row["session"] for row in self.store.peers()}))
        self.assertIsNone(self.store.meta("stops:" + ADA))
        for name in ("peer", "live"):
            self.assertFalse(os.path.exists(os.path.join(self.home.hints, name, ADA)))
            self.assertTrue(os.path.exists(os.path.join(self.home.hints, name, BOB)))

    def test_after_a_clock_that_was_ahead_keeps_no_message_for_ever(self):
        row = message(self.store, BOB, now=self.now + 400 * DAY, ttl=60)
        self.store.sweep(self.now)
        self.assertEqual("queued", self.state(row), "nor does it end early")
        self.store.sweep(self.now + 59000)
        self.assertEqual("queued", self.state(row))
        self.store.sweep(self.now + 61000)
        self.assertEqual("expired", self.state(row))

    def test_with_a_clock_that_fell_back_ends_nothing_early(self):
        row = message(self.store, BOB, ttl=60)
        ended = put_in(self.store, message(self.store, EVE), "delivered")
        for back in (30000, HOUR, DAY, 400 * DAY):
            self.store.sweep(self.now - back)
            self.assertEqual(["text"], [row["body"] for row in self.store.queued(BOB)])
        self.assertEqual("delivered", self.state(ended))
        self.assertEqual([row["id"]], [row["id"] for row in self.store.claim(BOB, self.now - 400 * DAY, 9, len, "Stop", myself())])

    def test_runs_in_a_hook_once_an_interval_also_after_the_clock_fell_back(self):
        self.assertIsNotNone(self.store.sweep(self.now, HOUR))
        self.assertIsNone(self.store.sweep(self.now, HOUR))
        self.assertIsNone(self.store.sweep(self.now + HOUR - 1, HOUR))
        self.assertIsNotNone(self.store.sweep(self.now + HOUR, HOUR))
        self.assertIsNotNone(self.store.sweep(self.now - DAY, HOUR))
        self.assertIsNone(self.store.sweep(self.now - DAY + 1, HOUR))
        self.assertIsNotNone(self.store.sweep(self.now - DAY + 1))

    def test_gives_space_back_above_the_free_pages_that_are_allowed(self):
        for _ in range(300):
            put_in(self.store, message(self.store, BOB, "x" * 8000), "cancelled", state_at=self.now - 60 * DAY)
        self.store._execute("pragma wal_checkpoint(truncate)")
        before = os.path.getsize(self.home.db)
        self.store.sweep(self.now)
        self.store._execute("pragma wal_checkpoint(truncate)")
        self.assertLess(self.store.free_pages(), 257)
        self.assertLess(os.path.getsize(self.home.db), before // 4)
        self.assertEqual("", self.store.integrity())

    def test_leaves_the_space_below_that_number_alone(self):
        asked = []
        message(self.store, BOB)
        self.store._db.set_trace_callback(asked.append)
        self.store.sweep(self.now)
        self.assertNotIn("vacuum", asked)

    def test_ends_and_forgets_a_bounded_number_at_a_time(self):
        with self.store.transaction():
            for _ in range(contract.SWEEP_ROWS + 20):
                self.store._execute("insert into messages (uid, created_at, expires_at, state, state_at, sender_kind, "
                                    "sender_label, sender_host, sender_session, target, target_host, body, priority) values "
                                    "(hex(randomblob(8)), 1, 2, 'queued', 1, 'agent', '', '', '', ?, '', '', 0)", (BOB,))
        self.assertEqual(contract.SWEEP_ROWS, self.store.sweep(self.now)["expired"])
        self.assertEqual(20, self.store.sweep(self.now)["expired"])

    def test_keeps_what_another_machine_may_send_again(self):
        """A link may be lost after the message came: `outbox --refresh` there sends it again until it expires."""
        for session in (ADA, "0123456789abcdef:" + ADA):
            put_in(self.store, message(self.store, BOB, now=self.now, ttl=60, sender_session=session), "cancelled", state_at=1)
        self.assertEqual(1, self.store.sweep(self.now)["forgotten"])
        self.assertEqual(0, self.store.sweep(self.now + 59000)["forgotten"])
        self.assertEqual(1, self.store.sweep(self.now + 60000)["forgotten"])

    def test_that_fails_costs_no_receipt(self):
        """The message is committed by then; without its receipt the sender would send it once more."""
        self.home.hook("codex", BOB, "SessionStart")
        put_in(self.store, message(self.store, BOB), "cancelled", state_at=1)
        self.store._execute("create trigger full before delete on messages begin "
                            "select raise(abort, 'database or disk is full'); end")
        out = self.home.xmsg("send", BOB, "text", "--no-direct")
        self.assertIn("queued #2", out)

    def test_leaves_the_hints_of_the_fast_path_readable_at_any_moment(self):
        self.store.remember_prefix(BOB, b'{"session_id":"x"', False)
        path = os.path.join(self.home.hints, "peer", BOB)
        self.assertGreater(os.stat(path).st_mtime, now_ms() / 1000 + 30)
        self.store.remember_prefix(BOB, b'{"session_id":"y"', True)
        with open(path, "rb") as file:
            self.assertEqual([b'{"session_id":"y"', b'{"session_id":"x"'], file.read().splitlines())
        self.store.remember_prefix(BOB, b'{"session_id":"z"', False)
        with open(path, "rb") as file:
            self.assertEqual([b'{"session_id":"z"'], file.read().splitlines())
        for number in range(9):
            self.store.remember_prefix(BOB, b"prefix %d" % number, True)
        with open(path, "rb") as file:
            self.assertLessEqual(len(file.read().splitlines()), 4)
        self.assertEqual([BOB], os.listdir(os.path.join(self.home.hints, "peer")))


class TheFaultLog(HomeCase):
    def test_is_one_line_a_fault_bounded_and_for_its_user_alone(self):
        settings = self.home.settings()
        for number in range(200):
            note_fault(settings, "claude Stop", ValueError("number %d\n%s" % (number, "x" * 5000)))
        paths = [self.home.db + ".faults", self.home.db + ".faults.old"]
        self.assertLessEqual(sum(os.path.getsize(path) for path in paths if os.path.exists(path)), 3 * contract.LOG_BYTES)
        for path in paths:
            if os.path.exists(path):
                self.assertEqual(0o600, stat.S_IMODE(os.stat(path).st_mode))
        self.assertIn("number 199", self.home.faults())

    def test_is_never_written_through_a_link_and_never_a_fault_itself(self):
        victim = os.path.join(self.home.folder, "victim")
        os.symlink(victim, self.home.db + ".faults")
        note_fault(self.home.settings(), "x", ValueError("x"))
        self.assertFalse(os.path.exists(victim))
        note_fault(self.home.settings(XMSG_DB=self.home.folder + "/missing/x"), "x", ValueError("x"))


class TheInterpreter(HomeCase):
    def test_is_recorded_as_a_real_path_and_kept_while_it_works(self):
        path = os.path.join(os.path.dirname(self.home.db), "python")
        os.unlink(path)
        record_interpreter(self.home.settings())
        with open(path) as file:
            self.assertEqual(os.path.realpath(sys.executable), file.read().strip())
        with open(path, "w") as file:
            file.write("/bin/sh\n")
        record_interpreter(self.home.settings())
        with open(path) as file:
            self.assertEqual("/bin/sh", file.read().strip())
        with open(path, "w") as file:
            file.write("/gone/python3\n")
        record_interpreter(self.home.settings())
        with open(path) as file:
            self.assertEqual(os.path.realpath(sys.executable), file.read().strip())
        self.assertEqual(0o600, stat.S_IMODE(os.stat(path).st_mode))


if __name__ == "__main__":
    unittest.main()
