"""What `codex-history` costs in a large home: the first page of a list, and an export's time and memory.

`python3 bench/history.py [ROUNDS [SESSIONS [MEGABYTES]]]`: status 1 if a bar is missed.
"""
import json
import os
import sqlite3
import sys

from measure import ROOT, Home, measure, python, report

FLOOR = "python json,sqlite3,argparse"
HISTORY = os.path.join(ROOT, "bin", "codex-history")
MOST_MEMORY = 60  # MB
# The columns and indexes of Codex 0.171.0 that matter here.
SCHEMA = """
create table threads (id text primary key, rollout_path text not null, created_at integer not null,
  updated_at integer not null, source text not null, model_provider text not null, cwd text not null,
  title text not null, archived integer not null default 0, model text, updated_at_ms integer,
  preview text not null default '', name text, attached_thread_parent_id text, first_user_message text);
create index idx_threads_updated_at_ms on threads(updated_at_ms desc, id desc);
create index idx_threads_visible_updated_at_ms on threads(archived, updated_at_ms desc) where preview <> '';
"""


def fill(home, sessions):
    """A CODEX_HOME with so many sessions, half of them without a name in the database, all in the index."""
    codex = os.path.join(home.folder, ".codex")
    os.makedirs(os.path.join(codex, "sessions"))
    rollout = os.path.join(codex, "sessions", "rollout.jsonl")
    open(rollout, "w").close()
    database = sqlite3.connect(os.path.join(codex, "state_5.sqlite"))
    database.executescript("pragma journal_mode = wal;" + SCHEMA)
    with database, open(os.path.join(codex, "session_index.jsonl"), "w") as index:
        for number in range(sessions):
            session, name = "%08x-0000-7000-8000-%012x" % (number * 7919, number), "session %d" % number
            said = "a prompt of some length that began session %d " % number * 5
            database.execute("insert into threads values (?, ?, ?, ?, ?, ?, ?, ?, 0, 'a-model', ?, ?, ?, null, ?)", (
                session, rollout, 1790000000 + number, 1790000000 + number, ("cli", "vscode", "exec")[number % 3],
                ("first", "second")[number % 2], home.folder, said, (1790000000 + number) * 1000, said,
                name if number % 2 else None, said))
            index.write('{"id":"%s","thread_name":"%s","updated_at":"2026-12-01T04:00:21.4Z"}\n' % (session, name))
    database.close()
    return rollout


def write_rollout(path, megabytes):
    """Records as a long session has them: what is said, tool calls, long results, and what an export leaves out."""
    records = [("message", {"role": "user", "content": [{"type": "input_text", "text": "do this and that. " * 20}]}),
               ("message", {"role": "assistant", "content": [{"type": "output_text", "text": "I see. é ``` " * 40}]}),
               ("function_call", {"name": "exec_command", "arguments": json.dumps({"cmd": "ls -l"}), "call_id": "c"}),
               ("function_call_output", {"call_id": "c", "output": "total 12\n-rw-r--r-- 1 a b 12 x.py\n" * 600}),
               ("reasoning", {"summary": [], "encrypted_content": "gAAAA" * 2000})]
    lines = [json.dumps({"timestamp": "2026", "type": "response_item", "payload": dict(payload, type=kind)})
             for kind, payload in records]
    lines.append(json.dumps({"timestamp": "2026", "type": "event_msg", "payload": {"type": "x", "info": "y" * 500}}))
    block = ("\n".join(lines) + "\n").encode()
    with open(path, "wb") as file:
        for _ in range((megabytes << 20) // len(block)):
            file.write(block)


def peak(home, command):
    """The most memory that a command has taken, in MB."""
    script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True);"
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    unit = 1 if sys.platform == "linux" else 1024
    return int(home.run([sys.executable, "-c", script, *command])[2]) / unit / 1024


def main(rounds, sessions, megabytes):
    with Home() as home:
        rollout = fill(home, sessions)
        run, every = [HISTORY, "list", "--backend", "sqlite"], ["--include-archived", "--include-non-interactive"]
        floor = python("json, sqlite3, argparse")
        times = measure({FLOOR: lambda: home.run(floor),
                         "list": lambda: home.run(run),
                         "list, every kind": lambda: home.run(run + every),
                         "list, search without a hit": lambda: home.run(run + ["--query", "nowhere"])}, rounds)
        held = report("history: %d sessions" % sessions, times, [("list", FLOOR, 3), ("list, every kind", FLOOR, 3)])
        write_rollout(rollout, megabytes)
        size = os.path.getsize(rollout)
        session = "%08x-0000-7000-8000-%012x" % (7919, 1)
        print("\nexport of %d MB" % (size >> 20))
        for options in ([], ["--full"], ["--full", "--redact"]):
            command = [HISTORY, "export", session, *options]
            seconds, memory = home.run(command)[0], peak(home, command)
            print("%-30s %6.1f s, %5.1f MB/s, %5.1f MB of memory, <= %d%s" % (
                " ".join(options) or "clipped", seconds, size / (1 << 20) / seconds, memory, MOST_MEMORY,
                "" if memory <= MOST_MEMORY else "  MISSED"))
            held = held and memory <= MOST_MEMORY
    return held


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(not main(*(numbers + [25, 20000, 200][len(numbers):])))
