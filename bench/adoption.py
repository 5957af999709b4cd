"""What taking over a store of the earlier xmsg costs, as a ratio to a raw copy of its rows in the same run.

`python3 bench/adoption.py [ROUNDS [ROWS]]`; status 1 if the bar is missed.
"""
import os
import shutil
import sqlite3
import sys

from measure import PYTHON, ROOT, Home, measure, report

EARLIER = """
create table messages (id integer primary key autoincrement, created_at integer not null, expires_at integer not null,
  from_label text not null, from_tool text not null default '', from_session text not null default '',
  to_session text not null, body text not null, priority integer not null default 0, delivered_at integer,
  delivered_tool text, delivered_event text, expired_at integer);
create index messages_pending_idx on messages (to_session, delivered_at, expired_at);
create table peers (session_id text primary key, tool text, cwd text, model text, label text, pid integer,
  pid_start text, sock_path text, permission_mode text, first_seen_at integer, last_seen_at integer,
  injected_count integer);
create index peers_seen_idx on peers (last_seen_at);
create table meta (key text primary key, value integer);
"""
# The rows into an empty database of the same tables and indexes, as durably as a store is written.
COPY = """
import sqlite3, sys
copy = sqlite3.connect(sys.argv[2], isolation_level=None)
copy.executescript("pragma journal_mode = wal; pragma synchronous = full;" + sys.argv[3])
copy.execute("attach ? as earlier", (sys.argv[1],))
copy.execute("begin immediate")
for table in ("messages", "peers", "meta"):
    copy.execute("insert into %s select * from earlier.%s" % (table, table))
copy.execute("commit")
"""
ADOPT = """
import os, sys
sys.path.append(sys.argv[1])
from contract import Settings
from store import Store
Store(Settings(os.environ)).close()
"""


def fill(path, rows):
    """Rows of all states, most of them delivered, for 1000 sessions."""
    with sqlite3.connect(path) as database:
        database.executescript("pragma journal_mode = wal;" + EARLIER)
        database.executemany("insert into peers values (?, 'claude', '/tmp', '', ?, null, null, '', '', 1, 1, 1)",
                             [("%08x-peer" % number, "peer%d" % number) for number in range(1000)])
        database.execute("""
            with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)
            insert into messages (created_at, expires_at, from_label, from_tool, from_session, to_session, body,
              delivered_at, delivered_tool, delivered_event, expired_at)
            select 1796000000 + i, 1896000000 + i, 'peer' || i % 1000, 'claude', printf('%08x-peer', i % 1000),
              printf('%08x-peer', i * 7 % 1000), 'a message of some length that was sent and seen, number ' || i
              || substr(hex(zeroblob(150)), 1, 200),
              iif(i % 100 > 1, 1796000001 + i, null), 'claude', iif(i % 100 > 1, 'PreToolUse', null),
              iif(i % 100 = 0, 1796003600 + i, null) from n""", (rows,))


def main(rounds, rows):
    with Home() as home:
        earlier, counts = os.path.join(home.folder, "earlier.sqlite3"), []
        fill(earlier, rows)

        def clear():
            for name in os.listdir(home.folder):
                path = os.path.join(home.folder, name)
                if name.startswith(("messages.sqlite3", "copy.sqlite3")):
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

        def copy():
            clear()
            return home.run([PYTHON, "-I", "-S", "-c", COPY, earlier, os.path.join(home.folder, "copy.sqlite3"),
                             EARLIER])

        def adopt():
            clear()
            shutil.copy(earlier, home.db)
            run = home.run([PYTHON, "-I", "-S", "-c", ADOPT, ROOT])
            with sqlite3.connect(home.db) as database:
                counts.append(database.execute("select count(*) from messages").fetchone()[0])
            return run
        times = measure({"raw copy of the rows": copy, "adoption": adopt}, rounds)
        if set(counts) != {rows}:
            raise SystemExit("not every row was adopted: %r" % counts)
    return report("adoption of %d rows" % rows, times, [("adoption", "raw copy of the rows", 3.0)])


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(not main(*(numbers + [10, 50000][len(numbers):])))
