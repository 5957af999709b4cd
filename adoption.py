"""Takes over a store of the earlier xmsg, in place: waiting messages, names, history; nothing is shown again.

That store has no state column and no version: a row's state is read from delivered_at, delivered_event and expired_at,
and its times are whole seconds. A cancelled message looks like an expired one there.
"""
import os

from contract import HOSTS, name_key

RENAMED = ("messages", "peers", "meta")
STATE = """
  case when delivered_event in ('direct-inflight', 'direct-uncertain') then 'direct-uncertain'
       when delivered_at is not null then 'delivered'
       when expired_at is not null then 'expired'
       else 'queued' end"""
MESSAGES = """
insert into messages (id, uid, created_at, expires_at, state, state_at, window, detail, sender_kind, sender_label,
                      sender_host, sender_session, target, target_host, body, priority)
select id, (select lower(hex(randomblob(4)))) || printf('%%08x', id), created_at * 1000, expires_at * 1000,
       """ + STATE + """,
       coalesce(delivered_at, expired_at, created_at) * 1000,
       case when """ + STATE + """ = 'delivered' then delivered_event end,
       case """ + STATE + """ when 'delivered' then 'taken over from the earlier xmsg'
                            when 'expired' then 'expired or cancelled by the earlier xmsg'
                            when 'direct-uncertain' then 'no answer came to the earlier xmsg' end,
       case when from_tool = 'notification' then 'notification'
            when from_session != '' and from_tool in (%s) then 'agent' else 'unknown' end,
       from_label, case from_tool when 'notification' then '' else from_tool end,
       case when from_tool in (%s) then from_session else '' end, to_session,
       coalesce(host, ''), body, priority
from earlier_messages left join peers on session = to_session"""
# What has ended says so in its detail, and nothing more will happen to it.
EVENTS = """
insert into events (message, at, state, window, detail)
select id, state_at, state, window, 'taken over from the earlier xmsg' from messages
where state in ('queued', 'direct-uncertain')"""
PEERS = """
insert into peers (session, host, name, name_key, cwd, model, permission_mode, pid, pid_start, first_seen, last_seen,
                   hook_seen)
select session_id, tool, coalesce(label, ''), name_key(coalesce(label, '')), coalesce(cwd, ''), coalesce(model, ''),
       coalesce(permission_mode, ''), pid, pid_start, first_seen_at * 1000, last_seen_at * 1000, last_seen_at * 1000
from earlier_peers"""


def keep_copy(database, path):
    """Copies the old store to <path>.earlier, whole and 0600, before anything changes; once."""
    import sqlite3
    kept = path + ".earlier"
    if os.path.exists(kept):
        return
    scratch = "%s.%d.new" % (kept, os.getpid())
    os.close(os.open(scratch, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    copy = sqlite3.connect(scratch)
    try:
        # What a crash cuts off is not taken for the copy, so it needs no journal.
        copy.executescript("pragma journal_mode = off; pragma synchronous = off")
        database.backup(copy)
    finally:
        copy.close()
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    os.rename(scratch, kept)


def adopt(database, create, raise_hint):
    """Turns the old tables into the new ones, inside the caller's transaction: all of it or nothing.

    create(what, partial=None): makes the new tables or indexes; the partial ones hold few of the rows and are free
    while these come, the others are cheaper over a whole table. raise_hint(session): for every session with mail.
    """
    # Pages that do not fit would go through the log more than once.
    database.execute("pragma cache_size = -65536")
    columns = {table: [row[1] for row in database.execute("pragma table_info(%s)" % table)] for table in RENAMED}
    for table in RENAMED:
        if columns[table]:
            database.execute("alter table %s rename to earlier_%s" % (table, table))
    # Columns that the earlier xmsg added over time.
    if "priority" not in columns["messages"]:
        database.execute("alter table earlier_messages add column priority integer not null default 0")
    for column in ("label", "pid", "pid_start", "permission_mode"):
        if column not in columns["peers"]:
            database.execute("alter table earlier_peers add column %s" % column)
    create("table")
    create("index", partial=True)
    database.create_function("name_key", 1, name_key)
    hosts = ", ".join("'%s'" % host for host in HOSTS)
    database.execute(PEERS)
    # The checks are of words that stand in these very statements, and cost as much as all the rest of a row.
    database.execute("pragma ignore_check_constraints = on")
    try:
        database.execute(MESSAGES % (hosts, hosts))
    finally:
        database.execute("pragma ignore_check_constraints = off")
    database.execute(EVENTS)
    for table in RENAMED:
        if columns[table]:
            database.execute("drop table earlier_%s" % table)
    create("index", partial=False)
    for row in database.execute("select distinct target from messages where state = 'queued'").fetchall():
        raise_hint(row[0])
