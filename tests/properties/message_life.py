#!/usr/bin/env python3
"""The life of messages as a state machine: random histories of the product beside a small model, which must agree.

usage: message_life.py [--lives N] [--steps N] [--seed N]      needs hypothesis, which only this test does

A history is made of sends, groups, hooks, direct outcomes of all five kinds, receipts, withdrawals, `resolve`,
evidence, sweeps, names, /clear, sandboxed senders, a reopened store, and time that passes and jumps; any command may
die before its k-th statement, write or call of a host. After each step the store equals the model, and by itself: each
text is shown at most once (once more for each `resolve --requeue`), each move is an edge of contract.STATES, a waiting
row has its hint, "delivered" was seen, what ended stays, and an acknowledged message is there. At the end a person can
settle every doubt.

The product runs in this process; hosts, processes and the clock are stand-ins. Last it says which edges of the table
were taken and which never, and "N passed, N failed", the whole being one test.
"""
import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import sqlite3
import sys
import types
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import support  # noqa: E402
import contract  # noqa: E402
import host_process  # noqa: E402
import sending  # noqa: E402
import spool  # noqa: E402
import store  # noqa: E402
import transcripts  # noqa: E402
import xmsg  # noqa: E402
from contract import ENDED, STATES, NoSuchTarget, NotPossible  # noqa: E402

try:
    from hypothesis import HealthCheck, Phase, seed, settings, strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
except ImportError:
    sys.exit("nothing was tried: this test needs hypothesis (python3 -m pip install hypothesis)")

HOUR = 3600000
OPTIONS = types.SimpleNamespace(lives=240, steps=30, seed=10, shrink=False)
EDGES = collections.Counter()
COUNTS = collections.Counter()
ALL_EDGES = [(old, new) for old in STATES for new in STATES[old][1]]


class Crash(BaseException):
    """The process dies here: nothing that it would do later is done."""


class World:
    """What stands in for hosts, processes and the clock of one history."""

    def __init__(self):
        self.now, self.process, self.living = 1800000000000, 0, set()
        self.steps = self.crash_at = None
        self.dead, self.seen, self.told = False, collections.Counter(), []
        self.outcomes, self.write, self.host = [], "all", (None, None)
        self.evidence, self.meanwhile, self.session, self.uid_of = (set(), True), None, None, None

    def tick(self):
        if self.dead:
            raise Crash
        if self.crash_at is not None:
            self.steps += 1
            if self.steps == self.crash_at:
                self.dead = True
                raise Crash

    def show(self, text):
        """What a hook of self.session shows; the messages of a group have one text, each its own session."""
        for body in re.findall(r"text-[0-9a-f]{16}\.", text):
            self.seen[self.uid_of(body, self.session)] += 1


W = World()


# ---------------------------------------------------------------------------------------------------- stand-ins

def _deliver(settings, jobs):
    """An inbox that answers as the history says; the first message of a command gets the first outcome."""
    answers = []
    for job in jobs:
        word, flag = W.outcomes.pop(0) if W.outcomes else ("ACCEPTED", True)
        facts = {}
        W.tick()
        if word != "NOT_SENT" or flag:
            job["leave"]("uds-direct")
            W.tick()
        if W.meanwhile:
            W.meanwhile(job["uid"])
        if word == "ACCEPTED" or word == "UNKNOWN" and flag:
            W.seen[job["uid"]] += 1
        if word == "HELD" and flag:
            facts["courier"] = 900000 + W.process
            W.living.add((facts["courier"], "1"))
        W.tick()
        answers.append(((word, "uds-direct" if word == "ACCEPTED" else "because"), facts))
    return answers


def _write_json(output):
    if W.write == "nothing":
        raise xmsg.NothingWritten("no reader")
    W.tick()
    W.show(json.dumps(output))
    W.tick()
    if W.write == "part":
        raise OSError("a part")


def _evidence(host, path, wanted, taken, seconds=0):
    offered, complete = W.evidence
    return types.SimpleNamespace(complete=complete, found={
        want["key"]: types.SimpleNamespace(name="trace-%d" % want["key"]) for want in wanted if want["key"] in offered})


def _facts(_, peer, direct, sender=None):
    return {"host": peer["host"], "direct": direct and peer["host"] == "claude", "inbox_fault": None}


def _found(opened):
    peers = {peer["session"]: peer for peer in opened.peers()}
    return types.SimpleNamespace(sessions={}, peers=peers, pids=None, writers={}, claude={})


def _stepwise(name):
    real = getattr(store.Store, name)

    def call(self, *arguments):
        W.tick()
        return real(self, *arguments)
    setattr(store.Store, name, call)


def put_stand_ins():
    for module in (contract, store, spool, xmsg, sending):
        if hasattr(module, "now_ms"):
            module.now_ms = lambda: W.now
    host_process.alive = lambda pid, start: bool(pid) and (pid, str(start)) in W.living
    host_process.start_time = lambda pid: "1" if pid >= 900000 else str(W.process)
    host_process.nearest_host = lambda *_: None
    xmsg.process_of_session = lambda host: W.host
    xmsg.found = sending.found = _found
    xmsg.record_interpreter = lambda *_: None
    xmsg.write_json = _write_json
    sending.direct_facts, sending._claude_job, sending._to_claude = _facts, lambda *_: {}, _deliver
    sending._transcript = lambda peer: "the transcript"
    transcripts.evidence = _evidence
    spool.start_delivery = lambda *_: None
    for name in ("_execute", "_one", "_all"):
        _stepwise(name)


# ---------------------------------------------------------------------------------------------------- the model

class Message:
    """What the model knows of one message: the columns that it predicts, and what may be seen of it."""

    def __init__(self, row):
        self.uid, self.id = row["uid"], row["id"]
        self.sender, self.label = row["sender_session"], row["sender_label"]
        self.key, self.priority, self.body = row["request_key"], row["priority"], row["body"]
        self.allowed, self.said = 1, False
        self.take(row)

    def take(self, row):
        self.state, self.state_at, self.target = row["state"], row["state_at"], row["target"]
        self.created, self.expires = row["created_at"], row["expires_at"]
        self.holder, self.confirmed = (row["holder_pid"], row["holder_start"]), row["confirmed_at"] is not None

    def move(self, state, holder=(None, None)):
        self.state, self.state_at, self.holder = state, W.now, holder

    @property
    def held_by_the_living(self):
        return host_process.alive(*self.holder)

    @property
    def unknown(self):
        return self.state == "direct-uncertain" or self.state in contract.IN_FLIGHT and not self.held_by_the_living


CLAUDE = ["c%07d-claude" % number for number in range(2)]
CODEX = ["%08d-codex" % number for number in range(2)]
crashes = st.one_of(st.none(), st.none(), st.integers(1, 60))
outcomes = st.lists(st.tuples(st.sampled_from(sorted(contract.OUTCOME_STATES)), st.booleans()), max_size=4)
many = st.integers(0, 1000)


class Lives(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        W.__init__()
        COUNTS["lives"] += 1
        self.home = support.Home()
        self.home.env.update(XMSG_RETAIN_PEER_SECONDS=str(3000 * 86400), XMSG_HOOK_SWEEP_INTERVAL="0")
        self.settings = contract.Settings(self.home.env)
        self.store = store.Store(self.settings)
        self.eyes = sqlite3.connect(self.home.db, isolation_level=None)
        self.eyes.row_factory = sqlite3.Row
        W.uid_of = lambda body, session: self.eyes.execute(
            "select uid from messages where body = ? and target = ?", (body, session)).fetchone()[0]
        self.eyes.execute("create table audit (id integer, old text, new text)")
        self.eyes.execute("create trigger audit_moves after update of state on messages when old.state != new.state "
                          "begin insert into audit values (new.id, old.state, new.state); end")
        self.messages, self.spooled, self.acknowledged = {}, [], set()
        self.successor, self.names, self.ended = {}, {}, {}
        self.claudes = [[CLAUDE[0], (901, "1")], [CLAUDE[1], (902, "1")]]  # the session that each process has now
        self.sessions = 0
        W.living.update(pid for _, pid in self.claudes)
        self.hooked = set()
        for session in CLAUDE + CODEX:
            self.hook_event(session, "SessionStart")
        spool.make_key(self.home.db + ".key")

    # ---- running

    def run(self, crash, function):
        """One command, a process of its own; (its answer, None) or (None, what it raised). A Crash is one of these."""
        W.now += 7
        W.process += 1
        me = (os.getpid(), str(W.process))
        W.living.add(me)
        W.steps, W.crash_at = 0, crash
        COUNTS["steps"] += 1
        try:
            return function(), None
        except (Crash, Exception) as error:
            if isinstance(error, AssertionError):
                raise
            return None, error
        finally:
            W.living.discard(me)
            dead, W.dead, W.crash_at, W.meanwhile, W.outcomes, W.write = W.dead, False, None, None, [], "all"
            if dead:
                COUNTS["crashes"] += 1
                self.reopen_store()

    def reopen_store(self):
        self.store._db.close()
        self.store = store.Store(self.settings)

    def rows(self):
        return {row["uid"]: dict(row) for row in self.eyes.execute("select * from messages order by id")}

    def check(self, error=None):
        """The store is what the model says; after a crash the model takes over what the store has."""
        rows = self.rows()
        if isinstance(error, Crash):
            for uid, row in rows.items():
                self.messages.setdefault(uid, Message(row)).take(row)
            for uid in set(self.messages) - set(rows):
                gone = self.messages.pop(uid)
                assert gone.state in ENDED or uid not in self.acknowledged, ("lost", vars(gone))
            self.successor = dict(self.eyes.execute("select session, successor from peers where successor is not null"))
            self.names = dict(self.eyes.execute("select session, name from peers where name != ''"))
        elif error is not None:
            raise error
        model = {uid: (message.state, message.target, message.created, message.expires, message.confirmed)
                 for uid, message in self.messages.items()}
        columns = ("state", "target", "created_at", "expires_at")
        real = {uid: (*map(row.get, columns), row["confirmed_at"] is not None) for uid, row in rows.items()}
        assert real == model, ("store and model differ", {uid: (real.get(uid), model.get(uid)) for uid in
                                                          set(real) | set(model) if real.get(uid) != model.get(uid)})
        for number, old, new in self.eyes.execute("select * from audit").fetchall():
            assert new in STATES[old][1], ("no edge of the table", old, new)
            EDGES[old, new] += 1
        self.eyes.execute("delete from audit")
        for uid, row in rows.items():
            message = self.messages[uid]
            assert W.seen[uid] <= message.allowed, ("shown too often", W.seen[uid], row)
            if row["state"] in ("queued", "reserved"):
                assert os.path.exists(self.home.hint(row["target"])), ("no hint", row)
            if row["state"] == "delivered" and not message.said:
                assert W.seen[uid], ("delivered, and never seen", row)
            if row["state"] in ("refused", "expired", "cancelled") and not message.said:
                assert W.seen[uid] < message.allowed, ("seen, and said to be not", row)
            assert row["confirmed_at"] is None or W.seen[uid], ("confirmed, and never seen", row)
            if row["state"] in ENDED:
                assert self.ended.setdefault(uid, row["state"]) == row["state"], ("what ended moved", row)
            last = self.eyes.execute("select state from events where message = ? order by rowid desc", (row["id"],))
            assert last.fetchone()[0] == row["state"], ("the events say something else", row)
            assert store.is_unknown(row) == message.unknown
        for uid in self.acknowledged:
            assert uid in rows or uid in self.ended, ("acknowledged, and gone", uid)

    # ---- the model's verbs

    def successor_of(self, session):
        seen = set()
        while session in self.successor and session not in seen:
            seen.add(session)
            session = self.successor[session]
        return session

    def in_state(self, state, target=None):
        return sorted((message for message in self.messages.values() if message.state == state and target in (
            None, message.target)), key=lambda message: message.id)

    def model_requeue(self, session=None):
        for message in self.in_state("reserved", session):
            if not message.held_by_the_living:
                self.model_queue(message)

    def model_queue(self, message):
        message.move("queued")
        message.target = self.successor_of(message.target)

    def model_expire(self, messages):
        for message in messages:
            if message.expires <= W.now:
                message.move("expired")

    def model_sweep(self):
        self.model_requeue()
        for message in self.in_state("queued"):
            if message.created > W.now + 60000:
                message.expires = W.now + message.expires - message.created
                message.created = W.now
        self.model_expire(self.in_state("queued"))
        for uid, message in list(self.messages.items()):
            if message.state in ENDED and message.state_at < W.now - self.settings.retain_seconds * 1000:
                self.ended.setdefault(uid, message.state)
                del self.messages[uid]

    def model_claim(self, session):
        """The messages that a hook takes now."""
        if not self.in_state("queued", session) and not self.in_state("reserved", session):
            return []
        self.model_requeue(session)
        self.model_expire(self.in_state("queued", session))
        taken = sorted(self.in_state("queued", session), key=lambda message: (-message.priority, message.id))
        return taken[:self.settings.max_per_inject]

    def learn(self, rows):
        """Takes rows that a command has made into the model, which has no number for them."""
        for row in rows:
            if row["uid"] not in self.messages:
                self.messages[row["uid"]] = Message(dict(row, state="queued", state_at=W.now, holder_pid=None,
                                                         holder_start=None, confirmed_at=None))

    # ---- hooks

    def hook_event(self, session, event, crash=None, write="all", source="startup", **fields):
        host = "claude" if "claude" in session else "codex"
        process = next((pid for now, pid in self.claudes if now == session), (None, None))
        before = self.rows()
        W.host, W.write, W.session = process, write, session
        data = support.payload(host, event, session, cwd=self.home.folder, source=source,
                               turn_id="turn-%d" % W.process, **fields)
        call = xmsg.parse_call(host, event, data)
        _, error = self.run(crash, lambda: xmsg._serve(self.store, call))
        self.hooked.add(session)
        if isinstance(error, Crash):
            return self.check(error)
        if event == "SessionStart":
            self.successor.pop(session, None)
        shape = contract.WINDOWS[host, event]
        taken = self.model_claim(session) if shape and not (event == "Stop" and fields.get("stop_hook_active")
                                                           and host == "claude") else []
        assert all(message.expires > W.now for message in taken)
        names_a_file = host == "claude" and event in ("SessionStart", "CwdChanged")
        for message in taken:
            message.move("hook-inflight", (os.getpid(), str(W.process)))
        if write == "nothing" and (taken or names_a_file):
            assert isinstance(error, xmsg.NothingWritten), error
            for message in taken:
                self.model_queue(message)
            return self.check()
        if write == "part" and (taken or names_a_file):
            assert isinstance(error, OSError), error
            return self.check()
        if error:
            raise error
        for message in taken:
            message.move("delivered")
        self.model_take_spooled(session, before)
        self.model_sweep()
        self.check()

    def model_take_spooled(self, session, before):
        rows = self.rows()
        for message in sorted(self.spooled, key=lambda message: message["created_at"]):
            row = rows.get(message["uid"])
            if row is None or message["uid"] in before:
                continue
            EDGES["spooled", "queued"] += 1
            self.learn([dict(row, expires_at=message["expires_at"], created_at=W.now,
                             target=self.successor_of(message["target"]))])
            self.model_expire([self.messages[message["uid"]]])
        left = [message for message in self.spooled if message["uid"] not in rows]
        own = [message for message in left if message["sender_session"] == session
               and W.now - message["created_at"] < self.settings.retain_seconds * 1000]
        assert not own, ("a hook leaves what its own session has spooled", own)
        self.spooled = [message for message in left if message["sender_session"] != session]

    def any_session(self, number, but=None):
        known = sorted(self.hooked - {but})
        return known[number % len(known)]

    @rule(number=many, event=st.sampled_from(sorted({event for _, event in contract.WINDOWS})), crash=crashes,
          write=st.sampled_from(["all", "all", "all", "nothing", "part"]), active=st.booleans())
    def hook(self, number, event, crash, write, active):
        session = self.any_session(number)
        host = "claude" if "claude" in session else "codex"
        if event != "FileChanged" and (host, event) in contract.WINDOWS:
            self.hook_event(session, event, crash, write, stop_hook_active=active if event == "Stop" else None)

    @rule(number=many, crash=crashes)
    def wake(self, number, crash):
        """What FileChanged does once the session is idle."""
        W.session = session = self.claudes[number % 2][0]
        call = xmsg.parse_call("claude", "FileChanged", support.payload("claude", "FileChanged", session))
        _, error = self.run(crash, lambda: xmsg.show_mail(self.store, call, W.now, _write_json))
        if error is None:
            for message in self.model_claim(session):
                message.move("delivered")
        self.check(error)

    @rule(number=many, crash=st.one_of(st.none(), st.integers(1, 60)), first=st.sampled_from(["", "mail", "doubt"]))
    def clear(self, number, crash, first):
        at = self.claudes[number % 2]
        self.sessions += 1
        if first:
            self.send(number, at, False, 0, first == "doubt", 3600, None, False, [("UNKNOWN", False)], None, False,
                      False)
            sent = max(self.messages.values(), key=lambda message: message.id) if self.messages else None
        old, at[0] = at[0], "d%07d-claude" % self.sessions
        W.host, W.session = at[1], at[0]
        call = xmsg.parse_call("claude", "", support.payload("claude", "SessionStart", at[0], source="clear",
                                                             cwd=self.home.folder))
        predecessor = self.store.peers_of_process(*at[1])
        predecessor = [peer["session"] for peer in predecessor if peer["session"] != at[0] and not peer["successor"]]
        before = self.rows()
        _, error = self.run(crash, lambda: xmsg._serve(self.store, call))
        if not isinstance(error, Crash):
            assert error is None, error
            if predecessor:
                self.successor[predecessor[0]] = at[0]
                for message in self.in_state("queued", predecessor[0]):
                    message.target = at[0]
                if predecessor[0] in self.names:
                    self.names[at[0]] = self.names.pop(predecessor[0])
            for message in self.model_claim(at[0]):
                message.move("delivered")
            self.model_take_spooled(at[0], before)
            self.model_sweep()
        self.hooked.add(at[0])
        self.check(error)
        if self.eyes.execute("select 1 from peers where session = ?", (at[0],)).fetchone() is None:
            self.hooked.discard(at[0])
            at[0] = old  # its first hook died before it was registered
        if first and sent and sent.unknown:
            self.resolve_one(sent, "requeue", None)

    # ---- senders

    def request(self, target, uid, **more):
        return dict({"target": target, "body": "text-%s." % uid, "label": "", "ttl": 3600, "priority": 0, "key": None,
                     "uid": uid, "replace": False, "reply_to": None, "force": False, "direct": True,
                     "notification": False, "spool": False}, **more)

    def sender(self, session):
        self.home.env.update(XMSG_FROM_SESSION=session, XMSG_FROM_TOOL="claude" if "claude" in session else "codex")
        self.store.settings = self.settings = contract.Settings(self.home.env)

    @rule(number=many, other=many, by_name=st.booleans(), urgent=st.sampled_from([0, 0, 0, 100]), direct=st.booleans(),
          ttl=st.sampled_from([60, 3600, 86400]), key=st.sampled_from([None, None, "k"]), replace=st.booleans(),
          outcome=outcomes, crash=crashes, again=st.booleans(), meanwhile=st.booleans())
    def send(self, number, other, by_name, urgent, direct, ttl, key, replace, outcome, crash, again, meanwhile):
        sender = self.any_session(number)
        target = self.any_session(other, sender) if isinstance(other, int) else other[0]
        holds = [session for session in self.names if self.names[session] == self.names.get(target)]
        spec = self.names[target] if by_name and holds == [target] else target
        final = self.successor_of(target)
        if final == sender:
            return
        self.sender(sender)
        uid = "%016x" % (W.process + 1)
        if again and self.messages:  # the very same request once more, as after a lost answer
            first = sorted(self.messages)[other % len(self.messages)]
            known = self.messages[first]
            if (known.sender, known.label, known.body) == (
                    sender, xmsg.session_label(self.store, sender), self.request(None, first)["body"]):
                uid, key, target, final = first, known.key, known.target, self.successor_of(known.target)
                spec = target
        if self.store.peer(final) is None or final == sender:
            return
        request = self.request(spec, uid, priority=urgent, direct=direct, ttl=ttl, key=key,
                               replace=replace and bool(key))
        label = xmsg.session_label(self.store, sender)
        W.outcomes = list(outcome)
        if meanwhile:
            W.meanwhile = self.others_at_work
        results, error = self.run(crash, lambda: sending.send(self.store, request, self.home.env))
        if error:
            return self.check(error)
        [(row, note)] = results
        self.acknowledged.add(row["uid"])
        self.outcome_list = list(outcome)
        self.model_send(row, uid, final, sender, label, key, request, direct, urgent, meanwhile)
        assert row["state"] == self.states_at_receipt.get(row["uid"], row["state"]), (row, self.states_at_receipt)
        self.check()

    @rule(number=many, outcome=outcomes, crash=crashes, later=st.one_of(st.none(), st.sampled_from(
        sorted(contract.OUTCOME_STATES))))
    def send_directly(self, number, outcome, crash, later):
        """With a word of the host that comes later, for one that may still be moved by it."""
        self.send(number, self.claudes[number % 2], False, 0, True, 3600, None, False, outcome, crash, False, False)
        if later:
            self.receipt(number, later, None, True)

    def model_send(self, row, uid, target, sender, label, key, request, direct, urgent, meanwhile):
        self.model_requeue()
        known = self.messages.get(uid)
        if known is None and key:
            same = [message for message in self.messages.values() if message.key == key and message.target == target
                    and message.sender == sender and message.label == label and message.state not in ENDED]
            known = max(same, key=lambda message: message.id) if same else None
        if known and known.state == "queued" and known.expires <= W.now:
            known.move("expired")
            known = known if known.uid == uid else None
        if known and request["replace"] and known.state == "queued" and known.uid != uid:
            known.move("cancelled")
            known = None
        new = known is None
        if new:
            self.learn([dict(row, uid=uid, created_at=W.now, expires_at=W.now + request["ttl"] * 1000, target=target)])
            assert row["uid"] == uid and row["target"] == target, row
        else:
            assert row["uid"] == known.uid, (row, vars(known))
        self.states_at_receipt = {}
        if new and direct and "claude" in target:
            mine = self.messages[uid]
            older = [message for message in self.in_state("queued", target) if message.id < mine.id
                     and message.sender == sender and message.label == label and message.expires > mine.created]
            for message in ([] if urgent > 0 else older) + [mine]:
                if not self.model_attempt(message, meanwhile):
                    break
            self.states_at_receipt[uid] = mine.state
        self.model_sweep()

    def model_attempt(self, message, meanwhile):
        """One row into the inbox; whether the next one may follow."""
        if message.state != "queued":
            return False  # another process took it meanwhile
        word, flag = self.outcome_list.pop(0) if self.outcome_list else ("ACCEPTED", True)
        left = word != "NOT_SENT" or flag
        message.move("direct-inflight" if left else "reserved", (os.getpid(), str(W.process)))
        if meanwhile:
            for other in self.model_claim(message.target):
                other.move("delivered")
        if not left:
            self.model_queue(message)
        else:
            holder = (900000 + W.process, "1") if word == "HELD" and flag else (None, None)
            self.model_queue(message) if word == "NOT_SENT" else message.move(contract.OUTCOME_STATES[word], holder)
        return word not in ("NOT_SENT", "UNKNOWN")

    def others_at_work(self, uid):
        """While a message is on its way another process tries everything with it; only other messages may move."""
        crash, W.crash_at = W.crash_at, None
        beside = store.Store(self.settings)
        me = (os.getpid(), "beside")
        W.living.add(me)
        try:
            row = beside.by_uid(uid)
            W.session = row["target"]
            call = xmsg.parse_call("claude", "", support.payload("claude", "PreToolUse", row["target"]))
            myself, xmsg.myself = xmsg.myself, lambda: me
            try:
                xmsg.show_mail(beside, call, W.now, _write_json)
            finally:
                xmsg.myself = myself
            with contextlib.suppress(NotPossible):
                sending.cancel(beside, dict(row), {"session": ""})
            for resolution in sending.RESOLUTIONS:
                with contextlib.suppress(NotPossible):
                    sending.settle(beside, dict(row), resolution)
            if row["state"] == "direct-inflight":
                assert not sending.record_receipt(beside, uid, ("REFUSED", "too early"))
            W.evidence = ({row["id"]}, True)
            sending.look_for_evidence(beside, [row["target"]])
            beside.requeue_reserved(W.now)
            assert beside.by_uid(uid) == row, ("somebody moved what a living sender holds", row, beside.by_uid(uid))
        finally:
            beside.close()
            W.living.discard(me)
            W.crash_at = crash

    @rule(number=many, group=st.sampled_from(["all", "project", "claude:", "codex:"]), outcome=outcomes, crash=crashes)
    def broadcast(self, number, group, outcome, crash):
        sender = self.any_session(number)
        self.sender(sender)
        W.outcomes = list(outcome)
        request = dict(self.request(group, None), body="text-%016x." % (1 << 60 | W.process))
        before = self.rows()
        results, error = self.run(crash, lambda: sending.send(self.store, request, self.home.env))
        if isinstance(error, NoSuchTarget):
            return self.check()
        if error:
            return self.check(error)
        rows = self.rows()
        targets = [row["target"] for row, _ in results]
        assert sender not in targets and len(targets) == len(set(targets)), targets
        assert not {row["uid"] for row, _ in results} & set(before), "no new message"
        self.acknowledged |= {row["uid"] for row, _ in results}
        for uid, row in rows.items():  # what may become of them is not predicted
            self.messages.setdefault(uid, Message(row)).take(row)
        for uid in set(self.messages) - set(rows):
            assert self.messages.pop(uid).state in ENDED
        self.check()

    @rule(number=many, other=many, ttl=st.sampled_from([60, 86400]))
    def leave_in_sandbox(self, number, other, ttl):
        sender = CODEX[number % 2]
        target = self.any_session(other, sender)
        uid = "%016x" % (1 << 40 | W.process)
        W.process += 1
        W.now += 7
        message = {"uid": uid, "created_at": W.now, "expires_at": W.now + ttl * 1000, "sender_kind": "agent",
                   "sender_label": sender[:8], "sender_host": "codex", "sender_session": sender, "target": target,
                   "target_host": "claude" if "claude" in target else "codex", "body": "text-%s." % uid, "priority": 0,
                   "request_key": None, "reply_to": None, "replace": False, "direct": False}
        spool.leave(self.home.db, self.home.env, sender, spool.read_key(self.home.db + ".key"), [message])
        self.spooled.append(message)

    # ---- people, hosts, time

    def any_message(self, number, among=None):
        able = [message for message in self.messages.values() if among is None or among(message)]
        able.sort(key=lambda message: message.id)
        return able[number % len(able)] if able else None

    @rule(number=many, crash=crashes)
    def cancel(self, number, crash):
        message = self.any_message(number)
        if message is None:
            return
        row = self.rows()[message.uid]
        _, error = self.run(crash, lambda: sending.cancel(self.store, row, {"session": message.sender}))
        if isinstance(error, NotPossible):
            assert message.state != "queued", vars(message)
            return self.check()
        if error is None:
            assert message.state == "queued", vars(message)
            message.move("cancelled")
        self.check(error)

    @rule(number=many, how=st.sampled_from(sorted(sending.RESOLUTIONS)), crash=crashes, doubtful=st.booleans())
    def resolve(self, number, how, crash, doubtful):
        message = self.any_message(number, (lambda message: message.unknown or message.state == "held") if doubtful
                                   else None)
        if message is not None:
            self.resolve_one(message, how, crash)

    def resolve_one(self, message, how, crash):
        row = self.rows()[message.uid]
        possible = message.unknown or message.state == "held" and how == "drop"
        if possible:  # a person takes it upon herself
            message.said = True
            message.allowed = max(message.allowed, W.seen[message.uid] + 1) if how == "requeue" else message.allowed
        _, error = self.run(crash, lambda: sending.settle(self.store, row, how))
        if isinstance(error, NotPossible):
            assert not possible, vars(message)
            return self.check()
        if error is None:
            assert possible, vars(message)
            self.settled(message, how)
        self.check(error)

    def settled(self, message, how):
        if how == "requeue":
            self.model_queue(message)
            message.expires = W.now + message.expires - message.created
        else:
            message.move("delivered" if how == "delivered" else "cancelled")

    @rule(number=many, offered=st.sets(st.integers(0, 5)), complete=st.booleans(), crash=crashes)
    def look_for_evidence(self, number, offered, complete, crash):
        """A transcript that shows nothing but what was seen."""
        target = self.any_session(number)
        proven = [message for at, message in enumerate(sorted(self.messages.values(), key=lambda message: message.id))
                  if at % 6 in offered and W.seen[message.uid] >= message.allowed and message.target == target]
        W.evidence = ({message.id for message in proven}, complete)
        _, error = self.run(crash, lambda: sending.look_for_evidence(self.store, [target]))
        if error is None:
            looked = [message for message in self.messages.values() if message.target == target]
            peer = self.store.peer(target)
            for message in looked:
                if message.state in ENDED and (message.state != "delivered" or message.confirmed):
                    continue
                if message.state in ("queued", "reserved") or (message.state in contract.IN_FLIGHT
                                                               and message.held_by_the_living):
                    continue
                if message in proven:
                    message.confirmed = True
                    if message.state != "delivered":
                        message.move("delivered")
                elif message.state == "held" and complete and not message.held_by_the_living and not (
                        host_process.alive(peer["pid"], peer["pid_start"])):
                    message.move("expired")
        self.check(error)

    @rule(number=many, word=st.sampled_from(sorted(contract.OUTCOME_STATES)), crash=crashes,
          open_ones=st.sampled_from([True, True, True, False]))
    def receipt(self, number, word, crash, open_ones):
        """A late word of the host, which knows whether it showed the text."""
        states = ("held", "direct-uncertain", "direct-inflight")
        message = self.any_message(number, (lambda message: message.state in states) if open_ones else None)
        if message is None or (word in ("NOT_SENT", "REFUSED", "HELD") and W.seen[message.uid] >= message.allowed):
            return
        can = message.state in states
        if word == "ACCEPTED" and can and W.seen[message.uid] < message.allowed:
            W.seen[message.uid] += 1
        if word == "UNKNOWN" and message.state == "held" and W.seen[message.uid] >= message.allowed:
            return
        text = "uds-direct" if word == "ACCEPTED" else "because"
        answer, error = self.run(crash, lambda: sending.record_receipt(self.store, message.uid, (word, text)))
        if error is None:
            assert answer, vars(message)
            state = contract.OUTCOME_STATES[word]
            if message.state == "held" and word in ("NOT_SENT", "UNKNOWN"):
                message.move("expired")
            elif can and message.state != state:
                if state == "queued":
                    self.model_queue(message)
                else:
                    message.move(state, message.holder if word == "HELD" else (None, None))
        self.check(error)

    @rule(crash=crashes, anything=st.booleans())
    def sweep(self, crash, anything):
        _, error = self.run(crash, lambda: self.store.sweep(W.now, anything=anything))
        if error is None:
            self.model_sweep()
        self.check(error)

    @rule(number=many, name=st.sampled_from(["leader", "worker", ""]), crash=crashes)
    def rename(self, number, name, crash):
        session = self.any_session(number)
        _, error = self.run(crash, lambda: self.store.set_name(session, name))
        if error is None:
            self.names.pop(session, None)
            self.names.update({session: name} if name else {})
        self.check(error)

    @rule(step=st.one_of(st.integers(1, 2 * HOUR), st.integers(-24 * HOUR, -1), st.integers(HOUR, 20 * 24 * HOUR)))
    def time(self, step):
        W.now += step

    @rule(number=many)
    def end_of_a_process(self, number):
        """A courier dies, or a Claude Code is closed and opened again, on another conversation or on the same."""
        couriers = sorted(pair for pair in W.living if pair[0] >= 900000)
        if couriers:
            W.living.discard(couriers[number % len(couriers)])
        at = self.claudes[number % 2]
        if number % 3 == 0 and at[1] in W.living:
            W.living.discard(at[1])
        elif number % 3 == 1:
            at[1] = (at[1][0] + 2, "1")
            W.living.add(at[1])

    @rule()
    def reopen(self):
        self.reopen_store()
        self.check()

    def teardown(self):
        try:
            W.now += 7
            for message in list(self.messages.values()):
                if message.unknown or message.state == "held":
                    W.process += 1
                    message.said = True
                    sending.settle(self.store, self.rows()[message.uid], "drop")
                    self.settled(message, "drop")
            self.check()
            assert self.store.integrity() == ""
            open_states = {message.state for message in self.messages.values()} - set(ENDED)
            assert open_states <= {"queued", "reserved"}, open_states
        finally:
            self.eyes.close()
            self.store.close()
            for folder in contract.spool_folders(self.home.db, self.home.env):
                shutil.rmtree(folder, ignore_errors=True)
            self.home.remove()


class AMessagesLife(unittest.TestCase):
    def test_is_that_of_the_table_of_states_whatever_happens(self):
        put_stand_ins()
        seed(OPTIONS.seed)(Lives)
        run_state_machine_as_test(Lives, settings=settings(
            max_examples=OPTIONS.lives, stateful_step_count=OPTIONS.steps, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False,
            phases=[Phase.generate] + [Phase.shrink] * OPTIONS.shrink))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lives", type=int, default=OPTIONS.lives, help="so many histories")
    parser.add_argument("--steps", type=int, default=OPTIONS.steps, help="so many steps in each at most")
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--shrink", action="store_true", help="a failure is made short, which takes long")
    parser.parse_args(arguments, OPTIONS)
    result = unittest.TextTestRunner(verbosity=0).run(unittest.defaultTestLoader.loadTestsFromTestCase(AMessagesLife))
    print("%(lives)d histories, %(steps)d commands, %(crashes)d of them died on the way" % collections.Counter(COUNTS))
    for old, new in ALL_EDGES:
        if EDGES[old, new]:
            print("taken %6d times: %s -> %s" % (EDGES[old, new], old, new))
    for old, new in ALL_EDGES:
        if not EDGES[old, new]:
            print("never taken: %s -> %s" % (old, new))
    failed = 0 if result.wasSuccessful() else 1
    print("%d passed, %d failed" % (1 - failed, failed))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
