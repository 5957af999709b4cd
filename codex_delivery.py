"""Codex: which threads are open, what waits in Codex's own queue, and how a message becomes visible in a thread.

What Codex keeps is only read, and whatever another program may leave in CODEX_HOME does no harm. Codex 0.148 and
newer hold a lock on `thread-writer-locks/<thread>.lock` while a thread is open: the TUI or `codex exec` itself, or the
daemon that a TUI is attached to. We look the lock up in /proc/locks and never take it, since even a moment could make
Codex fail to.

A thread that the app-server of its CODEX_HOME has loaded takes messages through it; one that runs standalone, through
Codex's own queue. What is possible is asked of the processes that run, never of the `codex` on PATH. A thread is never
started, resumed or configured.
"""
import os
import re
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


def control_socket(home):
    """The path of the app-server that the sessions of a CODEX_HOME share (0.144 to 0.171)."""
    return os.path.join(home, "app-server-control", "app-server-control.sock")


def writer(home, thread):
    """The pid that holds a thread open, 0 if nobody does, None if that cannot be known (Codex < 0.148, macOS)."""
    folder = os.path.join(home, "thread-writer-locks")
    if not os.path.isdir(folder):
        return None
    return host_process.flock_holder(os.path.join(folder, thread + ".lock"))


def open_threads(home, read_locks=host_process.flock_holders):
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
    locks = read_locks()
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
    from itertools import compress
    from operator import itemgetter
    # Most lines are other threads', and a loop over them all would take longer than all the rest of a report.
    heads, names = {b'{"id":"%s"' % thread.encode() for thread in wanted}, {}
    length = max(map(len, heads))
    try:
        descriptor = os.open(os.path.join(home, "session_index.jsonl"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return names
            file.seek(max(0, status.st_size - LARGEST_INDEX))
            lines = list(file)
            lines = list(compress(lines, map(heads.__contains__, map(itemgetter(slice(length)), lines))))
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


# ---------------------------------------------------------------------------------------------------- capabilities

# What is possible from which release on. A pre-release proves nothing. All were measured with the releases themselves.
FLOORS = {
    # thread/read says canAcceptDirectInput; absent on 0.144.6.
    "direct": (0, 145, 0),
    # thread/queue/add and the `codex queue` that uses it: 0.148.0 has only the first and takes the second for a prompt.
    "queue": (0, 149, 0),
    # turn/start takes toolOutput; 0.144.6, 0.145.0 and 0.149.0 answer with success and drop the text silently.
    "delegation": (0, 151, 0),
    # The TUI renders a delegation, as "Sent by Codex from task ..."; to others it is invisible.
    "rendering": (0, 151, 0),
}
PROBE_SECONDS = 3.0  # an app-server of this machine that takes longer to say what it holds is of no use
VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})\Z", re.ASCII)
# Measured on 0.156.1 and 0.171.0: a tool's output of more than 12,000 characters loses its middle, an input of more
# than 1,048,576 is refused.
DELEGATION_BYTES = 11500
INPUT_CHARS = 1 << 20


def parse_version(text):
    """(major, minor, patch) of a release, None for a pre-release and anything else."""
    match = VERSION.match(text)
    return tuple(map(int, match.groups())) if match else None


def server_version(answer):
    """The version of an app-server by its answer to `initialize`: "<name of a client>/0.156.1 (Debian ...) ..."."""
    agent = answer.get("userAgent")
    return parse_version(agent.partition(" ")[0].rpartition("/")[2]) if isinstance(agent, str) else None


def running_version(pid):
    """The version of the codex that a process runs, None if that is not known.

    npm's and the daemon's packages say it in a file two folders up. Any other, or one that was replaced meanwhile, says
    it itself.
    """
    path, program = host_process.executable(pid), host_process.program(pid)
    try:
        if os.path.basename(os.path.dirname(path)) == "bin" and os.path.samefile(path, program):
            import json
            with open(os.path.join(os.path.dirname(os.path.dirname(path)), "codex-package.json"), "rb") as file:
                return parse_version(json.loads(file.read(4096))["version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return program_version(program)


def program_version(program):
    """The version of a program `codex`, a path or a word for PATH, as it says itself, which takes 0.2 s; else None."""
    import subprocess
    try:
        said = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=PROBE_SECONDS).stdout[:100].split()
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(said[1].decode("ascii", "replace")) if said[:1] == [b"codex-cli"] and len(said) == 2 else None


class Codex:
    """One CODEX_HOME during one command: its processes, and its app-server over one connection, all by one deadline.

    fault: why the app-server serves nothing, None if it does. version: the app-server's. writers: {thread: pid} of all
    that are held open, where that has been read already. A process is looked at once.
    """

    def __init__(self, home, seconds, program="", writers=None):
        self.home, self.deadline, self.program = home, time.monotonic() + seconds, program
        self.version = self.fault = self._connection = self._tuis = None
        self._writers, self._versions, self._roles = writers, {}, {}

    def facts(self, thread, sender=None):
        """What windows() decides on, for one thread. sender: (thread, pid of the host process above it) or None."""
        self.reach()
        found = {"fault": None, "version": self.version, "status": None, "flags": (), "accepts": None,
                 "source": None, "tuis": [], "delegable": False, "writer": None, "writer_pid": None,
                 "writer_version": None}
        if not self.fault:
            found.update(self._read_thread(thread))
        if found["status"] in LOADED:
            found["tuis"] = self.tuis()
            # A thread of this app-server runs its tools below it.
            found["delegable"] = bool(sender) and sender[1] == self._connection.pid and (
                self._read_thread(sender[0])["status"] in LOADED)
        if self.fault:  # from the beginning, or since one of the questions
            found.update(fault=self.fault, status=None)
        if found["status"] not in LOADED:
            found.update(self._writer(thread))
        return found

    def tuis(self):
        """The version of each TUI of this CODEX_HOME that runs, None for one that is not known. Looked up once."""
        if self._tuis is None:
            self._tuis = []
            for pid in host_process.processes():
                if os.path.basename(host_process.executable(pid)) != "codex" or not self._is_tui(pid):
                    continue
                self._tuis.append(self._version_of(pid))
        return self._tuis

    def _version_of(self, pid):
        """The version that a process runs, asked once for each program; None for one that is not known in time."""
        try:
            program = os.stat(host_process.program(pid))
        except OSError:
            return None
        key = program.st_dev, program.st_ino
        if key not in self._versions:
            self._versions[key] = running_version(pid) if time.monotonic() < self.deadline else None
        return self._versions[key]

    def request(self, method, params, leaving=None):
        """A request to the app-server within the deadline; its errors are app_server's."""
        self._connection.deadline = self.deadline
        return self._connection.request(method, params, leaving)

    def close(self):
        if self._connection:
            self._connection.close()
            self._connection = None

    def _is_tui(self, pid):
        host = host_process.identify(pid)
        if not host or host.role != "tui":
            return False
        environment = host_process.environment(pid)
        return environment is None or os.path.realpath(codex_home(environment)) == os.path.realpath(self.home)

    def reach(self):
        """Connects to the app-server, once a command. Returns the fault."""
        if self._connection or self.fault:
            return self.fault
        path = control_socket(self.home)
        if not os.path.lexists(path):
            self.fault = "no app-server runs there"
        # The first client names an app-server's sessions for ever, so it must not be us (measured on 0.156.1).
        elif not (open_threads(self.home) if self._writers is None else self._writers) and not self.tuis():
            self.fault = "its app-server has no session yet"
        else:
            import app_server
            try:
                self._connection = app_server.Connection(path, self._probe_deadline())
            except app_server.AppServerError as error:
                self.fault = str(error)
                return self.fault
            self.version = server_version(self._connection.server)
            if not _at_least(self.version, "direct"):
                self.fault = "its app-server (%s) cannot say whether a thread takes input; %s can" % (
                    _name(self.version), _name(FLOORS["direct"]))
                self.close()
        return self.fault

    def _probe_deadline(self):
        return min(self.deadline, time.monotonic() + PROBE_SECONDS)

    def _read_thread(self, thread):
        """The status of a thread, and whether it takes input. Sets the fault if the app-server does not answer."""
        import app_server
        try:
            self._connection.deadline = self._probe_deadline()
            read = self._connection.request("thread/read", {"threadId": thread, "includeTurns": False})
            read = read["thread"]
            flags = read["status"].get("activeFlags")
            return {"status": str(read["status"]["type"])[:40],
                    "flags": tuple(flags) if isinstance(flags, list) else (),
                    "accepts": read.get("canAcceptDirectInput"), "source": read.get("source")}
        except app_server.RpcError:  # "thread not loaded"
            return {"status": "notLoaded"}
        except app_server.AppServerError as error:
            self.fault = str(error)
        except (KeyError, TypeError, AttributeError):
            self.fault = "its app-server describes a thread in an unknown form"
        self.close()
        return {"status": None}

    def _writer(self, thread):
        """Who holds a thread open: the role of the process, "nobody", or None if that cannot be known."""
        pid = writer(self.home, thread) if self._writers is None else self._writers.get(thread, 0)
        if not pid:
            return {"writer": None if pid is None else "nobody"}
        if pid not in self._roles:
            host = host_process.identify(pid)
            self._roles[pid] = host.role if host and host.kind == "codex" else "other"
        role = self._roles[pid]
        return {"writer": role, "writer_pid": pid, "writer_version": self._version_of(pid) if role == "tui" else None}


LOADED = ("idle", "active")


def _at_least(version, what):
    return version is not None and version >= FLOORS[what]


def _name(version):
    return ".".join(map(str, version)) if version else "of an unknown version"


# ---------------------------------------------------------------------------------------------------- routes

def windows(facts):
    """(windows to try, best first, None) or ([], why there is none), by the facts of one thread. A pure function."""
    if facts["status"] in LOADED:
        if facts["source"] == "exec":
            return [], "`codex exec` loses what it is sent"
        if facts["accepts"] is not True:
            return [], "its app-server takes no input for this thread"
        names = ["codex-turn-steer" if facts["status"] == "active" else "codex-turn-start"]
        if (facts["delegable"] and _at_least(facts["version"], "delegation") and facts["tuis"]
                and all(_at_least(version, "rendering") for version in facts["tuis"])):
            names.insert(0, "codex-delegated-tool-output")
        return names, None
    # A TUI holds its thread itself only if it is attached to no app-server; one beside it leaves its queue alone.
    if facts["writer"] == "tui" and _at_least(facts["writer_version"], "queue"):
        return ["codex-queue"], None
    fault = facts["fault"] or "its app-server does not hold the thread (%s)" % facts["status"]
    reason = {"nobody": "nobody holds the thread open", "exec": "`codex exec` loses what it is sent",
              "tui": "%s; codex %s has no queue, %s has" % (fault, _name(facts["writer_version"]),
                                                             _name(FLOORS["queue"])),
              "server": "another app-server holds the thread (%s)" % fault,
              "other": "a process that is not Codex holds the thread"}
    return [], reason.get(facts["writer"], fault)


# ---------------------------------------------------------------------------------------------------- delivery

def deliver_all(jobs):
    """Delivers messages, one after the other; [(outcome, facts)]. facts: detail, what else a receipt says, or None.

    A job is a dict: codex, the Codex of the thread; target_session, the thread; sender, as Codex.facts() takes it; uid;
    body, the bare text; text, the same below its source line; leave(window), which is called before the first byte of
    the message can leave: what it raises stops the delivery, and the outcome is NOT_SENT.

    An app-server of this machine answers within milliseconds; one that hangs holds up the threads of its CODEX_HOME
    only, since all of them share one deadline.
    """
    return [(outcome, {"detail": detail}) for outcome, detail in map(_deliver, jobs)]


def _deliver(job):
    import app_server
    codex = job["codex"]
    facts = codex.facts(job["target_session"], job["sender"])
    names, reason = windows(facts)
    if names[:1] == ["codex-delegated-tool-output"]:
        output = delegation(job["sender"][0], job["body"])
        if len(output.encode()) > DELEGATION_BYTES:
            names.pop(0)
    if not names:
        return ("NOT_SENT", reason), None
    if len(job["text"]) > INPUT_CHARS:
        return ("NOT_SENT", "more than Codex takes at once"), None
    announce, left = job["leave"], []

    def leave(window):
        announce(window)
        left.append(window)
    job = dict(job, leave=leave)
    detail = None if facts["tuis"] or names[0] == "codex-queue" else "no window of its CODEX_HOME shows it"
    try:
        if names[0] == "codex-queue":
            return _enqueue(codex, facts["writer_pid"], job)
        if names[0] == "codex-delegated-tool-output":
            return _turn(codex, job, names[0], {"input": [], "toolOutput": {
                "namespace": "codex_tui", "name": "send_message_to_thread", "output": output}}), detail
        return _input(codex, job, names[0]), detail
    except app_server.RpcError as error:
        return ("NOT_SENT", "Codex declined: %s" % error), None
    except app_server.AppServerError as error:
        codex.fault = str(error)
        return ("UNKNOWN" if error.dirty else "NOT_SENT", str(error)), None
    except Exception as error:  # of leave(), mostly: then nothing was sent
        return ("UNKNOWN" if left else "NOT_SENT", str(error)), None


def _input(codex, job, window):
    """Puts the text into a thread as visible input: into its turn if one runs, else as a new turn."""
    import app_server
    if window == "codex-turn-steer":
        try:
            turns = codex.request("thread/turns/list", {"threadId": job["target_session"], "limit": 1})
            turn = turns["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            return "NOT_SENT", "its app-server lists turns in an unknown form"
        try:
            return _turn(codex, job, window, dict(_visible(job), expectedTurnId=turn), "turn/steer")
        except app_server.RpcError as error:
            # "no active turn to steer", "expected active turn id `A` but found `B`": it ended just now.
            if "active turn" not in error.message:
                raise
            job = dict(job, leave=lambda window: None)
    return _turn(codex, job, "codex-turn-start", _visible(job))


def _visible(job):
    return {"input": [{"type": "text", "text": job["text"]}], "clientUserMessageId": job["uid"]}


def _turn(codex, job, window, params, method="turn/start"):
    """One request with the message; its outcome. No model, permission or sandbox is ever named."""
    result = codex.request(method, dict(params, threadId=job["target_session"]), lambda: job["leave"](window))
    return ("ACCEPTED", window) if isinstance(result, dict) else ("UNKNOWN", "Codex answered in an unknown form")


def delegation(thread, body):
    """What Codex's own tool of that name writes, by which its TUI shows a message and where it came from."""
    escaped = body.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return ("<codex_delegation>\n  <source_thread_id>%s</source_thread_id>\n  <input>%s</input>\n</codex_delegation>"
            % (thread, escaped))


def _enqueue(codex, pid, job):
    """Puts the text into Codex's own queue, from which a standalone TUI takes it within 10 s, when it is idle.

    `codex queue` shows the text to everybody in the process list and takes no id for it. So this asks what that asks,
    `thread/queue/add`, of an app-server of its own, which is the running TUI's program and ends with the answer.
    """
    import app_server
    import socket
    import subprocess
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen(
            [codex.program or host_process.program(pid), "app-server", "--listen", "stdio://"], cwd=codex.home,
            env=dict(os.environ, CODEX_HOME=codex.home), stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
            start_new_session=True)
        theirs.close()
        try:
            with app_server.Connection(None, codex.deadline, lines=ours) as connection:
                if not _at_least(server_version(connection.server), "queue"):
                    raise app_server.NotReached("the app-server for Codex's queue is too old")
                result = connection.request("thread/queue/add", dict(_visible(job), threadId=job["target_session"]),
                                            lambda: job["leave"]("codex-queue"))
        finally:
            server.terminate()
            try:
                server.wait(2)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    try:
        item = result["queuedSubmission"]["id"]
    except (KeyError, TypeError):
        item = None
    if not isinstance(item, str):
        return ("UNKNOWN", "Codex's queue answered in an unknown form"), None
    return ("ACCEPTED", "codex-queue"), "put into Codex's own queue as %s" % item[:100]


def queue_holds(home, item):
    """Whether an item still waits in Codex's own queue; None where that cannot be read."""
    rows = _query(_queue(home), "select count(*) from queued_items where id = ?", (item,))
    return None if rows is None else rows[0][0] > 0
