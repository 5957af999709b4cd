"""Codex: which threads are open, what they are called, and where; and what waits in Codex's own queue.

Read-only, bounded, and tolerant of whatever another program may leave in CODEX_HOME. Codex 0.148 and newer hold a lock
on `thread-writer-locks/<thread>.lock` while a thread is open: the TUI or `codex exec` itself, or the daemon that a TUI
is attached to. We look the lock up in /proc/locks and never take it, since even a moment could make Codex fail to.
"""
import os
import stat
import time

import host_process

THREAD_CHARS = frozenset("0123456789abcdef-")
MOST_THREADS = 1000
SOURCES = ("cli", "vscode", "exec")  # of sessions that a person or an agent has started
LARGEST_INDEX = 16 << 20  # bytes of session_index.jsonl, of which the newest count
MOST_QUEUED = 1000
LONGEST_WORD = 1000  # characters of a name, a folder or a text that we take from Codex
QUERY_SECONDS = 0.2


def codex_home(environ):
    """The CODEX_HOME of this environment."""
    return environ.get("CODEX_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".codex")


def home_of(rollout):
    """The CODEX_HOME that a rollout `<home>/sessions/Y/M/D/rollout-....jsonl` lies in, else None."""
    home, found, rest = (rollout or "").rpartition("/sessions/")
    return home if found and rest.count("/") <= 3 else None


def writer(home, thread):
    """The pid that holds a thread open, 0 if nobody does, None if that cannot be known (Codex < 0.148, macOS)."""
    folder = os.path.join(home, "thread-writer-locks")
    if not os.path.isdir(folder):
        return None
    return host_process.flock_holder(os.path.join(folder, thread + ".lock"))


def open_threads(home):
    """The threads that somebody holds open, as dicts; None where that cannot be known.

    session; pid, the holder's; name, cwd, model, rollout, "" where unknown; since, when it was opened, in seconds;
    source, "" for a thread that Codex has not written down yet, as before its first turn.
    """
    try:
        with os.scandir(os.path.join(home, "thread-writer-locks")) as entries:
            files = [(str(entry.inode()), entry.path) for entry in entries if entry.name.endswith(".lock")]
    except OSError:
        return None
    if not files:
        return []
    locks = host_process.flock_holders()
    if locks is None:
        return None
    threads = []
    # What crashes left behind can be much, so the inodes are compared first, which the folder itself tells.
    for path in [path for inode, path in files if inode in locks][:MOST_THREADS]:
        thread, pid = os.path.basename(path)[:-len(".lock")], host_process.flock_holder(path, locks)
        if pid and THREAD_CHARS.issuperset(thread):
            threads.append({"session": thread, "pid": pid, "name": "", "cwd": "", "model": "", "source": "",
                            "rollout": "", "since": _modified(path)})
    if threads:
        _describe(home, threads)
    return threads


def is_session(thread):
    """Whether an open thread is a session of its own: a subagent's has no window, and its id begins like its parent's.

    One that is not written down yet can be a TUI that waits for its first prompt (0.156.1, 0.171.0).
    """
    return thread["source"] in SOURCES + ("",)


def _modified(path):
    """When a lock was taken: Codex truncates the file then (0.156.1, 0.171.0)."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _describe(home, threads):
    """Adds what the newest state_<n>.sqlite says, and names from session_index.jsonl, where the last rename wins."""
    by_id = {thread["session"]: thread for thread in threads}
    path = _newest_state(home)
    columns = {row[0] for row in _query(path, "select name from pragma_table_info('threads')") or ()} if path else ()
    if "id" in columns:
        keys = {"name": "name", "cwd": "cwd", "model": "model", "source": "source", "rollout": "rollout_path"}
        words = ", ".join("substr(%s, 1, %d)" % (column, LONGEST_WORD) if column in columns else "''"
                          for column in keys.values())
        import json
        for thread, *values in _query(path, "select id, %s from threads where id in (select value from json_each(?))"
                                      % words, (json.dumps(list(by_id)),)) or ():
            if thread in by_id:
                by_id[thread].update(zip(keys, map(_word, values)))
                by_id[thread]["source"] = by_id[thread]["source"] or ("unknown" if "source" in columns else "")
    for thread, name in _renames(home, by_id).items():
        by_id[thread]["name"] = name


def _newest_state(home):
    numbers = [int(name[6:-7]) for name in _names(home) if name.startswith("state_") and name.endswith(".sqlite")
               and name[6:-7].isdecimal() and name.isascii()]
    return os.path.join(home, "state_%d.sqlite" % max(numbers)) if numbers else None


def _query(path, sql, values=()):
    """The rows of a query of Codex's database; None if it cannot be read, or not in time."""
    import sqlite3
    deadline = time.monotonic() + QUERY_SECONDS
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        # Where there is no -wal, nobody has the database open, and mode=ro alone would leave one behind.
        option = "mode=ro" if os.path.exists(path + "-wal") else "mode=ro&immutable=1"
        escaped = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        database = sqlite3.connect("file:%s?%s" % (escaped, option), uri=True, timeout=QUERY_SECONDS)
        try:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            database.set_progress_handler(lambda: time.monotonic() > deadline, 10000)
            return database.execute(sql, values).fetchall()
        finally:
            database.close()
    except (OSError, sqlite3.Error):
        return None


def _renames(home, wanted):
    """{thread: name} of session_index.jsonl for the threads wanted; the last whole line of a thread wins."""
    import json
    # Most lines are other threads', and parsing them all would take longer than all the rest of a report.
    heads, names = {b'{"id":"%s"' % thread.encode() for thread in wanted}, {}
    length = max(map(len, heads))
    try:
        descriptor = os.open(os.path.join(home, "session_index.jsonl"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return names
            file.seek(max(0, status.st_size - LARGEST_INDEX))
            lines = [line for line in file if line[:length] in heads]
    except OSError:
        return names
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            if entry["id"] not in names and isinstance(entry["thread_name"], str):
                names[entry["id"]] = _word(entry["thread_name"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return {thread: name for thread, name in names.items() if thread in wanted}


def queue_counts(home):
    """{thread: how many inputs wait in Codex's own queue}."""
    return dict(_query(_queue(home), "select thread_id, count(*) from queued_items group by 1 limit %d" % MOST_QUEUED)
                or ())


def queued_items(home):
    """What waits in Codex's own queue, as dicts: id, session, text, created_at (ms); in Codex's order a thread."""
    rows = _query(_queue(home), "select id, thread_id, case when json_valid(payload_json) then substr(json_extract("
                  "payload_json, '$.UserInput.content[0].text'), 1, %d) end, created_at_ms from queued_items "
                  "order by thread_id, queue_order limit %d" % (LONGEST_WORD, MOST_QUEUED)) or ()
    return [{"id": _word(item), "session": _word(thread), "text": _word(text),
             "created_at": created if isinstance(created, int) and 0 <= created < 1 << 47 else 0}
            for item, thread, text, created in rows]


def _queue(home):
    return os.path.join(home, "queue_1.sqlite")


def _names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _word(value):
    return value[:LONGEST_WORD] if isinstance(value, str) else ""
