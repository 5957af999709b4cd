"""Codex: which threads are open, what they are called, and where.

Read-only, and tolerant of whatever another program may leave in CODEX_HOME. Codex 0.148 and newer hold a lock on
`thread-writer-locks/<thread>.lock` while a thread is open: the TUI or `codex exec` itself, or the daemon that a TUI is
attached to. We look the lock up in /proc/locks and never take it, since even a moment could make Codex fail to.
"""
import os

THREAD_CHARS = frozenset("0123456789abcdef-")
MOST_THREADS = 1000
SOURCES = ("cli", "vscode", "exec")  # of sessions that a person or an agent has started
LARGEST_INDEX = 16 << 20  # bytes of session_index.jsonl, of which the newest count


def codex_home(environ):
    """The CODEX_HOME of this environment."""
    return environ.get("CODEX_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".codex")


def home_of(rollout):
    """The CODEX_HOME that a rollout `<home>/sessions/Y/M/D/rollout-....jsonl` lies in, else None."""
    folder = os.path.dirname(rollout or "")
    for _ in range(4):
        if os.path.basename(folder) == "sessions":
            return os.path.dirname(folder)
        folder = os.path.dirname(folder)
    return None


def writer(home, thread):
    """The pid that holds a thread open, 0 if nobody does, None if that cannot be known (Codex < 0.148, macOS)."""
    folder = os.path.join(home, "thread-writer-locks")
    if not os.path.isdir(folder):
        return None
    holders = _lock_holders()
    return None if holders is None else holders.get(_identity(os.path.join(folder, thread + ".lock")), 0)


def open_threads(home):
    """The threads that somebody holds open, as dicts: session, pid, name, cwd, model; [] where that cannot be known."""
    folder = os.path.join(home, "thread-writer-locks")
    holders = _lock_holders()
    try:
        names = os.listdir(folder)[:MOST_THREADS] if holders else []
    except OSError:
        return []
    threads = []
    for name in names:
        thread, ending = os.path.splitext(name)
        pid = holders.get(_identity(os.path.join(folder, name)))
        if pid and ending == ".lock" and THREAD_CHARS.issuperset(thread):
            threads.append({"session": thread, "pid": pid, "name": "", "cwd": "", "model": "", "source": ""})
    if threads:
        _describe(home, threads)
    # A subagent's thread is open too, but it has no window and its id begins like its parent's.
    return [thread for thread in threads if thread["source"] in SOURCES]


def _identity(path):
    """(device, inode) of a file as /proc/locks writes them; None if it is gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return "%02x:%02x:%d" % (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


def _lock_holders():
    """{file identity: pid} of all flocks, None where the system does not tell."""
    try:
        with open(os.path.join(os.environ.get("XMSG_PROC_ROOT") or "/proc", "locks")) as file:
            lines = file.read(4 << 20).splitlines()
    except OSError:
        return None
    holders = {}
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF"; a line with "->" waits and holds nothing.
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[4].isdigit():
            holders[fields[5]] = int(fields[4])
    return holders


def _describe(home, threads):
    """Adds names, folders and models from the newest state_<n>.sqlite; the last rename in session_index.jsonl wins."""
    import sqlite3
    by_id = {thread["session"]: thread for thread in threads}
    numbers = sorted((int(name[6:-7]) for name in _names(home) if name.startswith("state_") and name.endswith(".sqlite")
                      and name[6:-7].isdigit()), reverse=True)
    if numbers:
        try:
            from urllib.parse import quote
            database = sqlite3.connect("file:%s?mode=ro" % quote(os.path.join(home, "state_%d.sqlite" % numbers[0])),
                                       uri=True, timeout=0.2)
            try:
                columns = {row[1] for row in database.execute("pragma table_info(threads)")}
                wanted = [column if column in columns else "''" for column in ("name", "cwd", "model", "source")]
                for row in database.execute("select id, %s from threads where id in (%s)" % (
                        ", ".join(wanted), ", ".join("?" * len(by_id))), list(by_id)):
                    by_id[row[0]].update(name=_word(row[1]), cwd=_word(row[2]), model=_word(row[3]),
                                         source=_word(row[4]))
            finally:
                database.close()
        except sqlite3.Error:
            pass
    for thread, name in _renames(home).items():
        if thread in by_id:
            by_id[thread]["name"] = name


def _renames(home):
    """{thread: name} of session_index.jsonl, where the last line of a thread wins."""
    import json
    names = {}
    try:
        with open(os.path.join(home, "session_index.jsonl"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LARGEST_INDEX))
            for line in file.read(LARGEST_INDEX).splitlines():
                try:
                    entry = json.loads(line)
                    if isinstance(entry["id"], str) and isinstance(entry["thread_name"], str):
                        names[entry["id"]] = _word(entry["thread_name"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
    except OSError:
        pass
    return names


def _names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _word(value):
    return value[:1000] if isinstance(value, str) else ""
