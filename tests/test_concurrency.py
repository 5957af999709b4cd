"""Many senders, hooks, withdrawals and sweeps at once, half of them killed; then the books are balanced.

Each process loops over the product's own entries. XMSG_FULL=1 runs the full size: 16 senders of 200 messages.
"""
import collections
import json
import os
import random
import subprocess
import tempfile
import unittest

from support import ADA, BOB, EVE, PATIENCE, PYTHON, ROOT, HomeCase, end, message, payload, wait_until
from side_by_side import load_tests  # noqa: F401

from contract import ENDED, STATES

FULL = os.environ.get("XMSG_FULL") == "1"
SEED = int(os.environ.get("XMSG_TEST_SEED", "5"))

# All begin when their standard input is closed.
SENDER = """
import os, sys
sys.path.append(%r)
from command_line import main
name, count, targets = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
sys.stdin.read()
for number in range(count):
    text = "text %%s-%%d." %% (name, number)
    main(["send", targets[number %% len(targets)], text, "--no-direct", "--json"])
""" % ROOT
# A session's hook, again and again, until there is a file that says stop.
CLAIMER = """
import os, sys
sys.path.append(%r)
from contract import Settings
from xmsg import run_hook
stop, payloads = sys.argv[1], [word.encode() for word in sys.argv[2:]]
sys.stdin.read()
last = False
while not last:
    last = os.path.exists(stop)
    for payload in payloads:
        try:
            run_hook(Settings(os.environ), "codex", "", payload)
        except Exception as error:
            sys.stderr.write("%%r\\n" %% error)
""" % ROOT
# One of those who race for a message: reads `uid` after `uid` and does its own thing to each; prints what it won.
RACER = """
import os, sys, time
sys.path.append(%r)
from contract import Settings, now_ms
from command_line import main
from store import Store
from xmsg import run_hook
kind, target, payload = sys.argv[1], sys.argv[2], sys.argv[3].encode()
for line in sys.stdin:
    uid, pause = line.split()
    time.sleep(float(pause))
    try:
        if kind == "hook":
            run_hook(Settings(os.environ), "codex", "", payload)
        elif kind == "cancel":
            main(["cancel", uid, "--json"])
        elif kind == "replace":
            main(["send", target, "newer than " + uid + ".", "--no-direct", "--key", uid, "--replace"])
        elif kind == "sweep":
            store = Store(Settings(os.environ))
            store.sweep(now_ms() + 100000)
            store.close()
    except Exception as error:
        sys.stderr.write("%%r\\n" %% error)
    sys.stdout.flush()
    os.write(3, b".")
""" % ROOT


class Crowd(HomeCase):
    def setUp(self):
        super().setUp()
        self.home.hook("claude", ADA, "SessionStart")
        for session in (BOB, EVE):
            self.home.hook("codex", session, "SessionStart")
        self.store = self.open_store()
        self.random = random.Random(SEED)
        self.processes = []
        # Every move that the store ever makes, seen from inside it.
        self.home.sql("create table audit (id integer, old text, new text)")
        self.home.sql("create trigger audit_moves after update of state on messages when old.state != new.state begin "
                      "insert into audit values (new.id, old.state, new.state); end")

    def start(self, code, *arguments, **options):
        """A process that waits for its standard input; .out is the file that it writes to."""
        out = tempfile.TemporaryFile()
        process = subprocess.Popen([PYTHON, "-I", "-S", "-c", code, *arguments], stdin=subprocess.PIPE, stdout=out,
                                   stderr=subprocess.DEVNULL, cwd=self.home.folder,
                                   env=dict(self.home.env, XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=ADA), **options)
        process.out = out
        self.processes.append(process)
        self.addCleanup(out.close)
        self.addCleanup(end, process)
        return process

    def written(self, process):
        process.out.seek(0)
        return process.out.read().decode()

    def claimer(self, stop):
        return self.start(CLAIMER, stop, *(payload("codex", "PreToolUse", session).decode() for session in (BOB, EVE)))

    def kill_each(self, processes, reached, most):
        """Kills the processes one after the other, as reached() comes to random numbers up to most; how many lived."""
        killed = 0
        for process, goal in zip(processes, sorted(self.random.randrange(most) for _ in processes)):
            wait_until(lambda: reached() >= goal, "the others go on", 60)
            if process.poll() is None:
                process.kill()
                killed += 1
        return killed

    def records(self, process):
        """The records of messages that a process has printed; the last one may be torn by its death."""
        text, at, decoder = self.written(process), 0, json.JSONDecoder()
        while text[at:].strip():
            at += len(text[at:]) - len(text[at:].lstrip())
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                return
            yield from value.get("messages", ())

    def balance(self, acknowledged, shown, killed):
        """Nothing is shown twice; each acknowledged message is shown, or UNKNOWN, and there are not more of those than
        hooks that were killed could hold."""
        for session in (BOB, EVE):
            while self.store.waiting(session):
                before = len(shown)
                shown += json.dumps(self.home.hook("codex", session, "PreToolUse"))
                self.assertLess(before, len(shown), "waiting mail that no hook shows")
        self.assertEqual("", self.store.integrity())
        rows = {row["uid"]: row for row in self.store.messages()}
        self.assertLessEqual(set(acknowledged), set(rows), "acknowledged without a row")
        reports = {record["uid"]: record for record in self.home.json(
            "outbox", "--all", "--limit", "100000", session=ADA)["messages"]}
        counts = collections.Counter()
        for uid, row in rows.items():
            times, report = shown.count(row["body"]), reports[uid]
            self.assertLessEqual(times, 1, "shown twice: %r" % row)
            if row["state"] == "delivered":
                self.assertEqual(1, times, row)
            else:
                self.assertTrue(report["unknown"], report)
            counts[row["state"], times] += 1
        self.assertLessEqual(sum(counts.values()) - counts["delivered", 1], 10 * killed, counts)
        self.check_moves()
        return counts

    def check_moves(self):
        for _, old, new in self.home.sql("select * from audit"):
            self.assertIn(new, STATES[old][1], "a move that the table of states does not have")
        for number, moves in self.home.sql("select id, count(*) from audit where new in (%s) group by id" % ", ".join(
                "'%s'" % state for state in ENDED)):
            self.assertEqual(1, moves, "#%d ended more than once" % number)


class ACrowd(Crowd):
    def test_of_senders_and_hooks_of_whom_half_are_killed_leaves_nothing_unaccounted_for(self):
        senders, messages, claimers = (16, 200, 8) if FULL else (16, 12, 4)
        stop = os.path.join(self.home.folder, "stop")
        hooks = [self.claimer(stop) for _ in range(claimers)]
        crowd = [self.start(SENDER, str(number), str(messages), BOB, EVE) for number in range(senders)]
        for process in hooks + crowd:
            process.stdin.close()
        victims = crowd[::2] + hooks[::2]
        self.random.shuffle(victims)
        total = senders * messages
        self.assertGreater(self.kill_each(victims, lambda: self.store._one("select count(*) from messages")[0], total // 3), 0)
        for process in crowd:
            process.wait(120 * PATIENCE)
        open(stop, "w").close()
        for process in hooks:
            process.wait(60 * PATIENCE)
        acknowledged = {record["uid"] for process in crowd for record in self.records(process)}
        self.assertGreater(len(acknowledged), total // 3)
        self.balance(acknowledged, "".join(map(self.written, hooks)), claimers // 2)

    def test_of_claimers_shows_each_message_once_though_half_of_them_are_killed(self):
        messages, claimers = (3200, 16) if FULL else (160, 16)
        self.home.env["XMSG_MAX_PER_INJECT"] = "2"
        for number in range(messages):
            message(self.store, (BOB, EVE)[number % 2], "text %d." % number)
        stop = os.path.join(self.home.folder, "stop")
        hooks = [self.claimer(stop) for _ in range(claimers)]
        for process in hooks:
            process.stdin.close()
        taken = "select count(*) from messages where state != 'queued'"
        killed = self.kill_each(hooks[::2], lambda: self.store._one(taken)[0], messages * 3 // 4)
        wait_until(lambda: not (self.store.waiting(BOB) or self.store.waiting(EVE)), "all is claimed", 60)
        open(stop, "w").close()
        for process in hooks:
            process.wait(60 * PATIENCE)
        self.assertEqual(claimers // 2, killed)
        counts = self.balance((), "".join(map(self.written, hooks)), killed)
        self.assertEqual(messages, sum(counts.values()))
        self.assertGreater(sum(1 for process in hooks if self.written(process)), 2, "one took it all: no race")

    def test_of_senders_alone_keeps_each_senders_order(self):
        senders, messages = (8, 50) if FULL else (4, 8)
        crowd = [self.start(SENDER, str(number), str(messages), BOB) for number in range(senders)]
        for process in crowd:
            process.stdin.close()
        for process in crowd:
            self.assertEqual(0, process.wait(60 * PATIENCE))
        bodies = [row["body"] for row in self.store.messages(BOB)]
        self.assertEqual(senders * messages, len(bodies))
        for number in range(senders):
            self.assertEqual(["text %d-%d." % (number, step) for step in range(messages)],
                             [body for body in bodies if body.startswith("text %d-" % number)])


class ARace(Crowd):
    def test_for_one_message_has_exactly_one_winner(self):
        """A hook's claim, `cancel`, `send --replace` and a sweep past its time, all at the same message."""
        rounds = 400 if FULL else 50
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        racers = {kind: self.start(RACER, kind, BOB, payload("codex", "PreToolUse", BOB).decode(), pass_fds=(3,),
                                   preexec_fn=lambda: os.dup2(writer, 3)) for kind in ("hook", "cancel", "replace", "sweep")}
        os.close(writer)
        raced = []
        for number in range(rounds):
            row = message(self.store, BOB, "race %d." % number, ttl=90, request_key="%016x" % number, uid="%016x" % number)
            raced.append(row)
            order = list(racers)
            self.random.shuffle(order)
            for kind in order:
                racers[kind].stdin.write(("%s %f\n" % (row["uid"], self.random.random() * 0.004)).encode())
                racers[kind].stdin.flush()
            for _ in racers:
                self.assertEqual(b".", os.read(reader, 1))
        for process in racers.values():
            process.stdin.close()
            self.assertEqual(0, process.wait(20 * PATIENCE))
        shown = self.written(racers["hook"])
        cancelled = {record["uid"] for record in self.records(racers["cancel"])}
        winners = collections.Counter()
        for row in raced:
            end_state, events = self.store.by_id(row["id"])["state"], self.store.events(row["id"])
            winner = events[-1]["detail"] or end_state
            winners[winner] += 1
            self.assertEqual(int(end_state == "delivered"), shown.count(row["body"]), row)
            self.assertEqual(winner == "withdrawn", row["uid"] in cancelled, (row, events))
        self.check_moves()
        self.assertGreater(len(winners), 1, "somebody always wins: no race: %r" % winners)
        for target in self.store.queued_counts():
            self.assertTrue(os.path.exists(self.home.hint(target)))


if __name__ == "__main__":
    unittest.main()
