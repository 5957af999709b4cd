"""Visible delivery to Codex: the routes as a table, and every way in which an app-server can fail.

The app-servers are scripted and hostile, on real sockets; tests/real/ has the real ones.
"""
import collections
import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
import unittest
from unittest import mock

import support
import codex_delivery
from codex_delivery import Codex, windows
from support import FakeProc, HomeCase, PATIENCE
from side_by_side import load_tests  # noqa: F401
from test_app_server import Gone, Server, read_client_frames, server_frame, text_frame

FULL = os.environ.get("XMSG_FULL") == "1"
LONG, SHORT, SLACK = 20 * PATIENCE, 0.15 * PATIENCE, 1.0 * PATIENCE
THREAD, SENDER = "01a04cd2-0000-7000-8000-000000000001", "01a04cd2-0000-7000-8000-000000000002"
TEXT = "[peer ada · claude:7c1f0a52; not a user instruction]\nhello <b> & c"
UID = "0123456789abcdef"


class World(unittest.TestCase):
    """A CODEX_HOME whose processes, and who holds a thread open there, are what the test says."""

    def setUp(self):
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="xmsg-test-codex-"))
        self.addCleanup(shutil.rmtree, self.home)
        os.mkdir(os.path.join(self.home, "thread-writer-locks"))
        os.mkdir(os.path.join(self.home, "app-server-control"), 0o700)
        self.proc = FakeProc()
        self.addCleanup(self.proc.remove)
        self.enterContext(mock.patch.dict(os.environ, {"XMSG_PROC_ROOT": self.proc.folder}))
        self.hold(SENDER, 1)
        write_down(self.home, SENDER)
        self.left = []

    if not hasattr(unittest.TestCase, "enterContext"):  # Python before 3.11
        def enterContext(self, manager):
            self.addCleanup(manager.__exit__, None, None, None)
            return manager.__enter__()

    def hold(self, thread, pid):
        path = os.path.join(self.home, "thread-writer-locks", thread + ".lock")
        open(path, "w").close()
        status = os.stat(path)
        with open(os.path.join(self.proc.folder, "locks"), "a") as file:
            file.write("1: FLOCK  ADVISORY  WRITE %d %02x:%02x:%d 0 EOF\n" % (
                pid, os.major(status.st_dev), os.minor(status.st_dev), status.st_ino))

    def tui(self, pid, version="0.171.0", home=None, words=("codex",)):
        """A process of Codex; version: as its package says, None for a program that says nothing."""
        package = os.path.join(self.home, "package-%d" % pid)
        os.makedirs(os.path.join(package, "bin"))
        with open(os.path.join(package, "bin", "codex"), "w") as file:
            file.write("#!/bin/sh\n")
        if version:
            with open(os.path.join(package, "codex-package.json"), "w") as file:
                json.dump({"version": version}, file)
        self.proc.add(pid, list(words), executable=os.path.join(package, "bin", "codex"))
        with open(os.path.join(self.proc.folder, str(pid), "environ"), "wb") as file:
            file.write(b"CODEX_HOME=%s\0" % os.fsencode(home or self.home))

    def serving(self, script, **limits):
        """An app-server on the control socket of the CODEX_HOME."""
        server = self.enterContext(Server(script, **limits))
        link = os.path.join(self.home, "app-server-control", "app-server-control.sock")
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(server.path, link)
        return server

    def deliver(self, seconds=LONG, **changes):
        """(outcome, detail) of one message to THREAD; self.left has the windows that leave() was told of."""
        codex = Codex(self.home, seconds)
        job = {"codex": codex, "target_session": THREAD, "sender": None, "uid": UID, "body": "hello <b> & c",
               "text": TEXT, "leave": self.left.append}
        [(outcome, facts)] = codex_delivery.deliver_all([dict(job, **changes)])
        codex.close()
        return outcome, facts["detail"]


Deed = collections.namedtuple("Deed", "act")  # what a server does, act(peer, request's id), instead of answering


class AppServer:
    """The script of an app-server: answers each request by a table, method -> result, RpcError's dict, or function."""

    def __init__(self, **answers):
        self.asked = []
        self.answers = {"thread/read": thread(), "turn/start": {"turn": {"id": "new"}},
                        "turn/steer": {"turnId": "running"}, "thread/turns/list": {"data": [{"id": "running"}]}}
        self.answers.update((name.replace("_", "/"), answer) for name, answer in answers.items())

    version = "0.171.0"

    def __call__(self, peer):
        peer.hello({"userAgent": "anybody/%s (Debian 12.0.0; x86_64) xterm (xmsg; 1)" % self.version})
        done = 1
        while True:
            for message in peer.messages():
                if message.get("id", 0) > done:
                    done = message["id"]
                    self.asked.append((message["method"], message["params"]))
                    answer = self.answers[message["method"]]
                    if isinstance(answer, Deed):
                        return answer.act(peer, done)
                    answer = answer(message["params"]) if callable(answer) else answer
                    kind = "error" if isinstance(answer, dict) and "code" in answer else "result"
                    peer.send(text_frame({"id": message["id"], kind: answer}))
            peer.receive()

    def methods(self):
        return [method for method, _ in self.asked]


def thread(status="idle", accepts=True, source="vscode", flags=()):
    status = {"type": status, "activeFlags": list(flags)} if status == "active" else {"type": status}
    return {"thread": {"id": THREAD, "status": status, "canAcceptDirectInput": accepts, "source": source}}


def write_down(home, session):
    """A thread as Codex's own index of its threads has it."""
    with contextlib.closing(sqlite3.connect(os.path.join(home, "state_5.sqlite"))) as database, database:
        database.execute("create table threads(id text primary key, name text, cwd text, model text, source text)")
        database.execute("insert into threads values (?, 'n', '/w', 'm', 'vscode')", (session,))


def error(message, code=-32600):
    return {"code": code, "message": message}


# ---------------------------------------------------------------------------------------------------- routes

class TheRoute(unittest.TestCase):
    NEW, OLD = (0, 171, 0), (0, 149, 0)

    def route(self, **facts):
        usual = {"fault": None, "version": self.NEW, "status": "idle", "flags": (), "accepts": True, "source": "vscode",
                 "tuis": [self.NEW], "delegable": False, "writer": None, "writer_pid": None, "writer_version": None}
        return windows(dict(usual, **facts))

    def standalone(self, **facts):
        return self.route(**dict({"fault": "no app-server runs there", "status": None, "writer": "tui",
                                  "writer_version": self.NEW}, **facts))

    def test_is_the_seeds_order(self):
        steer, start, native = "codex-turn-steer", "codex-turn-start", "codex-delegated-tool-output"
        for facts, expected in (
                ({}, [start]), ({"status": "active"}, [steer]),
                ({"status": "active", "flags": ("waitingOnApproval",)}, [steer]),
                ({"delegable": True}, [native, start]), ({"delegable": True, "status": "active"}, [native, steer]),
                ({"delegable": True, "version": self.OLD}, [start]),
                ({"delegable": True, "version": (0, 150, 9)}, [start]),
                ({"delegable": True, "version": (0, 151, 0), "tuis": [(0, 151, 0)]}, [native, start]),
                ({"delegable": True, "tuis": [self.NEW, self.OLD]}, [start]),
                ({"delegable": True, "tuis": [self.NEW, None]}, [start]), ({"delegable": True, "tuis": []}, [start]),
                ({"version": (0, 145, 0), "tuis": []}, [start])):
            self.assertEqual((expected, None), self.route(**facts), facts)

    def test_is_none_where_a_thread_takes_nothing_and_says_why(self):
        for facts, why in (({"accepts": None}, "takes no input"), ({"accepts": False}, "takes no input"),
                           ({"accepts": "yes"}, "takes no input"), ({"source": "exec"}, "codex exec"),
                           ({"status": "notLoaded"}, "does not hold"), ({"status": "systemError"}, "does not hold"),
                           ({"status": "notLoaded", "writer": "server"}, "another app-server"),
                           ({"status": "notLoaded", "writer": "nobody"}, "nobody holds")):
            names, reason = self.route(**facts)
            self.assertEqual([], names, facts)
            self.assertIn(why, reason)

    def test_of_a_standalone_session_is_codexs_own_queue_and_of_nothing_else(self):
        self.assertEqual((["codex-queue"], None), self.standalone())
        self.assertEqual((["codex-queue"], None), self.standalone(writer_version=self.OLD))
        self.assertEqual((["codex-queue"], None), self.standalone(fault=None, status="notLoaded"))
        for facts, why in (({"writer_version": (0, 148, 0)}, "has no queue"), ({"writer_version": None}, "unknown"),
                           ({"writer": "exec"}, "codex exec"), ({"writer": "nobody"}, "nobody holds"),
                           ({"writer": "server"}, "another app-server"), ({"writer": "other"}, "not Codex"),
                           ({"writer": None}, "no app-server runs")):
            names, reason = self.standalone(**facts)
            self.assertEqual([], names, facts)
            self.assertIn(why, reason)


class AVersion(World):
    def test_is_that_of_a_release_and_no_other(self):
        for text, expected in (("0.156.1", (0, 156, 1)), ("1.0.10", (1, 0, 10)), ("0.172.0-alpha.3", None), ("", None),
                               ("0.156", None), ("0.156.1.2", None), ("v0.156.1", None), ("0.156.99999", None),
                               ("0.156.1\n", None), ("٠.156.1", None)):
            self.assertEqual(expected, codex_delivery.parse_version(text), text)

    def test_of_an_app_server_is_what_it_says_itself(self):
        for agent, expected in (("xmsg/0.156.1 (Debian 12.0.0; x86_64) xterm-256color (xmsg; 1)", (0, 156, 1)),
                                ("codex/tui/0.156.1 (x)", (0, 156, 1)), ("xmsg/0.157.0-alpha.1 (x)", None),
                                (None, None),
                                ("0.156.1", (0, 156, 1)), ("x (y/0.156.1)", None), (["0.156.1"], None)):
            self.assertEqual(expected, codex_delivery.server_version({"userAgent": agent}), agent)
        self.assertIsNone(codex_delivery.server_version({}))

    def test_of_a_process_is_its_packages(self):
        self.tui(4001, "0.156.1")
        self.assertEqual((0, 156, 1), codex_delivery.running_version(4001))
        for content in (b"", b"[]", b"{}", b'{"version": 1}', b'{"version": "0.156.1-beta"}', b"\xff", b"[" * 5000):
            with open(os.path.join(self.home, "package-4001", "codex-package.json"), "wb") as file:
                file.write(content)
            self.assertIsNone(codex_delivery.running_version(4001), content)

    def test_of_a_program_without_a_package_is_what_the_running_file_says(self):
        self.tui(4001, None)
        path = os.path.join(self.home, "package-4001", "bin", "codex")
        for said, expected in (("codex-cli 0.156.1", (0, 156, 1)), ("codex-cli 0.157.0-alpha.2", None),
                               ("0.156.1", None),
                               ("GNU bash, version 5.2.15", None), ("", None), ("codex-cli 0.156.1 x", None)):
            with open(path, "w") as file:
                file.write("#!/bin/sh\necho '%s'\n" % said)
            os.chmod(path, 0o700)
            self.assertEqual(expected, codex_delivery.running_version(4001), said)

    def test_of_an_upgraded_package_does_not_count_for_a_process_that_still_runs_the_old_file(self):
        self.tui(4001, "0.171.0")
        old = os.path.join(self.home, "old")
        with open(old, "w") as file:
            file.write("#!/bin/sh\necho 'codex-cli 0.149.0'\n")
        os.chmod(old, 0o700)
        path = os.path.join(self.home, "package-4001", "bin", "codex")
        with mock.patch("host_process.executable", return_value=path), \
                mock.patch("host_process.program", return_value=old):
            self.assertEqual((0, 149, 0), codex_delivery.running_version(4001))


class TheFacts(World):
    def facts(self, sender=None, seconds=LONG):
        codex = Codex(self.home, seconds)
        facts = codex.facts(THREAD, sender)
        codex.close()
        return facts

    def test_name_the_tuis_of_this_codex_home_and_no_other_process(self):
        self.serving(AppServer())
        self.tui(4001, "0.156.1")
        self.tui(4002, "0.171.0", words=("codex", "resume", THREAD))
        self.tui(4003, home="/elsewhere")
        self.tui(4004, words=("codex", "exec", "x"))
        self.tui(4005, words=("codex", "app-server", "--listen", "unix://"))
        self.tui(4006, words=("codex", "queue", "--thread", "x"))
        self.proc.add(4007, ["node", "/bin/codex"])
        self.assertEqual([(0, 156, 1), (0, 171, 0)], sorted(self.facts()["tuis"]))

    def test_count_a_tui_whose_home_cannot_be_read_as_one_of_an_unknown_version(self):
        self.serving(AppServer())
        self.tui(4001, "")
        os.unlink(os.path.join(self.proc.folder, "4001", "environ"))
        self.assertEqual([None], self.facts()["tuis"])

    def test_of_an_empty_app_server_are_not_asked_for(self):
        """Its first client would be the originator of all that it ever starts."""
        server = self.serving(AppServer())
        open(os.path.join(self.proc.folder, "locks"), "w").close()
        self.assertIn("no session yet", self.facts()["fault"])
        self.assertEqual([], server.peers)
        self.tui(4001)
        self.assertIsNone(self.facts()["fault"])

    def test_of_an_app_server_that_is_too_old_or_of_no_release_are_its_fault(self):
        for version in ("0.144.6", "0.172.0-alpha.1", "x"):
            script = AppServer()
            script.version = version
            self.serving(script)
            self.assertIn("cannot say whether", self.facts()["fault"])
            self.assertEqual([], script.asked)

    def test_say_whether_the_sender_may_be_named_by_codex_itself(self):
        own = os.getpid()
        script = AppServer(thread_read=lambda params: thread() if params["threadId"] == THREAD else thread(
            "idle" if params["threadId"] == SENDER else "notLoaded"))
        self.serving(script)
        for sender, expected in ((None, False), ((SENDER, own), True), ((SENDER, own + 1), False),
                                 (("other", own), False)):
            self.assertEqual(expected, self.facts(sender)["delegable"], sender)

    def test_of_an_app_server_that_fails_at_the_second_question_are_a_fault(self):
        def only_the_first(params):
            if params["threadId"] == SENDER:
                raise Gone
            return thread()
        self.serving(AppServer(thread_read=only_the_first))
        facts = self.facts((SENDER, os.getpid()))
        self.assertEqual((None, False), (facts["status"], facts["delegable"]))
        self.assertIn("closed", facts["fault"])

    def test_of_a_thread_that_is_described_in_an_unknown_form_are_a_fault(self):
        for answer in ({}, {"thread": None}, {"thread": {"status": "idle"}}, {"thread": {"status": {}}}, [], None, "x"):
            self.serving(AppServer(thread_read=answer))
            facts = self.facts()
            self.assertIsNone(facts["status"], answer)
            self.assertEqual([], windows(facts)[0])

    def test_tell_who_holds_a_thread_that_no_app_server_serves(self):
        self.tui(4001, "0.156.1")
        self.tui(4002, words=("codex", "exec", "x"))
        self.tui(4003, words=("codex", "app-server"))
        self.proc.add(4004, ["vim"])
        for pid, role, version in ((4001, "tui", (0, 156, 1)), (4002, "exec", None), (4003, "server", None),
                                   (4004, "other", None), (4005, "other", None), (None, "nobody", None)):
            open(os.path.join(self.proc.folder, "locks"), "w").close()
            if pid:
                self.hold(THREAD, pid)
            facts = self.facts()
            self.assertEqual((role, version), (facts["writer"], facts["writer_version"]), pid)
            self.assertEqual(role == "tui", windows(facts)[0] == ["codex-queue"], pid)

    def test_take_no_longer_than_the_probe_whatever_the_time_limit(self):
        self.serving(lambda peer: (peer.hello(), peer.drain()))
        with mock.patch.object(codex_delivery, "PROBE_SECONDS", SHORT):
            begin = time.monotonic()
            self.assertIn("did not answer", self.facts()["fault"])
            self.assertLess(time.monotonic() - begin, SHORT + SLACK)


# ---------------------------------------------------------------------------------------------------- delivery

class ADelivery(World):
    def test_to_an_idle_thread_starts_a_turn_and_names_nothing_but_the_text(self):
        script = AppServer()
        self.serving(script)
        self.tui(4001)
        self.assertEqual((("ACCEPTED", "codex-turn-start"), None), self.deliver())
        self.assertEqual(["codex-turn-start"], self.left)
        self.assertEqual(("turn/start", {"threadId": THREAD, "input": [{"type": "text", "text": TEXT}],
                                         "clientUserMessageId": UID}), script.asked[-1])

    def test_that_no_window_shows_says_so(self):
        self.serving(AppServer())
        outcome, detail = self.deliver()
        self.assertEqual(("ACCEPTED", "codex-turn-start"), outcome)
        self.assertIn("no window", detail)

    def test_to_an_active_thread_steers_the_newest_turn(self):
        script = AppServer(thread_read=thread("active"))
        self.serving(script)
        self.assertEqual(("ACCEPTED", "codex-turn-steer"), self.deliver()[0])
        self.assertEqual(("turn/steer", {"threadId": THREAD, "expectedTurnId": "running", "clientUserMessageId": UID,
                                         "input": [{"type": "text", "text": TEXT}]}), script.asked[-1])
        self.assertEqual(("thread/turns/list", {"threadId": THREAD, "limit": 1}), script.asked[-2])

    def test_whose_turn_has_just_ended_is_a_start_once(self):
        for message in ("no active turn to steer", "expected active turn id `A` but found `B`"):
            script, self.left = AppServer(thread_read=thread("active"), turn_steer=error(message)), []
            self.serving(script)
            self.assertEqual(("ACCEPTED", "codex-turn-start"), self.deliver()[0])
            self.assertEqual(["codex-turn-steer"], self.left)
            self.assertEqual(["turn/steer", "turn/start"], script.methods()[-2:])
        script = AppServer(thread_read=thread("active"), turn_steer=error("no active turn to steer"),
                           turn_start=error("no active turn to steer"))
        self.serving(script)
        self.assertEqual("NOT_SENT", self.deliver()[0][0])
        self.assertEqual(["turn/steer", "turn/start"], script.methods()[-2:])

    def test_that_codex_declines_is_not_sent(self):
        for changes in ({"turn_start": error("thread not found")}, {"turn_start": error("x", -32603)},
                        {"thread_read": thread("active"), "turn_steer": error("input too large")}):
            script = AppServer(**changes)
            self.serving(script)
            outcome, _ = self.deliver()
            self.assertEqual("NOT_SENT", outcome[0])
            self.assertIn("Codex declined", outcome[1])
            self.assertIn(script.methods()[-1], ("turn/start", "turn/steer"))

    def test_that_is_answered_by_anything_but_an_object_is_unknown(self):
        for result in (None, [], "ok", True, 1):
            self.serving(AppServer(turn_start=result))
            self.assertEqual("UNKNOWN", self.deliver()[0][0], result)

    def test_whose_turns_are_listed_in_an_unknown_form_is_not_sent(self):
        for result in (None, {}, {"data": []}, {"data": [{}]}, error("not materialized yet")):
            script = AppServer(thread_read=thread("active"), **{"thread/turns/list": result})
            self.serving(script)
            self.assertEqual(("NOT_SENT", []), (self.deliver()[0][0], self.left), result)

    def test_that_may_not_leave_does_not(self):
        script = AppServer()
        self.serving(script)

        def refuse(window):
            raise RuntimeError("the reservation was lost")
        self.assertEqual((("NOT_SENT", "the reservation was lost"), None), self.deliver(leave=refuse))
        self.assertNotIn("turn/start", script.methods())

    def test_whose_time_is_over_before_it_leaves_is_not_sent(self):
        script = AppServer()
        self.serving(script)
        self.assertEqual("NOT_SENT", self.deliver(2 * SHORT, leave=lambda window: time.sleep(3 * SHORT))[0][0])
        self.assertNotIn("turn/start", script.methods())

    def test_that_is_longer_than_codex_takes_is_not_sent(self):
        script = AppServer()
        self.serving(script)
        self.assertEqual("NOT_SENT", self.deliver(text="x" * (codex_delivery.INPUT_CHARS + 1))[0][0])
        self.assertNotIn("turn/start", script.methods())


class ADelegation(World):
    def setUp(self):
        super().setUp()
        self.sender = (SENDER, os.getpid())
        self.tui(4001)

    def test_carries_the_bare_body_in_codexs_own_envelope(self):
        script = AppServer()
        self.serving(script)
        self.assertEqual((("ACCEPTED", "codex-delegated-tool-output"), None), self.deliver(sender=self.sender))
        self.assertEqual(("turn/start", {"threadId": THREAD, "input": [], "toolOutput": {
            "namespace": "codex_tui", "name": "send_message_to_thread",
            "output": "<codex_delegation>\n  <source_thread_id>%s</source_thread_id>\n"
                      "  <input>hello &lt;b&gt; &amp; c</input>\n</codex_delegation>" % SENDER}}), script.asked[-1])

    def test_never_goes_to_a_version_that_drops_it(self):
        for server, tui in (("0.149.0", "0.171.0"), ("0.150.0", "0.171.0"), ("0.172.0-alpha.1", "0.171.0"),
                            ("0.171.0", "0.149.0"), ("0.171.0", "0.172.0-alpha.1"), ("0.145.0", "0.149.0")):
            script = AppServer()
            script.version = server
            self.serving(script)
            self.proc.end(4001)
            shutil.rmtree(os.path.join(self.home, "package-4001"))
            self.tui(4001, tui)
            self.deliver(sender=self.sender)
            self.assertFalse([params for _, params in script.asked if "toolOutput" in params], (server, tui))

    def test_that_codex_would_cut_goes_as_visible_input(self):
        script = AppServer()
        self.serving(script)
        room = codex_delivery.DELEGATION_BYTES - len(codex_delivery.delegation(SENDER, ""))
        for body, window in (("x" * room, "codex-delegated-tool-output"), ("x" * (room + 1), "codex-turn-start"),
                             ("汉" * (room // 3 + 1), "codex-turn-start"),
                             ("<" * (room // 4 + 1), "codex-turn-start")):
            self.assertEqual(("ACCEPTED", window), self.deliver(sender=self.sender, body=body)[0])

    def test_that_fails_is_not_tried_by_another_window(self):
        script = AppServer(turn_start=error("x"))
        self.serving(script)
        self.assertEqual("NOT_SENT", self.deliver(sender=self.sender)[0][0])
        self.assertEqual(1, script.methods().count("turn/start"))


# ---------------------------------------------------------------------------------------------------- hostile servers

class AHostileAppServer(World):
    def of_the_message(self, peer):
        """How many bytes of the message the server got."""
        frames, rest = [], b""
        if peer._frames_at:
            frames, rest = read_client_frames(peer.received[peer._frames_at:])
        texts = [payload for first, payload in frames if first == 0x81]
        whole = sum(len(text) for text in texts if b'"turn/start"' in text)
        return whole or (len(rest) if any(b'"thread/read"' in text for text in texts) else 0)

    def check(self, outcome, peer):
        """The word is as good as what can be known: nothing left, or only the server knows."""
        if self.of_the_message(peer) or outcome[0] == "UNKNOWN":
            self.assertEqual(("UNKNOWN", ["codex-turn-start"]), (outcome[0], self.left))
        else:
            self.assertEqual("NOT_SENT", outcome[0])

    def test_that_ends_after_any_number_of_bytes_it_wrote(self):
        words, size = [], 1
        while words[-1:] != ["ACCEPTED"]:
            self.left = []
            server = self.serving(AppServer(), write_at_most=size)
            outcome, _ = self.deliver()
            words.append(outcome[0])
            if outcome[0] != "ACCEPTED":
                self.check(outcome, server.peer)
            size += 1 if FULL else 2
        self.assertEqual(["NOT_SENT", "UNKNOWN", "ACCEPTED"], sorted(set(words), key=words.index))
        self.assertEqual(sorted(words, key=["NOT_SENT", "UNKNOWN", "ACCEPTED"].index), words)

    def test_that_ends_after_any_number_of_bytes_it_read(self):
        whole = self.serving(AppServer())
        self.deliver()
        for size in range(1, len(whole.peer.received) - 8, 1 if FULL else 3):  # the last eight are our goodbye
            self.left = []
            server = self.serving(AppServer(), read_at_most=size)
            outcome, _ = self.deliver()
            if outcome[0] != "ACCEPTED":
                self.check(outcome, server.peer)

    def within(self, script, *words, seconds=SHORT):
        self.left = []
        server = self.serving(script)
        begin = time.monotonic()
        outcome, _ = self.deliver(seconds)
        self.assertLess(time.monotonic() - begin, seconds + SLACK)
        self.assertIn(outcome[0], words)
        server.quiet.set()
        self.check(outcome, server.peer)
        return outcome

    def before_and_after(self, act, seconds=SHORT):
        """A server that misbehaves in place of its answer, to the first question and to the message itself."""
        def early(peer):
            peer.hello()
            peer.wait_message("thread/read")
            act(peer)

        def late(peer):
            peer.hello()
            peer.send(text_frame({"id": peer.wait_message("thread/read")["id"], "result": thread()}))
            peer.wait_message("turn/start")
            act(peer)
        self.within(early, "NOT_SENT", seconds=seconds)
        self.within(late, "UNKNOWN", seconds=seconds)

    def test_in_every_other_way_leaves_a_message_queued_or_unknown_in_time(self):
        def flood(data):
            def act(peer):
                while True:
                    peer.send(data)
            return act

        def drip(peer):
            for byte in text_frame({"id": 9, "result": "x" * 100}):
                peer.send(bytes([byte]))
                time.sleep(SHORT / 20)
        for act in (
                lambda peer: peer.drain(),                                              # silence
                drip,                                                                   # a byte now and then
                flood(server_frame(0x89, b"p" * 125)),                                  # pings
                flood(text_frame({"method": "m", "params": "x" * 60000})),              # notifications
                flood(server_frame(0x00, b"x" * 60000)),                                # fragments of nothing
                lambda peer: (peer.send(b"\x01\x00"), flood(server_frame(0x00, b"x" * 60000))(peer)),  # without an end
                lambda peer: peer.send(b"\x81\x7f\x00\x00\x00\xff\x00\x00\x00\x00"),     # an oversized one
                lambda peer: peer.send(text_frame({"id": 77, "result": {}})),            # an answer to nobody
                lambda peer: peer.send(b"\x81\x01{"), lambda peer: peer.send(b"\xff"),   # no JSON, no frame
                lambda peer: peer.send(b"\x88\x00"), lambda peer: None):  # the end, with and without a word
            self.before_and_after(act)

    def test_with_a_wrong_handshake_gets_nothing(self):
        for response in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"id":1}\n', b"HTTP/1.1 101 x\r\n\r\n"):
            self.within(lambda peer: (peer.shake_hands(lambda _: response), peer.drain()), "NOT_SENT")

    def test_that_has_failed_once_is_not_asked_again_by_the_same_command(self):
        server = self.serving(lambda peer: peer.drain())
        self.enterContext(mock.patch.object(codex_delivery, "PROBE_SECONDS", SHORT))
        codex = Codex(self.home, LONG)
        begin = time.monotonic()
        job = {"codex": codex, "target_session": THREAD, "sender": None, "uid": UID, "body": "x", "text": TEXT,
               "leave": self.left.append}
        outcomes = [outcome[0] for outcome, _ in codex_delivery.deliver_all([job] * 10)]
        self.assertEqual((["NOT_SENT"] * 10, []), (outcomes, self.left))
        self.assertLess(time.monotonic() - begin, SHORT + SLACK)
        self.assertEqual(1, len(server.peers))


# ---------------------------------------------------------------------------------------------------- Codex's queue

class TheQueue(World):
    """A program in place of codex, which serves the socket that it is told to."""

    def setUp(self):
        super().setUp()
        self.tui(4001)
        self.hold(THREAD, 4001)

    def program(self, answer, version="0.171.0", before=""):
        """Answers initialize and then one request, a line each."""
        path = os.path.join(self.home, "package-4001", "bin", "codex")
        kind = "error" if "code" in answer else "result"
        with open(path + ".new", "w") as file:
            file.write("#!%s -S\nimport json, os, sys\n%s\n" % (support.PYTHON, before) +
                       "def answer(**what):\n"
                       "    with open(%r, 'a') as asked:\n"
                       "        asked.write(json.dumps(sys.argv[1:]) + '\\n' + sys.stdin.readline())\n"
                       "    sys.stdout.write(json.dumps(what) + '\\n')\n"
                       "    sys.stdout.flush()\n"
                       "answer(id=1, result={'userAgent': 'xmsg/%s (x)'})\n"
                       "sys.stdin.readline()\n"
                       "answer(id=2, %s=%r)\n"
                       "sys.stdin.read()\n" % (os.path.join(self.home, "asked"), version, kind, answer))
        os.chmod(path + ".new", 0o700)
        os.rename(path + ".new", path)

    def test_of_a_standalone_session_takes_the_text_by_its_socket_and_not_by_an_argument(self):
        self.program({"queuedSubmission": {"id": "item-1"}})
        outcome, detail = self.deliver()
        self.assertEqual((("ACCEPTED", "codex-queue"), ["codex-queue"]), (outcome, self.left))
        self.assertTrue(detail.endswith(" item-1"), detail)
        with open(os.path.join(self.home, "asked")) as asked:
            arguments, _, _, message = map(json.loads, asked)
        self.assertEqual(["app-server", "--listen", "stdio://"], arguments)
        self.assertEqual({"id": 2, "method": "thread/queue/add", "params": {
            "threadId": THREAD, "input": [{"type": "text", "text": TEXT}], "clientUserMessageId": UID}}, message)

    def test_that_declines_has_nothing(self):
        for answer, version, word in ((error("no rollout found for thread id X", -32603), "0.171.0", "NOT_SENT"),
                                      ({"queuedSubmission": {"id": "item-1"}}, "0.148.0", "NOT_SENT"),
                                      ({"queuedSubmission": None}, "0.171.0", "UNKNOWN")):
            self.program(answer, version)
            self.assertEqual(word, self.deliver()[0][0], answer)

    def test_that_ends_without_an_answer_may_have_it(self):
        self.program({}, before="json.dumps = lambda *_, dumps=json.dumps: dumps(*_) if 'result' not in _[0] or "
                                "'userAgent' in _[0]['result'] else os._exit(0)")
        self.assertEqual(("UNKNOWN", ["codex-queue"]), (self.deliver()[0][0], self.left))

    def test_that_does_not_start_has_nothing(self):
        self.program({}, before="sys.exit(1)")
        self.assertEqual(("NOT_SENT", []), (self.deliver()[0][0], self.left))

    def test_is_never_asked_for_a_session_that_has_ended(self):
        """Codex would take it with success and keep it until somebody resumes the session."""
        self.program({"queuedSubmission": {"id": "item-1"}})
        open(os.path.join(self.proc.folder, "locks"), "w").close()
        self.assertEqual(("NOT_SENT", []), (self.deliver()[0][0], self.left))
        self.assertFalse(os.path.exists(os.path.join(self.home, "asked")))


# ---------------------------------------------------------------------------------------------------- the whole way

class TheWholeWay(HomeCase):
    def setUp(self):
        super().setUp()
        self.codex_home = os.path.join(self.home.folder, ".codex")
        for folder in ("thread-writer-locks", "app-server-control", "sessions/2026/12/01"):
            os.makedirs(os.path.join(self.codex_home, folder), 0o700)
        self.rollout = os.path.join(self.codex_home, "sessions/2026/12/01",
                                    "rollout-2026-12-01T00-00-00-%s.jsonl" % THREAD)
        lock = open(os.path.join(self.codex_home, "thread-writer-locks", THREAD + ".lock"), "w")
        self.addCleanup(lock.close)
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_down(self.codex_home, THREAD)
        store = self.open_store()
        support.peer(store, THREAD, transcript=self.rollout)

    def serving(self, script):
        server = Server(script)
        server.__enter__()
        self.addCleanup(server.__exit__, None, None, None)
        link = os.path.join(self.codex_home, "app-server-control", "app-server-control.sock")
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(server.path, link)

    def write_rollout(self, uid):
        with open(self.rollout, "a") as file:
            at = time.strftime("%Y-%m-%dT%H:%M:%S.999Z", time.gmtime())
            file.write(json.dumps({"timestamp": at, "type": "event_msg", "payload": {
                "type": "item_completed", "item": {"type": "UserMessage", "client_id": uid}}}) + "\n")

    def test_of_a_message_is_told_with_its_window_and_confirmed_by_its_own_id_alone(self):
        script = AppServer()
        self.serving(script)
        out = self.home.xmsg("send", THREAD, "hello", session=support.ADA)
        self.assertRegex(out, r"^delivered #1 -> %s  \(from 7c1f0a52, codex-turn-start; no window" % THREAD)
        self.write_rollout("0000000000000000")
        self.assertIsNone(self.home.json("show", "1")["confirmed_at"])
        message = self.home.json("show", "1")
        self.write_rollout(message["uid"])
        message = self.home.json("show", "1")
        self.assertTrue(message["confirmed_at"])
        self.assertEqual(1, script.methods().count("turn/start"))

    def test_of_an_answer_that_got_lost_is_unknown_until_the_rollout_proves_it_and_never_a_second_copy(self):
        def lose(params):
            raise Gone
        script = AppServer(turn_start=lose)
        self.serving(script)
        sent = self.home.json("send", THREAD, "hello", session=support.ADA, status=6)["messages"][0]
        self.assertEqual((True, "direct-uncertain"), (sent["unknown"], sent["state"]))
        self.assertIsNone(self.home.context("codex", THREAD, "PreToolUse", transcript_path=self.rollout))
        self.write_rollout(sent["uid"])
        message = self.home.json("show", "1")
        self.assertEqual(("delivered", "codex-turn-start"), (message["state"], message["window"]))
        self.assertTrue(message["confirmed_at"])
        self.assertEqual(1, script.methods().count("turn/start"))

    def test_of_a_steer_that_got_lost_is_delivered_but_not_confirmed(self):
        self.serving(AppServer(thread_read=thread("active")))
        self.home.xmsg("send", THREAD, "hello", session=support.ADA)
        with open(self.rollout, "w") as file:
            file.write(json.dumps({"timestamp": "2026-12-01T00:00:00.000Z", "type": "event_msg", "payload": {
                "type": "turn_aborted", "reason": "interrupted"}}) + "\n")
        message = self.home.json("show", "1")
        self.assertEqual(("delivered", "codex-turn-steer", None), (
            message["state"], message["window"], message["confirmed_at"]))

    def test_of_what_was_declined_goes_on_by_the_hook(self):
        self.serving(AppServer(turn_start=error("thread not found: x")))
        self.assertIn("queued #1", self.home.xmsg("send", THREAD, "hello", session=support.ADA))
        message = self.home.json("show", "1")
        self.assertEqual(("queued", None), (message["state"], message["window"]))
        self.assertIn("hello", self.home.context("codex", THREAD, "PreToolUse"))

    def test_of_several_in_a_row_keeps_their_order(self):
        script = AppServer()
        self.home.xmsg("send", THREAD, "first", "--no-direct", session=support.ADA)
        self.serving(script)
        self.home.xmsg("send", THREAD, "second", session=support.ADA)
        texts = [params["input"][0]["text"].split("\n")[1] for method, params in script.asked if method == "turn/start"]
        self.assertEqual(["first", "second"], texts)

    def test_past_a_hostile_app_server_keeps_its_memory_within_bounds(self):
        """By what the kernel counted; in KiB."""
        def pour(*parts):
            def act(peer, number):
                for part in parts:
                    peer.send(part)
                while True:
                    peer.send(parts[-1])
            return act

        def answer(text):
            return lambda peer, number: (peer.send(server_frame(0x81, (text % number).encode())), peer.drain())
        endless = pour(b"\x01\x00", server_frame(0x00, b"x" * 60000))
        for question, act in (("thread_read", endless), ("turn_start", endless),
                              ("turn_start", answer('{"id":%d,"result":"' + "é" * ((4 << 20) - 40) + '"}')),
                              ("turn_start", answer('{"id":%d,"result":[' + "[]," * 166000 + "0]}")),
                              ("turn_start", pour(text_frame({"method": "m", "params": "x" * 60000})))):
            self.serving(AppServer(**{question: Deed(act)}))
            process = subprocess.Popen(
                [os.path.join(support.ROOT, "bin", "xmsg"), "send", THREAD, "x"], stdout=subprocess.DEVNULL,
                env=dict(self.home.env, XMSG_CODEX_TIMEOUT=str(PATIENCE), XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=support.ADA))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.WEXITSTATUS(status)
            self.assertEqual(6 if question == "turn_start" else 0, process.returncode)
            self.assertLess(usage.ru_maxrss, 100 << 10)
            self.home.sql("delete from messages")

    def test_shows_in_list_and_in_a_dry_run_what_would_be_tried_and_why_not(self):
        [session] = self.home.json("list")["sessions"]
        self.assertEqual((False, "hook"), (session["direct"], session["window"]))
        self.assertIn("not Codex", session["reason"])
        self.serving(AppServer(thread_read=thread("active", flags=["waitingOnApproval"])))
        [session] = self.home.json("list")["sessions"]
        self.assertEqual((True, "codex-turn-steer", "waiting", None), tuple(
            session[key] for key in ("direct", "window", "activity", "reason")))
        self.assertIn("codex-turn-steer", self.home.xmsg("send", THREAD, "x", "--dry-run", session=support.ADA))

    def test_of_what_waits_in_codexs_own_queue_says_so_until_that_item_is_gone(self):
        queue = sqlite3.connect(os.path.join(self.codex_home, "queue_1.sqlite"))
        self.addCleanup(queue.close)
        queue.execute("create table queued_items(id text primary key, thread_id text)")
        queue.executemany("insert into queued_items values (?, ?)", [("ours", THREAD), ("another", THREAD)])
        queue.commit()
        with_store = self.open_store()
        row = support.message(with_store, THREAD)
        with with_store.transaction():
            with_store.move(row, "reserved", 1)
            with_store.move(row, "direct-inflight", 2)
            with_store.move(row, "delivered", 3, window="codex-queue", detail="put into Codex's own queue as ours")
        self.assertIn("waiting in Codex's own queue", self.home.xmsg("outbox"))
        self.assertIn("gives nothing back", self.home.xmsg("cancel", "1", status=7))
        queue.execute("delete from queued_items where id = 'ours'")
        queue.commit()
        self.assertNotIn("Codex", self.home.xmsg("outbox"))
        self.assertIn("taken from Codex's own queue", self.home.xmsg("outbox", "--all"))


if __name__ == "__main__":
    unittest.main()
