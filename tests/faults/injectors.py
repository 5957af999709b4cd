"""Two ways to make a real run of the product fail at one chosen call, by the call's name and ordinal.

Strace is the true one: `strace -e inject` at system calls, with no hook in the product. Its `when` counts by name, so a
point is a (name, ordinal) pair. Wrapper stands in where there is no strace: a preamble in the same process counts the
calls of os, sqlite3, socket and fcntl; it cannot fail inside one statement of SQLite.
A program is {code, arguments, input, env, wake, below}; both run it as bin/xmsg and xmsg-hook.sh do, by `-I -S -c`.
wake: it has the descriptor 3; below: the HostProcess that starts it.
"""
import collections
import errno
import os
import re
import shutil
import tempfile

from support import PATIENCE, PYTHON, ROOT

SECONDS = 40 * PATIENCE
BEGIN = "import os, sys; os.umask(0o022); sys.path.append(%r)\n" % ROOT

# A call is (name, ordinal, whether something outside of the process is another thing after it). A kill between two such
# calls leaves what a kill before the second one leaves.
Call = collections.namedtuple("Call", "name ordinal changes")


def run(home, command, program):
    """A program as CompletedProcess with bytes; also .wake, what it wrote to descriptor 3, if it has one."""
    if program.get("below"):
        done = program["below"].run(command, program.get("input", b""), program.get("env", ()))
        done.wake = b""
        return done
    with tempfile.TemporaryFile() as wake:
        before = (lambda: os.dup2(wake.fileno(), 3)) if program.get("wake") else None
        done = home.run(command, input=program.get("input", b""), env=program.get("env", ()), before=before,
                        seconds=SECONDS, pass_fds=(3,) if before else ())
        wake.seek(0)
        done.wake = wake.read()
    return done


class Strace:
    name = "strace"
    # What can fail in this way on a real machine.
    FAILING = {
        "ENOSPC": set("write pwrite64 fsync fdatasync openat mkdir mkdirat link linkat rename renameat symlink "
                      "ftruncate fallocate utimensat".split()),
        "EIO": set("read pread64 write pwrite64 fsync fdatasync openat mkdir unlink rename link ftruncate utimensat "
                   "getdents64 stat lstat newfstatat fstat statx readlink access fchmod chmod rmdir connect sendto "
                   "recvfrom sendmsg recvmsg mmap close".split()),
        "EINTR": set("read pread64 write pwrite64 openat fcntl flock connect accept accept4 sendto recvfrom sendmsg "
                     "recvmsg poll select pselect6 ppoll wait4 fallocate ftruncate fsync fdatasync close".split())}
    CHANGING = set("write pwrite64 fsync fdatasync mkdir mkdirat link linkat rename renameat renameat2 symlink unlink "
                   "unlinkat rmdir ftruncate fallocate utimensat fchmod chmod connect bind listen sendto sendmsg "
                   "shutdown clone clone3 fork vfork kill flock exit_group".split())

    @staticmethod
    def here():
        return shutil.which("strace") is not None

    def command(self, program):
        return [PYTHON, "-I", "-S", "-X", "utf8", "-c", BEGIN + program["code"], *program.get("arguments", ())]

    def calls(self, home, program, marks):
        """The calls of one run from the first on that names one of the marks, which are paths."""
        log = os.path.join(home.folder, "strace.count")
        done = run(home, ["strace", "-qq", "-s", "512", "-o", log, *self.command(program)], program)
        counts, found, touched = collections.Counter(), [], False
        with open(log, errors="replace") as file:
            for line in file:
                match = re.match(r"(\w+)\(", line)
                if not match:
                    continue
                name = match[1]
                counts[name] += 1
                touched = touched or any(mark in line for mark in marks)
                if touched and name not in ("execve", "rt_sigreturn", "exit"):
                    changes = (name in self.CHANGING or name == "openat" and "O_CREAT" in line
                               or name == "fcntl" and "F_SETLK" in line)
                    found.append(Call(name, counts[name], changes))
        return done, found

    def run(self, home, program, kind, call):
        """One run with the fault; .reached says whether it came to it, .killed whether it died of it."""
        log = os.path.join(home.folder, "strace.log")
        inject = "%s:signal=KILL:when=%d" % (call.name, call.ordinal) if kind == "KILL" else "%s:error=%s:when=%d%s" % (
            call.name, kind, call.ordinal, "" if kind == "EINTR" else "+")
        done = run(home, ["strace", "-qq", "-o", log, "-e", "trace=" + call.name, "-e", "inject=" + inject,
                          *self.command(program)], program)
        done.killed = kind == "KILL" and done.returncode in (-9, 137)
        with open(log, errors="replace") as file:
            done.reached = done.killed or "(INJECTED)" in file.read()
        return done


class Wrapper:
    name = "wrapper"
    # Python itself tries a call again that EINTR has interrupted, so above it there is no such fault.
    FAILING = {
        "ENOSPC": set("write fsync open mkdir link rename replace symlink ftruncate utime execute "
                      "connect_database".split()),
        "EIO": set("write read pread pwrite fsync open mkdir unlink rename replace link ftruncate utime stat lstat "
                   "listdir chmod rmdir connect sendall sendmsg send recv execute connect_database close".split()),
        "EINTR": set()}
    READING = {"stat", "lstat", "listdir", "read", "pread", "recv"}
    PREAMBLE = """
import builtins, errno, fcntl, os, signal, socket, sqlite3, sys
_log, _name, _ordinal, _kind, _marks = %r
_log = _log and os.open(_log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
_counts, _touched, _me, _write = {}, [False], os.getpid(), os.write
def _step(name, arguments):
    if os.getpid() != _me:
        return
    _touched[0] = _touched[0] or any(mark in repr(arguments) for mark in _marks)
    if not _touched[0]:
        return
    _counts[name] = _counts.get(name, 0) + 1
    if _log:
        _write(_log, ("%%s %%s\\n" %% (name, "reads" if name == "open" and not any(
            sign in repr(arguments[1:]) for sign in ("w", "a", "x", "+")) and not (
            isinstance(arguments[1:2] and arguments[1], int) and arguments[1] & os.O_CREAT) else "")).encode())
    if name == _name and (_counts[name] == _ordinal or _kind != "KILL" and _counts[name] > _ordinal):
        if _kind == "KILL":
            os.kill(_me, signal.SIGKILL)
        _write(2, b"") if _counts[name] > _ordinal else _write(_report, b"injected")
        if name in ("execute", "connect_database"):
            word = str(arguments[0]).split()[0].lower()
            if word == "rollback" or _kind == "ENOSPC" and word in ("select", "pragma"):
                return  # which need no room
            raise sqlite3.OperationalError(
                "database or disk is full" if _kind == "ENOSPC" else "disk I/O error")
        raise OSError(getattr(errno, _kind), os.strerror(getattr(errno, _kind)))
_report = os.open(%r, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
def _wrap(place, name, known_as=None):
    real = getattr(place, name)
    def call(*arguments, **options):
        _step(known_as or name, arguments)
        return real(*arguments, **options)
    setattr(place, name, call)
for _each in ("write read pread pwrite fsync open mkdir unlink rename replace link symlink ftruncate truncate utime "
              "stat lstat listdir chmod rmdir close fork fchmod").split():
    _wrap(os, _each)
_wrap(builtins, "open")
_wrap(fcntl, "flock")
for _each in ("connect", "bind", "listen", "sendall", "sendmsg", "send", "recv", "shutdown"):
    _wrap(socket.socket, _each)
class _Connection(sqlite3.Connection):
    def execute(self, *arguments):
        _step("execute", arguments)
        return super().execute(*arguments)
_connect = sqlite3.connect
def _connect_database(*arguments, **options):
    _step("connect_database", arguments)
    return _connect(*arguments, factory=_Connection, **options)
sqlite3.connect = _connect_database
"""

    @staticmethod
    def here():
        return True

    def command(self, home, program, *chosen):
        return [PYTHON, "-I", "-S", "-X", "utf8", "-c",
                self.PREAMBLE % (chosen, os.path.join(home.folder, "wrapper.report")) + BEGIN + program["code"],
                *program.get("arguments", ())]

    def calls(self, home, program, marks):
        log = os.path.join(home.folder, "wrapper.count")
        self.marks = marks
        done = run(home, self.command(home, program, log, "", 0, "", marks), program)
        counts, found = collections.Counter(), []
        with open(log) as file:
            for line in file:
                name, _, reads = line.strip().partition(" ")
                counts[name] += 1
                found.append(Call(name, counts[name], not reads and name not in self.READING))
        os.unlink(log)
        return done, found

    def run(self, home, program, kind, call):
        done = run(home, self.command(home, program, "", call.name, call.ordinal, kind, self.marks), program)
        done.killed = kind == "KILL" and done.returncode in (-9, 137)
        with open(os.path.join(home.folder, "wrapper.report")) as file:
            done.reached = done.killed or bool(file.read())
        return done


INJECTORS = {kind.name: kind for kind in (Strace, Wrapper)}
KINDS = ("KILL", "ENOSPC", "EIO", "EINTR")
assert all(hasattr(errno, kind) for kind in KINDS[1:])
