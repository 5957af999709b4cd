"""What `send` costs, and how send and hook grow with the store: `python3 bench/send.py [ROUNDS [ROWS]]`.

Ratios to floors of the same run; status 1 if a bar is missed.
"""
import os
import sqlite3
import sys
import time

from hook import HOOK, SESSION, payload
from measure import ROOT, Home, measure, python, report

XMSG = os.path.join(ROOT, "bin", "xmsg")
OTHERS = 1000
WAITING = 10000


def fill(path, rows):
    """Delivered rows with their events, rows that wait for others, and registered sessions, by plain SQL."""
    now = int(time.time() * 1000)
    with sqlite3.connect(path) as database:
        database.execute("pragma synchronous = off")
        database.executescript("""
            with recursive n(i) as (select 1 union all select i + 1 from n where i < %d)
            insert into messages (uid, created_at, expires_at, state, state_at, window, sender_kind, sender_label,
              sender_host, sender_session, target, target_host, body, priority)
            select printf('%%016x', i), %d, %d, iif(i <= %d, 'queued', 'delivered'), %d, iif(i <= %d, null, 'PreToolUse'),
              'agent', 'peer' || (i %% %d), 'claude', printf('%%08x-peer', i %% %d), printf('%%08x-peer', (i * 7) %% %d),
              'claude', 'a message of some length that was sent and seen, number ' || i, 0 from n;
            insert into events (message, at, state) select id, created_at, 'queued' from messages;
            insert into events (message, at, state) select id, state_at, state from messages where state != 'queued';
            with recursive n(i) as (select 0 union all select i + 1 from n where i < %d)
            insert into peers (session, host, name, name_key, cwd, first_seen, last_seen, hook_seen)
            select printf('%%08x-peer', i), 'claude', 'peer' || i, 'peer' || i, '/tmp', %d, %d, %d from n;
            analyze;
            """ % (rows + WAITING, now, now + 3600000, WAITING, now, WAITING, OTHERS, OTHERS, OTHERS, OTHERS - 1,
                   now, now, now))
    for number in range(OTHERS):
        open("%s.hints/mail/%08x-peer" % (path, number), "w").close()


def main(rounds, rows):
    with Home() as empty, Home() as full:
        for home in (empty, full):
            home.run(HOOK, payload())
        fill(full.env["XMSG_DB"], rows)

        def send(home):
            seconds, out = home.run([XMSG, "send", SESSION, "the API is ready", "--no-direct"])
            if not out.startswith(b"queued"):
                raise SystemExit("send said %r" % out)
            return seconds

        def hook(home):
            seconds, out = home.run(HOOK, payload())
            if b"the API is ready" not in out:
                raise SystemExit("the hook showed %r" % out)
            return seconds
        times = measure({
            "python json,sqlite3,argparse": lambda: empty.run(python("json, sqlite3, argparse"))[0],
            "send": lambda: send(empty), "hook": lambda: hook(empty),
            "send, full store": lambda: send(full), "hook, full store": lambda: hook(full),
        }, rounds)
    return report("send, and growth: %d delivered, %d waiting for others, %d sessions" % (rows, WAITING, OTHERS), times, [
        ("send", "python json,sqlite3,argparse", 1.8), ("send, full store", "send", 1.25),
        ("hook, full store", "hook", 1.25)])


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(not main(*(numbers + [40, 1000000][len(numbers):])))
