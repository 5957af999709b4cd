"""Antigravity (agy): who is open and what it is called, what became of a hook's text, how a session that left is woken.

Read-only towards agy's own files. An open conversation is told by the lock that agy holds on
`presence/<conversation>.lock`, which stays behind unlocked when agy leaves; the file itself says nothing. The facts are
those of public reports on agy 1.0 to 1.3 and of the published engine, since no registry ships the program.
"""
import os
import time

import host_process

MOST_CONVERSATIONS = 5000
LONGEST_TITLE = 1000
QUERY_SECONDS = 0.5  # for agy's database, which a hook reads too
VERSION_SECONDS = 1.0  # a hook waits for `agy --version` no longer
READ_BYTES = 64 << 10
GRACE_SECONDS = 60  # agy ends by itself at --print-timeout; later than this it is ended
# Whose session somebody is; configuration (CODEX_HOME, CLAUDE_CONFIG_DIR, XMSG_DB) is not.
IDENTITY = ("CLAUDE", "CODEX_", "ANTIGRAVITY_", "AI_AGENT", "XMSG_FROM")
NO_IDENTITY = ("CLAUDE_CONFIG_DIR", "CODEX_HOME")


# ---- what is open, and what it is called -----------------------------------------------------------------------------

def data_dir(environ):
    """Where the command line program keeps its data; HOME alone decides."""
    return os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".gemini", "antigravity-cli")


def data_dir_of(transcript):
    """The data directory that a transcript `<data>/brain/<id>/.system_generated/logs/<file>` lies in, else None."""
    parts = (transcript or "").split("/")
    return "/".join(parts[:-5]) if len(parts) > 5 and parts[-5] == "brain" else None


def presence(folder, conversation):
    """The pid that holds a conversation open, 0 if nobody does, None if that cannot be known.

    No lock file: an agy that takes no lock may run, or the conversation may be one of Antigravity's other programs.
    """
    path = os.path.join(folder, conversation + ".lock")
    return host_process.flock_holder(path) if os.path.exists(path) else None


CONTINUES = {"-c", "-continue", "--continue"}


def attached(folder, conversation):
    """presence(), and a process that was started for the conversation counts before it has taken its lock.

    `agy -p` takes it some seconds after its start, the terminal interface at the first prompt. Where no agy runs at
    all, nobody has it open. One that goes on with the last conversation of its folder does not say which that is:
    until it holds a lock, it may be any.
    """
    holder, running = presence(folder, conversation), list(_processes())
    named = {prefix + conversation for prefix in ("", "-conversation=", "--conversation=")}
    for pid, words in running:
        if not holder and named.intersection(words):
            return pid
    if holder == 0 and any(CONTINUES.intersection(words[1:]) for _, words in running):
        busy = set(_held(folder, host_process.flock_holders).values())
        if any(CONTINUES.intersection(words[1:]) and pid not in busy for pid, words in running):
            return None
    return holder if running else holder or 0


def has_conversation(data, conversation):
    """Whether the program keeps a conversation. For one that it does not know it would begin another one."""
    return any(os.path.exists(os.path.join(data, "conversations", conversation + ending)) for ending in (".db", ".pb"))


def _processes():
    """(pid, arguments) of each agy of this user that runs."""
    for pid in host_process.processes():
        words = host_process.arguments(pid)
        if any(os.path.basename(word) == "agy" for word in words[:2]) and host_process.owner(pid) == os.geteuid():
            host = host_process.identify(pid)
            if host and host.kind == "agy":
                yield pid, words


def open_sessions(folder, data, read_locks=host_process.flock_holders):
    """The conversations that somebody holds open, as dicts: session, pid, pid_start, title, cwd; [] where that cannot
    be known."""
    held = _held(folder, read_locks)
    known = conversations(data, held) if held else {}
    return [dict({key: known.get(conversation, {}).get(key, "") for key in ("title", "cwd")}, session=conversation,
                 pid=pid, pid_start=host_process.start_time(pid)) for conversation, pid in held.items()]


def _held(folder, read_locks):
    """{conversation: pid} by the locks that are held."""
    try:
        with os.scandir(folder) as entries:
            files = [(str(entry.inode()), entry.name) for entry in entries]
    except OSError:
        return {}
    holders, found = read_locks() if files else None, {}
    if not holders:
        return {}
    # Only files whose inode holds a lock are looked at: agy never removes one.
    for name in [name for inode, name in files if inode in holders]:
        conversation, ending = os.path.splitext(name)
        pid = ending == ".lock" and host_process.flock_holder(os.path.join(folder, name), holders)
        if pid:
            found[conversation] = pid
    return found


def conversations(data, wanted=None):
    """{conversation: {title, cwd, activity}} by agy's own summaries, the newest first, {} if there are none.

    wanted: only these conversations. Nothing is written, and nothing is left beside the file: without a -shm nobody
    has it open, and SQLite would make one even for a reader.
    """
    import sqlite3
    path = os.path.join(data, "conversation_summaries.db")
    option = "mode=ro" if os.path.exists(path + "-shm") else "immutable=1"
    found = {}
    if not os.path.isfile(path):  # SQLite would wait for a pipe
        return found
    try:
        escaped = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        database = sqlite3.connect("file:%s?%s" % (escaped, option), uri=True, timeout=0.2)
        try:
            deadline = time.monotonic() + QUERY_SECONDS
            database.set_progress_handler(lambda: time.monotonic() > deadline, 10000)
            columns = {row[1] for row in database.execute("pragma table_info(conversation_summaries)")}
            fields = [name if name in columns else "''" for name in (
                "title", "workspace_uris", "status", "last_modified_time")]
            sql = "select conversation_id, %s from conversation_summaries" % ", ".join(fields)
            if wanted is not None:
                sql += " where conversation_id in (%s)" % ", ".join("?" * len(wanted))
            elif "last_modified_time" in columns:
                sql += " order by last_modified_time desc"
            for row in database.execute("%s limit %d" % (sql, MOST_CONVERSATIONS), list(wanted or ())):
                if isinstance(row[0], str):
                    found[row[0]] = {"title": _word(row[1]), "cwd": _workspace(row[2]), "activity": _activity(row[3])}
        finally:
            database.close()
    except (sqlite3.Error, UnicodeDecodeError):  # the second: a damaged schema
        pass
    return found


def _word(value):
    return value[:LONGEST_TITLE] if isinstance(value, str) else ""


def _activity(status):
    return {"CASCADE_RUN_STATUS_IDLE": "idle", "CASCADE_RUN_STATUS_RUNNING": "busy"}.get(status, "unknown")


def _workspace(uris):
    """The first folder of a JSON list of file:// addresses, "" if there is none."""
    import json
    try:
        first = json.loads(uris)[0]
    except (TypeError, ValueError, LookupError, RecursionError):
        return ""
    if not isinstance(first, str) or not first.startswith("file:///"):
        return ""
    if "%" in first:
        from urllib.parse import unquote  # costs a hook more than all the rest
        first = unquote(first)
    return first[len("file://"):][:4096]


# ---- what became of a hook's text ------------------------------------------------------------------------------------

def version(pid):
    """What the program of a running agy says of its version, "" if it does not. Takes VERSION_SECONDS at most."""
    words, path = host_process.arguments(pid), host_process.executable(pid)
    if os.path.basename(path) == "agy":
        # An update replaces the file below the running process; this is the one that runs.
        running = "/proc/%d/exe" % pid
        command = [running if os.path.exists(running) and "XMSG_PROC_ROOT" not in os.environ else path]
    elif len(words) > 1 and os.path.basename(words[1]) == "agy" and path:
        command = [path, words[1]]  # under an interpreter
    else:
        return ""
    import re
    import subprocess
    try:
        done = subprocess.run(command + ["--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=VERSION_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    text = done.stdout[:200].decode("utf-8", "replace").strip()
    return text if done.returncode == 0 and re.match(r"\d[0-9A-Za-z.+-]{0,60}\Z", text) else ""


# A pure function, so that every rule tests as a table.
def was_refused(steps, first, shape, heads):
    """Whether it is certain that a hook's text never entered its conversation: the conversation went on without it.

    steps: (index, source, type, text) of all that the transcript got since. first: the index that the next step had
    then. shape: the key that the text went by. heads: the source lines of its messages; without any there is nothing
    to look for. The text is looked for leniently here, by letters and digits alone, since a host may frame or wrap it:
    doubt is no refusal.
    """
    wanted = [_letters(head) for head in heads]
    if not wanted:
        return False
    for _, source, kind, text in steps:
        if source != "MODEL" and any(head in _letters(text) for head in wanted):
            return False
    for index, source, kind, _ in steps:
        if kind == "USER_INPUT":
            return shape == "continue"  # the loop ended where it was to go on
        # A transcript may be written late: only a step that came after the hook counts.
        if kind == "PLANNER_RESPONSE" and source == "MODEL" and shape != "continue" and index >= first:
            return True
    return False


def _letters(text):
    return "".join(filter(str.isalnum, text))


# ---- waking a session that has left ----------------------------------------------------------------------------------

def program(given, environ):
    """The path of agy: the given one, else that on PATH, else ~/.local/bin/agy; None if there is none to run."""
    import shutil
    home = environ.get("HOME") or os.path.expanduser("~")
    candidates = [given] if given else [shutil.which("agy", path=environ.get("PATH", "")),
                                        os.path.join(home, ".local", "bin", "agy")]
    for path in filter(None, candidates):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def wake_command(path, conversation, timeout, workspace, more, kick):
    """The arguments that resume a conversation without a terminal. timeout: a Go duration; no word of any message."""
    folders = ["--add-dir", workspace] if workspace else []
    return [path, "--conversation", conversation, "--print-timeout", timeout, *folders, *more, "-p", kick]


def clean_environment(environ):
    """The environment without whose session the sender is, and without agy's secret of another process."""
    return {name: value for name, value in environ.items() if name in NO_IDENTITY or not name.startswith(IDENTITY)}


def run_wake(command, environ, workspace, write_log, seconds, started):
    """Runs a woken agy to its end; (exit status or minus a signal, why, as it says). OSError if it cannot start.

    started(pid) is called once it runs; write_log(bytes) gets what it prints. It has a session of its own, no input,
    and a pipe for output, so that what it prints is bounded by us. After so many seconds, and some grace, it is ended.
    """
    import select
    import subprocess
    process = subprocess.Popen(command, env=environ, cwd=workspace or environ.get("HOME") or "/",
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    deadline, tail, output = time.monotonic() + seconds + GRACE_SECONDS, b"", process.stdout.fileno()
    os.set_blocking(output, False)
    started(process.pid)
    try:
        while True:
            # A child that agy leaves behind may hold the pipe open: its own end is what counts.
            ended = process.poll() is not None
            data = b""
            if select.select([output], [], [], 0 if ended else 0.2)[0]:
                data = os.read(output, READ_BYTES)
                write_log(data)
                tail = (tail + data)[-READ_BYTES:]
                if not data and not ended:
                    time.sleep(0.05)
            late = time.monotonic() > deadline
            if ended and (late or not data):
                break
            if late:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    finally:
        process.stdout.close()
    return process.returncode, last_word(tail.decode("utf-8", "replace"))


def last_word(text):
    """The line of a program's output that says why it ended: the last one, or the one before a usage text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    usage = next((place for place, line in enumerate(lines) if place and line.lower().startswith("usage")), None)
    return lines[usage - 1 if usage else -1][:300] if lines else ""


# ---- from inside agy -------------------------------------------------------------------------------------------------

def api_program(environ):
    """The agy that can speak to its own conversations, None unless this very environment carries address and secret."""
    if not environ.get("ANTIGRAVITY_LS_ADDRESS") or not environ.get("ANTIGRAVITY_CSRF_TOKEN"):
        return None
    return program(environ.get("ANTIGRAVITY_AGENTAPI_EXE"), environ) or program("", environ)


# What `agy agentapi` says when nothing can have arrived. After anything else nobody knows.
REFUSALS = ("not found", "csrf", "not set", "connection refused", "flag provided but not defined", "usage:")


def send_message(path, conversation, text, leave, seconds=5):
    """`agy agentapi send-message`: one message into an open conversation, as (word, text).

    leave() is called before anything can leave. The secret stays in the environment that it is in.
    """
    import subprocess
    leave()
    try:
        done = subprocess.run([path, "agentapi", "send-message", conversation, text], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    except OSError as error:  # it was never started
        return "NOT_SENT", "agy agentapi: %s" % error.strerror
    except subprocess.TimeoutExpired:
        return "UNKNOWN", "agy agentapi gave no answer in %g s" % seconds
    said = " ".join(done.stdout[:4096].decode("utf-8", "replace").split())
    said = said.replace(os.environ.get("ANTIGRAVITY_CSRF_TOKEN") or "\0", "***")[:200]
    if done.returncode == 0:
        return "ACCEPTED", "agy-message"
    if any(sign in said.lower() for sign in REFUSALS):
        return "NOT_SENT", "agy agentapi: " + said
    return "UNKNOWN", "agy agentapi left with %d: %s" % (done.returncode, said)
