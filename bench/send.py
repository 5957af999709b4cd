"""What `send` costs, and how send and hook grow with the store.

`python3 bench/send.py [ROUNDS [ROWS]]`: ratios to floors of the same run; status 1 if a bar is missed.
"""
import os
import sqlite3
import sys
import time

from hook import SESSION, hook, payload, send
from measure import Home, python, report

OTHERS = 1000
WAITING = 10000
FLOOR = "python json,sqlite3,argparse"


def fill(path, rows):
    """Delivered rows with their events, rows that wait for others, and registered sessions, by plain SQL.

    The session that is measured has its share of what was delivered, and what waits lies between what has arrived.
    No `analyze`: xmsg never runs it, and it changes what SQLite plans.
    """
    now = int(time.time() * 1000)
    with sqlite3.connect(path) as database:
        # Without a log, and with the indexes made at the end, this takes a tenth of the time.
        indexes = database.execute("select name, sql from sqlite_master where type = 'index' and sql is not null")
        indexes = indexes.fetchall()
        database.executescript("pragma journal_mode = off; pragma synchronous = off; pragma cache_size = -500000;")
        database.executescript("".join("drop index %s;" % name for name, _ in indexes))
        database.executescript("""
            with recursive n(i) as (select 0 union all select i + 1 from n where i < {others} - 2)
            insert into peers (session, host, name, name_key, cwd, project, first_seen, last_seen, hook_seen)
            select printf('%08x-peer', i), iif(i % 2, 'claude', 'codex'), 'peer' || i, 'peer' || i, '/tmp', '/tmp',
              {now}, {now}, {now} from n;
            create temp table who as
              select row_number() over (order by session) - 1 as number, session, name from peers;
            create unique index temp.who_number on who (number);
            with recursive
              n(i) as (select 1 union all select i + 1 from n where i < {rows} + {waiting}),
              m(i, sender, label, target, state) as (
                select i, sender.session, sender.name, target.session,
                  iif(i % {every} = 0 and target.session != '{session}', 'queued', 'delivered')
                from n join who as sender on sender.number = i % {others}
                join who as target on target.number = (i * 7 + i / {others}) % {others})
            insert into messages (uid, created_at, expires_at, state, state_at, window, sender_kind, sender_label,
              sender_host, sender_session, target, target_host, body, priority)
            select printf('%016x', i), {now} - 600000, {now} + 3600000, state, {now} - i % 600000,
              iif(state = 'queued', null, 'PreToolUse'), 'agent', label, 'claude', sender, target, 'claude',
              'a message of some length that was sent and seen, number ' || i, 0 from m;
            insert into events (message, at, state) select id, created_at, 'queued' from messages;
            insert into events (message, at, state, window)
              select id, state_at, state, window from messages where state != 'queued';
            """.format(rows=rows, waiting=WAITING, others=OTHERS, every=(rows + WAITING) // WAITING, now=now,
                       session=SESSION))
        for _, statement in indexes:
            database.execute(statement)
        waiting = database.execute("select distinct target from messages where state = 'queued'").fetchall()
        database.executescript("drop table temp.who; pragma journal_mode = wal;")
    for session, in waiting:
        open(os.path.join(path + ".hints", "mail", session), "w").close()


def main(rounds, rows):
    with Home() as empty, Home() as full:
        for home in (empty, full):
            hook(home, payload())
        begin = time.monotonic()
        fill(full.db, rows)
        print("the large store: %d MB, made in %d s" % (os.path.getsize(full.db) >> 20, time.monotonic() - begin))
        # A send comes before each hook, so these take turns as pairs.
        times = {FLOOR: [], "send": [], "hook": [], "send, large store": [], "hook, large store": []}
        for turn in range(rounds + 1):
            times[FLOOR].append(empty.run(python("json, sqlite3, argparse"))[:2])
            for home, name in ((empty, ""), (full, ", large store"))[::-1 if turn % 2 else 1]:
                times["send" + name].append(send(home)[:2])
                times["hook" + name].append(hook(home, payload(), 1)[:2])
        times = {name: runs[1:] for name, runs in times.items()}
    title = "send, and growth: %d delivered, %d waiting for others, %d sessions" % (rows, WAITING, OTHERS)
    return report(title, times, [("send", FLOOR, 1.8), ("send, large store", "send", 1.25),
                                 ("hook, large store", "hook", 1.25)])


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(not main(*(numbers + [40, 1000000][len(numbers):])))
