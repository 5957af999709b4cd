"""What the hosts keep of their sessions is found at once, read once, never written, and tolerated whatever it is."""
import fcntl
import glob
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
import unittest

from support import ADA, BOB, EVE, PYTHON, ROOT, FakeProc, HomeCase, HostProcess, environ, peer, wait_until
from side_by_side import load_tests  # noqa: F401

import command_line
import store as store_module
from contract import now_ms

SUB = "01a04cd2-3333-7000-8000-0000000000aa"
OPENED = []  # what this process opens while a test counts


def _count(event, arguments):
    if event == "open" and OPENED and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


sys.addaudithook(_count)


class Hosts(HomeCase):
    """A home with what Codex and Claude Code write there."""

    def setUp(self):
        super().setUp()
        self.codex, self.claude = (os.path.join(self.home.folder, name) for name in (".codex", ".claude"))
        os.makedirs(self.codex + "/thread-writer-locks")
        os.makedirs(self.claude + "/sessions", 0o700)

    def open_thread(self, thread):
        file = open(os.path.join(self.codex, "thread-writer-locks", thread + ".lock"), "w")
        self.addCleanup(file.close)
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def rollout(self, thread):
        return os.path.join(self.codex, "sessions/2026/11/30/rollout-2026-11-30T22-23-02-%s.jsonl" % thread)

    def state(self, *rows, number=5):
        """Codex's state with threads as (id, name, source)."""
        database = sqlite3.connect(os.path.join(self.codex, "state_%d.sqlite" % number))
        database.executescript("pragma journal_mode = wal; create table threads (id text primary key, rollout_path "
                               "text, cwd text, title text, source text, model text, name text)")
        with database:
            database.executemany("insert into threads values (?, ?, '/w', 'first words', ?, 'gpt-5.1-codex', ?)",
                                 [(thread, self.rollout(thread), source, name) for thread, name, source in rows])
        database.close()

    def index(self, *entries):
        with open(os.path.join(self.codex, "session_index.jsonl"), "ab") as file:
            for entry in entries:
                file.write(entry if isinstance(entry, bytes) else json.dumps(
                    {"id": entry[0], "thread_name": entry[1]}, separators=(",", ":")).encode() + b"\n")

    def run_claude(self, session, **fields):
        host = HostProcess(self.home)
        self.addCleanup(host.end)
        record = dict({"pid": host.pid, "sessionId": session, "cwd": self.home.folder, "procStart": host.start,
                       "version": "2.1.332", "name": "work-21", "nameSource": "derived", "status": "busy",
                       "updatedAt": now_ms()}, **fields)
        with open(os.path.join(self.claude, "sessions", "%d.json" % host.pid), "w") as file:
            json.dump(record, file)
        import host_process
        wait_until(lambda: host_process.alive(host.pid, host.start), "the stand-in runs")
        return host

    def transcript(self, session, *records):
        slug = "".join(char if char.isalnum() else "-" for char in self.home.folder)
        path = os.path.join(self.claude, "projects", slug, session + ".jsonl")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab") as file:
            for record in records:
                file.write(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")
        return path

    def listed(self, *arguments, **options):
        begin = time.monotonic()
        sessions = self.home.json("list", *arguments, **options)["sessions"]
        self.assertLess(time.monotonic() - begin, 5)
        return {record["session"]: record for record in sessions}


class ACodexThread(Hosts):
    def test_is_found_by_the_last_of_its_renames_as_soon_as_it_is_open(self):
        self.state((BOB, "old", "cli"), (EVE, "eve", "vscode"))
        self.state((BOB, "ancient", "cli"), (EVE, "ancient eve", "vscode"), number=4)
        self.index((BOB, "first"), (SUB, "sub"), (BOB, "leader"), b'{"id":"%s","thread_name":"to' % BOB.encode())
        self.home.xmsg("find", "--exact", "leader", status=3)
        lock = self.open_thread(BOB)
        for spec in ("leader", "LEADER", BOB[:13], "codex:leader"):
            self.assertEqual(BOB, self.home.json("find", "--exact", spec)["sessions"][0]["session"], spec)
        for name in ("first", "old", "ancient", "eve"):
            self.home.xmsg("find", "--exact", name, status=3)
        record = self.listed()[BOB]
        self.assertEqual((True, "leader", "/w", "gpt-5.1-codex"),
                         tuple(record[key] for key in ("live", "name", "cwd", "model")))
        lock.close()
        self.assertEqual({}, self.listed())
        self.open_thread(EVE)
        self.assertEqual("eve", self.listed()[EVE]["name"])

    def test_is_told_before_its_first_prompt_and_a_subagents_never(self):
        self.state((SUB, "", '{"subagent":{}}'), (BOB, "", "cli"))
        for thread in (BOB, EVE, SUB):
            self.open_thread(thread)
        self.assertEqual({BOB, EVE}, set(self.listed()))

    def test_that_has_run_a_hook_is_live_whatever_its_source(self):
        store = self.open_store()
        peer(store, SUB, transcript=self.rollout(SUB), now=now_ms() - 86400000)
        peer(store, EVE, transcript=self.rollout(EVE), pid=os.getpid(), pid_start="1")
        self.state((SUB, "", "a new word"))
        self.open_thread(SUB)
        self.assertEqual({SUB: True, EVE: False}, {name: row["live"] for name, row in self.listed("--all").items()})

    def test_is_idle_or_busy_by_the_last_turn_that_began_since_it_was_opened(self):
        self.state((BOB, "", "cli"))
        os.makedirs(os.path.dirname(self.rollout(BOB)))
        lock = self.open_thread(BOB)
        now = time.strftime("%Y-%m-%dT%H:%M:%S.123Z", time.gmtime())

        def turn(kind, at=now):
            with open(self.rollout(BOB), "a") as file:
                file.write(json.dumps({"timestamp": at, "ordinal": 3, "type": "event_msg",
                                       "payload": {"type": kind, "turn_id": "x"}}, separators=(",", ":")) + "\n")
            return self.listed()[BOB]["activity"]
        self.assertEqual("unknown", self.listed()[BOB]["activity"])
        self.assertEqual("idle", turn("task_started", "2026-01-01T00:00:00.000Z"))
        self.assertEqual("busy", turn("task_started"))
        self.assertEqual("busy", turn("token_count"))
        self.assertEqual("idle", turn("task_complete"))
        turn("task_started")
        self.assertEqual("idle", turn("turn_aborted"))
        turn("task_started")
        os.utime(lock.fileno(), (time.time() + 60,) * 2)  # opened anew since
        self.assertEqual("idle", self.listed()[BOB]["activity"])

    def test_is_found_among_thousands_of_locks_that_crashes_left(self):
        self.state((BOB, "leader", "cli"))
        for number in range(1500):
            open(os.path.join(self.codex, "thread-writer-locks", "01a0%04x-7000.lock" % number), "w").close()
        self.open_thread(BOB)
        self.assertEqual({BOB}, set(self.listed()))

    def test_is_known_by_its_process_where_a_lock_names_another_device_than_its_file(self):
        """As on btrfs and overlayfs."""
        proc = FakeProc()
        self.addCleanup(proc.remove)
        path = self.open_thread(BOB).name
        os.mkdir(os.path.join(proc.folder, "4711"))
        os.mkdir(os.path.join(proc.folder, "4711", "fd"))
        for pid, expected in ((4711, {BOB}), (os.getpid(), set())):
            with open(os.path.join(proc.folder, "locks"), "w") as file:
                file.write("1: FLOCK  ADVISORY  WRITE %d ff:fe:%d 0 EOF\n" % (pid, os.stat(path).st_ino))
            if not os.path.lexists(os.path.join(proc.folder, "4711", "fd", "7")):
                os.symlink(path, os.path.join(proc.folder, "4711", "fd", "7"))
            self.assertEqual(expected, set(self.listed(XMSG_PROC_ROOT=proc.folder)))

    def test_costs_its_own_row_only_whatever_lies_there(self):
        state, index = os.path.join(self.codex, "state_5.sqlite"), os.path.join(self.codex, "session_index.jsonl")
        self.open_thread(BOB)
        self.open_thread("not-a-thread!")
        self.run_claude(ADA, name="ada", nameSource="user")
        hostile = b'{"id":"%s","thread_name":%%s}\n' % BOB.encode()

        def rows(*values):
            def make():
                self.state()
                with sqlite3.connect(state) as database:
                    database.execute("insert into threads (id, source, name, cwd) values (?, 'cli', ?, ?)",
                                     (BOB,) + values)
            return make

        def write(path, content):
            with open(path, "wb") as file:
                file.write(content)

        def endless():
            with sqlite3.connect(state) as database:
                database.execute("create view threads as with recursive n(i) as (select 1 union all select i + 1 from "
                                 "n) select i as id, i as name, 'cli' as source, '' as cwd, '' as model from n")
        cases = {
            "nothing": lambda: None,
            "garbage": lambda: write(state, os.urandom(9000)),
            "cut": lambda: (self.state((BOB, "x", "cli")), os.truncate(state, 5000)),
            "a pipe": lambda: (os.mkfifo(state), os.mkfifo(index)),
            "a folder": lambda: (os.mkdir(state), os.mkdir(index)),
            "a link to nowhere": lambda: (os.symlink("/nowhere", state), os.symlink("/nowhere", index)),
            "another table": lambda: sqlite3.connect(state).execute("create table threads (x)"),
            "endless": endless,
            "bytes": rows(b"\xff\xfe\0", b"\x80"),
            "numbers": rows(7, 1e300),
            "huge": rows("n" * 3000000, "c" * 3000000),
            "control characters": rows("\x1b[31m\u202e\nx", "/w\x1b"),
            "lines": lambda: self.index(b"\0" * 100000, b"\n", hostile % b"[]", hostile % (b"[" * 100000), b"[]\n",
                                        hostile % b'"\\ud800\\u0000"', b"null\n", b"x" * 3000000)}
        for name, make in cases.items():
            with self.subTest(name):
                for path in (state, state + "-wal", state + "-shm", index):
                    if os.path.lexists(path):
                        os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
                make()
                self.assertEqual({ADA, BOB}, set(self.listed()), name)
                out = self.home.xmsg("list")
                self.assertNotIn("\x1b", out)
                self.assertLess(len(out), 4000)

    def test_leaves_nothing_in_codexs_home(self):
        self.state((BOB, "leader", "cli"))
        self.open_thread(BOB)
        before = {name: os.stat(os.path.join(self.codex, name)).st_mtime_ns for name in os.listdir(self.codex)}
        self.assertNotIn("state_5.sqlite-wal", before)
        self.assertEqual("leader", self.listed()[BOB]["name"])
        self.home.xmsg("queue")
        self.assertEqual(before, {name: os.stat(os.path.join(self.codex, name)).st_mtime_ns
                                  for name in os.listdir(self.codex)})


class AClaudeSession(Hosts):
    def title(self, title, session=ADA):
        return {"type": "custom-title", "customTitle": title, "sessionId": session}

    def test_without_a_name_in_the_registry_has_the_last_title_of_its_transcript(self):
        self.run_claude(ADA)
        self.assertEqual("", self.listed()[ADA]["name"])
        path = self.transcript(ADA)
        os.mkdir(path[:-6])
        with open(path[:-6] + "/custom-title.json", "w") as file:
            json.dump({"customTitle": "by its file", "by": "user"}, file)
        self.assertEqual("by its file", self.listed()[ADA]["name"])
        self.transcript(ADA, self.title("first"), {"type": "user", "text": 'says "custom-title"'}, self.title("second"),
                        self.title("of another", BOB), b'{"type":"custom-title","customTitle":"to')
        record = self.listed()[ADA]
        self.assertEqual(("second", "busy", True), (record["name"], record["activity"], record["live"]))
        self.assertEqual(ADA, self.home.json("find", "--exact", "Second")["sessions"][0]["session"])

    def test_is_called_what_its_host_calls_it_now(self):
        peer(self.open_store(), ADA, "claude", title="old", title_key="old")
        self.run_claude(ADA, name="new", nameSource="user")
        self.assertEqual("new", self.listed()[ADA]["name"])
        self.assertEqual(ADA, self.home.json("find", "--exact", "new")["sessions"][0]["session"])
        self.home.xmsg("find", "--exact", "old", status=3)

    def test_costs_its_own_row_only_whatever_its_transcript_is(self):
        self.run_claude(ADA)
        self.run_claude(EVE, name="eve", nameSource="user")
        path = self.transcript(ADA)
        for make in (lambda: os.mkfifo(path), lambda: os.mkdir(path), lambda: os.symlink("/dev/zero", path),
                     lambda: self.transcript(ADA, b'"custom-title"' * 100000),
                     lambda: self.transcript(ADA, b"\n" + self.title_bytes(b"[" * 50000)),
                     lambda: self.transcript(ADA, b"\n" + self.title_bytes(b"7")),
                     lambda: self.transcript(ADA, b"\n" + self.title_bytes(b'"\\u001b[2J\\ud800 x"'))):
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
            make()
            self.assertEqual({ADA, EVE}, set(self.listed()))
            self.assertNotIn("\x1b", self.home.xmsg("list"))

    def title_bytes(self, value):
        return b'{"type":"custom-title","customTitle":%s,"sessionId":"%s"}\n' % (value, ADA.encode())


class AReport(Hosts):
    def test_reads_each_file_of_a_host_once_and_only_those_of_open_sessions(self):
        store = self.open_store()
        for number in range(40):
            thread = BOB[:-2] + "%02x" % number
            peer(store, thread, transcript=self.rollout(thread))
            self.transcript(ADA[:-2] + "%02x" % number, {"type": "user"})
        for number in range(3):
            self.run_claude(ADA[:-2] + "%02x" % number)
        self.state(*[(BOB[:-2] + "%02x" % number, "", "cli") for number in range(40)])
        self.open_thread(BOB[:-2] + "07")
        self.index((BOB, "x"))
        with environ(HOME=self.home.folder, XMSG_DB=self.home.db):
            OPENED.append("")
            try:
                records = command_line.session_records(store)
            finally:
                opened = [path for path in OPENED if path]
                OPENED.clear()
        self.assertEqual(4, len(records))
        self.assertLessEqual(opened.count("/proc/locks"), 3)  # one that is longer than a page is read again
        theirs = [path for path in opened if path.startswith((self.codex, self.claude))]
        self.assertEqual(sorted(set(theirs)), sorted(theirs))
        self.assertEqual(3, len([path for path in theirs if "/sessions/" in path and ".claude" in path]))
        self.assertLess(len(theirs), 15)


class TheQueue(Hosts):
    def queue(self, *items):
        database = sqlite3.connect(os.path.join(self.codex, "queue_1.sqlite"))
        with database:
            database.execute("create table queued_items (id text primary key not null, thread_id text not null, "
                             "payload_json text not null, queue_order integer not null, created_at_ms integer not "
                             "null, updated_at_ms integer not null)")
            database.executemany("insert into queued_items values (?, ?, ?, ?, ?, 0)", items)
        database.close()

    def payload(self, text):
        return json.dumps({"UserInput": {"content": [{"type": "text", "text": text, "text_elements": []}]}})

    def test_shows_codexs_own_as_what_it_is(self):
        self.assertNotIn("Codex", self.home.xmsg("queue"))
        self.state((BOB, "leader", "cli"))
        self.open_thread(BOB)
        self.queue(("b", BOB, self.payload("then this"), 1, 1796097638663),
                   ("a", BOB, self.payload("first this"), 0, 5), ("c", EVE, self.payload("for eve\x1b[2J"), 0, 5))
        self.home.hook("codex", BOB, "SessionStart", transcript_path=self.rollout(BOB))
        self.home.xmsg("send", BOB, "by xmsg", "--no-direct", "--urgent", session=ADA)
        out = self.home.xmsg("queue")
        self.assertLess(out.index("by xmsg"), out.index("no priorities"))
        self.assertLess(out.index("first this"), out.index("then this"))
        for words in ("--urgent does not touch it", "Enter steers the running turn", "Tab queues the next", "leader"):
            self.assertIn(words, out)
        self.assertNotIn("\x1b", out)
        told = self.home.json("queue", "--name", "leader")
        self.assertEqual(["by xmsg"], [message["body"] for message in told["messages"]])
        self.assertEqual([("codex", "a", BOB, "leader", "first this"), ("codex", "b", BOB, "leader", "then this")],
                         [tuple(item[key] for key in ("host", "id", "session", "name", "text"))
                          for item in told["host_queue"]])
        self.assertEqual("2026-12-01T04:00:38.663Z", told["host_queue"][1]["created_at"])
        record = self.listed()[BOB]
        self.assertEqual((1, 2), (record["queued"], record["host_queued"]))
        self.assertIn("1+2 in Codex", self.home.xmsg("list"))

    def test_shows_what_it_can_of_hostile_items(self):
        self.queue(("1", BOB, "{", 0, -5), ("2", BOB, "[" * 5000, 1, 5),
                   ("3", BOB, self.payload("x" * 3000000), 2, 1 << 62), ("4", b"\xff", self.payload("y"), 3, 5),
                   ("5", BOB, json.dumps({"UserInput": 7}), 4, 5),
                   ("6", BOB, self.payload("good"), 5, 5))
        out = self.home.xmsg("queue")
        self.assertIn("good", out)
        self.assertLess(len(out), 4000)
        self.assertEqual(6, len(self.home.json("queue")["host_queue"]))
        with open(os.path.join(self.codex, "queue_1.sqlite"), "r+b") as file:
            file.write(os.urandom(4096))
        self.assertEqual("nothing waits\n", self.home.xmsg("queue"))


class TheEarlierStore(HomeCase):
    ROWS = 300

    def setUp(self):
        super().setUp()
        self.now = now_ms() // 1000
        database = sqlite3.connect(self.home.db)
        database.executescript("""
            pragma journal_mode = wal;
            create table messages (id integer primary key autoincrement, created_at integer not null, expires_at integer
              not null, from_label text not null, from_tool text not null default '', from_session text not null
              default '', to_session text not null, body text not null, priority integer not null default 0,
              delivered_at integer, delivered_tool text, delivered_event text, expired_at integer);
            create table peers (session_id text primary key, tool text, cwd text, model text, label text, pid integer,
              pid_start text, permission_mode text, first_seen_at integer, last_seen_at integer);
            create table meta (key text primary key, value integer);""")
        with database:
            database.executemany("insert into messages values (?, ?, ?, 'ada', 'claude', ?, ?, ?, ?, ?, null, ?, "
                                 "null)", [
                (number, self.now, self.now + 9999, ADA, BOB, "text %d" % number, number % 5,
                 None if number % 3 else self.now, None if number % 3 else "PreToolUse")
                for number in range(1, self.ROWS + 1)])
            database.execute("insert into peers values (?, 'codex', '/w', 'm', 'bob', null, null, '', ?, ?)",
                             (BOB, self.now, self.now))
        database.close()
        os.chmod(self.home.db, 0o600)

    def adopt_and_die(self, at):
        """A process that takes the store over and is killed at its statement of this number; true if it got there."""
        child = os.fork()
        if not child:
            try:
                import adoption
                whole, count = adoption.adopt, [0]

                class Mortal:
                    def __init__(self, database):
                        self.database = database

                    def execute(self, *arguments):
                        count[0] += 1
                        if count[0] == at:
                            os.kill(os.getpid(), signal.SIGKILL)
                        return self.database.execute(*arguments)

                    def create_function(self, *arguments):
                        self.database.create_function(*arguments)

                def adopt(database, create, raise_hint):
                    def die(session):
                        raise_hint(session)
                        count[0] += 1
                        if count[0] >= at:
                            os.kill(os.getpid(), signal.SIGKILL)
                    whole(Mortal(database), create, die)
                adoption.adopt = adopt
                store_module.Store(self.home.settings()).close()
            finally:
                os._exit(0)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def test_killed_at_any_statement_of_its_adoption_loses_and_doubles_nothing(self):
        at = 1
        while self.adopt_and_die(at):
            with sqlite3.connect(self.home.db) as database:
                self.assertEqual(self.ROWS, database.execute("select count(*) from messages").fetchone()[0], at)
                self.assertEqual([("ok",)], database.execute("pragma integrity_check").fetchall())
            at += 1
        self.assertGreater(at, 15)
        rows = self.home.sql("select id, body, state, priority, uid from messages order by id")
        self.assertEqual([(number, "text %d" % number, "queued" if number % 3 else "delivered", number % 5)
                          for number in range(1, self.ROWS + 1)], [row[:4] for row in rows])
        self.assertEqual(self.ROWS, len({row[4] for row in rows}))
        self.assertEqual(self.ROWS - self.ROWS // 3, self.home.sql("select count(*) from events")[0][0])
        shown = self.home.context("codex", BOB, "PreToolUse")
        self.assertNotIn("text 3\n", shown + "\n")
        with sqlite3.connect(self.home.db + ".earlier") as kept:
            self.assertEqual(self.ROWS, kept.execute("select count(*) from messages where to_session = ?",
                                                     (BOB,)).fetchone()[0])

    @unittest.skipUnless(shutil.which("strace"), "the statements are tried above where there is no strace")
    def test_killed_at_any_system_call_of_its_adoption_loses_and_doubles_nothing(self):
        before, killed = self.home.db + ".before", 0
        shutil.copy(self.home.db, before)
        code = "import os, sys; sys.path.append(%r); from contract import Settings; from store import Store; " \
               "Store(Settings(os.environ)).close()" % ROOT
        calls = [("pwrite64", 1), ("pwrite64", 60), ("pwrite64", 100), ("fdatasync", 1), ("fdatasync", 4),
                 ("rename", 1), ("unlink", 1), ("fsync", 1)]
        for name, ordinal in calls if os.environ.get("XMSG_FULL") != "1" else [
                (name, ordinal) for name, _ in calls for ordinal in range(1, 150)]:
            for path in glob.glob(self.home.db + "-*") + glob.glob(self.home.db + ".earlier*"):
                os.unlink(path)
            shutil.copy(before, self.home.db)
            done = self.home.run(["strace", "-qq", "-f", "-o", os.devnull, "-e", "trace=" + name, "-e",
                                  "inject=%s:signal=KILL:when=%d" % (name, ordinal), PYTHON, "-I", "-S", "-c", code])
            killed += done.returncode != 0
            rows = self.home.json("inbox", BOB, "--limit", "9999")["messages"] + self.home.json(
                "queue", "--limit", "9999")["messages"]
            self.assertEqual(sorted("text %d" % number for number in range(1, self.ROWS + 1)),
                             sorted(row["body"] for row in rows), (name, ordinal))
            self.assertEqual([("ok",)], self.home.sql("pragma integrity_check"))
            with sqlite3.connect(self.home.db + ".earlier") as kept:
                self.assertEqual(self.ROWS, kept.execute("select count(*) from messages where to_session = ?",
                                                         (BOB,)).fetchone()[0], (name, ordinal))
        self.assertGreater(killed, 4)

    def test_has_the_same_tables_and_indexes_afterwards_as_a_new_one(self):
        store = self.open_store()
        fresh = sqlite3.connect(":memory:")
        fresh.executescript(store_module.TABLES)
        names = "select type, name, sql from sqlite_master where sql is not null order by 1, 2"
        self.assertEqual(fresh.execute(names).fetchall(), self.home.sql(names))
        with self.assertRaises(sqlite3.IntegrityError):
            store._db.execute("update messages set state = 'nonsense' where id = 1")


if __name__ == "__main__":
    unittest.main()
