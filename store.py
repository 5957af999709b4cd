"""The queue and the registry: one SQLite file, and the hints beside it. All SQL of xmsg stands here.

Invariant: while the write lock is free, a queued row implies its mail hint. One function makes every move of a message.
"""
import json
import os
import sqlite3
import sys
import time

from contract import (ENDED, IN_FLIGHT, LOG_BYTES, OPEN, SCHEMA, SENDER_KINDS, SHORTEST_LABEL_ID, STATES,
                      STORED, SWEEP_ROWS, StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly,
                      StoreRefused, StoreTooNew, UsageError, VACUUM_IN_PASSING, name_key, now_ms)


def _quoted(words):
    return ", ".join("'%s'" % word for word in words)


# SQLite uses a partial index only where a query repeats the index's own condition to the letter.
IS_OPEN = "state in (%s)" % _quoted(OPEN)
IS_ENDED = "state in (%s)" % _quoted(ENDED)
# Without statistics it would take the index of all of a session's messages, and a hook would grow with its history.
QUEUED = "messages indexed by messages_queued"
TABLES = """
create table messages (
  id integer primary key autoincrement,
  uid text not null unique,
  created_at integer not null,
  expires_at integer not null,
  state text not null check (state in (%s)),
  state_at integer not null,
  window text,
  detail text,
  holder_pid integer,
  holder_start text,
  sender_kind text not null check (sender_kind in (%s)),
  sender_label text not null,
  sender_host text not null,
  sender_session text not null,
  target text not null,
  target_host text not null,
  body text not null,
  priority integer not null,
  request_key text,
  reply_to text,
  confirmed_at integer,
  evidence text,
  remote text,
  far_session text,
  far_id integer,
  far_state text,
  far_at integer,
  far_machine text
);
create index messages_queued on messages (target, priority desc, id) where state = 'queued';
create index messages_open on messages (state, target, id) where %s;
create index messages_expiring on messages (expires_at) where state = 'queued';
create index messages_sent on messages (created_at) where state = 'queued';
create index messages_ended on messages (state_at) where %s;
create index messages_target on messages (target, id);
create index messages_sender on messages (sender_session, id);
create index messages_label on messages (sender_label) where sender_session != '';
create index messages_key on messages (request_key, target) where request_key is not null;
create index messages_remote on messages (remote, id) where remote is not null;
create table events (
  message integer not null,
  at integer not null,
  state text not null,
  window text,
  detail text
);
create index events_message on events (message);
create table peers (
  session text primary key,
  host text not null,
  name text not null default '',
  name_key text not null default '',
  title text not null default '',
  title_key text not null default '',
  cwd text not null default '',
  project text not null default '',
  model text not null default '',
  permission_mode text not null default '',
  transcript text not null default '',
  pid integer,
  pid_start text,
  successor text,
  first_seen integer not null,
  last_seen integer not null,
  hook_seen integer
) without rowid;
create index peers_name on peers (name_key) where name_key != '';
create index peers_title on peers (title_key) where title_key != '';
create index peers_pid on peers (pid) where pid is not null;
create index peers_seen on peers (last_seen);
create table meta (key text primary key, value text not null) without rowid;
""" % (_quoted(STORED), _quoted(SENDER_KINDS), IS_OPEN, IS_ENDED)


# What a store of an earlier version lacks: version -> the statements that make it the next one. They only add.
ADDITIONS = {
    1: ["alter table messages add column " + column for column in (
        "remote text", "far_session text", "far_id integer", "far_state text", "far_at integer",
        "far_machine text")] + [
        "create index messages_remote on messages (remote, id) where remote is not null"],
}

PREFIX_SECONDS = 60  # a payload that says nothing new takes the fast path for so long
# A damaged schema comes out of Python's sqlite3 as a text that cannot be decoded.
BROKEN = (sqlite3.Error, UnicodeDecodeError)


class Store:
    """The queue and the registry: one SQLite file and its hints. All SQL of xmsg is in this class.

    write=False opens a store that exists for reading only, and an empty one in memory where none exists.
    Errors: StoreRefused, StoreTooNew, StoreBusy, StoreCorrupt, StoreFull, StoreReadOnly.
    """

    def __init__(self, settings, write=True, busy_seconds=2.0):
        self.settings, self.path, self.hints = settings, settings.db, settings.db + ".hints"
        self.sandboxed = None  # what xmsg.in_sandbox() has found, once a command
        self.found = None  # what xmsg.found() has read of the hosts, once a command
        self.codex = {}  # what xmsg.codex_of() has asked, by CODEX_HOME
        if write:
            self._prepare_files()
            self._connect(self.path, busy_seconds)
            self._migrate()
        elif os.path.exists(self.path):
            self._check_file(self.path, tighten=False)
            self._connect_read_only(busy_seconds)
        else:
            self._connect(":memory:", busy_seconds)
            self._migrate()

    def close(self):
        self._db.close()

    # ---- files

    def _prepare_files(self):
        folder = os.path.dirname(self.path)
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            self._check_folder(folder)
            try:
                # Created by us before SQLite opens it, so that -wal and -shm inherit 0600 whatever the umask is.
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR, 0o600))
            except FileExistsError:
                for suffix in ("", "-wal", "-shm", "-journal"):
                    self._check_file(self.path + suffix)
            for name in ("", "/mail", "/peer", "/live", "/wake"):
                try:
                    os.mkdir(self.hints + name, 0o700)
                except FileExistsError:
                    pass
            self._check_folder(self.hints, tighten=True)
        except StoreError:
            raise
        except OSError as error:
            raise (StoreFull if error.errno in (28, 122) else StoreReadOnly)(
                "cannot prepare the store at %s: %s; make it writable or set XMSG_DB" % (self.path, error.strerror))

    def _check_folder(self, folder, tighten=False):
        status = os.stat(folder) if not tighten else os.lstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_mode & 0o170000 != 0o040000:
            raise StoreRefused("%s is not a folder that only you can write; `chmod go-w` it, or set XMSG_DB to a place "
                               "of your own" % folder)
        if status.st_mode & 0o077 and (tighten or os.path.basename(folder) == "agent-msg"):
            os.chmod(folder, 0o700)

    def _check_file(self, path, tighten=True):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_mode & 0o170000 != 0o100000:
            raise StoreRefused("%s is not a plain file that only you can write; look at it, then move it away" % path)
        if status.st_mode & 0o077 and tighten:
            os.chmod(path, 0o600)

    def _connect(self, path, busy_seconds):
        self._db = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._execute("pragma synchronous = full")

    def _connect_read_only(self, busy_seconds):
        """immutable is right only where nobody writes and there is no -wal: a sandbox that denies every write."""
        if os.path.exists(self.path + "-journal"):  # an adoption was cut off, and only a writer can take it back
            return self.__init__(self.settings)
        for option in ("mode=ro", "mode=ro&immutable=1"):
            escaped = self.path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
            self._db = sqlite3.connect("file:%s?%s" % (escaped, option), uri=True, timeout=busy_seconds,
                                       isolation_level=None)
            self._db.row_factory = sqlite3.Row
            try:
                version = self._one("pragma user_version")[0]
                break
            except StoreReadOnly:
                if "immutable" in option or os.path.exists(self.path + "-wal"):
                    raise
        self._check_version(version)
        if 0 < version < SCHEMA or (version == 0 and self._is_earlier()):
            self._db.close()
            self.__init__(self.settings)
        elif version == 0:
            self._connect(":memory:", busy_seconds)
            self._migrate()

    def _check_version(self, version):
        if version > SCHEMA:
            raise StoreTooNew("%s was written by a newer xmsg (schema %d, this one knows %d); update xmsg"
                              % (self.path, version, SCHEMA))

    def _migrate(self):
        version = self._one("pragma user_version")[0]
        self._check_version(version)
        if version == SCHEMA:
            return
        version, tables = self._one("select (select user_version from pragma_user_version), count(*) "
                                    "from sqlite_master")
        if version == 0 and tables and not self._is_earlier():
            raise StoreRefused("%s is a database of another program; set XMSG_DB to a file of xmsg's own" % self.path)
        if self._is_earlier():
            import adoption
            adoption.keep_copy(self._db, self.path)
            # So that its rows are not written twice; it stays in WAL mode while somebody else has it open.
            self._execute("pragma journal_mode = delete")
        else:
            self._to_wal()
        with self.transaction():
            version = self._one("pragma user_version")[0]
            try:
                if version:
                    for earlier in range(version, SCHEMA):
                        for statement in ADDITIONS[earlier]:
                            self._execute(statement)
                elif self._is_earlier():
                    import adoption
                    adoption.adopt(self._db, self._create, self.raise_hint)
                else:
                    self._create("table")
                    self._create("index")
            except BROKEN as error:
                raise self._typed(error) from error
            self._execute("pragma user_version = %d" % SCHEMA)
        self._to_wal()

    def _is_earlier(self):
        """Whether the tables are those of the earlier xmsg, which set no user_version."""
        return (self._one("pragma user_version")[0] == 0
                and self._one("select 1 from pragma_table_info('messages') where name = 'to_session'") is not None)

    def _create(self, what, partial=None):
        for statement in TABLES.split(";\n"):
            if statement.strip().startswith("create " + what) and partial in (None, " where " in statement):
                self._execute(statement)

    def _to_wal(self):
        """SQLite does not wait for other connections when it changes the journal mode, so two first runs collide."""
        deadline = time.monotonic() + 2
        while True:
            try:
                return self._execute("pragma journal_mode = wal")
            except StoreBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    # ---- statements

    def transaction(self):
        """`with store.transaction():` holds the write lock; the end commits, an exception rolls back."""
        return Transaction(self)

    def _execute(self, sql, values=()):
        try:
            return self._db.execute(sql, values)
        except BROKEN as error:
            raise self._typed(error) from error

    def _one(self, sql, values=()):
        try:
            return self._db.execute(sql, values).fetchone()
        except BROKEN as error:
            raise self._typed(error) from error

    def _all(self, sql, values=()):
        try:
            return self._db.execute(sql, values).fetchall()
        except BROKEN as error:
            raise self._typed(error) from error

    def _typed(self, error):
        text = "malformed text" if isinstance(error, UnicodeDecodeError) else str(error)
        for signs, kind, advice in (
                (("locked", "busy"), StoreBusy, "another process holds it; try again"),
                (("full",), StoreFull, "free some space and try again"),
                (("readonly", "read-only", "unable to open", "permission"), StoreReadOnly,
                 "make the file and its folder writable, or set XMSG_DB"),
                (("malformed", "not a database", "corrupt", "encrypted"), StoreCorrupt,
                 "it is left untouched; move it away to begin a new one"),
                (("no such table", "no such column"), StoreCorrupt, "it does not hold what xmsg wrote; move it away"),
                (("disk i/o",), StoreError, "look at the disk; what was to be written may stand there all the same")):
            if any(sign in text.lower() for sign in signs):
                return kind("the store %s: %s; %s" % (self.path, text, advice))
        return StoreError("the store %s: %s" % (self.path, text))

    # ---- hints. Invariant: while the write lock is free, a queued row implies mail/<target>.

    def raise_hint(self, session):
        """Says on disk that the session may have mail, and wakes a Claude session, which watches this very file.

        Call it inside the transaction that makes a row queued: no hint, no commit. Also for a hint that exists, since
        its time is what the watcher sees.
        """
        if ":" in session:
            return  # a session of another machine, which no hook here serves
        folder = os.path.join(self.hints, "mail")
        try:
            descriptor = os.open(os.path.join(folder, session),
                                 os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise (StoreFull if error.errno in (28, 122) else StoreReadOnly)(
                "cannot raise the mail hint of %s below %s: %s" % (session, self.hints, error.strerror))

    def lower_hint(self, session):
        """Removes the mail hint if nothing waits. The lock is held from the look to the unlink, and nothing is written,
        so neither a crash nor a sender in between can leave a queued row without its hint."""
        path = os.path.join(self.hints, "mail", session)
        if ":" in session or not os.path.exists(path):
            return
        self._execute("begin immediate")
        try:
            if not self._waiting(session):
                os.unlink(path)
        except FileNotFoundError:
            pass
        finally:
            self._execute("rollback")

    def touch_hint(self, session):
        """Makes the watcher of a session look once more, if mail waits."""
        if self._waiting(session):
            with self.transaction():
                if self._waiting(session):
                    self.raise_hint(session)

    def waiting(self, session):
        """Whether mail waits, decided under the write lock: the hint is raised before its row is committed."""
        with self.transaction():
            return self._waiting(session)

    def _waiting(self, session):
        """A reserved row counts: if its sender dies, it is queued again."""
        return self._one("select 1 from " + QUEUED + " where target = :session and state = 'queued' union all "
                         "select 1 from messages where target = :session and state = 'reserved' and " + IS_OPEN +
                         " limit 1", {"session": session}) is not None

    # ---- messages

    def add(self, message, now, replace=False):
        """Makes a message queued, or finds the one that it repeats, by uid or by key. Returns its row.

        Call it in a transaction. message: a dict of the columns that the sender decides. replace: the one with the same
        key is withdrawn, if nobody has seen it yet.
        """
        known = self.by_uid(message["uid"]) or (message["request_key"] and self.same_request(message))
        if known and known["state"] == "queued" and not known["far_state"] and known["expires_at"] <= now:
            self.move(known, "expired", now, detail="its time ran out")
            known = known if known["uid"] == message["uid"] else None
        if known and known["uid"] == message["uid"] and any(
                known[column] != message[column] for column in ("body", "sender_session", "sender_label")):
            raise UsageError("the uid %s is that of another message, #%d; leave it out, or resend that one unchanged"
                             % (known["uid"], known["id"]))
        if (known and replace and known["state"] == "queued" and not known["far_state"]
                and known["uid"] != message["uid"]):
            self.move(known, "cancelled", now, detail="replaced by a newer one")
        elif known:
            return known
        message = dict(message, target=self.successor(message["target"]), remote=message.get("remote"), now=now)
        cursor = self._execute(
            "insert into messages (uid, created_at, expires_at, state, state_at, sender_kind, sender_label, "
            "sender_host, sender_session, target, target_host, body, priority, request_key, reply_to, remote) values "
            "(:uid, :now, :expires_at, 'queued', :now, :sender_kind, :sender_label, :sender_host, :sender_session, "
            ":target, :target_host, :body, :priority, :request_key, :reply_to, :remote)", message)
        self._record(cursor.lastrowid, now, "queued")
        self.raise_hint(message["target"])
        return self.by_id(cursor.lastrowid)

    def same_request(self, message):
        """The message with this sender, target and key that has not ended yet."""
        return self._row("select * from messages where request_key = :request_key and target = :target and "
                         "sender_session = :sender_session and sender_label = :sender_label and not " + IS_ENDED +
                         " order by id desc limit 1",
                         dict(message, target=self.successor(message["target"])))

    def move(self, row, state, now, window=None, detail=None, holder=(None, None), evidence=None, far=False):
        """Moves a row from the state that it was read in to another; the only function that does.

        far: another machine that has the message said so; there it came by the same table, here by what was heard of
        it. True if this process made the move. False if somebody else won, which is not an error.
        """
        if state not in STATES[row["state"]][1] and not (far and row["remote"] and row["state"] not in ENDED):
            raise ValueError("no move from %s to %s" % (row["state"], state))
        target = self.successor(row["target"]) if state == "queued" else row["target"]
        cursor = self._execute(
            "update messages set state = :state, state_at = :now, detail = :detail, "
            "window = case when :state = 'queued' then null else coalesce(:window, window) end, "
            "holder_pid = :pid, holder_start = :start, target = :target, "
            "evidence = coalesce(:evidence, evidence), "
            "confirmed_at = case when :evidence is null then confirmed_at else :now end "
            "where id = :id and state = :old",
            {"state": state, "now": now, "window": window, "detail": detail, "pid": holder[0], "start": holder[1],
             "target": target, "evidence": evidence, "id": row["id"], "old": row["state"]})
        if cursor.rowcount != 1:
            return False
        self._record(row["id"], now, state, window, detail)
        if state == "queued":
            self.raise_hint(target)
        row.update(state=state, state_at=now, window=None if state == "queued" else window or row["window"],
                   detail=detail, holder_pid=holder[0], holder_start=holder[1], target=target)
        return True

    def note(self, row, now, detail, holder=None):
        """Writes down what is new about a row that stays in the state that it was read in; holder: who holds it now.

        Call it in a transaction.
        """
        pid, start = holder or (row["holder_pid"], row["holder_start"])
        cursor = self._execute("update messages set detail = :detail, holder_pid = :pid, holder_start = :start "
                               "where id = :id and state = :state", dict(row, detail=detail, pid=pid, start=start))
        if cursor.rowcount == 1:
            self._record(row["id"], now, row["state"], None, detail)
            row.update(detail=detail, holder_pid=pid, holder_start=start)

    def leaves_for(self, row, machine):
        """Notes which machine a message is on its way to, by that machine's id. Call it in a transaction."""
        self._execute("update messages set far_machine = :machine where id = :id",
                      {"machine": machine, "id": row["id"]})
        row["far_machine"] = machine

    def heard(self, row, now, session, host, number, state):
        """Writes down what another machine says of a message that it has. Call it in a transaction."""
        told = {"target_host": host, "far_session": session, "far_id": number, "far_state": state, "far_at": now}
        self._execute("update messages set target_host = :target_host, far_session = :far_session, far_id = :far_id, "
                      "far_state = :far_state, far_at = :far_at where id = :id", dict(told, id=row["id"]))
        row.update(told)

    def away(self, remote=None):
        """The rows of other machines, or of one, that have not ended, oldest first."""
        return [dict(row) for row in self._all(
            "select * from messages where remote is not null and (:remote is null or remote = :remote collate nocase) "
            "and not " + IS_ENDED + " order by id", {"remote": remote})]

    def extend(self, row, now):
        """Gives a row that is queued again as much time as it had at first."""
        self._execute("update messages set expires_at = ? + expires_at - created_at where id = ?", (now, row["id"]))

    def _record(self, message, now, state, window=None, detail=None):
        self._execute("insert into events (message, at, state, window, detail) values (?, ?, ?, ?, ?)",
                      (message, now, state, window, detail))

    def _row(self, sql, values):
        row = self._one(sql, values)
        return dict(row) if row else None

    def by_id(self, number):
        """The row of a message, as a dict; None if there is none."""
        return self._row("select * from messages where id = ?", (number,))

    def by_uid(self, uid):
        return self._row("select * from messages where uid = ?", (uid,))

    def events(self, number):
        """The moves of a message, oldest first: at, state, window, detail."""
        return [dict(row) for row in self._all("select at, state, window, detail from events where message = ? "
                                               "order by rowid", (number,))]

    def claim(self, session, now, limit, choose, window, holder):
        """Takes up to limit waiting messages of a session for one injection, in order, and returns their rows.

        One transaction. choose(rows) -> how many of these rows, from the first on, go into the injection. Rows whose
        time ran out expire here; reserved rows of dead senders are queued again first.
        """
        if not self._waiting(session):
            return []
        self.requeue_reserved(now, session)
        with self.transaction():
            for row in self._all("select * from " + QUEUED + " where target = ? and state = 'queued' and "
                                 "expires_at <= ? limit ?", (session, now, SWEEP_ROWS)):
                self.move(dict(row), "expired", now, detail="its time ran out")
            fresh = [dict(row) for row in self._all(
                "select * from " + QUEUED + " where target = ? and state = 'queued' and expires_at > ? "
                "order by priority desc, id limit ?", (session, now, limit))]
            taken = fresh[:choose(fresh)] if fresh else []
            for row in taken:
                self.move(row, "hook-inflight", now, window=window, holder=holder)
            return taken

    def requeue_reserved(self, now, session=None):
        """Queues reserved rows again whose sender is dead: no byte of them has left."""
        for row in self.open_rows("reserved", session):
            if not holder_lives(row):
                with self.transaction():
                    self.move(row, "queued", now, detail="its sender ended before any byte left")

    def open_rows(self, state, session=None):
        """The rows in one of the OPEN states, by target, oldest first."""
        return [dict(row) for row in self._all(
            "select * from messages where state = :state and " + IS_OPEN +
            (" and target = :session" if session else "") + " order by target, id",
            {"state": state, "session": session})]

    def messages(self, target=None, sender=None, states=None, limit=None, newest=False):
        """Rows by target and sender session, oldest first, or the newest ones."""
        where, values = ["1"], {"target": target, "sender": sender, "limit": limit if limit is not None else -1}
        if target is not None:
            where.append("target = :target")
        if sender is not None:
            where.append("sender_session = :sender")
        if states is not None:
            where.append("state in (%s)" % _quoted(states))
        rows = self._all("select * from messages where %s order by id%s limit :limit"
                         % (" and ".join(where), " desc" if newest else ""), values)
        return [dict(row) for row in (reversed(rows) if newest else rows)]

    def queued(self, target=None, limit=None):
        """The waiting rows in the order in which hooks take them, and those that wait for the way to their machine."""
        return [dict(row) for row in self._all(
            "select * from messages where state = 'queued' and far_state is null and "
            "(:target is null or target = :target) "
            "order by target, priority desc, id limit :limit",
            {"target": target, "limit": limit if limit is not None else -1})]

    def dropped_lately(self, target, since):
        """Whether the host of a target has dropped one of its newest messages since a time, ms."""
        return self._one("select 1 from (select id from messages where target = ? order by id desc limit 50) as newest "
                         "join events on message = newest.id where at > ? and events.state = 'queued' and "
                         "detail like 'the host dropped it%' limit 1", (target, since)) is not None

    def waiting_before(self, row):
        """The older waiting rows of the same sender and target."""
        return [dict(other) for other in self._all(
            "select * from " + QUEUED + " where target = :target and state = 'queued' and id < :id and "
            "sender_session = :sender_session and sender_label = :sender_label and expires_at > :created_at "
            "order by id",
            row)]

    def unproven(self, target):
        """The rows of a target that evidence could settle or confirm, newest first, with `since`: their claim, ms."""
        rows = self._all(
            "select *, (select min(at) from events where message = id and events.state in "
            "('direct-inflight', 'hook-inflight')) as since from messages where target = :target and (("
            + IS_OPEN + " and state != 'reserved') or (state = 'delivered' and confirmed_at is null)) "
            "order by id desc limit 200", {"target": target})
        return [dict(row) for row in rows]

    def occurrences(self, target):
        """The evidence that has confirmed the newest messages of a target already."""
        return [row[0] for row in self._all("select evidence from (select id, evidence from messages where target = ? "
                                            "order by id desc limit 1000) where evidence is not null", (target,))]

    def confirm(self, row, now, evidence):
        """Notes the proof that a delivered message reached the model. Call it in a transaction."""
        self._execute("update messages set confirmed_at = :now, evidence = :evidence where id = :id and "
                      "state = 'delivered' and confirmed_at is null",
                      {"now": now, "evidence": evidence, "id": row["id"]})
        self._record(row["id"], now, "delivered", row["window"], "confirmed: %s" % evidence)

    def queued_counts(self):
        return dict(self._all("select target, count(*) from messages where state = 'queued' and remote is null "
                              "group by target"))

    def last_received(self, session):
        """The newest message that was shown to a session."""
        return self._row("select * from messages where target = ? and state in ('delivered', 'hook-inflight') "
                         "order by id desc limit 1", (session,))

    def sessions_of_label(self, label):
        """The sessions that have sent under a label, at most 20."""
        return [row[0] for row in self._all("select distinct sender_session from messages where sender_label = ? "
                                            "and sender_session != '' limit 20", (label,))]

    # ---- peers

    def peer(self, session):
        """The registered session with this full id, as a dict; None if there is none."""
        return self._row("select * from peers where session = ?", (session,))

    def peers(self):
        rows = self._all("select * from peers order by last_seen desc")
        names = rows[0].keys() if rows else ()
        return [dict(zip(names, row)) for row in rows]  # a third of the time of dict(row), and there may be many

    def peers_named(self, name):
        """The sessions that a name means, given or by the host's title, whatever its case."""
        return [dict(row) for row in self._all(
            "select * from peers where name_key = :key and name_key != '' union "
            "select * from peers where title_key = :key and title_key != ''", {"key": name_key(name)})]

    def peers_beginning(self, prefix):
        return [dict(row) for row in self._all("select * from peers where session >= ? and session < ? limit 100",
                                               (prefix, prefix + "\x7f"))]

    def peers_of_process(self, pid, start):
        """The sessions that a host process has held, the present one first."""
        return [dict(row) for row in self._all("select * from peers where pid = ? and pid_start = ? "
                                               "order by last_seen desc", (pid, start))]

    def successor(self, session):
        """The session that a /clear has put in the place of this one, else itself."""
        for _ in range(100):
            row = self._one("select successor from peers where session = ?", (session,))
            if not row or not row[0]:
                break
            session = row[0]
        return session

    def short_id(self, session):
        """The shortest prefix, of 8 characters or more, that no other registered session begins with or is called."""
        shared = 0
        for sql in ("select session from peers where session > ? order by session limit 1",
                    "select session from peers where session < ? order by session desc limit 1"):
            row = self._one(sql, (session,))
            if row:
                shared = max(shared, len(os.path.commonprefix([session, row[0]])))
        length = max(SHORTEST_LABEL_ID, shared + 1)
        while length < len(session) and any(peer["session"] != session for peer in self.peers_named(session[:length])):
            length += 1
        return session[:length]

    def register(self, peer, now, predecessor=None, fresh_ms=30000):
        """Writes what a hook reports of its session, if it is news. peer: a dict of columns; "" never erases.
        predecessor: the row of the session whose place this one takes, by /clear, in the same transaction.

        Returns the row as it now stands. An ended session that is opened again has no successor any more.
        """
        old, opened, event = self.peer(peer["session"]), peer.pop("opened", False), peer.pop("event", None)
        news = {key: value for key, value in peer.items() if value not in ("", None) and (not old or old[key] != value)}
        if old and old["successor"] and opened:
            news["successor"] = None
        # A session that is opened again is its process's present one, which the time alone tells.
        if old and not news and not opened and not predecessor and now - old["last_seen"] < fresh_ms:
            return old
        if "title" in news:
            news["title_key"] = name_key(news["title"])
        news.update(last_seen=now, hook_seen=now)
        with self.transaction():
            self._execute("insert or ignore into peers (session, host, first_seen, last_seen) values (?, ?, ?, ?)",
                          (peer["session"], peer["host"], now, now))
            self._execute("update peers set %s where session = :session"
                          % ", ".join("%s = :%s" % (column, column) for column in sorted(news)),
                          dict(news, session=peer["session"]))
            if event and self.meta("hook:" + peer["host"]) != event:
                self.set_meta("hook:" + peer["host"], event)
            if predecessor:
                self._succeed(predecessor, peer["session"], now)
        if predecessor:
            self.lower_hint(predecessor["session"])
        return self.peer(peer["session"])

    def _succeed(self, old, new, now):
        """After a /clear: the waiting messages and the given name of the old session move to the new one."""
        for row in self._all("select * from " + QUEUED + " where target = ? and state = 'queued'", (old["session"],)):
            self._execute("update messages set target = ? where id = ?", (new, row["id"]))
            self._record(row["id"], now, "queued", None, "moved to %s by /clear" % new)
            self.raise_hint(new)
        self._execute("update peers set name = ?, name_key = ? where session = ? and name_key = ''",
                      (old["name"], old["name_key"], new))
        self._execute("update peers set successor = ?, name = '', name_key = '' where session = ?",
                      (new, old["session"]))

    def set_name(self, session, name):
        with self.transaction():
            self._execute("update peers set name = ?, name_key = ? where session = ?", (name, name_key(name), session))

    # ---- meta and upkeep

    def meta(self, key):
        row = self._one("select value from meta where key = ?", (key,))
        return row[0] if row else None

    def set_meta(self, key, value):
        self._execute("insert into meta (key, value) values (?, ?) "
                      "on conflict (key) do update set value = excluded.value", (key, value))

    def integrity(self):
        """What SQLite's own check finds wrong, "" if nothing."""
        found = self._one("pragma integrity_check(1)")[0]
        return "" if found == "ok" else found

    def free_pages(self):
        return self._one("pragma freelist_count")[0]

    def loose_modes(self):
        """The files and folders of the store that others can read or write."""
        paths = [self.path + suffix for suffix in (
            "", "-wal", "-shm", ".key", ".faults", ".faults.old", ".faults.shell")]
        paths.append(os.path.join(os.path.dirname(self.path), "python"))
        paths += [self.hints] + [os.path.join(self.hints, name) for name in ("mail", "peer", "live", "wake")]
        return [path for path in paths if os.path.exists(path) and os.stat(path).st_mode & 0o077]

    def hook_last_seen(self, host):
        """(when a hook of this host last registered a session, ms, its event); (None, None) if never."""
        return self._one("select max(hook_seen) from peers where host = ?", (host,))[0], self.meta("hook:" + host)

    def newest_time(self):
        """The latest time that the store holds, ms."""
        return self._one("select coalesce((select max(state_at) from messages), 0)")[0]

    def targets_open(self):
        """The sessions with a message whose fate is open or not proven."""
        return [row[0] for row in self._all("select distinct target from messages where " + IS_OPEN +
                                            " union select target from (select target from messages where "
                                            "state = 'delivered' and confirmed_at is null order by id desc limit 100)")]

    def try_to_write(self):
        """Writes for nothing but to see whether that works; StoreFull, StoreReadOnly, StoreBusy if it does not."""
        with self.transaction():
            self.set_meta("last_doctor", str(now_ms()))

    def repair_hints(self):
        """Makes the hints agree with the rows, after a restored backup, an insert by hand or a clock that was ahead.

        Returns {what: how many}.
        """
        counts = {"missing": 0, "of no mail": 0, "with a deadline too far ahead": 0}
        for target in self.queued_counts():
            with self.transaction():
                if self._waiting(target) and not os.path.exists(os.path.join(self.hints, "mail", target)):
                    self.raise_hint(target)
                    counts["missing"] += 1
        for session in os.listdir(os.path.join(self.hints, "mail")):
            self.lower_hint(session)
            counts["of no mail"] += not os.path.exists(os.path.join(self.hints, "mail", session))
        for name in os.listdir(os.path.join(self.hints, "peer")):
            path = os.path.join(self.hints, "peer", name)
            try:
                if os.stat(path).st_mtime > time.time() + 2 * PREFIX_SECONDS:
                    os.unlink(path)
                    counts["with a deadline too far ahead"] += 1
            except FileNotFoundError:
                pass
        return counts

    def sweep(self, now, every_ms=0, anything=False):
        """Ends what is overdue, forgets what is old, compacts the file; returns counts, None if it is not time yet.

        Bounded in rows a call; anything: compacts a file of any size. Never call it between a claim and its flush.
        """
        settings = self.settings
        counts = {"expired": 0, "forgotten": 0, "sessions": 0}
        if every_ms:
            last = int(self.meta("last_sweep") or 0)
            if last <= now < last + every_ms:
                return None
        self.requeue_reserved(now)
        with self.transaction():
            if every_ms:
                self.set_meta("last_sweep", str(now))
            # A clock that was ahead when a message was sent must not keep it for ever once it is right again.
            self._execute("update messages indexed by messages_sent set expires_at = :now + (expires_at - created_at), "
                          "created_at = :now where state = 'queued' and created_at > :now + 60000", {"now": now})
            # What another machine has waiting is its to end.
            for row in self._all("select * from messages where state = 'queued' and far_state is null and "
                                 "expires_at <= ? limit ?", (now, SWEEP_ROWS)):
                counts["expired"] += self.move(dict(row), "expired", now, detail="its time ran out")
            # Until it expires another machine may send a message again, after a lost link, and it must be known then.
            old = [row[0] for row in self._all(
                "select id from messages where " + IS_ENDED + " and state_at < ? and "
                "(expires_at <= ? or instr(sender_session, ':') = 0) limit ?",
                (now - settings.retain_seconds * 1000, now, SWEEP_ROWS))]
            for number in old:
                self._execute("delete from events where message = ?", (number,))
                self._execute("delete from messages where id = ?", (number,))
            counts["forgotten"] = len(old)
            gone = [row[0] for row in self._all(
                "select session from peers where last_seen < ? and not exists (select 1 from messages where "
                "target = session and not " + IS_ENDED + ") limit ?",
                (now - settings.retain_peer_seconds * 1000, SWEEP_ROWS))]
            for session in gone:
                self._execute("delete from peers where session = ?", (session,))
                self._execute("delete from meta where key in (?, ?)", ("stops:" + session, "agy:" + session))
            counts["sessions"] = len(gone)
        for session in gone:
            self._forget_hints(session)
        free = self._one("pragma freelist_count")[0]
        if free > settings.vacuum_free_pages and (anything or os.path.getsize(self.path) < VACUUM_IN_PASSING):
            self._execute("vacuum")
        return counts

    def _forget_hints(self, session):
        self.lower_hint(session)
        for name in ("peer", "live", "wake"):
            try:
                os.unlink(os.path.join(self.hints, name, session))
            except OSError:
                pass

    # ---- what the fast path of xmsg-hook.sh reads

    def remember_prefix(self, session, prefix, unchanged, seconds=PREFIX_SECONDS):
        """Lets payloads that begin with exactly these bytes take the fast path for a minute.

        unchanged: the registry already held all that this payload says; then earlier prefixes stay good too (Codex
        names the event before the permission mode, so each event has its own).
        """
        path = os.path.join(self.hints, "peer", session)
        lines = [prefix]
        if unchanged:
            try:
                with open(path, "rb") as file:
                    known, deadline = file.read(16384).split(b"\n"), os.fstat(file.fileno()).st_mtime
                if prefix in known and time.time() + seconds / 2 < deadline <= time.time() + seconds:
                    return
                lines += [line for line in known if line and line != prefix][:3]
            except OSError:
                pass
        write_whole(path, b"\n".join(lines) + b"\n", time.time() + seconds)
        self.heartbeat(session)

    def heartbeat(self, session):
        descriptor = os.open(os.path.join(self.hints, "live", session),
                             os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)

    def seen_at(self, peer):
        """When a session last gave a sign, in ms: its last registration or the heartbeat of its fast path."""
        try:
            beat = int(os.stat(os.path.join(self.hints, "live", peer["session"])).st_mtime * 1000)
        except OSError:
            beat = 0
        return max(peer["last_seen"], beat)


class Transaction:
    """`begin immediate` ... `commit`. Not reentrant: one decision is one transaction."""

    def __init__(self, store):
        self._store = store

    def __enter__(self):
        self._store._execute("begin immediate")

    def __exit__(self, kind, error, trace):
        try:
            self._store._execute("rollback" if kind else "commit")
        except StoreError:
            if not kind:
                try:
                    self._store._execute("rollback")
                except StoreError:
                    pass
                raise
        return False


def write_whole(path, content, modified=None):
    """Puts a file of mode 0600 in place at once; modified: its time in seconds since 1970."""
    scratch = "%s.%d.new" % (path, os.getpid())
    descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    if modified:
        os.utime(scratch, (modified, modified))
    os.rename(scratch, path)


def holder_lives(row):
    """Whether the process that holds a reserved or in-flight row still runs."""
    import host_process
    return host_process.alive(row["holder_pid"], row["holder_start"])


def is_unknown(row):
    """Whether nobody can say what became of a row: xmsg shows it as UNKNOWN and waits for evidence or a person."""
    return row["state"] == "direct-uncertain" or (row["state"] in IN_FLIGHT and not holder_lives(row))


def shown_state(row):
    return "UNKNOWN" if is_unknown(row) else row["state"]


def myself():
    """(pid, start) of this process, as the holder of a row."""
    import host_process
    return os.getpid(), host_process.start_time(os.getpid())


def append_log(path, data):
    """Adds bytes to a log of ours: 0600, and of LOG_BYTES at most, twice, since the last one is kept as `.old`."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data[-LOG_BYTES:])
        if os.fstat(descriptor).st_size > LOG_BYTES:
            os.rename(path, path + ".old")
    finally:
        os.close(descriptor)


def note_fault(settings, where, error):
    """Adds a line to the log of faults that hooks have swallowed; never a fault itself."""
    try:
        line = json.dumps({"at": now_ms(), "where": where, "fault": "%s: %s" % (type(error).__name__, error)})
        append_log(settings.db + ".faults", line.encode()[:2000] + b"\n")
    except Exception:
        pass


def record_interpreter(settings, check=None):
    """Writes the real path of this interpreter beside the store, where xmsg-hook.sh and bin/xmsg look for it.

    An earlier record stands while it can be run. check(recorded), for the installer, is asked for a better answer.
    """
    path, python = os.path.join(os.path.dirname(settings.db), "python"), os.path.realpath(sys.executable)
    if sys.version_info < (3, 9):
        return
    try:
        with open(path) as file:
            recorded = file.read(4096).strip()
        if os.access(recorded, os.X_OK) and (not check or check(recorded) == recorded):
            return
    except OSError:
        pass
    try:
        write_whole(path, (check and check() or python).encode() + b"\n")
    except OSError:
        pass
