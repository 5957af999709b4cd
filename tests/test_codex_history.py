"""Codex's history: what is listed and found, when a session is resumed and how, and what an export holds."""
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import unittest

from support import ROOT, HomeCase, HostProcess, end, on_a_terminal, peer, permissions_count
import codex_history
from contract import is_invisible
from export_reader import read_markdown
from side_by_side import load_tests  # noqa: F401
from test_app_server import Server, text_frame

COMMAND = os.path.join(ROOT, "bin", "codex-history")
# As Codex 0.171.0 makes it, without what nothing here reads.
SCHEMA = """
create table threads (id text primary key, rollout_path text not null, created_at integer not null,
  updated_at integer not null, source text not null, model_provider text not null, cwd text not null,
  title text not null, archived integer not null default 0, model text, updated_at_ms integer,
  preview text not null default '', name text, attached_thread_parent_id text);
create index idx_threads_updated_at_ms on threads(updated_at_ms desc, id desc);
"""
TOMLLIB = sys.version_info >= (3, 11)  # else only the app-server tells the providers
ODD = 'a "b" \\ é'
NOW = 1796097600  # seconds; the sessions of the tests are from this minute


def session_id(number):
    return "01a22fc2-%04x-7000-8000-00000000000%d" % (number, number % 10)


def response(kind, **payload):
    return {"timestamp": "2026-12-01T04:00:18.000Z", "type": "response_item", "payload": dict(payload, type=kind)}


def said(role, text, *kinds, **more):
    """A message record as Codex 0.156 and newer write it; without kinds, as older ones do."""
    parts = [text] if isinstance(text, str) else text
    part = {"type": "output_text" if role == "assistant" else "input_text"}
    payload = {"id": "msg_01a22f1d", "role": role, "content": [dict(part, text=one) for one in parts]}
    if kinds:
        payload["internal_chat_message_metadata_passthrough"] = {"turn_id": "01a22f1d-a06d",
                                                                 "content_item_kinds": list(kinds)}
    return response("message", **payload, **more)


class Case(HomeCase):
    """A CODEX_HOME with sessions in a database and rollouts."""

    def setUp(self):
        super().setUp()
        self.codex = os.path.join(self.home.folder, ".codex")
        self.work = os.path.join(self.home.folder, "the work's $(folder)")
        os.makedirs(self.work)
        os.makedirs(os.path.join(self.codex, "sessions"))
        self.numbers = iter(range(1, 9999))
        self.database = os.path.join(self.codex, "state_5.sqlite")
        self.sql(SCHEMA)
        with open(os.path.join(self.codex, "config.toml"), "w") as file:
            file.write('[model_providers.first]\nname = "first"\n[model_providers.second]\nname = "second"\n')

    def sql(self, script, values=None, path=None):
        database = sqlite3.connect(path or self.database)
        with database:
            database.execute(script, values) if values else database.executescript(script)
        database.close()

    def session(self, records=(), **columns):
        """Adds a session, newer than all before it; its id. records: of its rollout."""
        number = next(self.numbers)
        session = columns.get("id") or session_id(number)
        path = os.path.join(self.codex, "archived_sessions" if columns.get("archived") else "sessions",
                            "rollout-%s.jsonl" % session)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            for record in records:
                file.write(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")
        row = dict({"id": session, "rollout_path": path, "created_at": NOW, "updated_at": NOW + number,
                    "updated_at_ms": (NOW + number) * 1000, "source": "cli", "model_provider": "first",
                    "cwd": self.work, "title": "", "model": "model-1", "preview": "began %d" % number}, **columns)
        self.sql("insert into threads (%s) values (%s)" % (", ".join(row), ", ".join("?" * len(row))),
                 tuple(row.values()))
        return session

    def serve(self, answer):
        """An app-server that answers a request with answer(method, parameters)."""
        self.asked = []

        def script(connection):
            connection.hello()
            done = 0
            while True:
                requests = [message for message in connection.messages() if message.get("id", 0) > 1]
                for message in requests[done:]:
                    self.asked.append((message["method"], message["params"]))
                    result = answer(message["method"], message["params"])
                    key = "error" if isinstance(result, dict) and "code" in result else "result"
                    connection.send(text_frame({"id": message["id"], key: result}))
                done = len(requests)
                connection.receive()
        server = Server(script)
        server.__enter__()
        self.addCleanup(server.__exit__, None, None, None)
        folder = os.path.join(self.codex, "app-server-control")
        os.makedirs(folder, mode=0o700)
        os.symlink(server.path, os.path.join(folder, "app-server-control.sock"))

    def history(self, *arguments, status=0, **options):
        return self.home.xmsg("history", *arguments, status=status, **options)

    def listed(self, *options, status=0):
        return self.home.json("history", "list", *options, status=status)

    def ids(self, *options):
        return [record["session"] for record in self.listed(*options)["sessions"]]

    def export(self, session, *options):
        return self.home.command("history", "export", session, *options).stdout.decode()

    def texts(self, records, *options):
        """What an export of these records holds."""
        return read_markdown(self.export(self.session(records), *options))


class AList(Case):
    def test_shows_the_sessions_of_all_providers_with_the_newest_first(self):
        one, two = self.session(name="one"), self.session(model_provider="second", model="m2")
        report = self.listed()
        self.assertEqual(("sqlite", False), (report["backend"], report["more"]))
        self.assertEqual([two, one], [record["session"] for record in report["sessions"]])
        self.assertEqual({
            "session": one, "name": "one", "preview": "began 1", "provider": "first", "model": "model-1",
            "cwd": self.work, "updated_at": "2026-12-01T04:00:01.000Z", "archived": False, "status": "unknown",
            "source": "cli", "rollout": os.path.join(self.codex, "sessions", "rollout-%s.jsonl" % one),
        }, report["sessions"][1])
        self.assertRegex(self.history("list"), r"(?s)SEEN.*%s  began 2 +second/m2.*%s  one +first/model-1" % (two, one))

    def test_says_aloud_that_the_database_was_read_in_place_of_the_app_server(self):
        self.session()
        self.assertIn("no app-server socket", self.home.command("history", "list").stderr.decode())
        self.assertEqual(b"", self.home.command("history", "list", "--backend", "sqlite").stderr)
        out = self.history("list", "--backend", "app-server", status=7)
        self.assertIn("codex app-server daemon start", out)

    def test_leaves_out_what_the_app_server_leaves_out(self):
        shown = self.session()
        self.session(preview="")
        self.session(attached_thread_parent_id=shown)
        self.session(id="not-a-uuid")
        os.unlink(os.path.join(self.codex, "sessions", "rollout-%s.jsonl" % self.session()))
        executed, archived = self.session(source="exec"), self.session(archived=1)
        child = self.session(source='{"subagent":{"thread_spawn":{"parent_thread_id":"x"}}}')
        self.session(source='{"internal":"memory_consolidation"}')
        self.session(source='{"custom":"other"}')
        desktop = self.session(source='{"custom":"chatgpt"}')
        self.assertEqual([desktop, shown], self.ids())
        self.assertEqual([desktop, archived, shown], self.ids("--include-archived"))
        self.assertEqual([desktop, child, executed, shown], self.ids("--include-non-interactive"))

    def test_narrows_by_provider_text_and_folder(self):
        other = self.home.folder + "/the work's $(folder)2"
        os.makedirs(other)
        one = self.session(name="Der Große Plan")
        two = self.session(model_provider="second", cwd=other, preview="fix the API")
        below = self.session(cwd=self.work + "/sub")
        self.assertEqual([two], self.ids("--provider", "second"))
        self.assertEqual([one], self.ids("--query", "große"))
        self.assertEqual([two], self.ids("--query", "api"))
        self.assertEqual([below, one], self.ids("--cwd", self.work))
        self.assertEqual([], self.ids("--query", "nothing like it"))
        self.assertIn("no session fits", self.history("list", "--query", "nothing like it"))

    def test_ends_after_so_many_and_says_that_there_are_more(self):
        made = [self.session() for _ in range(4)]
        report = self.listed("--limit", "2")
        self.assertEqual((made[:1:-1], True), ([record["session"] for record in report["sessions"]], report["more"]))
        self.assertFalse(self.listed("--limit", "4")["more"])
        self.assertIn("there are older ones", self.history("list", "--limit", "3"))
        self.history("list", "--limit", "0", status=2)

    def test_reads_the_newest_generation_and_never_an_older_one(self):
        self.session(name="old")
        newest = os.path.join(self.codex, "state_10.sqlite")
        shutil.copy(self.database, newest)
        self.sql("update threads set name = 'new'", path=newest)
        self.assertEqual("new", self.listed()["sessions"][0]["name"])
        self.sql("alter table threads drop column cwd" if sqlite3.sqlite_version_info >= (3, 35) else
                 "drop table threads; create table threads (id text)", path=newest)
        self.assertIn("has no", self.history("list", status=7))

    def test_reads_an_older_schema_whose_names_stand_in_the_index_alone(self):
        session, other = self.session(), self.session()
        self.sql("create table old as select id, model_provider, cwd, updated_at, archived, source, rollout_path "
                 "from threads; drop table threads; alter table old rename to threads")
        with open(os.path.join(self.codex, "session_index.jsonl"), "w") as file:
            for name in ("first", "last %s" % other):
                file.write('{"id":"%s","thread_name":"%s","updated_at":"2026"}\n' % (session, name))
            file.write('{"id":"%s","thread_name":7}\n{"id":"%s\n\n[]\n' % (other, other))
        self.assertEqual([(other, "", ""), (session, "last %s" % other, "")], [
            (record["session"], record["name"], record["model"]) for record in self.listed()["sessions"]])
        self.assertIn(session, self.history("resume", "last %s" % other, "--dry-run", status=7))

    def test_makes_nothing_and_changes_nothing(self):
        self.sql("pragma journal_mode = wal")
        session = self.session(model_provider="openai")
        self.assertEqual([], [name for name in os.listdir(self.codex) if name.endswith(("-wal", "-shm"))])

        def state():
            return {path: (os.stat(path).st_mtime_ns, os.stat(path).st_size) for folder, folders, files in os.walk(
                self.codex) for path in [folder] + [os.path.join(folder, name) for name in files]}
        before = state()
        self.listed()
        self.export(session)
        self.history("resume", session, "--dry-run")
        self.assertEqual(before, state())
        writer = sqlite3.connect(self.database)
        writer.execute("update threads set name = 'fresh'")
        writer.commit()
        before = {path: values for path, values in state().items() if not path.endswith("-shm")}
        self.assertEqual("fresh", self.listed()["sessions"][0]["name"])
        self.assertEqual(before, {path: values for path, values in state().items() if not path.endswith("-shm")})
        writer.close()

    def test_reads_a_home_that_is_read_only(self):
        self.sql("pragma journal_mode = wal")
        session = self.session()
        os.chmod(self.codex, 0o500)
        done = self.home.run_xmsg("history", "list", "--json", before=permissions_count)
        os.chmod(self.codex, 0o700)
        self.assertEqual(session, json.loads(done.stdout)["sessions"][0]["session"])

    def test_of_a_home_without_codex_says_so(self):
        self.assertIn("no Codex history", self.history("list", "--home", self.home.folder, status=3))

    def test_survives_a_database_with_any_bytes_turned(self):
        for number in range(20):
            self.session(name="name %d" % number)
        with open(self.database, "rb") as file:
            whole = file.read()
        chance = random.Random(6)
        for _ in range(12):
            broken = bytearray(whole)
            for _ in range(chance.choice((1, 20, 400))):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            with open(self.database, "wb") as file:
                file.write(broken)
            done = self.home.command("history", "list")
            self.assertIn(done.returncode, (0, 7), done)
            self.assertNotIn(b"unexpected", done.stderr)

    def test_shows_hostile_names_as_harmless_text(self):
        self.session(name="\x1b[2Jnice\u202ename\n\x9b5m", cwd="/\x1b]0;x\x07", model="\x00", model_provider="\x7f\u2028")
        self.session(name=b"\xff\xfe", model=7.5, preview=b"\x00", cwd=b"\xff")
        out = self.history("list")
        self.assertEqual([], [char for char in out if is_invisible(char) and char != "\n"])
        self.assertIn("nice", out)


class TheAppServer(Case):
    """Asked over a real socket; the answers are a script's."""

    def thread(self, number, **fields):
        """A thread as Codex 0.171.0 tells it."""
        return dict({"id": session_id(number), "name": None, "preview": "began %d" % number, "modelProvider": "first",
                     "model": "model-1", "cwd": self.work, "updatedAt": NOW + number, "source": "cli",
                     "status": {"type": "notLoaded"}, "path": "%s/sessions/x" % self.codex}, **fields)

    def test_is_asked_for_all_providers_page_by_page_and_never_lets_it_mend_its_database(self):
        pages = {None: ([3, 2], "2026|a"), "2026|a": ([1], None)}

        def answer(method, parameters):
            numbers, cursor = pages[parameters["cursor"]]
            return {"data": [self.thread(number) for number in numbers], "nextCursor": cursor}
        self.serve(answer)
        report = self.listed()
        self.assertEqual("app-server", report["backend"])
        self.assertEqual([session_id(3), session_id(2), session_id(1)], [r["session"] for r in report["sessions"]])
        self.assertEqual({"thread/list"}, {method for method, _ in self.asked})
        for _, parameters in self.asked:
            self.assertEqual(([], True, False, []), tuple(parameters[key] for key in (
                "modelProviders", "useStateDbOnly", "archived", "sourceKinds")))
        self.assertEqual(2, len(self.asked))
        self.listed("--limit", "1")
        self.assertEqual(3, len(self.asked), "a page that nobody needs is not asked for")

    def test_that_repeats_a_cursor_is_refused(self):
        self.session()
        self.serve(lambda method, parameters: {"data": [self.thread(1)], "nextCursor": "round"})
        self.assertIn("circles", self.history("list", "--backend", "app-server", status=7))
        report = self.home.command("history", "list", "--json")
        self.assertEqual("sqlite", json.loads(report.stdout)["backend"])
        self.assertIn(b"circles", report.stderr)

    def test_tells_the_same_as_the_database(self):
        kinds = {"cli": 1, "exec": 2, "vscode": 3}
        for source, number in kinds.items():
            self.session(source=source, archived=int(source == "vscode"))

        def answer(method, parameters):
            wanted = ([] if parameters["archived"] else [2]) if parameters["sourceKinds"] else (
                [3] if parameters["archived"] else [1])
            return {"data": [self.thread(number, source={1: "cli", 2: "exec", 3: "vscode"}[number])
                             for number in wanted], "nextCursor": None}
        self.serve(answer)
        for options in ((), ("--include-archived",), ("--include-archived", "--include-non-interactive")):
            both = [self.listed("--backend", backend, *options)["sessions"] for backend in ("app-server", "sqlite")]
            for records in both:
                for record in records:
                    del record["status"], record["rollout"]
            self.assertEqual(*both)
            self.assertEqual(1 + len(options), len(both[0]))

    def test_gets_missing_names_and_models_from_beside_where_they_cannot_be_wrong(self):
        for provider in ("first", "second"):
            self.session(model_provider=provider, model="from the database")
        with open(os.path.join(self.codex, "session_index.jsonl"), "w") as file:
            file.write('{"id":"%s","thread_name":"from the index"}\n' % session_id(1))
        self.serve(lambda *_: {"data": [self.thread(2, model=None), self.thread(1, model=None)], "nextCursor": None})
        self.assertEqual([("", ""), ("from the index", "from the database")], [
            (record["name"], record["model"]) for record in self.listed()["sessions"]])

    def test_that_answers_nonsense_leads_to_the_database(self):
        session = self.session()
        answers = [[], {"data": {}}, {"data": [1, None, {"id": 7}], "nextCursor": 7}, {"code": -1, "message": "x"}, 7]
        left = list(answers)
        self.serve(lambda *_: left.pop())
        for _ in answers:
            report = self.listed()
            self.assertEqual(("sqlite", [session]), (report["backend"], [r["session"] for r in report["sessions"]]))
        self.assertEqual([], left)

    def test_is_asked_for_one_session_by_its_full_id_alone(self):
        def answer(method, parameters):
            if parameters["threadId"] == session_id(1):
                return {"thread": self.thread(1, path=self.codex + "/archived_sessions/x", status={"type": "active"})}
            return {"code": -32600, "message": "thread not loaded: x"}
        self.serve(answer)
        self.assertIn("is archived", self.history("resume", session_id(1), "--dry-run", status=7))
        self.assertIn("no Codex session", self.history("resume", session_id(2), "--dry-run", status=3))
        self.assertEqual({"thread/read"}, {method for method, _ in self.asked})

    def test_has_the_last_word_on_a_session_that_was_found_by_name(self):
        self.session(name="leader")

        def answer(method, parameters):
            if method == "thread/list":
                wanted = [] if parameters["archived"] or parameters["sourceKinds"] else [self.thread(1, name="leader")]
                return {"data": wanted, "nextCursor": None}
            return {"thread": self.thread(1, status={"type": "active", "activeFlags": []})}
        self.serve(answer)
        self.assertIn("loaded (active)", self.history("resume", "leader", "--dry-run", status=7))
        self.assertEqual(["thread/read"], [method for method, _ in self.asked])
        os.unlink(self.database)
        self.assertIn("loaded (active)", self.history("resume", "LEADER", "--dry-run", status=7))
        self.assertEqual("thread/list", self.asked[1][0])

    def test_that_has_the_session_loaded_stops_a_resume(self):
        for status in ("idle", "active", "systemError"):
            record = codex_history._thread_record(self.thread(1, status={"type": status}), False)
            with self.assertRaisesRegex(codex_history.NotPossible, "loaded \\(%s\\)" % status):
                codex_history.resume_plan(self.codex, record, {})

    def test_tells_the_providers_to_a_python_without_tomllib(self):
        self.serve(lambda *_: {"config": {"model_providers": {"third": {}}}})
        script = ("import sys; sys.path.append(%r); sys.modules['tomllib'] = None; import codex_history;"
                  "print(sorted(codex_history.configured_providers(sys.argv[1])))" % ROOT)
        done = subprocess.run([sys.executable, "-c", script, self.codex], stdout=subprocess.PIPE)
        self.assertEqual(b"['third']\n", done.stdout)
        shutil.rmtree(os.path.join(self.codex, "app-server-control"))
        done = subprocess.run([sys.executable, "-c", script, self.codex], stderr=subprocess.PIPE)
        self.assertIn(b"no tomllib", done.stderr)


class ATarget(Case):
    def found(self, target):
        with codex_history.Database(self.codex) as index:
            return codex_history.find(index, self.codex, target)["session"]

    def test_is_a_full_id_then_an_exact_name_then_a_unique_start(self):
        one, two = self.session(name="leader"), self.session(name="Leader of others")
        three = self.session(name=one, archived=1)
        self.session(name="01a22fc2-0002")
        self.assertEqual(one, self.found(one.upper()))
        self.assertEqual(one, self.found("LEADER"))
        self.assertEqual(session_id(4), self.found("01a22fc2-0002"))
        self.assertEqual(three, self.found("01a22fc2-0003"))
        self.assertEqual(two, self.found(two[:-1]))

    def test_is_refused_if_it_means_several_with_their_full_ids(self):
        one, two = self.session(name="same"), self.session(name="Same", archived=1)
        for target in ("same", "01a2"):
            report = self.home.json("history", "export", target, status=4)
            self.assertEqual("ambiguous", report["error"]["code"])
            self.assertEqual([two, one], [line.split()[0] for line in report["error"]["candidates"]])

    def test_that_looks_like_an_id_is_never_a_name(self):
        self.session(name=session_id(9))
        self.history("resume", session_id(9), "--dry-run", status=3)

    def test_is_not_made_of_nothing(self):
        self.session(name="")
        for target in ("01a", "", " ", "%"):
            self.history("export", target, status=2 if not target else 3)

    def test_is_never_chosen_without_a_terminal(self):
        self.session()
        for action in ("resume", "export"):
            self.assertIn("without a terminal", self.history(action, status=2))

    def test_is_chosen_by_number_on_a_terminal(self):
        self.session([said("user", "of the first")])
        self.session([said("user", "of the second")], name="\x1b[31mred")
        no_fzf = {"PATH": self.home.folder}
        status, out = on_a_terminal(self.home, [COMMAND, "export"], 200, env=no_fzf, keys=b"2\r")
        self.assertEqual(0, status)
        self.assertIn(b"of the first", out)
        self.assertNotIn(b"\x1b[31m", out)
        for keys in (b"\x04", b"\r", b"3\r", b"0\r", b"-1\r", b"x\r"):
            status, out = on_a_terminal(self.home, [COMMAND, "export"], 200, env=no_fzf, keys=keys)
            self.assertEqual(2 if keys.strip(b"\r\x04") else 130, status, (keys, out))
            self.assertNotIn(b"Traceback", out)

    def test_is_chosen_by_fzf_where_there_is_one_without_its_user_options(self):
        one, two = self.session([said("user", "of the first")]), self.session(name="a\tb")
        self.program("fzf", 'env | grep FZF && exit 1\nwhile read -r line; do last=$line; done\nprintf "%s\\n" "$last"\n')
        env = {"PATH": self.home.folder + "/bin:/usr/bin:/bin", "FZF_DEFAULT_OPTS": "--bind=start:execute(touch x)"}
        status, out = on_a_terminal(self.home, [COMMAND, "export"], 200, env=env)
        self.assertEqual(0, status, out)
        self.assertIn(b"of the first", out)
        self.program("fzf", "cat >/dev/null; exit 130\n")
        self.assertEqual(130, on_a_terminal(self.home, [COMMAND, "export"], 200, env=env)[0])

    def program(self, name, script):
        folder = os.path.join(self.home.folder, "bin")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "w") as file:
            file.write("#!/bin/sh\n" + script)
        os.chmod(os.path.join(folder, name), 0o755)


class AResume(Case):
    def setUp(self):
        super().setUp()
        if not TOMLLIB:
            self.serve(lambda method, _: {"config": {"model_providers": {"first": {}, "second": {}, ODD: {}}}}
                       if method == "config/read" else {"code": -1, "message": "not asked"})

    def plan(self, session, *options, status=0, **env):
        return self.home.json("history", "resume", session, "--dry-run", *options, status=status, **env)

    def refused(self, session, reason, *options, **env):
        error = self.plan(session, *options, status=7, **env)["error"]
        self.assertEqual("not_possible", error["code"])
        self.assertIn(reason, error["message"])

    def test_is_one_command_with_the_sessions_own_provider_model_and_folder(self):
        session = self.session(model_provider=ODD, model="-m odd")
        with open(os.path.join(self.codex, "config.toml"), "w", encoding="utf-8") as file:
            file.write("[model_providers.'%s']\n" % ODD)
        plan = self.plan(session)
        self.assertEqual(["codex", "resume", session, "-c", 'model_provider="a \\"b\\" \\\\ é"', "--model=-m odd",
                          "--cd=" + self.work], plan["argv"])
        self.assertEqual({"CODEX_HOME": self.codex}, plan["env"])
        import shlex
        self.assertEqual(plan["argv"], shlex.split(self.home.command(
            "history", "resume", session, "--dry-run").stdout.decode()))
        out = self.home.command("history", "resume", session, "--dry-run", "--home", self.codex, CODEX_HOME="/else")
        self.assertEqual(["env", "CODEX_HOME=" + self.codex] + plan["argv"], shlex.split(out.stdout.decode()))

    def test_says_what_a_status_does_not_prove(self):
        session = self.session()
        self.assertIn("no lock tells", self.plan(session)["warnings"][0])
        os.mkdir(os.path.join(self.codex, "thread-writer-locks"))
        self.assertIn("nobody holds its writer lock", self.plan(session)["warnings"][0])

    def test_is_refused_to_the_session_itself(self):
        session = self.session()
        self.refused(session, "cannot resume itself", CODEX_THREAD_ID=session)
        self.refused(session, "cannot resume itself", CODEX_THREAD_ID="child", CODEX_SESSION_ID=session)

    def test_of_an_archived_session_is_refused(self):
        self.refused(self.session(archived=1), "codex unarchive")

    def test_without_provider_or_model_is_refused(self):
        self.refused(self.session(model_provider=""), "no provider")
        session = self.session(model=None)
        self.refused(session, "no model")
        self.assertEqual("--model=m", self.plan(session, "--model", "m")["argv"][5])

    def test_is_one_that_the_filters_leave(self):
        here, there = self.session(name="same"), self.session(name="same", model_provider="second", cwd="/")
        self.assertIn("2 Codex sessions", self.history("resume", "same", "--dry-run", status=4))
        for options, expected in ((["--provider", "first"], here), (["--cwd", self.work], here), (["--query", here], here)):
            self.assertEqual(expected, self.plan("same", *options)["argv"][2])
            self.assertIn("--provider, --query", self.history("resume", there, *options, "--dry-run", status=3))
            self.assertIn("--provider, --query", self.history("resume", there[:-1], *options, "--dry-run", status=3))

    def test_with_a_provider_that_is_not_configured_is_refused(self):
        session = self.session(model_provider="gone")
        self.refused(session, "config.toml")
        self.refused(self.session(), "config.toml", "--switch-provider", "gone", "--model", "m")
        self.plan(self.session(model_provider="openai"))
        if not TOMLLIB:
            return
        with open(os.path.join(self.codex, "config.toml"), "w") as file:
            file.write('[model_providers.gone]\nkey = "secret-sk-1234\n')
        self.refused(session, "not valid TOML")
        self.assertNotIn("secret", json.dumps(self.plan(session, status=7)))
        os.unlink(os.path.join(self.codex, "config.toml"))
        self.refused(session, "config.toml")

    def test_with_control_characters_is_refused(self):
        for column in ("model", "model_provider", "cwd"):
            self.refused(self.session(**{column: "/a\x1bb"}), "control characters")

    def test_whose_folder_is_gone_is_refused(self):
        self.refused(self.session(cwd=self.home.folder + "/gone"), "is gone")
        self.refused(self.session(cwd="relative"), "is gone")

    def test_of_a_session_whose_writer_lock_is_held_is_refused(self):
        session = self.session()
        os.mkdir(os.path.join(self.codex, "thread-writer-locks"))
        lock = os.path.join(self.codex, "thread-writer-locks", session + ".lock")
        holder = subprocess.Popen([sys.executable, "-c", "import fcntl, sys; file = open(sys.argv[1], 'w');"
                                   "fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()", lock],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(end, holder)
        holder.stdout.readline()
        self.refused(session, "process %d holds" % holder.pid)
        end(holder)
        self.plan(session)

    def test_of_a_session_that_xmsg_knows_as_open_is_refused(self):
        session = self.session()
        host = HostProcess(self.home, "codex")
        self.addCleanup(host.end)
        store = self.open_store()
        peer(store, session, pid=host.pid, pid_start=host.start)
        self.refused(session, "xmsg list")
        host.end()
        self.plan(session)

    def test_at_another_provider_says_where_the_history_goes_and_needs_a_model(self):
        session = self.session()
        self.history("resume", session, "--switch-provider", "second", "--dry-run", status=2)
        plan = self.plan(session, "--switch-provider", "second", "--model", "m2")
        self.assertEqual(['model_provider="second"', "--model=m2"], plan["argv"][4:6])
        self.assertRegex(plan["warnings"][1], "history of this session goes to .* second.*xmsg history export")
        for said, possible in (("codex-cli 0.165.0", True), ("codex-cli 0.166.0", False), ("codex-cli 1.0.0", False),
                               ("codex-cli 0.166.0-alpha.1", True), ("nonsense", True)):
            path = self.codex_on_path("echo " + said) + ":/usr/bin:/bin"
            out = self.history("resume", session, "--switch-provider", "second", "--model", "m2", "--dry-run", PATH=path,
                               status=0 if possible else 7)
            self.assertEqual(not possible, "only at its own provider, first; `xmsg history export" in out, said)
            self.history("resume", session, "--dry-run", PATH=path)

    def codex_on_path(self, script):
        """The folder of a program `codex`."""
        folder = os.path.join(self.home.folder, "bin")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "codex"), "w") as file:
            file.write("#!/bin/sh\n%s\n" % script)
        os.chmod(os.path.join(folder, "codex"), 0o755)
        return folder

    def test_needs_a_terminal(self):
        self.assertIn("terminal", self.history("resume", self.session(), status=2))

    def resume(self, *arguments, keys=b"", **env):
        """(status, screen, what codex got) of a resume on a terminal."""
        seen = os.path.join(self.home.folder, "seen")
        folder = self.codex_on_path('[ "$1" != --version ] || exit\n{ umask; printf "%%s\\n" "${CODEX_HOME-unset}" "$@"; } '
                                    '>"%s"\ntrap | grep -c PIPE >>"%s"; exit 7' % (seen, seen))
        status, out = on_a_terminal(self.home, [COMMAND, "resume", *arguments], 200, keys=keys, umask=0o027,
                                    env=dict({"PATH": folder + ":/usr/bin:/bin"}, **env))
        if not os.path.exists(seen):
            return status, out, None
        with open(seen) as file:
            words = file.read().split("\n")
        os.unlink(seen)
        return status, out, words

    def test_becomes_codex_as_if_that_had_been_started_in_its_place(self):
        session = self.session()
        status, out, got = self.resume(session)
        self.assertEqual((7, ["0027", "unset", "resume", session, "-c", 'model_provider="first"', "--model=model-1",
                              "--cd=" + self.work]), (status, got[:8]), out)
        self.assertEqual(self.codex, self.resume(session, "--home", self.codex, CODEX_HOME="/else")[2][1])

    def test_at_another_provider_asks_once_and_only_yes_is_yes(self):
        session = self.session()
        switch = [session, "--switch-provider", "second", "--model", "m2"]
        for keys, goes in ((b"y\r", True), (b"yes\r", True), (b"\r", False), (b"n\r", False), (b"\x04", False)):
            status, out, got = self.resume(*switch, keys=keys)
            self.assertEqual((7 if goes else 130, goes), (status, got is not None), out)
            self.assertEqual(1, out.count(b"go on?"))

    def test_without_codex_on_the_path_says_so(self):
        status, out = on_a_terminal(self.home, [COMMAND, "resume", self.session()], 200)
        self.assertEqual(1, status)
        self.assertIn(b"cannot run codex", out)


CONTEXT = [
    {"timestamp": "x", "type": "session_meta", "payload": {"id": session_id(1), "base_instructions": {"text": "BASE"}}},
    said("developer", ["SKILLS", "PERMISSIONS"], "host_skills.instructions", "permissions.instructions"),
    said("user", "<environment_context>\n  <cwd>/tmp</cwd>", "environments.environment_context"),
    {"timestamp": "x", "type": "event_msg", "payload": {"type": "item_completed", "item": {"text": "do it"}}}]


class AnExport(Case):
    def test_holds_what_was_said_and_done_once_in_order_and_nothing_else(self):
        records = CONTEXT + [
            said("user", "do it", "user.text"),
            response("reasoning", id="rs_1", summary=[{"type": "summary_text", "text": "THOUGHT"}],
                     encrypted_content="gAAAAENCRYPTED"),
            said("assistant", "I look", "unknown"),
            response("function_call", id="fc_1", name="exec_command", arguments='{"cmd": "ls"}', call_id="call_1"),
            response("function_call_output", id="fco_1", call_id="call_1", output="a\nb\n"),
            response("custom_tool_call", name="apply_patch", input="*** Begin Patch", call_id="call_2"),
            response("custom_tool_call_output", call_id="call_2", output=[{"type": "input_text", "text": "Done"},
                                                                          {"type": "input_image", "image_url": "data:"}]),
            response("local_shell_call", action={"type": "exec", "command": ["ls", "é"], "timeout_ms": 10000}, call_id="call_3"),
            response("function_call_output", call_id="call_3", output={"content": "old form", "success": True}),
            response("web_search_call", action={"type": "search", "query": "q"}, id="ws_1"),
            response("function_call_output", name="send_message_to_thread", namespace="codex_tui", output="a peer's"),
            response("function_call", name="now", arguments="", call_id="call_4"),
            response("function_call_output", call_id="call_4", output={"at": 12345678901234567891}),
            response("tool_search_output", call_id="call_5", tools=[{"name": "t"}]),
            response("image_generation_call", id="ig_1", revised_prompt="a cat", result="iVBOR"),
            {"timestamp": "x", "type": "compacted", "payload": {"message": "SUMMARY", "replacement_history": [
                said("user", "do it")["payload"]]}},
            said("assistant", ["done", "really"], "unknown", "unknown")]
        expected = [
            ("User", "do it"), ("Assistant", "I look"), ("Tool call: `exec_command`", '{"cmd": "ls"}'),
            ("Tool result", "a\nb"), ("Tool call: `apply_patch`", "*** Begin Patch"),
            ("Tool result", "Done\n(an image)"),
            ("Tool call: `local_shell`", '{"type": "exec", "command": ["ls", "é"], "timeout_ms": 10000}'),
            ("Tool result", "old form"),
            ("Tool call: `web_search`", '{"type": "search", "query": "q"}'), ("Tool result", "a peer's"),
            ("Tool call: `now`", ""), ("Tool result", '{"at": 12345678901234567891}'),
            ("Tool result", '[{"name": "t"}]'), ("Tool call: `image_generation`", "a cat"),
            ("Assistant", "done\nreally")]
        session = self.session(records)
        out = self.export(session)
        self.assertEqual(expected, [item[:2] for item in read_markdown(out)])
        self.assertIn("*The end: 15 texts.*\n", out)
        full = read_markdown(self.export(session, "--full"))
        self.assertEqual(("Reasoning, as Codex shows it", "THOUGHT"), full.pop(1)[:2])
        self.assertEqual(expected, [item[:2] for item in full])
        for word in ("msg_", "fc_1", "call_1", "ENCRYPTED", "SKILLS", "BASE", "SUMMARY", session, "environment_context"):
            self.assertNotIn(word, self.export(session, "--full"))

    def test_of_a_fork_begins_with_what_it_was_forked_from_as_far_as_that_counts(self):
        def meta(**base):
            return {"timestamp": "x", "type": "session_meta", "payload": dict({"id": "x"}, **base)}
        lines = [json.dumps(record).encode() + b"\n" for record in (
            meta(), said("user", "first"), said("assistant", "one"), said("user", "only in the first"))]
        first = self.session(lines)
        base = {"thread_id": first, "end_ordinal_exclusive": 3, "end_byte_offset": sum(map(len, lines[:3]))}
        second = [json.dumps(record).encode() + b"\n" for record in (meta(history_base=base), said("user", "second"))]
        fork = self.session(second + [said("user", "only in the second")])
        third = self.session([meta(history_base={"thread_id": fork, "end_byte_offset": sum(map(len, second))}),
                              said("user", "third")], source="vscode")
        self.assertEqual(["first", "one", "second", "only in the second"],
                         [text for _, text, _ in read_markdown(self.export(fork))])
        self.assertEqual(["first", "one", "second", "third"], [text for _, text, _ in read_markdown(self.export(third))])
        round_about = session_id(next(self.numbers) + 1)
        for base in (round_about, session_id(9999)):
            session = self.session([meta(history_base={"thread_id": base, "end_byte_offset": 9}), said("user", "x")])
            self.assertIn("goes on from", self.history("export", session, status=7))
        for base in ({}, 7, {"thread_id": first, "end_byte_offset": "9"}, {"thread_id": "../x", "end_byte_offset": 9}):
            self.assertEqual(["own"], [text for _, text, _ in self.texts([meta(history_base=base), said("user", "own")])])

    def test_of_a_session_whose_user_went_back_holds_what_it_went_on_with(self):
        """Each way back makes a further file, which names the one before by the id at the end of that one's name."""
        def write(session, revert, base, count, *texts):
            """A file; base and count: how many lines of which it goes on from. Its id, and its lines."""
            meta = {"id": session}
            if base:
                meta["history_base"] = {"thread_id": base[0], "end_byte_offset": sum(map(len, base[1][:count]))}
            lines = [json.dumps(record).encode() + b"\n" for record in
                     [{"timestamp": "x", "type": "session_meta", "payload": meta}] + [said("user", text) for text in texts]]
            name = "rollout-%s%s.jsonl" % (session, "_" + revert if revert else "")
            path = os.path.join(self.codex, "sessions", "2026", "12", "01", name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.writelines(lines)
            return revert or session, lines, path

        def exported(session):
            return [text for _, text, _ in read_markdown(self.export(session))]
        once, twice, forked = (session_id(9000 + number) for number in range(3))
        first = self.session()
        os.unlink(os.path.join(self.codex, "sessions", "rollout-%s.jsonl" % first))
        begun = write(first, "", None, 0, "a", "b", "c")
        back = write(first, once, begun, 3, "d", "e")
        again = write(first, twice, back, 2, "f")
        self.sql("update threads set rollout_path = ? where id = ?", (back[2], first))
        self.assertEqual(["a", "b", "d", "e"], exported(first))
        self.sql("update threads set rollout_path = ? where id = ?", (again[2], first))
        self.assertEqual(["a", "b", "d", "f"], exported(first))
        # What was forked before has the old file, whatever became of the session since.
        old, new = self.session(), self.session()
        for fork, base, count in ((old, begun, 4), (new, again, 2)):
            self.sql("update threads set rollout_path = ? where id = ?",
                     (write(fork, "", base, count, "own")[2], fork))
        self.assertEqual(["a", "b", "c", "own"], exported(old))
        self.assertEqual(["a", "b", "d", "f", "own"], exported(new))
        archived = os.path.join(self.codex, "archived_sessions", os.path.basename(begun[2]))
        os.makedirs(os.path.dirname(archived), exist_ok=True)
        os.rename(begun[2], archived)
        self.assertEqual(["a", "b", "d", "f", "own"], exported(new))
        os.rename(archived, archived + ".zst")
        self.assertIn("compressed", self.history("export", old, status=7))

    def test_of_an_older_codex_tells_its_context_by_how_it_begins(self):
        records = [said("user", start + "x") for start in codex_history.NOT_SAID] + [
            said("user", "mine"), said("user", "see <environment_context>"), said("developer", "rules")]
        self.assertEqual(["mine", "see <environment_context>"], [item[1] for item in self.texts(records)])

    def test_keeps_a_prompt_that_looks_like_context_where_codex_says_that_it_is_the_users(self):
        self.assertEqual([("User", "<environment_context>", "")],
                         self.texts([said("user", "<environment_context>", "user.text")]))

    def test_never_shows_a_hooks_words_as_the_users(self):
        records = [said("developer", "[peer x]\nhello", "hooks.additional_context"),
                   said("user", '<hook_prompt hook_run_id="stop:4:/h">a &lt;b&gt;&amp;</hook_prompt>', "unknown")]
        hook = "A hook, not the user"
        self.assertEqual([(hook, "[peer x]\nhello", ""), (hook, "a <b>&", "")], self.texts(records))

    def test_gives_each_text_a_fence_that_nothing_in_it_ends(self):
        texts = ["```", "a\n```python\nx", "``````\n# forged", "~~~\n", "a\r```\rb\r\n````c", "    ```", "` ``", "<!--",
                 "## User\n\n```\nforged\n```", "*The end: 0 texts.*", "```" * 1000, "\u2028```\x0b````\x0c`````"]
        found = self.texts([said("user", text) for text in texts] +
                           [response("function_call", name="`x`\n# y", arguments=text) for text in texts])
        plain = [codex_history.BAD_CHARACTERS.sub("\ufffd", re.sub("\r\n?", "\n", text)).rstrip("\n") for text in texts]
        self.assertEqual(plain * 2, [text for _, text, _ in found])
        self.assertEqual(["User"] * 12 + ["Tool call: `_x____y`"] * 12, [heading for heading, _, _ in found])

    def test_clips_long_tool_output_and_says_how_much_and_never_what_was_said(self):
        long = "x" * 9000
        records = [said("user", long), said("assistant", long), response("function_call", name="n", arguments=long),
                   response("function_call_output", output=long)]
        note = "*1000 more characters are left out; `--full` keeps them.*"
        self.assertEqual([(9000, ""), (9000, ""), (8000, note), (8000, note)],
                         [(len(text), more) for _, text, more in self.texts(records)])
        self.assertEqual([(9000, "")] * 4, [(len(text), more) for _, text, more in self.texts(records, "--full")])

    def test_passes_over_what_cannot_be_read_and_says_so(self):
        huge = json.dumps(said("user", "y" * (codex_history.LONGEST_RECORD + 1))).encode() + b"\n"
        records = [b'{"type":"response_item","payload":{"type":"message"\n', b'["response_item"]\n', huge,
                   b'{"type":"response_item","payload":' + b"[" * 100000 + b"\n", b'"response_item"\n', b"\xff\n\n\0\n",
                   b'{"type":"response_item","payload":' + b"9" * 6000 + b"}\n", {"type": "unknown_item", "payload": 3},
                   b'{"type":"response_item","payload":{"type":"message","role":"user","content":"\xff\xfe caf\xc3"}}\n',
                   json.dumps(response("web_search_call", action=[[]] * codex_history.MOST_BRACKETS)).encode() + b"\n",
                   json.dumps(said("user", "\U0001f600" + "w" * codex_history.LONGEST_WIDE), ensure_ascii=False).encode()
                   + b"\n",
                   json.dumps(said("assistant", "w" * codex_history.LONGEST_WIDE), ensure_ascii=False).encode() + b"\n",
                   said("user", "last", "user.text"),
                   json.dumps(said("assistant", "torn")).encode()[:-9]]
        out = self.export(self.session(records))
        self.assertEqual(["\ufffd\ufffd caf\ufffd", "w" * codex_history.LONGEST_WIDE, "last"],
                         [text for _, text, _ in read_markdown(out)])
        self.assertIn("; 6 records that could not be read are left out.*", out)

    def test_of_any_rollout_is_whole_markdown(self):
        chance = random.Random(20)
        pieces = ["```", "````", "\n", "\r", "# ", "~~~", "<!--", "\x1b[2J", "\0", "\u202e", "\ud800", "é漢😀", " ", "x" * 90,
                  "---", "*The end: 1 texts.*", "<hook_prompt x>", "</hook_prompt>", "<environment_context>", "\u2028"]

        def text():
            return "".join(chance.choice(pieces) for _ in range(chance.randrange(12)))

        def value(depth=0):
            kind = chance.randrange(9 if depth < 3 else 6)
            if kind > 6:
                return [value(depth + 1) for _ in range(chance.randrange(4))]
            if kind > 5:
                return {chance.choice(["type", "text", "role", "x"]): value(depth + 1) for _ in range(3)}
            return chance.choice([None, True, 7, 1e300, text(), text()])
        kinds = ["message", "reasoning", "function_call", "function_call_output", "web_search_call", "_call", "_output", "x", 5]
        roles = ["user", "assistant", "developer", "system", None, ["user"]]
        keys = ["content", "output", "arguments", "input", "action", "name", "summary"]
        for _ in range(60):
            lines = []
            for _ in range(30):
                payload = {key: value() for key in keys if chance.random() < 0.7}
                payload.update(type=chance.choice(kinds), role=chance.choice(roles))
                if chance.random() < 0.5:
                    payload["internal_chat_message_metadata_passthrough"] = {"content_item_kinds": value()}
                if chance.random() < 0.3:
                    payload["content"] = [{"type": "input_text", "text": text()} for _ in range(2)]
                line = json.dumps({"type": "response_item", "payload": payload}).encode()
                if chance.random() < 0.2:
                    cut = chance.randrange(len(line))
                    line = line[:cut] + bytes([chance.randrange(256)]) + line[cut + chance.randrange(2):]
                lines.append(line if chance.random() < 0.1 else line + b"\n")
            with tempfile.TemporaryFile() as file:
                file.write(b"".join(lines))
                file.seek(0)
                out = "".join(codex_history.markdown([(file, None)], full=True, redact=chance.random() < 0.5))
            read_markdown(out)
            self.assertEqual([], [char for char in out if codex_history.BAD_CHARACTERS.match(char)])
            out.encode("utf-8")

    def test_masks_secrets_on_request(self):
        secrets = ["sk-proj-" + "Ab1_" * 8, "ghp_" + "a1" * 18, "AKIA" + "ABCD1234" * 2, "xoxb-123456789-abcdef",
                   "github_pat_" + "a1" * 20, "AIza" + "x" * 35, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjMifQ.abc-_9",
                   "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
                   "-----BEGIN PRIVATE KEY-----\\nMIIE and no end", "hf_" + "a" * 30, "glpat-" + "a" * 20,
                   "GOCSPX-" + "a1" * 14, "ya29." + "a1_" * 20, "SG." + "a" * 22 + "." + "b" * 40, "pypi-" + "Ag" * 30]
        texts = ["key %s." % secret for secret in secrets] + [
            "https://ada:hunter2hunter@example.org/x", "Authorization: Bearer abcdefgh1234", "PASSWORD=correcthorse x",
            "redis://:hunter2hunter@cache", "postgres://u:hunter2@hunter@db/x", "AWS_SECRET_ACCESS_KEY=correcthorse",
            'API_KEY="correcthorse"', '{"password": "correcthorse"}', '{\\"api_key\\":\\"correcthorse\\"}',
            "token = 'correcthorse'", "AccountKey=correcthorse==", "-H 'Authorization: Basic Y29ycmVjdGhvcnNl'",
            "https://hooks.slack.com/services/T0/B0/correcthorsecorrect"]
        records = [said("user", text) for text in texts]
        out = self.export(self.session(records), "--redact")
        for secret in secrets + ["hunter", "abcdefgh1234", "correcthorse", "Y29y", "MIIE"]:
            self.assertNotIn(secret, out)
        self.assertEqual(len(texts), out.count("[redacted]"))
        self.assertIn("@example.org/x", out)
        plain = "an ordinary sentence about task-force, disk-usage and https://example.org:80/a@b, its token: a secret, and " \
                "token = generate_token()"
        self.assertEqual([plain], [text for _, text, _ in self.texts([said("user", plain)], "--redact")])
        self.assertIn(secrets[0], self.export(self.session(records)))
        long = [response("function_call_output", output="x" * 7990 + " " + secrets[0])]
        self.assertNotIn("sk-proj", self.export(self.session(long), "--redact"))

    def test_is_a_file_of_ones_own_that_has_its_name_only_once_it_is_whole(self):
        session, path = self.session([said("user", "hello")]), os.path.join(self.home.folder, "out.md")
        self.assertEqual("written to %s\n" % path, self.history("export", session, "--output", path,
                                                                "--backend", "sqlite"))
        self.assertEqual(0o600, stat.S_IMODE(os.stat(path).st_mode))
        with open(path) as file:
            self.assertEqual(self.export(session), file.read())
        self.assertIn("--output FILE", self.history("export", session, "--json", "--backend", "sqlite", status=2))
        import command_line

        def pieces():
            yield "a part"
            with open(path) as file:
                self.assertIn("hello", file.read())
            os.kill(os.getpid(), number)
            yield "another"
        before = sorted(os.listdir(self.home.folder))
        for number in (signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.assertRaises(KeyboardInterrupt):
                command_line.write_whole(path, pieces())
            self.assertEqual(before, sorted(os.listdir(self.home.folder)))
            with open(path) as file:
                self.assertIn("hello", file.read())

    def test_never_writes_over_a_device_a_folder_or_through_a_link(self):
        session, link = self.session([said("user", "hello")]), os.path.join(self.home.folder, "link")
        fifo = os.path.join(self.home.folder, "fifo")
        os.mkfifo(fifo)
        for path in (self.work, fifo, "/dev/null"):
            self.assertIn("no plain file", self.history("export", session, "--output", path, status=2))
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        os.symlink(os.path.join(self.codex, "config.toml"), link)
        self.history("export", session, "--output", link)
        with open(os.path.join(self.codex, "config.toml")) as file:
            self.assertTrue(file.read().startswith("[model_providers"))
        self.assertIn("cannot write", self.history("export", session, "--output", self.work + "/no/x", status=1))

    def test_reads_nothing_but_a_plain_file_inside_the_codex_home(self):
        outside = os.path.join(self.home.folder, "outside.jsonl")
        with open(outside, "w") as file:
            file.write(json.dumps(said("user", "of somebody else")))
        link, fifo = os.path.join(self.codex, "link.jsonl"), os.path.join(self.codex, "fifo.jsonl")
        os.symlink(outside, link)
        os.mkfifo(fifo)
        open(self.codex + "/packed.jsonl.zst", "w").close()
        for path, reason in ((self.codex + "/packed.jsonl", "compressed"), (outside, "outside"), (link, "outside"), (self.codex + "/../outside.jsonl", "outside"),
                             (self.codex + "2/x", "outside"), (fifo, "not a plain file"), (self.codex, "outside"),
                             (self.codex + "/sessions", "not a plain file"), (self.codex + "/none", "No such file"),
                             ("", "does not say"), (self.codex + "/x.jsonl.zst", "compressed")):
            session = self.session(rollout_path=path)
            out = self.history("export", session, status=7)
            self.assertIn(reason, out)
            self.assertNotIn("somebody", out)

    def test_takes_memory_that_does_not_grow_with_the_rollout(self):
        # Records of the greatest sizes, then many of 64 KiB: 35 MB in all.
        largest = said("user", "é" * (codex_history.LONGEST_RECORD // 2 - 200))
        widest = said("user", "\U0001f600" + "x" * (codex_history.LONGEST_WIDE - 400))
        too_wide = said("user", "\U0001f600" + "x" * (codex_history.LONGEST_RECORD - 400))
        too_much = response("web_search_call", action=[[]] * (codex_history.LONGEST_RECORD // 4 - 400))
        session = self.session([json.dumps(record, ensure_ascii=False).encode() + b"\n"
                                for record in (largest, widest, too_wide, too_much)])
        with open(os.path.join(self.codex, "sessions", "rollout-%s.jsonl" % session), "ab") as file:
            line = json.dumps(response("function_call_output", output="z" * 65000)).encode() + b"\n"
            for _ in range(300):
                file.write(line)
        script = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True);" \
                 "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = self.home.run([sys.executable, "-c", script, COMMAND, "export", session, "--full"])
        self.assertLess(int(done.stdout) * (1 if sys.platform == "linux" else 1 / 1024), 60 * 1024, done.stderr)


if __name__ == "__main__":
    unittest.main()
