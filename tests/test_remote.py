"""Other machines, each a home of its own that a command leads to: what arrives there, what comes back, and what does not."""
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import ADA, BOB, EVE, PATIENCE, PYTHON, ROOT, Home, end, message, wait_until
from side_by_side import load_tests  # noqa: F401
import contract
import remote

FULL = os.environ.get("XMSG_FULL") == "1"
BODIES = ["plain", "-n --help", "--", "''", "a\nb\n\n c ", "\t$HOME `id` $(id) \\ \\\\ \"x\" 'y' ; & | > < * ? [a] {b} ~ ! # %s",
          "\U0001f600 é 漢字 \u200d\u202e \x7f \x1b[31m", "x" * 8000]
# A command that does to its words what ssh does: it joins them to one line for a shell of the other machine.
WAY = """#!/bin/sh
%s
exec /usr/bin/env -i %s /bin/sh -c "$*"
"""
# The same to a process that is forked from an interpreter which has imported everything, in a tenth of the time.
FAST_WAY = """#!/bin/sh
%s
[ "$*" = "xmsg receive" ] || exit 127
folder=%s/$$
mkdir "$folder" && mkfifo "$folder/in" "$folder/out" || exit 1
echo "$folder %s" >%s
exec 3<&0
/bin/cat <&3 >"$folder/in" &
exec /bin/cat <"$folder/out" 3<&-
"""


class Doors:
    """Forks an `xmsg receive` for each line of a pipe: a folder with its pipes, then its environment."""

    CODE = """
import os, signal, sys
sys.path.append(sys.argv[1])
import argparse, calendar, json, shlex, shutil, subprocess, tempfile, threading, unicodedata
import claude_delivery, codex_delivery, forwarding, host_process, receiving, remote, transcripts
from command_line import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with open(sys.argv[2]) as door:
    for line in door:
        folder, *environ = line.split()
        if os.fork():
            continue
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(folder + "/in", os.O_RDONLY), 0)
            os.dup2(os.open(folder + "/out", os.O_WRONLY), 1)
            os.environ.clear()
            os.environ.update(word.split("=", 1) for word in environ)
            main(["receive"])
        finally:
            os._exit(0)
"""
    door = None

    @classmethod
    def open(cls):
        """The path of the pipe that takes the lines."""
        if cls.door is None:
            cls.folder = tempfile.mkdtemp(prefix="xmsg-test-door-")
            cls.door = os.path.join(cls.folder, "door")
            os.mkfifo(cls.door)
            cls.process = subprocess.Popen([PYTHON, "-I", "-S", "-X", "utf8", "-c", cls.CODE, ROOT, cls.door],
                                           env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            cls.held = os.open(cls.door, os.O_RDWR)  # it never comes to an end between two lines
        return cls.door


def tearDownModule():
    if Doors.door:
        end(Doors.process)
        shutil.rmtree(Doors.folder, True)


class Machine(Home):
    """A home that other homes reach by a command."""

    def way_to(self, alias, other, before="", spool=False, real=False):
        """Sets up another machine under an alias; before: shell code that runs first, each time."""
        environ = "HOME=%s XMSG_DB=%s XMSG_LANG=en XMSG_REMOTE_TIMEOUT=10 PATH=%s/bin:/usr/bin:/bin" % (
            other.folder, other.db, ROOT)
        path = self.script("to-" + alias, WAY % (before, environ) if real else FAST_WAY % (
            before, Doors.folder if Doors.open() else "", environ, Doors.door))
        self.add(alias, path, spool)
        return path

    def add(self, alias, command, spool=False):
        os.makedirs(os.path.join(self.folder, ".config", "xmsg"), 0o700, exist_ok=True)
        with open(os.path.join(self.folder, ".config", "xmsg", "remotes"), "a") as file:
            file.write("%s %s%s\n" % (alias, "--spool " if spool else "", command))

    def script(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o700)
        return path

    def rows(self):
        return self.sql("select uid, state, far_state, target, body from messages order by id")


class Case(unittest.TestCase):
    """Two machines: ada, a Claude Code session here, reaches bob and eve, Codex sessions of the machine `box`."""

    real = False

    def setUp(self):
        self.here, self.there = Machine(), Machine()
        self.addCleanup(self.here.remove)
        self.addCleanup(self.there.remove)
        for home, host, session, name in ((self.here, "claude", ADA, "ada"), (self.there, "codex", BOB, "bob"),
                                          (self.there, "codex", EVE, "eve")):
            opened = home.store()
            now = contract.now_ms()
            opened.register({"session": session, "host": host, "cwd": home.folder}, now, fresh_ms=0)
            opened.set_name(session, name)
            opened.close()
        self.here.way_to("box", self.there, real=self.real)

    def send(self, *arguments, session=ADA, **options):
        return self.here.json("send", *arguments, session=session, **options)["messages"][0]

    def arrived(self):
        """The bodies that the other machine holds, and their states."""
        return self.there.sql("select body, state from messages order by id")

    def shown(self, session=BOB):
        """What bob's next hook shows."""
        return self.there.context("codex", session, "PreToolUse")

    def refreshed(self, number):
        return {found["id"]: found for found in self.here.json("outbox", "--all", "--refresh")["messages"]}[number]


class AMessage(Case):
    def test_arrives_byte_for_byte(self):
        os.rename(os.path.join(self.here.folder, "to-box"), os.path.join(self.here.folder, "away"))
        for body in BODIES:
            self.send("box:bob", "-", "--spool", text=body + "\n")
        os.rename(os.path.join(self.here.folder, "away"), os.path.join(self.here.folder, "to-box"))
        self.here.xmsg("send", "box:bob", "--", "-n --help", session=ADA)
        self.assertEqual(BODIES + ["-n --help"], [body for body, _ in self.arrived()])
        refused = self.here.json("send", "box:bob", "", session=ADA, status=2)
        self.assertEqual("usage", refused["error"]["code"])

    def test_is_in_the_outbox_here_with_its_state_there(self):
        sent = self.send("box:bob", "hello", "--ttl", "77")
        self.assertEqual(("queued", "bob", BOB, "codex"),
                         (sent["state"], sent["to"]["name"], sent["to"]["session"], sent["to"]["host"]))
        self.assertEqual({"alias": "box", "id": 1, "state": "queued"},
                         {key: sent["remote"][key] for key in ("alias", "id", "state")})
        (uid, expires, created), = self.there.sql("select uid, expires_at, created_at from messages")
        self.assertEqual(sent["uid"], uid)
        self.assertAlmostEqual(77000, expires - created, delta=5000)
        self.assertIn("queued on box, as of", self.here.xmsg("outbox", session=ADA))
        self.assertTrue(self.shown().endswith("\nhello"))
        found = self.refreshed(sent["id"])
        self.assertEqual(("delivered", "PreToolUse", False), (found["state"], found["window"], found["unknown"]))
        story = self.here.json("show", sent["uid"])
        self.assertEqual(["queued", "reserved", "direct-inflight", "queued", "delivered"],
                         [event["state"] for event in story["events"]])
        self.assertEqual(["queued", "hook-inflight", "delivered"], [event["state"] for event in story["remote"]["events"]])
        self.assertIn("delivered on box", self.here.xmsg("outbox", "--all", session=ADA))

    def test_that_the_other_machine_has_never_expires_here_and_is_never_shown_here(self):
        sent = self.send("box:bob", "hello")
        opened = self.here.store()
        self.addCleanup(opened.close)
        opened.sweep(contract.now_ms() + 10 ** 9)
        self.assertEqual("queued", opened.by_id(sent["id"])["state"])
        self.assertEqual(({}, {0}), (opened.queued_counts(), set(opened.repair_hints().values())))
        self.assertEqual([], [name for name in os.listdir(os.path.join(self.here.hints, "mail")) if ":" in name])
        self.assertEqual("nothing waits\n", self.here.xmsg("queue"))

    def test_comes_back_with_the_statuses_and_the_json_of_a_local_one(self):
        for target, status, code in (("nobody", 3, "no_such_target"), ("01a04cd2", 4, "ambiguous"), ("agy:bob", 3, "no_such_target"),
                                     ("claude:all", 3, "no_such_target")):
            far = self.here.json("send", "box:" + target, "x", session=ADA, status=status)["error"]
            near = self.there.json("send", target, "x", session=ADA, status=status)["error"]
            self.assertEqual((code, code), (far["code"], near["code"]), target)
            self.assertEqual([line.split()[0] for line in near.get("candidates") or ()],
                             [line.split()[0] for line in far.get("candidates") or ()])
            self.assertIn(near["message"], far["message"])
        self.assertEqual([], self.arrived())
        self.assertEqual({"refused"}, set(self.here.states()))
        self.assertEqual("no_such_target", self.here.json("send", "box:agy:", "x", session=ADA, status=3)["error"]["code"])
        self.assertEqual("remote", self.here.json("send", "box:peer:bob", "x", session=ADA, status=8)["error"]["code"])

    def test_by_name_prefix_and_full_id_reaches_the_same_session(self):
        for spec in ("bob", "BOB", "01a04cd2-1", BOB, "codex:bob"):
            self.assertEqual(BOB, self.send("box:" + spec, "x")["to"]["session"])

    def test_to_all_is_one_row_for_each_session_there(self):
        for spec in ("box:all", "box:codex:"):
            sent = self.here.json("send", spec, "everybody", session=ADA)["messages"]
            self.assertEqual({BOB, EVE}, {found["to"]["session"] for found in sent})
            self.assertEqual(2, len({found["uid"] for found in sent}))
        self.assertEqual(4, len(self.arrived()))
        for words, why in ((("box:project", "x"), "project"), (("box:all", "x", "--uid", "0" * 16), "group"), (("box:", "x"), "all")):
            self.assertIn(why, self.here.json("send", *words, session=ADA, status=2)["error"]["message"])

    def test_with_a_key_is_one_while_it_waits_and_replaces_the_one_that_waits_there(self):
        first = self.send("box:bob", "one", "--key", "k")
        self.assertEqual(first["id"], self.send("box:bob", "two", "--key", "k")["id"])
        third = self.send("box:bob", "three", "--key", "k", "--replace")
        self.assertEqual([("one", "cancelled"), ("three", "queued")], self.arrived())
        self.shown()
        fourth = self.send("box:bob", "four", "--key", "k", "--replace")
        self.assertEqual(4, len({first["id"], third["id"], fourth["id"], 0}))
        self.assertEqual(("four", "queued"), self.arrived()[-1])

    def test_can_be_cancelled_there_while_nobody_has_seen_it(self):
        one, two = self.send("box:bob", "one"), self.send("box:eve", "two")
        self.assertIn("cancelled", self.here.xmsg("cancel", str(one["id"]), session=ADA))
        self.assertIsNone(self.shown())
        self.assertIn("two", self.shown(EVE))
        self.assertIn("it is delivered on box", self.here.xmsg("cancel", str(two["id"]), session=ADA, status=7))
        self.assertEqual(["cancelled", "delivered"], self.here.states())
        self.assertIn("not sent by this session", self.here.xmsg("cancel", "2", session=BOB, host="codex", status=7))

    def test_that_is_unknown_there_is_unknown_here_and_resolved_there(self):
        for resolution, state in (("--requeue", "queued"), ("--delivered", "delivered"), ("--drop", "cancelled")):
            sent = self.send("box:bob", "x")
            self.there.sql("update messages set state = 'hook-inflight', holder_pid = 1, holder_start = 'gone' where uid = ?", (sent["uid"],))
            found = self.refreshed(sent["id"])
            self.assertTrue(found["unknown"])
            self.assertIn("xmsg resolve %d" % sent["id"], self.here.xmsg("outbox", session=ADA))
            self.here.xmsg("resolve", sent["uid"], resolution)
            self.assertEqual((state, state), (self.here.states()[-1], self.arrived()[-1][1]))

    def test_is_waited_for_by_the_other_machine(self):
        sent = self.here.json("send", "box:bob", "x", "--wait", "0.2", session=ADA, status=6)["messages"][0]
        self.assertIsNone(sent["confirmed_at"])
        self.there.sql("update messages set state = 'delivered', window = 'Stop', confirmed_at = 1, evidence = 'line 7'")
        found = self.refreshed(sent["id"])
        self.assertEqual(("delivered", "Stop", "line 7"), (found["state"], found["window"], found["evidence"]))
        self.assertTrue(found["confirmed_at"])

    def test_carries_what_a_reply_answers(self):
        self.there.way_to("lap", self.here)
        self.there.xmsg("remote", "check", "lap")
        first = self.send("box:bob", "question")
        self.shown()
        reply = self.there.json("send", "lap:ada", "answer", "--reply-to", "last", session=BOB, host="codex")["messages"][0]
        self.assertEqual(first["uid"], reply["reply_to"])
        self.assertEqual([(first["uid"],)], self.here.sql("select reply_to from messages where body = 'answer'"))


class TheSender(Case):
    def test_is_an_address_that_works_from_there_once_the_way_back_is_known(self):
        self.send("box:bob", "before")
        self.assertTrue(self.shown().startswith("[peer ada@%s · claude; not a user instruction]" % os.uname().nodename))
        self.there.way_to("lap", self.here)
        checked = self.here.json("remote", "check", "box")
        self.assertEqual((True, "lap"), (checked["there"], checked["back"]))
        self.send("box:bob", "after")
        self.assertEqual("[peer lap:ada · claude; not a user instruction]\nafter", self.shown())
        self.there.xmsg("send", "lap:ada", "the answer", session=BOB, host="codex")
        self.assertIn("[peer box:bob · codex; not a user instruction]\nthe answer", self.here.context("claude", ADA, "PreToolUse"))
        self.there.xmsg("remote", "remove", "lap")
        self.there.xmsg("remote", "add", "lap", "some-other-machine")
        self.send("box:bob", "and now")
        self.assertTrue(self.shown().startswith("[peer ada@"), "the alias leads elsewhere now")

    def test_is_nobody_of_this_machine_whatever_id_it_has(self):
        store = self.there.store()
        self.addCleanup(store.close)
        store.register({"session": ADA, "host": "claude", "permission_mode": "bypassPermissions"}, contract.now_ms())
        self.send("box:bob", "x")
        (session, label), = self.there.sql("select sender_session, sender_label from messages")
        self.assertEqual(ADA, session.partition(":")[2])
        self.assertEqual(([], []), (store.messages(sender=ADA), store.peers_named(label)))
        self.assertIn("@", self.shown().split("\n")[0])
        found = self.there.json("inbox", BOB)["messages"][0]["from"]
        self.assertEqual((ADA, 16), (found["session"], len(found["machine"])))

    def test_that_is_no_session_is_an_unknown_source_there_too(self):
        for _ in ("before the way back is known", "and after, since nobody can be answered there"):
            self.here.xmsg("send", "box:bob", "x", "--from", "deploy")
            self.assertRegex(self.shown(), r"^\[unknown source deploy@\S+; not a user instruction\]\nx$")
            if not os.path.exists(os.path.join(self.there.folder, ".config")):
                self.there.way_to("lap", self.here)
                self.here.json("remote", "check", "box")

    def test_is_never_a_notification(self):
        error = self.here.json("send", "box:bob", "x", "--notification", "--from", "patrol", status=2)["error"]
        self.assertIn("for this machine", error["message"])
        self.assertEqual(([], []), (self.arrived(), self.here.states()))


class TheTarget(Case):
    def test_behind_a_colon_is_never_a_session_that_calls_itself_so(self):
        store = self.here.store()
        self.addCleanup(store.close)
        for title in ("box:bob", "lost:bob", "peer:bob"):
            store.register({"session": EVE[:-1] + title[0], "host": "codex", "title": title}, contract.now_ms())
        self.assertEqual(BOB, self.send("box:bob", "x")["to"]["session"])
        self.assertIn("lost is no host", self.here.xmsg("send", "lost:bob", "x", session=ADA, status=3))
        self.here.xmsg("send", "peer:bob", "x", session=ADA, status=8)
        self.assertEqual([("x", "queued")], self.arrived())
        self.assertEqual(1, len(self.here.states()))
        self.assertEqual(EVE[:-1] + "b", self.here.json("send", "codex:box:bob", "x", "--force", session=ADA)["messages"][0]["to"]["session"])

    def test_without_any_machine_is_refused_at_once_and_delivered_nowhere(self):
        for target in ("peer:bob", "peer", "peer:", "peer:all"):
            error = self.here.json("send", target, "x", session=ADA, status=8, PATH="/nonexistent")["error"]
            self.assertEqual("remote", error["code"])
            self.assertIn("XMSG_REMOTE", error["message"])
        self.assertEqual([], self.here.states())

    def test_peer_is_what_xmsg_remote_or_a_program_of_that_name_leads_to(self):
        way = self.here.way_to("other", self.there)
        self.assertEqual(BOB, self.send("peer:bob", "one", XMSG_REMOTE=way)["to"]["session"])
        tools = os.path.join(self.here.folder, "tools")
        os.mkdir(tools)
        os.rename(way, os.path.join(tools, "peer"))
        self.assertEqual(BOB, self.send("peer:bob", "two", PATH=tools + ":/usr/bin:/bin")["to"]["session"])

    def test_peer_is_opened_first_by_xmsg_remote_up_whatever_that_answers(self):
        way = self.here.way_to("other", self.there, before="[ -e %s/up ] || exit 7" % self.here.folder)
        self.here.xmsg("send", "peer:bob", "x", session=ADA, status=8, XMSG_REMOTE=way)
        up = self.here.script("peer-up", "#!/bin/sh\ntouch %s/up\nexit 3\n" % self.here.folder)
        self.assertEqual("queued", self.send("peer:bob", "x", XMSG_REMOTE=way, XMSG_REMOTE_UP=up)["state"])

    def test_can_be_tried_out(self):
        plan, = self.here.json("send", "box:bob", "x", "--dry-run", session=ADA)["plan"]
        self.assertEqual(("box", "bob"), (plan["machine"], plan["target"]))
        self.assertEqual([], self.arrived())


class TheLink(Case):
    real = True  # what is killed here is the program itself

    def down(self):
        os.rename(os.path.join(self.here.folder, "to-box"), os.path.join(self.here.folder, "cut"))

    def up(self):
        os.rename(os.path.join(self.here.folder, "cut"), os.path.join(self.here.folder, "to-box"))

    def test_is_made_on_its_way_in_one_transaction(self):
        """A process that is killed in between leaves no message that would go later though nobody was told of it."""
        from support import environ
        import forwarding
        opened = self.here.store()
        self.addCleanup(opened.close)
        seen = []
        opened._db.set_trace_callback(seen.append)
        request = {"target": "box:bob", "body": "x", "label": "", "ttl": 60, "priority": 0, "key": None, "uid": None,
                   "replace": False, "reply_to": None, "force": False, "direct": True, "notification": False, "spool": False}
        with environ(HOME=self.here.folder):
            forwarding.send(opened, request, {})
        made = next(at for at, text in enumerate(seen) if text.startswith("insert into messages"))
        left = next(at for at, text in enumerate(seen) if text.startswith("update") and "'direct-inflight'" in text)
        self.assertNotIn("commit", seen[made:left])

    def test_that_is_down_leaves_nothing_behind(self):
        self.down()
        error = self.here.json("send", "box:bob", "x", session=ADA, status=8)["error"]
        self.assertEqual("remote", error["code"])
        self.assertIn("nothing was sent", error["message"])
        self.assertEqual([], self.here.states())

    def test_that_is_down_lets_a_spooled_message_wait_here_in_order(self):
        self.down()
        sent = [self.send("box:bob", "first", "--spool"), self.send("box:bob", "second", "--spool", "--ttl", "50")]
        self.assertIn("waits here: box cannot be reached", self.here.xmsg("send", "box:bob", "third", "--spool", session=ADA))
        self.assertEqual(["queued"] * 3, self.here.states())
        self.assertIn("waits here for the way to box", self.here.xmsg("outbox", session=ADA))
        self.assertIn("3 wait", self.here.xmsg("flush", status=8))
        self.assertEqual(3, len(self.here.json("outbox", "--refresh", session=ADA, status=8)["messages"]))
        checks = {check["check"]: check for check in self.here.json("doctor", status=None)["checks"]}
        self.assertIn("messages #1, #2, #3 wait", checks["machines"]["detail"])
        self.assertEqual((True, True), (checks["waiting"]["ok"], checks["UNKNOWN"]["ok"]))
        self.assertEqual(3, len(self.here.json("queue")["messages"]))
        self.here.json("send", "box:all", "x", "--spool", session=ADA, status=8)
        self.here.xmsg("cancel", str(sent[0]["id"]), session=ADA)
        self.here.sql("update messages set expires_at = created_at where body = 'second'")
        self.up()
        self.send("box:eve", "fourth")
        self.assertEqual(["third", "fourth"], [body for body, _ in self.arrived()])
        self.assertEqual(["cancelled", "expired", "queued", "queued"], self.here.states())
        told = self.here.xmsg("outbox", "--all", session=ADA)
        self.assertRegex(told, r"expired \d+s ago")
        self.assertRegex(told, r"cancelled \d+s ago")
        self.assertIn("needs no cancelling: it is cancelled", self.here.xmsg("cancel", str(sent[0]["id"]), session=ADA, status=7))

    def test_carries_what_waits_at_a_flush(self):
        os.unlink(os.path.join(self.here.folder, ".config", "xmsg", "remotes"))
        self.here.way_to("box", self.there, spool=True)
        self.down()
        for number in range(23):
            self.send("box:bob", "number %02d" % number)
        self.up()
        self.assertEqual("", self.here.json("flush")["machines"][0]["reason"])
        self.assertEqual([("number %02d" % number, "queued") for number in range(23)], self.arrived())
        self.assertEqual(0, self.here.command("flush").returncode)
        self.assertEqual(23, len(self.arrived()))

    def test_that_is_lost_on_the_way_is_settled_by_one_refresh(self):
        """A relay cuts it: after so many bytes, or so long after all of them; then the message is there once."""
        rng = random.Random(8)
        greeting, request, answer = self.sizes()
        cuts = [("out", greeting - 1), ("in", 1), ("in", request - 1), ("in", request), ("out", greeting + 1),
                ("out", greeting + answer - 1)]
        cuts += [("in", rng.randrange(request)) for _ in range(16 if FULL else 1)]
        cuts += [("out", rng.randrange(greeting + answer)) for _ in range(14 if FULL else 1)]
        cuts += [("after", rng.random() * 0.06) for _ in range(20 if FULL else 4)]
        relay = self.here.script("relay", RELAY % (PYTHON, os.path.join(self.here.folder, "to-box")))
        self.here.add("cut", relay)
        unknown = 0
        for number, (where, point) in enumerate(cuts):
            body = "text %d" % number
            done = self.here.command("send", "cut:bob", body, "--json", session=ADA, CUT="%s %s" % (where, point))
            held = [state for text, state in self.arrived() if text == body]
            self.assertIn(done.returncode, (0, 6, 8), (where, point, done))
            if done.returncode == 8:
                self.assertEqual([], held, (where, point))
                self.assertEqual(0, self.here.sql("select count(*) from messages where body = ?", (body,))[0][0])
                continue
            sent = json.loads(done.stdout)["messages"][0]
            self.assertIn(sent["state"], ("queued", "direct-uncertain"))
            if done.returncode == 6:
                unknown += 1
                self.assertTrue(sent["unknown"])
                self.assertLessEqual(len(held), 1)
        for found in self.here.json("outbox", "--refresh", "--all", "--limit", "100")["messages"]:
            self.assertEqual(("queued", False), (found["state"], found["unknown"]), found)
        self.assertGreater(unknown, 4)
        bodies = [body for body, _ in self.arrived()]
        self.assertEqual(sorted(set(bodies)), sorted(bodies))
        self.assertEqual({row[4] for row in self.here.rows()}, set(bodies) - {"measured"})

    def sizes(self):
        """How many bytes the greeting, the request and the answer of one message take."""
        out = os.path.join(self.here.folder, "sizes")
        tee = self.here.script("tee-way", "#!/bin/sh\ntee %s.in | %s/to-box \"$@\" | tee %s.out\n" % (out, self.here.folder, out))
        self.here.add("tee", tee)
        self.send("tee:bob", "measured")
        self.here.sql("delete from messages")
        with open(out + ".out", "rb") as file:
            lines = file.read().splitlines(keepends=True)
        return len(lines[0]), os.path.getsize(out + ".in"), len(lines[1])

    def test_that_is_lost_needs_no_second_message_for_a_resend_a_cancel_or_a_word(self):
        relay = self.here.script("relay", RELAY % (PYTHON, os.path.join(self.here.folder, "to-box")))
        self.here.add("cut", relay)
        for number, cut in enumerate(("in 9", "out 200")):
            uid = "%016d" % number
            self.send("cut:bob", "x", "--uid", uid, status=6, CUT=cut)
            found = self.send("cut:bob", "x", "--uid", uid)
            self.assertEqual(("queued", uid, "queued"), (found["state"], found["uid"], found["remote"]["state"]))
        self.assertEqual(2, len(self.arrived()))
        self.here.xmsg("send", "cut:bob", "other text", "--uid", uid, session=ADA, status=2)
        # What may still be on its way is kept from arriving.
        sent = self.send("cut:bob", "late", status=6, CUT="in 9")
        self.here.xmsg("cancel", sent["uid"], session=ADA)
        self.assertEqual(("late", "cancelled"), self.arrived()[-1])
        sent = self.send("cut:bob", "word", status=6, CUT="in 9")
        os.unlink(relay)
        self.here.xmsg("cancel", sent["uid"], session=ADA, status=8)
        self.here.xmsg("resolve", sent["uid"], "--drop")
        self.assertEqual("cancelled", self.here.states()[-1])

    def test_that_is_lost_never_goes_to_another_machine_of_the_same_alias(self):
        relay = self.here.script("relay", RELAY % (PYTHON, os.path.join(self.here.folder, "to-box")))
        self.here.add("cut", relay)
        sent = self.send("cut:bob", "once only", status=6, CUT="out 200")
        self.assertEqual(1, len(self.arrived()))
        other = Machine()
        self.addCleanup(other.remove)
        other.hook("codex", EVE, "SessionStart")
        other.xmsg("name", EVE, "bob")
        self.here.way_to("other", other)
        os.rename(os.path.join(self.here.folder, "to-other"), relay)
        self.assertTrue(self.refreshed(sent["id"])["unknown"])
        self.assertEqual([], other.rows())
        self.assertIn("another machine now", self.here.xmsg("cancel", sent["uid"], session=ADA, status=8))
        self.here.xmsg("resolve", sent["uid"], "--requeue")
        self.assertEqual("queued", self.refreshed(sent["id"])["state"])
        self.assertEqual(["once only"], [row[4] for row in other.rows()], "a person's word counts")

    def test_that_is_lost_past_the_messages_time_makes_it_never_arrive(self):
        relay = self.here.script("relay", RELAY % (PYTHON, os.path.join(self.here.folder, "to-box")))
        self.here.add("cut", relay)
        sent = self.send("cut:bob", "late", status=6, CUT="in 9")
        self.here.sql("update messages set expires_at = created_at where uid = ?", (sent["uid"],))
        self.assertEqual("cancelled", self.refreshed(sent["id"])["state"])
        self.assertEqual([("late", "cancelled")], self.arrived())

    def test_of_a_sender_that_is_killed_leaves_its_message_unknown_until_a_refresh(self):
        pid = os.path.join(self.here.folder, "slow.pid")
        self.here.add("slow", self.here.script("slow", "#!/bin/sh\necho $$ >%s\n%s/to-box \"$@\" | { read -r first; echo "
                                               "\"$first\"; sleep 60; }\n" % (pid, self.here.folder)))
        process = subprocess.Popen([os.path.join(ROOT, "bin", "xmsg"), "send", "slow:bob", "x"], cwd=self.here.folder,
                                   env=self.here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        wait_until(lambda: self.arrived(), "the message there")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10 * PATIENCE)
        with open(pid) as file:
            os.killpg(int(file.read()), signal.SIGKILL)
        os.unlink(os.path.join(self.here.folder, "slow"))
        os.rename(os.path.join(self.here.folder, "to-box"), os.path.join(self.here.folder, "slow"))
        found = self.here.json("outbox")["messages"][0]
        self.assertTrue(found["unknown"])
        self.assertEqual(("queued", False), (self.refreshed(1)["state"], self.refreshed(1)["unknown"]))
        self.assertEqual([("x", "queued")], self.arrived())


# Runs the way and cuts it: CUT="in N" after N bytes of the request, "out N" of what comes back, "after S" seconds after
# the whole request. The far side is then killed.
RELAY = """#!%s
import os, select, signal, subprocess, sys, time
where, _, point = (os.environ.get("CUT") or "none 0").partition(" ")
point, passed, deadline = float(point), {"in": 0, "out": 0}, None
far = subprocess.Popen([%r] + sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
ways = {0: ("in", far.stdin.fileno()), far.stdout.fileno(): ("out", 1)}
def cut():
    os.killpg(far.pid, signal.SIGKILL)
    far.wait()
    os._exit(255)
while True:
    left = None if deadline is None else max(0, deadline - time.monotonic())
    ready = select.select(list(ways), [], [], left)[0]
    if deadline is not None and time.monotonic() >= deadline:
        cut()
    for source in ready:
        name, sink = ways[source]
        data = os.read(source, 65536)
        if not data:
            if name == "out":
                os._exit(far.wait())
            del ways[source]
            far.stdin.close()
            continue
        room = int(point) - passed[name] if where == name else len(data)
        try:
            os.write(sink, data[:room])
        except OSError:
            cut()
        passed[name] += len(data[:room])
        if where == name and passed[name] >= int(point):
            cut()
        if where == "after" and name == "in" and data.endswith(b"\\n"):
            deadline = time.monotonic() + point
"""


class TheOtherSide(Case):
    GREETING = '{"xmsg": 1, "machine": "%s", "name": "evil", "version": "9"}' % ("e" * 16)

    def test_that_never_speaks_as_xmsg_is_no_link_and_the_reason_is_its_own_word(self):
        for number, (script, reason) in enumerate((
                ("exit 0", "it said nothing"), ("echo no route >&2; exit 255", r"no route \(status 255\)"),
                ("exec /nonexistent/xmsg receive", r"it finds no xmsg there"),
                ("echo 'usage: xmsg ... invalid choice: receive' >&2; exit 2", "too old"),
                ("echo '{\"xmsg\": 7}'", "another protocol"), ("echo '{\"xmsg\": 1}'", "does not say who it is"),
                ("yes | head -c 100000", "other things"), ("printf '[[[[' ; cat", "no answer in time"),
                ("printf '\\033[31mred\\n' >&2; exit 1", r"^\S+ cannot be reached, and nothing was sent: \[31mred"))):
            self.here.add("no%d" % number, self.here.script("no%d" % number, "#!/bin/sh\n" + script + "\n"))
            error = self.here.json("send", "no%d:bob" % number, "x", session=ADA, status=8, XMSG_REMOTE_TIMEOUT="0.5")["error"]
            self.assertRegex(error["message"], reason)
        self.assertEqual([], self.here.states())

    def test_that_answers_nonsense_leaves_the_message_unknown(self):
        told = {"uid": "U", "id": 1, "state": "delivered", "session": BOB, "host": "codex", "window": "Stop"}
        for number, answer in enumerate((
                "", "garbage", "[]", '{"answers": []}', '{"answers": [1]}', '{"answers": [{"error": {}}]}', '{"answers": [{"ok": null}]}',
                '{"answers": [{"ok": [{}]}]}', json.dumps({"answers": [{"ok": [dict(told, uid="0" * 16)]}]}),
                *(json.dumps({"answers": [{"ok": [dict(told, **{key: value})]}]})
                  for key, value in (("state", "seen"), ("id", "1"), ("session", "../x"), ("host", "ssh"), ("state", None))))):
            uid = "%016d" % number
            way = self.here.script("odd%d" % number, "#!/bin/sh\necho '%s'\nread -r line\necho '%s'\n"
                                   % (self.GREETING, answer.replace('"U"', '"%s"' % uid)))
            self.here.add("odd%d" % number, way)
            sent = self.send("odd%d:bob" % number, "x", "--uid", uid, status=6)
            self.assertTrue(sent["unknown"], answer)
            self.assertEqual("direct-uncertain", sent["state"])

    def test_that_says_hostile_things_moves_no_terminal(self):
        nasty = "\x1b[2J\u202e\nevil"
        told = {"uid": "0" * 16, "id": 1, "state": "refused", "session": BOB, "host": "codex", "detail": nasty, "window": nasty,
                "evidence": nasty, "note": nasty, "events": [{"at": 10 ** 30, "state": "queued"}, {"at": 5, "state": nasty}, 7]}
        self.here.add("evil", self.here.script("evil", "#!/bin/sh\ncat <<'END'\n%s\n%s\nEND\ncat >/dev/null\n" % (
            self.GREETING, json.dumps({"answers": [{"ok": [told]}]}))))
        out = self.here.xmsg("send", "evil:bob", "x", "--uid", "0" * 16, session=ADA, status=7)
        out += self.here.xmsg("outbox", "--all", session=ADA) + self.here.xmsg("show", "1")
        self.assertFalse(set("\x1b\u202e") & set(out))

    def test_that_is_this_very_store_is_refused(self):
        self.here.way_to("me", self.here)
        self.assertIn("leads back to this store", self.here.xmsg("send", "me:ada", "x", session=BOB, host="codex", status=8))
        self.assertEqual([], self.here.states())


class Receiving(Case):
    """`xmsg receive` on this machine, spoken to by hand."""

    def converse(self, *lines):
        data = b"".join(json.dumps(line).encode() + b"\n" if not isinstance(line, bytes) else line for line in lines)
        done = self.there.command("receive", text=data.decode())
        return [json.loads(line) for line in done.stdout.decode().splitlines()]

    def job(self, **changes):
        return dict({"machine": "a" * 16, "name": "laptop", "body": "hi", "ttl": 60000, "priority": 0, "reply_to": None,
                     "kind": "agent", "label": "ada", "host": "claude", "session": ADA, "to": [["b" * 16, "bob"]]}, **changes)

    def test_says_who_it_is_and_answers_line_by_line(self):
        about, first, second = self.converse({"jobs": []}, {"jobs": [["group", {"target": "all"}], ["send", self.job()]]})
        self.assertEqual({"xmsg", "machine", "name", "version"}, set(about))
        self.assertEqual({"answers": []}, first)
        self.assertEqual({BOB, EVE}, set(second["answers"][0]["ok"]))
        self.assertEqual("queued", second["answers"][1]["ok"][0]["state"])

    def test_makes_nothing_of_a_request_that_it_does_not_understand(self):
        bad = [self.job(**{key: value}) for key, value in (
            ("machine", "x"), ("machine", None), ("body", None), ("body", 7), ("body", " "), ("body", "x" * 8001), ("ttl", 0),
            ("ttl", -1), ("ttl", 1e9), ("ttl", True), ("priority", "1"), ("priority", 10 ** 9), ("kind", "notification"), ("kind", "boss"),
            ("label", ""), ("label", "a]b"), ("label", "a:b"), ("label", "x" * 81), ("label", "a\nb"), ("host", "emacs"), ("host", ""),
            ("session", "../x"), ("session", ""), ("reply_to", "x"), ("to", []), ("to", [["b" * 16]]), ("to", [["B" * 16, "bob"]]),
            ("to", [["b" * 16, 7]]), ("to", [["b" * 16, "all"]]), ("to", "bob"))]
        answers = self.converse({"jobs": [["send", job] for job in bad] + [["send", None], ["send", []], ["dance", {}], ["list", 7]]})[1]["answers"]
        for job, answer in zip(bad + [None] * 4, answers):
            self.assertEqual("usage", answer["error"]["code"], job)
        self.assertEqual([], self.arrived())
        for line in (b"garbage\n", b"[]\n", b"{}\n", b'{"jobs": 1}\n', b'{"jobs": [1]}\n', b"[" * 100000 + b"\n", b'{"jobs": []}'):
            self.assertEqual(1, len(self.converse(line)), line[:20])

    def test_makes_one_message_of_any_number_of_requests_with_its_uid(self):
        for _ in range(3):
            self.converse({"jobs": [["send", self.job()], ["send", self.job()]]})
        self.assertEqual([("hi", "queued")], self.arrived())
        answers = self.converse({"jobs": [["send", self.job(body="other")], ["send", self.job(machine="c" * 16)],
                                          ["state", self.job(machine="c" * 16)], ["cancel", self.job(machine="c" * 16)]]})[1]["answers"]
        self.assertEqual(["usage"] * 4, [answer["error"]["code"] for answer in answers])
        local = self.there.json("send", "bob", "local", session=EVE, host="codex")["messages"][0]
        answer = self.converse({"jobs": [["cancel", self.job(to=[[local["uid"], "bob"]])]]})[1]["answers"][0]
        self.assertEqual("usage", answer["error"]["code"])
        self.assertEqual([("hi", "queued"), ("local", "queued")], self.arrived())

    def test_says_why_its_store_cannot_be_used(self):
        with open(self.there.db, "wb") as file:
            file.write(b"no database" * 1000)
        for ending in ("-wal", "-shm"):
            if os.path.exists(self.there.db + ending):
                os.unlink(self.there.db + ending)
        self.here.way_to("real", self.there, real=True)
        error = self.here.json("send", "real:bob", "x", session=ADA, status=8)["error"]
        self.assertIn("not a database", error["message"])
        self.assertEqual([], self.here.states())


class TheList(Case):
    def test_of_a_machine_or_of_all_shows_who_is_there(self):
        for words in (("--peer", "box"), ("--everywhere",)):
            found = self.here.json("list", *words)
            self.assertEqual({BOB, EVE}, {one["session"] for one in found["sessions"] if one["machine"] == "box"})
        self.assertEqual({ADA}, {one["session"] for one in found["sessions"] if not one["machine"]})
        text = self.here.xmsg("list", "--everywhere")
        self.assertRegex(text, r"(?m)^\(here\) +ada ")
        self.assertRegex(text, r"(?m)^box +bob ")
        self.here.xmsg("list", "--peer", status=8, PATH="/nonexistent")
        self.assertIn("remote list", self.here.xmsg("list", "--peer", "nowhere", status=8))

    def test_of_ten_machines_of_which_three_hang_ends_in_time_with_the_other_seven(self):
        os.unlink(os.path.join(self.here.folder, ".config", "xmsg", "remotes"))
        seconds = 5 * PATIENCE
        for number in range(10):
            if number % 4 == 1:
                self.here.add("m%d" % number, self.here.script("to-m%d" % number, "#!/bin/sh\n%s\n" % (
                    "exec sleep 600" if number == 1 else "echo hello; sleep 600 & sleep 600" if number == 5 else "trap '' TERM; sleep 600")))
            else:
                self.here.way_to("m%d" % number, self.there)
        self.here.json("list", "--peer", "m0")  # the tests' own servers have started
        begin = time.monotonic()
        done = self.here.command("list", "--everywhere", "--json", XMSG_REMOTE_TIMEOUT=str(seconds))
        self.assertLess(time.monotonic() - begin, seconds)
        found = json.loads(done.stdout)
        self.assertEqual(7, len({one["machine"] for one in found["sessions"] if one["machine"]}))
        self.assertEqual({"m1", "m5", "m9"}, {one["alias"] for one in found["machines"] if one["reason"]})


class TheFileOfMachines(Case):
    PATH = ".config/xmsg/remotes"

    def write(self, text, mode=0o600):
        path = os.path.join(self.here.folder, self.PATH)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, mode)

    def test_is_changed_by_add_and_remove_and_keeps_what_else_it_holds(self):
        self.write("# mine\nbox ssh 'other host'\n\n")
        self.here.xmsg("remote", "add", "lap.top", "ssh", "laptop")
        self.here.xmsg("remote", "add", "pod", "kubectl exec -i pod --", "--spool")
        self.here.xmsg("remote", "add", "db", "--", "docker", "exec", "-i", "db")
        found = self.here.json("remote", "list")["remotes"]
        self.assertEqual([("box", ["ssh", "other host"], False), ("lap.top", ["ssh", "laptop"], False),
                          ("pod", ["kubectl", "exec", "-i", "pod", "--"], True), ("db", ["docker", "exec", "-i", "db"], False)],
                         [(one["alias"], one["command"], one["spool"]) for one in found])
        self.here.xmsg("remote", "remove", "BOX")
        with open(os.path.join(self.here.folder, self.PATH)) as file:
            self.assertTrue(file.read().startswith("# mine\n\nlap.top ssh laptop\n"))
        self.assertEqual(0o600, os.stat(os.path.join(self.here.folder, self.PATH)).st_mode & 0o777)
        for words in (("add", "lap.top", "x"), ("add", "all", "x"), ("add", "CODEX", "x"), ("add", "a:b", "x"), ("add", "-x", "x"),
                      ("add", "x" * 33, "x"), ("add", "new"), ("add",), ("list", "a", "b"), ("check",)):
            self.here.xmsg("remote", *words, status=2)
        for words in (("remove", "nobody"), ("check", "nobody")):
            self.here.xmsg("remote", *words, status=8)

    def test_is_refused_where_others_may_write_it_or_a_line_is_no_machine(self):
        for text, mode in (("box ssh x\n", 0o622), ("box\n", 0o600), ("box ssh 'x\n", 0o600), ("peer ssh x\n", 0o600),
                           ("box ssh x\nBOX ssh y\n", 0o600), ("b:x ssh y\n", 0o600), ("x" * 70000, 0o600)):
            self.write(text, mode)
            self.assertIn("remotes", self.here.xmsg("send", "box:bob", "x", session=ADA, status=8))
            self.here.json("send", ADA, "local targets need no such file", "--force", "--no-direct", session=BOB, host="codex")

    def test_loses_by_a_bad_line_that_machine_only_and_says_so(self):
        with open(os.path.join(self.here.folder, self.PATH)) as file:
            good = file.read()
        for bad in ("lost", "lost ssh 'x", "lost ssh x\nLOST ssh y"):
            self.write(bad + "\n" + good)
            self.send("box:bob", bad)
            self.here.json("list", "--everywhere")
            self.assertIn("/remotes", self.here.xmsg("send", "lost:bob", "x", session=ADA, status=8))
            self.assertIn("/remotes", self.here.xmsg("remote", "check", "lost", status=8))
            listed = self.here.json("remote", "list", status=8)
            self.assertEqual((["box"], 1), ([one["alias"] for one in listed["remotes"]], len(listed["faults"])))
            checks = {check["check"]: check for check in self.here.json("doctor", status=None)["checks"]}
            self.assertIn("/remotes", checks["machines"]["advice"])
        self.write(good)
        checks = {check["check"]: check for check in self.here.json("doctor", status=None)["checks"]}
        self.assertNotEqual(False, checks["machines"]["ok"])
        self.assertEqual([], self.here.json("remote", "list")["faults"])

    def test_may_change_the_case_of_a_name(self):
        self.here.way_to("Lap", self.there, before="exit 1", spool=True)
        number = self.send("lap:bob", "x", "--spool")["id"]
        self.write("lAP %s\n" % os.path.join(self.here.folder, "to-box"))
        self.assertEqual("queued", self.refreshed(number)["state"])
        self.assertEqual([("x", "queued")], self.arrived())

    def test_gives_the_command_two_words_which_are_one_line_to_a_shell(self):
        for words, line in ((["ssh", "box"], ["ssh", "box", "xmsg", "receive"]),
                            (["docker", "exec", "-i", "box"], ["docker", "exec", "-i", "box", "xmsg", "receive"]),
                            (["ssh", "box", ".local/bin/xmsg"], ["ssh", "box", ".local/bin/xmsg", "receive"]),
                            (["su", "bob", "-c", "{}"], ["su", "bob", "-c", "xmsg receive"])):
            self.assertEqual(line, remote.far_command(words))

    def test_proves_both_directions(self):
        self.assertIn("no remote there leads here", self.here.xmsg("remote", "check", "box", status=8))
        self.there.way_to("dead", self.here, before="exit 1")
        self.there.way_to("lap", self.here)
        self.assertIn("it calls this machine lap", self.here.xmsg("remote", "check", "box"))
        self.assertIn("it calls this machine box", self.there.xmsg("remote", "check", "lap"))
        self.assertIn("cannot be reached", self.there.xmsg("remote", "check", "dead", status=8))


class AnEarlierStore(unittest.TestCase):
    def test_gets_the_new_columns_and_keeps_its_messages(self):
        home = Home()
        self.addCleanup(home.remove)
        opened = home.store()
        message(opened, BOB, "kept")
        opened.close()
        for column in ("remote", "far_session", "far_id", "far_state", "far_at", "far_machine"):
            if column == "remote":
                home.sql("drop index messages_remote")
            home.sql("alter table messages drop column %s" % column)
        home.sql("pragma user_version = 1")
        self.assertEqual("kept", home.json("queue")["messages"][0]["body"])
        with_all = home.sql("select sql from sqlite_master where name = 'messages_remote'")
        self.assertEqual([(contract.SCHEMA,)], home.sql("pragma user_version"))
        self.assertEqual(1, len(with_all))
        self.assertIn("kept", home.context("codex", BOB, "PreToolUse"))


if __name__ == "__main__":
    unittest.main()
