#!/usr/bin/env python3
"""A soak: 64 sessions, mixed verbs from 16 processes, many of them killed; then the books are balanced.

usage: soak.py [--seconds N] [--seed N]      the last line is `lost 0, doubled 0, unaccounted 0: ...`, else status 1

Each process is a Claude Code to the product (a Python script of that name): it owns one session of its own and three
more, runs their hooks by xmsg-hook.sh and commands in forks of itself, and keeps a log and the output of each. What
a session has seen is what a hook printed for it; of agy, what the process then wrote into its transcript, as agy does;
of the sessions with an inbox, what the inbox got. One text goes to one session once, so a text that is seen twice there
is doubled. A message is lost if it was acknowledged and has no row, or if its row says delivered and nobody has
seen it. It is unaccounted for if its end is not the one that its story tells: UNKNOWN without a killed hook or sender
that held it, cancelled or expired but seen, still waiting though every session has run its hooks until nothing came.
"""
import argparse
import collections
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
import unittest

TESTS = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(TESTS)
sys.path[:0] = [ROOT, TESTS]
from contract import ENDED, STATES  # noqa: E402

PROCESSES, EACH, INBOXES = 16, 4, 4  # the first few own a session with an inbox in place of a second Codex
EVENTS = {"claude": ("UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop", "FileChanged", "CwdChanged"),
          "codex": ("UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop"),
          "agy": ("PreInvocation", "Stop")}
# verb -> how often of all
VERBS = {"hook": 46, "send": 28, "group": 1, "cancel": 5, "take": 3, "inbox": 3, "outbox": 3, "show": 2, "list": 2,
         "name": 3, "clear": 2, "restart": 1, "sweep": 1}
TOKEN = re.compile(rb"text-\d+-\d+-\d+\.")
KILLED = 0.15  # of all commands and hooks
LONGEST_HOOK = 4.9
FRAME = "<SYSTEM_MESSAGE>\n[text of a hook, the user did not write this]\n%s\n</SYSTEM_MESSAGE>"


def session_id(host, process, place, generation=0):
    return "%s%04x-%04x-7000-8000-000000000000" % (
        {"claude": "7c1f", "inbox": "7c1f", "codex": "01a0", "agy": "c0ff"}[host], process * EACH + place, generation)


def host_of(session):
    return {"7c1f": "claude", "01a0": "codex", "c0ff": "agy"}[session[:4]]


def hosts_of(process):
    """The hosts of a process's sessions; an inbox is a Claude Code with an inbox and without hooks."""
    return ("claude", "codex", "inbox" if process < INBOXES else "codex", "agy")


# ---------------------------------------------------------------------------------------------------- a process

class Process:
    """One of those who work: it writes a record of each command before it starts and after its end."""

    def __init__(self, folder, number, life, seed):
        self.folder, self.number, self.life = folder, number, life
        self.random, self.count, self.texts, self.uids = random.Random(seed), 0, 0, []
        self.log = open(os.path.join(folder, "log-%d-%d" % (number, life)), "a")
        with open(os.path.join(folder, "world.json")) as file:
            self.world = json.load(file)
        self.sessions = [[host, self.latest(place) or session_id(host, number, place)]
                         for place, host in enumerate(hosts_of(number))]

    def latest(self, place):
        """The session that an earlier life of this process went on with after a /clear."""
        try:
            with open(os.path.join(self.folder, "session-%d-%d" % (self.number, place))) as file:
                return file.read()
        except OSError:
            return None

    def note(self, **record):
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()

    def work(self, stop):
        for place, (host, _) in enumerate(self.sessions):
            if host != "inbox":
                self.hook(place, "PreInvocation" if host == "agy" else "SessionStart",
                          source="resume" if self.life else "startup", victim=False)
        verbs = [verb for verb, often in VERBS.items() for _ in range(often)]
        while not os.path.exists(stop):
            getattr(self, self.random.choice(verbs))()

    def run(self, verb, place, start, victim=None, event=None):
        """Starts something through start(out) -> pid, and waits for its end, or kills it; (status, output)."""
        self.count += 1
        name = "out-%d-%d-%d" % (self.number, self.life, self.count)
        path = os.path.join(self.folder, name)
        session = self.sessions[place][1]
        self.note(begin=name, verb=verb, session=session, event=event, at=time.time())
        with open(path, "wb") as out:
            pid, group = start(out.fileno())
        killed = self.random.random() < KILLED if victim is None else victim
        if killed:
            time.sleep(self.random.random() ** 2 * 0.12)
            # Now and then only the wrapper dies, and Python goes on without it.
            try:
                os.killpg(pid, signal.SIGKILL) if group and self.random.random() < 0.8 else os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.note(end=name, status=status, killed=killed, at=time.time())
        with open(path, "rb") as file:
            return status, file.read()

    def command(self, verb, place, arguments, code=None, victim=None):
        """`xmsg ARGUMENTS --json` in a fork of this process, as that session runs it; the parsed output, or None."""
        host, session = self.sessions[place]
        env = {"CLAUDE_CODE_SESSION_ID": session} if self.number < PROCESSES and place == 0 else {
            "XMSG_FROM_TOOL": host.replace("inbox", "claude"), "XMSG_FROM_SESSION": session}

        def start(out):
            pid = os.fork()
            if not pid:
                status = 70
                try:
                    os.dup2(out, 1)
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    os.environ.update(env)
                    status = code() if code else main(arguments + ["--json"])
                finally:
                    os._exit(status or 0)
            return pid, False
        return parsed(self.run(verb, place, start, victim)[1])

    def hook(self, place=None, event=None, victim=None, **fields):
        if place is None:
            place = self.random.choice([place for place in range(EACH) if self.sessions[place][0] != "inbox"])
        host, session = self.sessions[place]
        event = event or self.random.choice(EVENTS[host])
        transcript = os.path.join(self.folder, "brain", session, "transcript_full.jsonl")
        steps = self.steps(transcript) if host == "agy" else 0
        if host == "agy":
            fields = {"conversationId": session, "initialNumSteps": steps, "invocationNum": self.random.choice((0, 1)),
                      "transcriptPath": transcript, "workspacePaths": [self.folder], "executionNum": 1,
                      "fullyIdle": True, "terminationReason": "NO_TOOL_CALL"}
        else:
            fields = dict({"session_id": session, "transcript_path": "%s/%s.jsonl" % (self.folder, session),
                           "cwd": self.folder, "turn_id": "turn-%d" % self.count, "hook_event_name": event,
                           "permission_mode": "default"}, **fields)
        argument = [event] if host == "agy" or event == "FileChanged" else []

        def start(out):
            reader, writer = os.pipe()
            os.write(writer, json.dumps(fields, separators=(",", ":")).encode())
            os.close(writer)
            if event != "FileChanged" and self.random.random() < 0.6:  # without the wrapper, many more go
                pid = os.fork()
                if not pid:
                    os.dup2(reader, 0)
                    os.dup2(out, 1)
                    os._exit(hook_main([host] + argument))
                os.close(reader)
                return pid, False
            hook = subprocess.Popen([os.path.join(ROOT, "xmsg-hook.sh"), host] + argument, stdin=reader, stdout=out,
                                    stderr=out, start_new_session=True)
            os.close(reader)
            hook.returncode = 0  # waited for by run()
            return hook.pid, True
        status, output = self.run("hook", place, start, victim, event)
        if host == "agy":
            self.play_agy(transcript, steps, parsed(output) if status == 0 else None)

    def steps(self, transcript):
        try:
            with open(transcript, "rb") as file:
                return file.read().count(b"\n")
        except OSError:
            os.makedirs(os.path.dirname(transcript), exist_ok=True)
            return 0

    def play_agy(self, transcript, index, output):
        """What agy writes after a hook: its output as a step, unless it drops it, and what the model then said.

        Of what it drops at a Stop nobody can tell that it was dropped: such a message is UNKNOWN without a death.
        """
        steps = []
        if output and self.random.random() < 0.9:
            step = (output.get("injectSteps") or [{}])[0]
            if "ephemeralMessage" in step:
                steps = [("SYSTEM", "EPHEMERAL_MESSAGE", step["ephemeralMessage"])]
            else:
                text = step["systemMessage"]["systemMessage"] if step else (
                    "Stop hook blocked termination: " + output["reason"])
                steps = [("SYSTEM", "SYSTEM_MESSAGE", FRAME % text)]
        elif output and "reason" in output:
            self.note(dropped=[token.decode() for token in TOKEN.findall(output["reason"].encode())])
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with open(transcript, "a") as file:
            for source, kind, text in steps + [("MODEL", "PLANNER_RESPONSE", "well")]:
                file.write(json.dumps({"step_index": index, "source": source, "type": kind, "status": "DONE",
                                       "content": text, "created_at": now}) + "\n")
                index += 1

    # ---- the verbs

    def place(self):
        return self.random.randrange(EACH)

    def text(self):
        self.texts += 1
        return "text-%d-%d-%d. %s" % (self.number, self.life, self.texts, "and so on " * self.random.randrange(30))

    def send(self):
        place, options = self.place(), []
        target = self.random.choice(self.world)
        if self.random.random() < 0.2:
            target = "name-%d" % self.random.randrange(PROCESSES)
        for option, chance in ((["--no-direct"], 0.5), (["--urgent"], 0.1), (["--ttl", "1"], 0.05),
                               (["--key", "key-%d" % self.random.randrange(3)], 0.1)):
            options += option if self.random.random() < chance else []
        options += ["--replace"] if "--key" in options and self.random.random() < 0.5 else []
        self.remember(self.command("send", place, ["send", target, self.text()] + options))

    def group(self):
        target = self.random.choice(("all", "project", "codex:", "claude:", "agy:"))
        self.remember(self.command("send", self.place(), ["send", target, self.text(), "--no-direct"]))

    def remember(self, answer):
        self.uids = (self.uids + [record["uid"] for record in (answer or {}).get("messages", ())])[-50:]

    def cancel(self):
        if self.uids:
            self.command("cancel", self.place(), ["cancel", self.random.choice(self.uids[-10:])])

    def show(self):
        if self.uids:
            self.command("show", self.place(), ["show", self.random.choice(self.uids)])

    def take(self):
        self.command("take", self.place(), ["inbox", "--take"])

    def inbox(self):
        self.command("inbox", self.place(), ["inbox"])

    def outbox(self):
        self.command("outbox", self.place(), ["outbox"] + (["--all"] if self.random.random() < 0.5 else []))

    def list(self):
        self.command("list", self.place(), ["list"] + (["--all"] if self.random.random() < 0.3 else []))

    def name(self):
        label = "name-%d" % self.random.randrange(PROCESSES) if self.random.random() < 0.8 else ""
        self.command("name", self.place(), ["name", ".", label])

    def clear(self):
        """A /clear of Claude Code: another session in the same process, and its mail goes with it."""
        generation = int(self.sessions[0][1].split("-")[1], 16) + 1
        self.sessions[0][1] = session_id("claude", self.number, 0, generation)
        path = os.path.join(self.folder, "session-%d-0" % self.number)
        with open(path + ".new", "w") as file:
            file.write(self.sessions[0][1])
        os.rename(path + ".new", path)
        self.hook(0, "SessionStart", source="clear")

    def restart(self):
        self.hook(1, "SessionStart", source="resume")

    def sweep(self):
        def code():
            store = Store(Settings(os.environ))
            store.sweep(now_ms())
            store.repair_hints()
            store.close()
        self.command("sweep", 0, [], code)


def parsed(output):
    """The JSON object that a command has printed whole, None else: a torn answer acknowledges nothing."""
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


# ---------------------------------------------------------------------------------------------------- the books

class Soak:
    def __init__(self, seconds, seed):
        from support import Home
        self.seconds, self.seed, self.random, self.wrong = seconds, seed, random.Random(seed), collections.Counter()
        self.home = Home()
        self.folder = self.home.folder
        self.env = dict(self.home.env, XMSG_HOOK_TIMEOUT=str(LONGEST_HOOK), XMSG_LANG="en")
        self.workers, self.inboxes, self.lives, self.drains = {}, {}, collections.Counter(), 0
        self.dropped = set()

    def blame(self, kind, what):
        self.wrong[kind] += 1
        if self.wrong[kind] <= 5:
            print("%s: %s" % (kind, what), flush=True)

    def run(self):
        begin = time.monotonic()
        try:
            self.begin()
            stop, dies = os.path.join(self.folder, "stop"), time.monotonic() + 2
            while time.monotonic() < begin + self.seconds:
                time.sleep(0.05)
                self.check_hints()
                for number, process in self.workers.items():
                    if process.poll() is not None:
                        self.blame("unaccounted", "process %d has ended by itself: %r" % (number, process.returncode))
                        self.start(number)
                if time.monotonic() > dies:  # a whole host, with whatever it has under way
                    number = self.random.randrange(PROCESSES)
                    self.workers[number].kill()
                    self.workers[number].wait()
                    self.start(number)
                    dies = time.monotonic() + 2
            open(stop, "w").close()
            for process in self.workers.values():
                process.wait(60)
            return self.balance()
        finally:
            for process in list(self.workers.values()) + [inbox for inbox, _ in self.inboxes.values()]:
                process.kill()
                process.wait()
            self.home.remove()

    def begin(self):
        runtime = os.path.join(self.folder, "run")
        os.makedirs(os.path.join(self.folder, ".claude", "sessions"))
        os.mkdir(runtime, 0o700)
        world = []
        for number in range(PROCESSES):
            for place, host in enumerate(hosts_of(number)):
                session = session_id(host, number, place)
                world.append(session)
                if host == "inbox":
                    log = open(os.path.join(self.folder, "inbox-%s" % session), "wb")
                    self.inboxes[session] = (subprocess.Popen(
                        [sys.executable, os.path.join(TESTS, "fake_claude.py"), os.path.join(self.folder, ".claude"),
                         runtime, session], stdin=subprocess.PIPE, stdout=log, env=self.env), log.name)
                    log.close()
        with open(os.path.join(self.folder, "world.json"), "w") as file:
            json.dump(world, file)
        os.symlink(os.path.realpath(__file__), os.path.join(self.folder, "claude"))
        self.home.xmsg("name", "nobody", "x", status=None)  # makes the store
        self.home.sql("create table audit (id integer, old text, new text)")
        self.home.sql("create trigger audit_moves after update of state on messages when old.state != new.state begin "
                      "insert into audit values (new.id, old.state, new.state); end")
        for number in range(PROCESSES):
            self.start(number)

    def start(self, number):
        life = self.lives[number]
        self.lives[number] += 1
        self.workers[number] = subprocess.Popen(
            [sys.executable, os.path.join(self.folder, "claude"), "--process", self.folder, str(number), str(life),
             str(self.seed * 1000 + number * 50 + life)], env=self.env, cwd=self.folder, start_new_session=True)

    def check_hints(self):
        """While the write lock is free, a queued row implies its mail hint."""
        database = sqlite3.connect(self.home.db, timeout=10, isolation_level=None)
        try:
            database.execute("begin immediate")
            for target, in database.execute("select distinct target from messages where state = 'queued'"):
                if not os.path.exists(self.home.hint(target)):
                    self.blame("unaccounted", "mail for %s without its hint" % target)
        finally:
            database.rollback()
            database.close()

    def read_logs(self):
        """The commands as dicts: name, verb, session, at, until, killed, output."""
        commands = {}
        for name in os.listdir(self.folder):
            if name.startswith("log-"):
                with open(os.path.join(self.folder, name)) as file:
                    for line in file:
                        record = json.loads(line)
                        if "dropped" in record:
                            self.dropped.update(word.encode() for word in record["dropped"])
                        elif "begin" in record:
                            # Without an end its process died, and the command itself went on to its own end.
                            commands[record["begin"]] = dict(record, killed=True, status=None, until=record["at"] + 30)
                        else:
                            commands[record["end"]].update(status=record["status"], killed=record["killed"],
                                                           until=record["at"])
        for name, command in commands.items():
            try:
                with open(os.path.join(self.folder, name), "rb") as file:
                    command["output"] = file.read()
            except OSError:
                command["output"] = b""
        return list(commands.values())

    def drain(self):
        """Every session that ever was, opened again, runs hooks until nothing comes; what has none takes it by hand."""
        subprocess.run([sys.executable, os.path.realpath(__file__), "--drain", self.folder, str(self.drains)],
                       env=self.env, check=True)
        self.drains += 1

    def seen(self, commands):
        """{(text, session): how often} of what the sessions have been shown."""
        seen = collections.Counter()
        for command in commands:
            # What a hook printed for agy, agy may have dropped.
            if command["verb"] == "take" or (command["verb"] == "hook" and host_of(command["session"]) != "agy"):
                seen.update((token, command["session"]) for token in TOKEN.findall(command["output"]))
        brain = os.path.join(self.folder, "brain")
        records = [(session, path) for session, (_, path) in self.inboxes.items()]
        records += [(session, os.path.join(brain, session, "transcript_full.jsonl")) for session in os.listdir(brain)]
        for session, path in records:
            with open(path, "rb") as file:
                seen.update((token, session) for token in TOKEN.findall(file.read()))
        return seen

    def balance(self):
        """Whether the books are balanced; says what is not, and at last the counts."""
        self.drain()
        commands = self.read_logs()
        answers = [parsed(command["output"]) or {} for command in commands]
        acknowledged, cancelled = set(), set()
        for command, answer in zip(commands, answers):
            self.check_command(command, answer)
            if command["verb"] in ("send", "cancel"):
                uids = {record["uid"] for record in answer.get("messages", ())}
                (acknowledged if command["verb"] == "send" else cancelled).update(uids)
        rows, first = self.rows(), self.seen(commands)
        unknown = [row for row in rows.values() if row["unknown"]]
        for uid in acknowledged - set(rows):
            self.blame("lost", "%s was acknowledged, and there is no such row" % uid)
        for row in unknown:
            self.check_doubt(row, commands)
            self.home.xmsg("resolve", row["uid"], "--delivered" if first[key(row)] else "--requeue")
        self.drain()
        rows, seen = self.rows(), self.seen(self.read_logs())
        states = collections.Counter(row["state"] for row in rows.values())
        # A text for a whole group may have been for two sessions of which a /clear then made one.
        twins = collections.Counter(map(key, rows.values()))
        for row in rows.values():
            self.check_end(row, seen[key(row)], twins[key(row)], cancelled)
        for token in set(seen) - {key(row) for row in rows.values()}:
            self.blame("unaccounted", "%r was seen by %s, and there is no such row" % token)
        self.check_store()
        kills = sum(command["killed"] for command in commands)
        print("%d messages (%d acknowledged), %s; %d had been UNKNOWN, %d of them seen, all settled" % (
            len(rows), len(acknowledged), ", ".join("%d %s" % (states[state], state) for state in sorted(states)),
            len(unknown), sum(1 for row in unknown if first[key(row)])))
        verbs = collections.Counter(command["verb"] for command in commands)
        print("%d commands (%s), %d killed; %d processes, started %d times; %d sessions" % (
            len(commands), ", ".join("%d %s" % (count, verb) for verb, count in verbs.most_common()), kills, PROCESSES,
            sum(self.lives.values()), self.home.sql("select count(*) from peers")[0][0] + INBOXES))
        print("lost %d, doubled %d, unaccounted %d: %d messages in %d s" % (
            self.wrong["lost"], self.wrong["doubled"], self.wrong["unaccounted"], len(rows), self.seconds), flush=True)
        return not self.wrong and bool(acknowledged) and states["delivered"] > 0 and kills > 0

    def rows(self):
        report = self.home.json("outbox", "--all", "--limit", "10000000")
        return {record["uid"]: record for record in report["messages"]}

    def check_command(self, command, answer):
        """A command that nobody killed leaves with what it may leave with."""
        code = answer.get("error", {}).get("code")
        if code in ("unexpected", "store", "store_corrupt", "store_full", "store_read_only"):
            self.blame("unaccounted", "%s said %r" % (command["verb"], answer))
        woke = command["verb"] == "hook" and command["status"] == 2 and command["event"] == "FileChanged"
        if command["verb"] == "hook" and not command["killed"] and command["status"] != 0 and not woke:
            self.blame("unaccounted", "a hook left with %r" % command["status"])

    def check_doubt(self, row, commands):
        """A message is UNKNOWN because a hook or sender that held it was killed, or cut by its own limit, or agy
        has dropped it at a Stop, or died."""
        if row["state"] == "direct-uncertain" and row["detail"]:
            return
        at = self.home.sql("select state_at from messages where uid = ?", (row["uid"],))[0][0] / 1000
        verbs = ("send",) if row["state"].startswith("direct") else ("hook", "take")
        for command in commands:
            # Python goes on for a while where only its wrapper was killed.
            late = command["until"] - command["at"] > LONGEST_HOOK - 1
            cut = LONGEST_HOOK if command["killed"] else 0.1 if late else None
            if command["verb"] in verbs and cut and command["at"] - 0.1 <= at <= command["until"] + cut and (
                    verbs[0] == "send" or command["session"] == row["to"]["session"]):
                return
        if row["to"]["host"] == "agy" and (key(row)[0] in self.dropped or self.agy_died(row, commands, at)):
            return
        self.blame("unaccounted", "nobody was killed who held %s" % self.story(row))

    def agy_died(self, row, commands, at):
        """Whether the process that played agy ended before it could write down what it did with a hook's output."""
        hooks = sorted((command for command in commands if command["verb"] == "hook"
                        and command["session"] == row["to"]["session"]), key=lambda command: command["at"])
        for command, later in zip(hooks, hooks[1:]):
            if command["at"] - 0.1 <= at <= command["until"] + 0.1 and life(command) != life(later):
                return True
        return False

    def check_end(self, row, times, most, cancelled):
        if times > most:
            self.blame("doubled", "seen %d times: %s" % (times, self.story(row)))
        elif row["unknown"] or row["state"] not in ENDED:
            self.blame("unaccounted", "no end: %s" % self.story(row))
        elif row["state"] == "delivered" and not times:
            self.blame("lost", "delivered, and nobody has seen it: %s" % self.story(row))
        elif row["state"] != "delivered" and times == most:
            self.blame("unaccounted", "ended, and it was seen: %s" % self.story(row))
        elif row["uid"] in cancelled and row["state"] != "cancelled":
            self.blame("unaccounted", "said to be cancelled: %s" % self.story(row))
        elif row["state"] == "cancelled" and row["uid"] not in cancelled and row["detail"] not in (
                "withdrawn", "replaced by a newer one"):
            self.blame("unaccounted", "nobody has withdrawn it: %s" % self.story(row))

    def story(self, row):
        events = self.home.sql("select at, state, window, detail from events where message = ? order by rowid",
                               (row["id"],))
        return "\n    ".join(["#%d %s for %s" % (row["id"], key(row)[0].decode(), row["to"]["session"])] + [
            " ".join(map(str, event)) for event in events])

    def check_store(self):
        """The file is whole, and every move that was ever made stands in the table of states."""
        if self.home.sql("pragma integrity_check") != [("ok",)]:
            self.blame("unaccounted", "the store is damaged")
        for _, old, new in self.home.sql("select * from audit"):
            if new not in STATES[old][1]:
                self.blame("unaccounted", "a move from %s to %s" % (old, new))


def life(command):
    """The process that ran a command, and which of its lives it was: `out-NUMBER-LIFE-COUNT`."""
    return command["begin"].split("-")[1:3]


def key(row):
    return TOKEN.match(row["body"].encode()).group(), row["to"]["session"]


def drain(work):
    """What Soak.drain() runs: the rest of every session's mail, and the last word of agy's transcripts."""
    store = Store(Settings(os.environ))
    store.sweep(now_ms())

    for turn in range(400):
        rest = {row["target"] for row in store.queued()}
        if turn < 3:  # agy's transcript speaks at a later hook, or never
            rest |= {row["target"] for row in store.open_rows("hook-inflight") if row["target_host"] == "agy"}
        if not rest:
            break
        for target in rest:
            host = host_of(target)
            if host != "claude" or store.peer(target):
                work.sessions = [[host, target]]
                work.hook(0, "PreInvocation" if host == "agy" else "UserPromptSubmit", victim=False)
            else:
                work.sessions = [["inbox", target]]
                work.command("take", 0, ["inbox", target, "--take"], victim=False)
    store.close()


def soak(seconds, seed=1):
    return Soak(seconds, seed).run()


class ASoak(unittest.TestCase):
    """For the mutants: a short one."""

    def test_balances_its_books(self):
        self.assertTrue(soak(float(os.environ.get("XMSG_SOAK_SECONDS", "20"))))


if __name__ == "__main__" and sys.argv[1:2] in (["--process"], ["--drain"]):
    from command_line import main
    from contract import Settings, now_ms
    from store import Store
    from xmsg import hook_main
    if sys.argv[1] == "--drain":
        drain(Process(sys.argv[2], 99, int(sys.argv[3]), 0))
    else:
        Process(sys.argv[2], *map(int, sys.argv[3:])).work(os.path.join(sys.argv[2], "stop"))
elif __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(0 if soak(options.seconds, options.seed) else 1)
