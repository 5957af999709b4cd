"""Processes: who runs, since when, below whom, and which of them are hosts.

The only file that knows /proc (Linux) and ps (everywhere else). A process is named by its pid *and* its start, because
a pid alone comes back as somebody else. XMSG_PROC_ROOT replaces /proc in tests.
"""
import os

HOST_KINDS = ("claude", "codex", "agy")
INTERPRETERS = ("node", "nodejs", "bun", "python")
# Codex options that take the next word; the first word after all options tells what the process is.
CODEX_VALUE_OPTIONS = {"-c", "--config", "-m", "--model", "-p", "--profile", "-C", "--cd", "-s", "--sandbox", "-a",
                       "--ask-for-approval", "-i", "--image", "--add-dir", "--enable", "--disable", "--remote"}
CODEX_ROLES = {"exec": "exec", "e": "exec", "review": "exec", "app-server": "server"}
CODEX_COMMANDS = {"queue", "login", "logout", "mcp", "mcp-server", "sandbox", "debug", "apply", "completion", "cloud",
                  "features", "help", "archive", "unarchive", "delete", "plugin", "update", "doctor"}
FURTHEST_ANCESTOR = 64
LONGEST_RECORD = 4 << 20  # bytes of a process's arguments or environment; Linux gives both together a few MiB


class Host:
    """A host process. kind: claude, codex, agy. role: tui, exec, server (a Codex app-server), other.

    A plain class: every hook and every send loads this module, and making a namedtuple costs more than all the rest.
    """
    __slots__ = ("kind", "role", "pid", "start", "child")

    def __init__(self, kind, role, pid, start):
        self.kind, self.role, self.pid, self.start, self.child = kind, role, pid, start, None

    def __repr__(self):
        return "Host(%r, %r, %r, %r)" % (self.kind, self.role, self.pid, self.start)


def start_time(pid):
    """The start of a process as text, None if it is gone or a zombie.

    Linux: field 22 of /proc/<pid>/stat in clock ticks since boot, the text that Claude Code calls procStart.
    """
    fields = _stat(pid)
    if fields is not None:
        return None if fields[0] in ("Z", "X") else fields[19]
    if _has_proc():
        return None
    state, _, start = _ps("stat=,lstart=", pid).partition(" ")
    return None if state.startswith("Z") else start.strip() or None


def alive(pid, start):
    """Whether exactly this process still runs. An unknown pid or start is never alive."""
    return bool(pid) and bool(start) and start_time(pid) == str(start)


def parent(pid):
    """The pid of the parent, None at the top or if the process is gone."""
    fields = _stat(pid)
    if fields is not None:
        found = int(fields[1])
    elif _has_proc():
        return None
    else:
        text = _ps("ppid=", pid)
        found = int(text) if text.isdigit() else 0
    return found or None


def ancestors(pid=None):
    """The pids above a process (this one by default), nearest first."""
    line, current = [], parent(pid or os.getpid())
    while current and current not in line and len(line) < FURTHEST_ANCESTOR:
        line.append(current)
        current = parent(current)
    return line


def arguments(pid):
    """The argument list of a process, [] if it cannot be read."""
    if _has_proc():
        return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]
    return _ps("args=", pid).split()


def executable(pid):
    """The path of the running program, "" if it cannot be read."""
    if _has_proc():
        try:
            path = os.readlink("%s/%d/exe" % (_proc(), pid))
        except OSError:
            return ""
        # Linux marks a program that an upgrade has replaced under the running process.
        return path[:-len(" (deleted)")] if path.endswith(" (deleted)") else path
    return _ps("comm=", pid)


def program(pid):
    """A path that starts the very program of a running process, also when an upgrade has replaced its file."""
    return "%s/%d/exe" % (_proc(), pid) if _has_proc() else executable(pid)


def environment(pid):
    """The environment that a process began with, None if it cannot be read."""
    words = _read(pid, "environ").split(b"\0") if _has_proc() else []
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word) or None


def owner(pid):
    """The uid that a process runs as, None if it is gone."""
    if _has_proc():
        try:
            return os.stat("%s/%d" % (_proc(), pid)).st_uid
        except OSError:
            return None
    text = _ps("uid=", pid)
    return int(text) if text.isdigit() else None


def processes():
    """The pids of all processes that can be seen."""
    if _has_proc():
        return [int(name) for name in os.listdir(_proc()) if name.isdigit()]
    return [int(word) for word in _ps("pid=").split() if word.isdigit()]


def flock_holders():
    """{inode: [(device, pid)]} of all flocks that are held for writing; None where the system does not list them.

    Looked up and never probed: even a moment's lock of ours could make a host fail to take its own.
    """
    try:
        lines = _locks().decode("ascii", "replace").splitlines()
    except OSError:
        return None
    holders = {}
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF"; a line with "->" waits and holds nothing.
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[4].isdigit():
            device, _, inode = fields[5].rpartition(":")
            holders.setdefault(inode, []).append((device, int(fields[4])))
    return holders


def flock_holders_ahead():
    """Begins to read flock_holders() beside the caller's other work; returns the function that waits for it.

    Linux stops all who lock files for the list (percpu_down_write in its fs/locks.c), which takes 7 ms of waiting.
    """
    import _thread
    read, told = _thread.allocate_lock(), []

    def look():
        try:
            told.append(flock_holders())
        finally:
            read.release()

    def wait():
        with read:
            return told[0]
    read.acquire()
    try:
        _thread.start_new_thread(look, ())
    except RuntimeError:  # no more threads may be made here
        look()
    return wait


def _locks():
    """The text of /proc/locks. OSError where there is none.

    Linux gives a page at a time, and counts lines to go on: a lock that is let go in between makes it pass over
    another. So a longer text is read again, three times if it differs, and a lock is held that stands in any of them:
    one that is overlooked would make an open session an ended one.
    """
    text, before = b"", None
    for _ in range(3):
        descriptor = os.open(_proc() + "/locks", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = list(iter(lambda: os.read(descriptor, 1 << 16), b""))
        finally:
            os.close(descriptor)
        text += b"".join(pieces) + b"\n"
        if len(pieces) < 2 or pieces == before:
            break
        before = pieces
    return text


def flock_holder(path, holders=None):
    """The pid that holds a file's flock, 0 for nobody or no file, None if that cannot be known.

    By inode, whatever path leads there. holders: what flock_holders() gave, for many files.
    """
    try:
        status = os.stat(path)
    except OSError:
        return 0
    if not _has_proc():
        return _lsof(path)
    holders = flock_holders() if holders is None else holders
    if holders is None:
        return None
    unsure = None
    for device, pid in holders.get(str(status.st_ino), ()):
        if device == "%02x:%02x" % (os.major(status.st_dev), os.minor(status.st_dev)):
            return pid
        # btrfs and overlayfs list another device than stat tells: then the holder's own descriptors decide.
        opened = _has_open(pid, status)
        if opened:
            return pid
        unsure = opened is None or unsure
    return None if unsure else 0


def _has_open(pid, status):
    """Whether a process has this very file open, None if it does not let us see."""
    folder = "%s/%d/fd" % (_proc(), pid)
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        try:
            if os.path.samestat(os.stat(os.path.join(folder, name)), status):
                return True
        except OSError:
            continue
    return False


def _lsof(path):
    """Who has a file open that only a lock's holder keeps open, where there is no /proc; None without `lsof`."""
    import subprocess
    try:
        done = subprocess.run(["lsof", "-t", "--", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    words = done.stdout.split()
    return int(words[0]) if words and words[0].isdigit() else 0


def identify(pid):
    """The Host that this process is, None if it is none.

    npm's `codex` is a Node script whose native child is the host, so only the native program counts there; Claude Code
    and agy count under an interpreter too.
    """
    words, path = arguments(pid), executable(pid)
    name = _program_name(path) or (words and _program_name(words[0])) or ""
    if name.rstrip("0123456789.") in INTERPRETERS and len(words) > 1:
        script = words[1]
        if "claude-code" in script or _program_name(script) == "claude":
            name = "claude"
        elif _program_name(script) == "agy":
            name = "agy"
    if name not in HOST_KINDS:
        return None
    start = start_time(pid)
    return Host(name, _role(name, words), pid, start) if start else None


def nearest_host(pid=None):
    """The nearest Host above a process (this one by default), None if there is none. Its child: the pid just below it
    on the way down."""
    child = pid or os.getpid()
    for ancestor in ancestors(pid):
        host = identify(ancestor)
        if host:
            host.child = child
            return host
        child = ancestor
    return None


def _role(kind, words):
    if kind == "codex":
        if words and os.path.basename(words[0]) == "codex-linux-sandbox":
            return "other"
        command = _first_word(words[1:])
        return CODEX_ROLES.get(command) or ("other" if command in CODEX_COMMANDS else "tui")
    return "exec" if {"-p", "--print"} & set(words[1:]) else "tui"


def _first_word(words):
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in CODEX_VALUE_OPTIONS:
            skip = True
        elif not word.startswith("-"):
            return word
    return None


def _program_name(path):
    name = os.path.basename(path)
    return name[:-4] if name.endswith(".exe") else name


def _proc():
    return os.environ.get("XMSG_PROC_ROOT") or "/proc"


def _has_proc():
    return os.path.isdir(_proc() + "/self") or "XMSG_PROC_ROOT" in os.environ


def _read(pid, name):
    try:
        descriptor = os.open("%s/%d/%s" % (_proc(), pid, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    limit, data = LONGEST_RECORD if name in ("cmdline", "environ") else 4096, b""
    try:
        while len(data) < limit:
            part = os.read(descriptor, min(limit, 1 << 17))
            data += part
            if len(part) < min(limit, 1 << 17):
                break
        return data
    except OSError:  # the process has just ended
        return b""
    finally:
        os.close(descriptor)


def _stat(pid):
    """The fields of stat from the state on. A command name may hold spaces and parentheses: split after its last."""
    fields = _read(pid, "stat").rpartition(b")")[2].decode("ascii", "replace").split()
    return fields if len(fields) > 19 else None


def _ps(columns, pid=None):
    import subprocess
    which = ["-A"] if pid is None else ["-p", str(pid)]
    try:
        done = subprocess.run(["ps", *which, "-o", columns], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=5, env=dict(os.environ, LC_ALL="C"))
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
