"""What `list` costs among much history and many sessions, as ratios to a floor of the same run.

`python3 bench/list.py [ROUNDS]`; status 1 if a bar is missed.
"""
import fcntl
import json
import os
import signal
import sqlite3
import sys
import time

from measure import ROOT, Home, measure, python, report

LIST = [os.path.join(ROOT, "bin", "xmsg"), "list"]
FLOOR = "python json,sqlite3,argparse"
THREADS, TRANSCRIPTS, OPEN = 20000, 2000, 200
REGISTERED, LIVE = 1000, 20


class World(Home):
    """A home with what hosts keep. Open Claude Code sessions are sleeping processes, open Codex threads locks."""

    def __enter__(self):
        super().__enter__()
        self.sleepers, self.locks, self.state = [], [], None
        self.codex, self.claude = (os.path.join(self.folder, name) for name in (".codex", ".claude"))
        for folder in (self.codex + "/thread-writer-locks", self.claude + "/sessions"):
            os.makedirs(folder, 0o700)
        return self

    def __exit__(self, *exc):
        for pid in self.sleepers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for lock in self.locks:
            os.close(lock)
        if self.state:
            self.state.close()
        super().__exit__(*exc)

    def open_claude(self, session, folder, name=None):
        """A running session; without a name of its own it has one that the host made up."""
        pid = os.posix_spawn("/bin/sleep", ["sleep", "3600"], {})
        self.sleepers.append(pid)
        with open("/proc/%d/stat" % pid) as file:
            start = file.read().rpartition(")")[2].split()[19]
        record = {"pid": pid, "sessionId": session, "cwd": folder, "startedAt": 1, "procStart": start,
                  "version": "2.1.332", "peerProtocol": 1, "kind": "interactive", "entrypoint": "cli",
                  "messagingSocketPath": os.path.join(self.folder, "%d.sock" % pid), "updatedAt": 1, "status": "idle",
                  "name": name or "work-21", "nameSource": "user" if name else "derived"}
        with open(os.path.join(self.claude, "sessions", "%d.json" % pid), "w") as file:
            json.dump(record, file)
        return pid, start

    def open_codex(self, thread):
        path = os.path.join(self.codex, "thread-writer-locks", thread + ".lock")
        lock = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.locks.append(lock)

    def write_threads(self, threads):
        """Codex's state, held open as a running Codex does, with a name for every thread and a rename for each."""
        self.state = sqlite3.connect(os.path.join(self.codex, "state_5.sqlite"))
        self.state.executescript(
            "pragma journal_mode = wal; create table threads (id text primary key, rollout_path text, cwd text, title "
            "text, source text, model text, name text, first_user_message text)")
        self.state.executemany("insert into threads values (?, ?, ?, ?, 'cli', 'gpt-5.1-codex', ?, ?)", [
            (thread, self.rollout(thread), self.project(number), "do it", "thread %d" % number, "do it " * 30)
            for number, thread in enumerate(threads)])
        self.state.commit()
        with open(os.path.join(self.codex, "session_index.jsonl"), "w") as file:
            for turn in ("thread", "renamed"):
                for number, thread in enumerate(threads):
                    file.write(json.dumps({"id": thread, "thread_name": "%s %d" % (turn, number), "updated_at":
                                           "2026-11-30T22:45:23.265872931Z"}, separators=(",", ":")) + "\n")

    def rollout(self, thread):
        return os.path.join(self.codex, "sessions/2026/11/30/rollout-2026-11-30T22-23-02-%s.jsonl" % thread)

    def write_rollout(self, thread):
        os.makedirs(os.path.dirname(self.rollout(thread)), exist_ok=True)
        with open(self.rollout(thread), "w") as file:
            for kind in ("task_started", "token_count", "task_complete"):
                record = {"timestamp": "2026-11-30T22:23:02.123Z", "ordinal": 1, "type": "event_msg",
                          "payload": {"type": kind, "text": "x" * 20000}}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def project(self, number):
        folder = os.path.join(self.folder, "project-%d" % (number % 40))
        os.makedirs(os.path.join(folder, ".git"), exist_ok=True)
        return folder

    def write_transcript(self, session, folder, title):
        slug = "".join(char if char.isalnum() else "-" for char in folder)
        path = os.path.join(self.claude, "projects", slug, session + ".jsonl")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            for record in ({"type": "user", "message": {"role": "user", "content": "x" * 20000}},
                           {"type": "custom-title", "customTitle": title, "sessionId": session},
                           {"type": "assistant", "message": {"content": "x" * 20000}}):
                file.write(json.dumps(record) + "\n")

    def listed(self, shown):
        """One `xmsg list` that has to show so many sessions."""
        run = self.run(LIST)
        if run[2].count(b"\n") != shown + 1:
            raise SystemExit("list showed %d lines instead of %d" % (run[2].count(b"\n"), shown + 1))
        return run


def codex_id(number):
    return "01a04cd2-%04x-7000-8000-%012x" % (number % 65536, number)


def claude_id(number):
    return "7c1f%04x-0000-4000-8000-%012x" % (number % 65536, number)


def fill_history(world):
    threads = [codex_id(number) for number in range(THREADS)]
    world.write_threads(threads)
    for thread in threads[::THREADS // (OPEN // 2)]:
        world.open_codex(thread)
        world.write_rollout(thread)
    for number in range(TRANSCRIPTS):
        world.write_transcript(claude_id(number), world.project(number), "talk %d" % number)
    for number in range(OPEN // 2):
        name = "named %d" % number if number % 2 else None
        world.open_claude(claude_id(number * 10), world.project(number * 10), name)


def fill_registry(world):
    """Sessions that have run hooks, half of each host; few are open, of the others the processes are gone."""
    world.write_threads([codex_id(number) for number in range(REGISTERED // 2)])
    world.run(LIST)
    open(world.db, "a").close()
    world.run([LIST[0], "outbox"])
    now = int(time.time() * 1000)
    rows = []
    for number in range(REGISTERED):
        claude, pid, start = number % 2, 100000 + number * 7, "123"
        session = (claude_id if claude else codex_id)(number // 2)
        if number < LIVE and claude:
            pid, start = world.open_claude(session, world.project(number))
        elif number < LIVE:
            world.open_codex(session)
        transcript = "%s/projects/x/%s.jsonl" % (world.claude, session) if claude else world.rollout(session)
        rows.append((session, "claude" if claude else "codex", "title %d" % number, "title %d" % number,
                     world.project(number), world.project(number), transcript, pid, start, now, now, now))
    with sqlite3.connect(world.db) as database:
        database.executemany("insert into peers (session, host, title, title_key, cwd, project, transcript, pid, "
                             "pid_start, first_seen, last_seen, hook_seen) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                             rows)


def main(rounds):
    with World() as history, World() as registry:
        fill_history(history)
        fill_registry(registry)
        crowd, known = ("list, %d open" % OPEN), ("list, %d known, %d open" % (REGISTERED, LIVE))
        times = measure({FLOOR: lambda: history.run(python("json, sqlite3, argparse")),
                         crowd: lambda: history.listed(OPEN), known: lambda: registry.listed(LIVE)}, rounds)
    return report("list: %d Codex threads, %d transcripts" % (THREADS, TRANSCRIPTS), times,
                  [(crowd, FLOOR, 3.0), (known, FLOOR, 2.0)])


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
