"""What is run with a fault, in which world, and what must hold afterwards: the promises, seen from outside.

A case makes its world once and puts it back before each run. check() first looks at what the fault left, then goes on
as hosts and people would (the sender tries again, the session's later hooks come, `xmsg resolve` settles a doubt), and
balances the books: each text shown at most once, each acknowledged message shown or said to be something else, each
word of the store true, each waiting row with its hint, the file whole.
"""
import collections
import contextlib
import ctypes
import fcntl
import glob
import json
import os
import shutil
import socket
import sqlite3
import tempfile

import support
import contract
import hook_install
import spool
from support import (ADA, AGY, BOB, EVE, ClaudeStandIn, CommandServer, Home, HostProcess, dead_process, message, peer,
                     wait_until)
from test_app_server import Server
from test_codex_delivery import THREAD, AppServer, write_down

MAIN = "from command_line import main; os._exit(main(sys.argv[1:]))"
HOOK = "from xmsg import hook_main; sys.exit(hook_main(sys.argv[1:]))"
SWEEP = ("from contract import Settings, now_ms; from store import Store; store = Store(Settings(os.environ)); "
         "store.sweep(now_ms(), anything=True); store.close()")
UID = "00000000000000%02x"
HOST_OF = {ADA: "claude", BOB: "codex", EVE: "codex", AGY: "agy", THREAD: "codex"}


class Wrong(AssertionError):
    """A promise that does not hold."""


def hold(condition, what, *facts):
    if not condition:
        raise Wrong("%s %s" % (what, " ".join(map(repr, facts))))


def keep_orphans():
    """Where Linux lets it, orphans of what this process runs become its children, and can be seen to end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def children():
    """The ids of this process's children, where the system tells them."""
    found = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found |= set(map(int, file.read().split()))
    return found


class Case:
    """One world and one program. name: as run.py's words match it; marks: the paths whose first touch begins it."""
    folders = ("store",)  # below the home

    def __init__(self):
        self.home, self.shown, self._cleanups = Home(), "", []
        self.addCleanup(self.home.remove)
        self.command("--version")  # starts the server of commands
        self.prepare()
        self._kept = tempfile.mkdtemp(prefix="xmsg-test-kept-", dir=support.FAST_DISK)
        self.addCleanup(shutil.rmtree, self._kept, True)
        self.own = children()
        for place, kept in self.places():
            if os.path.exists(place):
                shutil.copytree(place, kept, symlinks=True)

    def places(self):
        """[(a folder that each run starts with anew, its copy)]."""
        return [(os.path.join(self.home.folder, folder), os.path.join(self._kept, os.path.basename(folder)))
                for folder in self.folders]

    def addCleanup(self, function, *arguments):
        self._cleanups.append((function, arguments))

    def close(self):
        while self._cleanups:
            function, arguments = self._cleanups.pop()
            function(*arguments)

    def restore(self):
        self.wait_for_couriers()
        for place, kept in self.places():
            shutil.rmtree(place, ignore_errors=True)
            if os.path.exists(kept):
                shutil.copytree(kept, place, symlinks=True)
        self.seen_directly()
        self.shown = ""

    def seen_directly(self):
        """Adds what came by a direct window."""

    def marks(self):
        return [os.path.dirname(self.home.db)]

    def prepare(self):
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")
        self.home.hook("agy", AGY, "SessionStart")

    def command(self, *arguments, session=None, host="claude", data=b""):
        environ = {"XMSG_FROM_TOOL": host, "XMSG_FROM_SESSION": session} if session else {}
        return CommandServer.run(arguments, dict(self.home.env, **environ), self.home.folder, input=data)

    def report(self, *arguments, **options):
        done = self.command(*arguments, "--json", **options)
        hold(done.returncode == 0, "later, `xmsg %s` fails:" % " ".join(arguments), done.stderr, done.stdout)
        return json.loads(done.stdout)

    def rows(self):
        with contextlib.closing(sqlite3.connect(self.home.db)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute("select * from messages order by id")]

    def check_store(self):
        """The file is whole, a waiting row has its hint, and each row's story is one that the table of states has."""
        if not os.path.exists(self.home.db) or not os.path.getsize(self.home.db):
            return []
        with contextlib.closing(sqlite3.connect(self.home.db)) as database:
            found = database.execute("pragma integrity_check").fetchone()[0]
            hold(found == "ok", "the file is damaged:", found)
            if not database.execute("pragma user_version").fetchone()[0]:
                tables = database.execute("select name from sqlite_master").fetchall()
                hold(not tables, "half a schema:", tables)
                return []
            stories = collections.defaultdict(list)
            database.row_factory = sqlite3.Row
            database.execute("begin")  # a courier may be at work
            rows = [dict(row) for row in database.execute("select * from messages order by id")]
            for number, state in database.execute("select message, state from events order by rowid"):
                stories[number].append(state)
        for row in rows:
            if row["state"] in ("queued", "reserved"):
                hold(os.path.exists(self.home.hint(row["target"])), "a row that waits has no hint:", row)
            story = stories.pop(row["id"], [])
            hold(story and story[-1] == row["state"], "the events tell another state:", row["state"], story)
            # An event that tells more of the same state is none of the table's edges.
            moves = [state for at, state in enumerate(story) if at == 0 or story[at - 1] != state]
            hold(moves[0] == "queued", "a story begins with", moves)
            for old, new in zip(moves, moves[1:]):
                hold(new in contract.STATES[old][1], "no edge of the table:", old, new)
        hold(not stories, "events of no message:", dict(stories))
        return rows

    def check_output(self, done, kind, call):
        """A command that lives on ends with a status of its table, and with a sentence if it failed."""
        if done.killed:
            return
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        hold(done.returncode in (0, 1, 2, 3, 4, 5, 6, 7, 8), "leaves with status", done.returncode, err)
        hold("Traceback" not in err or not self.own_fault(err), "a traceback:", err)
        said = "error" in out or "xmsg: " in err or '"messages"' in out
        mute = call is not None and call.name in ("write", "close")  # its own words may be what was lost
        hold(done.returncode == 0 or said or mute, "fails without a sentence:", done.returncode, out, err)

    @staticmethod
    def own_fault(text):
        """Whether a traceback comes from the product, and not from Python's reading of its own files."""
        return "importlib" not in text and "Fatal Python error" not in text and "ImportError" not in text

    def wait_for_couriers(self):
        """Whoever holds a row has ended, and where orphans can be seen, each of the couriers."""
        import store

        def rests():
            held = os.path.exists(self.home.db) and any(
                row["holder_pid"] and store.holder_lives(row) for row in self.rows())
            return not held and all(os.waitpid(pid, os.WNOHANG)[0] for pid in children() - self.own)
        with contextlib.suppress(sqlite3.Error):  # there may be no table yet
            wait_until(rests, "a courier ends", 20)

    def hooks(self, session, times=2):
        """What the later hooks of a session show; kept, so that doubles are seen."""
        host = HOST_OF[session]
        event = {"claude": "PreToolUse", "codex": "PreToolUse", "agy": "PreInvocation"}[host]
        for _ in range(times):
            done = self.command("hook", "--host", host, "--event", event,
                                data=support.payload(host, event, session, cwd=self.home.folder))
            hold(done.returncode == 0, "a later hook leaves with", done.returncode)
            self.take_shown(done.stdout)

    def take_shown(self, output):
        """Adds what the hook's output shows, which must be one JSON object or nothing."""
        if output:
            value = json.loads(output)
            hold(isinstance(value, dict), "no JSON object:", output)
            self.shown += json.dumps(value, ensure_ascii=False) + "\n"

    def balance(self, acknowledged=()):
        """No text twice; none lost; what the store says is what was seen. acknowledged: uids that must be there."""
        rows = self.check_store()
        uids = {row["uid"] for row in rows}
        hold(set(acknowledged) <= uids, "acknowledged without a row:", set(acknowledged) - uids)
        for row in rows:
            record = self.report("show", row["uid"])
            times = self.shown.count(row["body"])
            hold(times <= 1, "shown %d times:" % times, row["body"], record["events"])
            if record["unknown"]:
                self.report("resolve", row["uid"], "--delivered")
                record = self.report("show", row["uid"])
                hold(record["state"] == "delivered", "resolve does not settle it:", record)
                continue
            hold(record["state"] in contract.ENDED, "not ended, and not UNKNOWN:", record["state"], record["events"])
            hold((times == 1) == (record["state"] == "delivered"), "%s, and shown %d times:" % (record["state"], times),
                 row["body"], record["events"])
            hold(record["confirmed_at"] is None, "confirmed without evidence:", record)


class Send(Case):
    """A message for the hooks of its target alone, for which nothing waits: so there is no hint yet."""
    name, target, options = "send", BOB, ("--no-direct",)

    def sent(self, text, uid):
        done = self.command("send", self.target, text, "--no-direct", "--uid", uid, session=ADA)
        hold(done.returncode == 0, "no world:", done)

    def program(self):
        return {"code": MAIN, "env": {"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA},
                "arguments": self.arguments()}

    def arguments(self):
        return ["send", self.target, "the text itself.", "--uid", UID % 2, "--json", *self.options]

    def check(self, done, kind, call):
        self.check_output(done, kind, call)
        rows = {row["uid"]: row for row in self.check_store()}
        receipts = []
        with contextlib.suppress(ValueError, KeyError):
            receipts = json.loads(done.stdout)["messages"]
        for receipt in receipts:
            hold(receipt["uid"] in rows, "a receipt without a row:", receipt)
            self.check_receipt(receipt)
        if not done.killed and done.returncode in (2, 3, 4, 5):  # after which one would send it once more
            # SQLite cannot take back what it wrote before the sync failed: another process may find it in the log.
            synced = call is None or call.name not in ("fsync", "fdatasync")
            hold(UID % 2 not in rows or not synced and b"all the same" in done.stdout,
                 "refused with %d, and in the store:" % done.returncode, done.stdout)
        if not done.killed and done.returncode == 0:
            hold(receipts or call and call.name in ("write", "close"), "status 0 without a receipt:", done.stdout)
        self.wait_for_couriers()
        again = self.command(*self.arguments(), session=ADA)
        hold(again.returncode in (0, 6), "a repetition fails:", again.returncode, again.stderr, again.stdout)
        self.wait_for_couriers()
        hold([row["uid"] for row in self.rows()].count(UID % 2) == 1, "a repetition makes a second row")
        self.seen_directly()
        self.hooks(self.target)
        self.seen_directly()
        self.balance([UID % 2])

    def check_receipt(self, receipt):
        """The state that a receipt names is one that the message was in, and no better one."""
        states = [event["state"] for event in self.report("show", receipt["uid"])["events"]]
        hold(receipt["state"] in states, "a receipt says %s, and the story is" % receipt["state"], states)


class SendFirst(Send):
    """The very first run, which makes the store."""
    name, options = "send-first", ("--no-direct", "--force")

    def prepare(self):
        self.home.hook("codex", BOB, "SessionStart")
        shutil.rmtree(os.path.dirname(self.home.db))

    def check(self, done, kind, call):
        if not os.path.exists(self.home.db):
            hold(not done.killed or done.stdout == b"", "a receipt without a store")
        super().check(done, kind, call)


class SendToClaude(Send):
    """Straight into the inbox of a running Claude Code, the waiting one first."""
    name, target, options, answer = "send-claude", ADA, (), {}

    def prepare(self):
        self.config = os.path.join(self.home.folder, ".claude")
        os.makedirs(os.path.join(self.config, "sessions"))
        self.runtime = tempfile.mkdtemp(prefix="xm", dir="/tmp")  # a socket's path is short
        self.addCleanup(shutil.rmtree, self.runtime, True)
        self.inbox = ClaudeStandIn(self, self.config, self.runtime, ADA)
        self.inbox.tell(do="answer", **self.answer)
        super().prepare()
        self.sent("an earlier text.", UID % 1)

    def arguments(self):
        return ["send", ADA, "the text itself.", "--uid", UID % 2, "--json"]

    def program(self):
        return dict(super().program(), env={"XMSG_FROM_TOOL": "codex", "XMSG_FROM_SESSION": BOB,
                                            "XMSG_DIRECT_TIMEOUT": "0.5"})

    def sent(self, text, uid):
        done = self.command("send", ADA, text, "--no-direct", "--uid", uid, session=BOB, host="codex")
        hold(done.returncode == 0, "no world:", done)

    def command(self, *arguments, **options):
        if arguments[0] == "send":
            options.update(session=BOB, host="codex")
        return super().command(*arguments, **options)

    def seen_directly(self):
        # It takes what waits at its socket in this many rounds at most.
        for _ in range(4):
            self.inbox.process.stdin.write(json.dumps(dict(self.answer, do="answer")).encode() + b"\n")
            self.inbox.process.stdin.flush()
            record = {}
            while "done" not in record:
                while b"\n" not in self.inbox._buffer:
                    self.inbox._buffer += os.read(self.inbox.process.stdout.fileno(), 1 << 16)
                line, _, self.inbox._buffer = self.inbox._buffer.partition(b"\n")
                record = json.loads(line)
                if "line" in record and record["line"].get("type") == "user":
                    self.shown += record["line"]["message"]["content"] + "\n"


class SendToClaudeThatAsks(SendToClaude):
    """The inbox holds it and asks its user, who says yes: a courier waits for that after the command has ended."""
    name, answer = "send-claude-held", {"receipts": [{"status": "held"}, {"status": "delivered"}]}


class SendToCodex(Send):
    """Into a running thread by the app-server of Codex."""
    name, target, options = "send-codex", THREAD, ()

    def prepare(self):
        codex = os.path.join(self.home.folder, ".codex")
        for folder in ("thread-writer-locks", "app-server-control", "sessions/2026/12/01"):
            os.makedirs(os.path.join(codex, folder), 0o700)
        lock = open(os.path.join(codex, "thread-writer-locks", THREAD + ".lock"), "w")
        self.addCleanup(lock.close)
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_down(codex, THREAD)
        self.script, self.probes, self.texts = AppServer(), 0, 0
        self.server = Server(self.serve)
        self.server.__enter__()
        self.addCleanup(self.end_server)
        os.symlink(self.server.path, os.path.join(codex, "app-server-control", "app-server-control.sock"))
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", THREAD, "SessionStart", transcript_path=os.path.join(
            codex, "sessions/2026/12/01/rollout-2026-12-01T00-00-00-%s.jsonl" % THREAD))
        self.sent("an earlier text.", UID % 1)

    def end_server(self):
        self.server.faults.clear()
        self.server.__exit__(None, None, None)

    def serve(self, connection):
        if connection._socket.recv(1, socket.MSG_PEEK) == b"!":
            self.probes += 1
        else:
            self.script(connection)

    def program(self):
        return dict(super().program(), env={"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": ADA,
                                            "XMSG_CODEX_TIMEOUT": "2"})

    def seen_directly(self):
        # Connections are served one after the other, so after this one those before it are done.
        seen = self.probes
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.server.path)
            connection.sendall(b"!")
        wait_until(lambda: self.probes > seen, "the app-server has seen all that was sent")
        for method, params in self.script.asked[self.texts:]:
            if method == "turn/start":
                self.shown += params["input"][0]["text"] + "\n"
        self.texts = len(self.script.asked)


class Hook(Case):
    """A hook of a session for which two messages wait."""
    host, event, fields = None, None, {}

    @property
    def name(self):
        return "hook-%s-%s" % (self.host, self.event)

    @property
    def session(self):
        return {"claude": ADA, "codex": BOB, "agy": AGY}[self.host]

    def prepare(self):
        super().prepare()
        for number, sender in enumerate((EVE, ADA if self.host != "claude" else BOB)):
            done = self.command("send", self.session, "waiting text %d." % number, "--no-direct", "--uid", UID % number,
                                session=sender, host=HOST_OF[sender])
            hold(done.returncode == 0, "no world:", done)

    def program(self):
        wake = self.event == "FileChanged"
        words = [self.host] + [self.event] * (wake or self.host == "agy") + ["3"] * wake
        data = support.payload(self.host, self.event, self.session, cwd=self.home.folder, **self.fields)
        return {"code": HOOK, "wake": wake, "arguments": words, "input": data}

    def check(self, done, kind, call):
        self.check_store()
        if not done.killed:
            hold(done.returncode == 0, "a hook leaves with", done.returncode, done.stderr)
        if self.event == "FileChanged":
            hold(done.stdout in (b"", b"xmsg wakes\n"), "the wake says", done.stdout)
            self.shown += done.wake.decode()
        else:
            self.take_shown(done.stdout)
        self.later()
        self.balance([UID % 0, UID % 1])

    def later(self):
        self.hooks(self.session)


class ClearHook(Hook):
    """`/clear`: the mail of the session goes to its next one, in the same Claude Code."""
    name, host, event, fields = "hook-claude-clear", "claude", "SessionStart", {"source": "clear"}
    session, after = ADA, EVE

    def prepare(self):
        self.claude = HostProcess(self.home, "claude", between=["/bin/sh", "-c", '"$@"; exit $?', "sh"])
        self.addCleanup(self.claude.end)
        self.claude.hook("claude", ADA, "SessionStart")
        super().prepare()

    def program(self):
        data = support.payload("claude", "SessionStart", self.after, cwd=self.home.folder, source="clear")
        return dict(super().program(), input=data, below=self.claude)

    def later(self):
        # The host says it once; if that came to nothing, the mail waits for the old id, and a further /clear takes it.
        output = self.claude.hook("claude", self.after, "SessionStart", source="clear")
        self.take_shown(json.dumps(output) if output else "")
        done = self.command("hook", "--host", "claude", data=support.payload(
            "claude", "PreToolUse", self.after, cwd=self.home.folder))
        self.take_shown(done.stdout)
        hold(not [row for row in self.rows() if row["target"] == ADA and row["state"] == "queued"],
             "mail stays with the session that was cleared")


class SpoolHook(Hook):
    """A Codex hook that takes in what its sandboxed thread has left in a file."""
    name, host, event, folders = "hook-codex-spool", "codex", "PostToolUse", ("store",)
    fields = {"tool_input": {"command": "xmsg send ada hello"}, "tool_response": ""}
    session = BOB

    def prepare(self):
        Case.prepare(self)
        self.folders = ("store", *contract.spool_folders(self.home.db, self.home.env))
        self.addCleanup(shutil.rmtree, self.folders[1], True)
        spool.make_key(self.home.db + ".key")
        now = contract.now_ms()
        left = {"uid": UID % 0, "created_at": now, "expires_at": now + 3600000, "sender_kind": "agent",
                "sender_label": BOB[:13], "sender_host": "codex", "sender_session": BOB, "target": ADA,
                "target_host": "claude", "body": "a text from the sandbox.", "priority": 0, "request_key": None,
                "reply_to": None, "replace": False, "direct": False}
        spool.leave(self.home.db, self.home.env, BOB, spool.read_key(self.home.db + ".key"), [left])
        store = self.home.store()
        message(store, BOB, "for the hook itself.", uid=UID % 1)
        store.close()

    def later(self):
        self.hooks(BOB)
        self.hooks(ADA)
        hold(not os.path.exists(self.folders[1]), "the file stays")


class Sweep(Case):
    """Upkeep over a message of each age: overdue, young, old, UNKNOWN, held by the dead, and a session long gone."""
    name = "sweep"

    def prepare(self):
        super().prepare()
        self.home.env.update(XMSG_RETAIN_SECONDS="3600", XMSG_RETAIN_PEER_SECONDS="3600", XMSG_VACUUM_FREE_PAGES="1")
        now, store = contract.now_ms(), self.home.store()
        ago, dead = now - 86400 * 1000, dead_process()
        message(store, BOB, "overdue text.", uid=UID % 0, now=ago)
        message(store, BOB, "young text.", uid=UID % 1)
        for number, states in enumerate((
                ("hook-inflight", "delivered"), ("reserved", "direct-inflight", "direct-uncertain"), ("reserved",),
                ("cancelled",))):
            row = message(store, BOB, "text %d." % number, uid=UID % (number + 2), now=ago, ttl=1e6)
            for state in states:
                with store.transaction():
                    store.move(row, state, ago, holder=dead if state == "reserved" else (None, None))
        for number in range(60):  # so that there are pages to give back
            row = message(store, EVE, "x" * 4000, now=ago)
            with store.transaction():
                store.move(row, "cancelled", ago)
        peer(store, EVE, now=ago)
        store.close()

    def program(self):
        return {"code": SWEEP}

    def check(self, done, kind, call):
        rows = {row["uid"]: row["state"] for row in self.check_store()}
        allowed = {0: ("queued", "expired"), 1: ("queued",), 2: ("delivered", None), 3: ("direct-uncertain",),
                   4: ("reserved", "queued"), 5: ("cancelled", None)}
        for number, states in allowed.items():
            hold(rows.get(UID % number) in states, "the sweep leaves #%d as" % number, rows.get(UID % number))
        if not done.killed and done.returncode == 0:
            hold(UID % 2 not in rows and UID % 5 not in rows, "a whole sweep leaves what is old")
        store = self.home.store()
        store.sweep(contract.now_ms(), anything=True)
        store.close()
        rows = {row["uid"]: row["state"] for row in self.check_store()}
        hold(rows == {UID % 0: "expired", UID % 1: "queued", UID % 3: "direct-uncertain", UID % 4: "queued"},
             "after a second sweep:", rows)
        self.hooks(BOB)
        self.balance([UID % 1, UID % 3, UID % 4])


class Install(Case):
    """The entries in a host's configuration, which holds others already."""
    command_word, folders = "install", ("store", ".claude", ".codex", ".gemini", ".local")
    host = None

    @property
    def name(self):
        return "%s-%s" % (self.command_word, self.host)

    def prepare(self):
        self.path = hook_install.config_path(self.host, self.home.env)
        os.makedirs(os.path.dirname(self.path))
        other = {"hooks": [{"type": "command", "command": "true"}]} if self.host != "agy" else {"type": "command",
                                                                                               "command": "true"}
        value = {"others": {"Stop": [other]}} if self.host == "agy" else {"hooks": {"Stop": [other]}}
        with open(self.path, "w") as file:
            json.dump(value, file, indent=4)
        self.old = self.content()
        self.do("install")
        self.new = self.content()
        hold(self.new != self.old, "install changes nothing")
        if self.command_word == "install":
            self.do("uninstall")
            hold(self.content() == self.old, "uninstall does not give back what was there")

    def content(self):
        with open(self.path, "rb") as file:
            return file.read()

    def do(self, word):
        done = self.command(word, "--host", self.host)
        hold(done.returncode == 0, "%s fails:" % word, done.stdout, done.stderr)

    def marks(self):
        return [os.path.dirname(self.path)]

    def program(self):
        return {"code": MAIN, "arguments": [self.command_word, "--host", self.host, "--json"]}

    def check(self, done, kind, call):
        hold(self.content() in (self.old, self.new), "a torn configuration file:", self.content())
        if not done.killed:
            hold("Traceback" not in done.stderr.decode() or not self.own_fault(done.stderr.decode()),
                 "a traceback:", done.stderr.decode())
            changes = json.loads(done.stdout).get("changes", ()) if done.stdout.startswith(b"{") else ()
            for change in changes:
                if change["host"] and change["action"] in ("added", "removed"):
                    hold(self.content() == (self.new if change["action"] == "added" else self.old),
                         "says %s, and it is not" % change["action"])
        self.do("install")
        hold(self.content() == self.new, "a second install ends in", self.content())
        self.do("uninstall")
        hold(self.content() == self.old, "an uninstall afterwards ends in", self.content())
        left = set(os.listdir(os.path.dirname(self.path))) - {os.path.basename(self.path)}
        hold(not left, "left behind:", left)
        self.check_store()


class Cancel(Case):
    """A message is withdrawn."""
    name = "cancel"

    def prepare(self):
        super().prepare()
        self.command("send", BOB, "a text withdrawn.", "--no-direct", "--uid", UID % 0, session=ADA)

    def program(self):
        return {"code": MAIN, "arguments": ["cancel", UID % 0, "--json"]}

    def check(self, done, kind, call):
        self.check_output(done, kind, call)
        [row] = self.check_store()
        if b'"cancelled"' in done.stdout:
            hold(row["state"] == "cancelled", "says cancelled, and it is", row["state"])
        self.hooks(BOB)
        self.balance([UID % 0])


class Requeue(Case):
    """`xmsg resolve --requeue` of one that was UNKNOWN."""
    name = "resolve"

    def prepare(self):
        super().prepare()
        store = self.home.store()
        row = message(store, BOB, "a text in doubt.", uid=UID % 0)
        with store.transaction():
            store.move(row, "hook-inflight", contract.now_ms(), window="PreToolUse", holder=dead_process())
        os.unlink(self.home.hint(BOB))
        store.close()

    def program(self):
        return {"code": MAIN, "arguments": ["resolve", UID % 0, "--requeue", "--json"]}

    def check(self, done, kind, call):
        self.check_output(done, kind, call)
        [row] = self.check_store()
        if not done.killed and done.returncode == 0:
            hold(row["state"] == "queued", "says queued, and it is", row["state"])
        self.hooks(BOB)
        self.balance([UID % 0])


def _variant(base, **values):
    return type(base.__name__, (base,), values)


# The promises hang on the first ones most; the rest is every window, and what else writes.
CASES = [Send, SendFirst, SendToClaude, SendToClaudeThatAsks, SendToCodex]
CASES += [_variant(Hook, host=host, event=event) for host, event in contract.WINDOWS]
CASES += [ClearHook, SpoolHook, Sweep]
CASES += [_variant(Install, host=host, command_word=word)
          for host in hook_install.HOSTS for word in ("install", "uninstall")]
CASES += [Cancel, Requeue]


def name_of(case):
    return case.name if isinstance(case.name, str) else case.name.fget(case)
