"""What the tests share: homes of their own, xmsg and its hook as real processes, stand-ins for hosts, and a guard.

Importing this module makes the test process itself safe: HOME becomes an empty folder, the variables of hosts and of
xmsg are gone, and touching the real home's host folders, /run/user or writing anywhere below the real home raises. Run
from inside an agent's session, the tests leave it first: that session would be the host of everything they start.
"""
import atexit
import contextlib
import ctypes
import json
import os
import pwd
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = float(os.environ.get("XMSG_TEST_PATIENCE", "1"))
PYTHON = os.path.realpath(sys.executable)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

ADA = "7c1f0a52-0000-4000-8000-00000000000a"  # Claude Code
BOB = "01a04cd2-1111-7000-8000-00000000000b"  # Codex
EVE = "01a04cd2-2222-7000-8000-0000000000ee"  # Codex, of the same minute as BOB
AGY = "c0ffee00-3333-4000-8000-00000000000c"  # Antigravity

HOST_VARIABLES = ("CLAUDE", "CODEX", "ANTIGRAVITY", "AI_AGENT", "XMSG_")
PRODUCT = ("xmsg-hook.sh", "bin", "hook-config.diff", "README.md")


# ---------------------------------------------------------------------------------------------------- the guard

REAL_HOMES = {pwd.getpwuid(os.getuid()).pw_dir, os.environ.get("HOME") or "/"} - {"/", "/nonexistent"}
FORBIDDEN = ["/run/user"] + [os.environ[name] for name in (
    "CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_RUNTIME_DIR") if os.path.isabs(os.environ.get(name, ""))]
FORBIDDEN += [os.path.join(home, name) for home in REAL_HOMES
              for name in (".claude", ".claude.json", ".codex", ".gemini", ".local/share/agent-msg")]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# audit event -> which of its arguments are paths
PATHS = {"os.listdir": (0,), "os.scandir": (0,), "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,),
         "os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,), "os.chmod": (0,), "os.utime": (0,),
         "os.truncate": (0,), "sqlite3.connect": (0,)}
CHANGES = set(PATHS) - {"os.listdir", "os.scandir"}


class TouchedTheRealUser(AssertionError):
    """A test reached for something that belongs to the person who runs it."""


def _inside(path, folders):
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def check_path(path, writing):
    """Raises TouchedTheRealUser for a path that no test may reach, or may not write."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str):
        return
    if path.startswith("file:"):
        path = path[5:].partition("?")[0]
    path = os.path.abspath(path)
    if _inside(path, FORBIDDEN):
        raise TouchedTheRealUser(path)
    free = (ROOT, tempfile.gettempdir(), "/dev", "/proc")
    if writing and _inside(path, REAL_HOMES) and not _inside(path, free) and "__pycache__" not in path:
        raise TouchedTheRealUser("written: %s" % path)


def _audit(event, arguments):
    if event == "open":
        check_path(arguments[0], bool(arguments[2] and arguments[2] & WRITES))
    elif event in PATHS:
        for index in PATHS[event]:
            check_path(arguments[index], event in CHANGES)
    elif event in ("socket.connect", "socket.bind"):
        check_path(arguments[1], True)
    elif event == "subprocess.Popen":
        environ = arguments[3]
        home = (os.environ if environ is None else dict(environ)).get("HOME")
        if home in REAL_HOMES:
            raise TouchedTheRealUser("a process with the real HOME: %s" % arguments[1])


def leave_hosts():
    """Goes on in a process that no host is an ancestor of; what remains here only hands on its status."""
    import host_process
    if not host_process.nearest_host():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.wait()
        with os.fdopen(reader, "rb") as file:
            os._exit(int(file.read() or b"70"))
    if os.fork():
        os._exit(0)
    # An orphan, whose parent is init; the tests run in its child.
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        os.write(writer, b"%d" % (os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)))
        os._exit(0)
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 10 * PATIENCE
    while host_process.nearest_host():
        if time.monotonic() > deadline:
            sys.stderr.write("the tests cannot leave the agent's session that runs them\n")
            os._exit(70)
        time.sleep(0.01)


def _make_safe():
    leave_hosts()
    scratch = tempfile.mkdtemp(prefix="xmsg-test-home-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(scratch, ignore_errors=True))
    versions = os.path.join(os.environ.get("HOME", ""), ".pyenv")
    if os.path.isdir(versions):  # a shim finds its interpreters below HOME
        os.environ.setdefault("PYENV_ROOT", versions)
    for name in list(os.environ):
        if name.startswith(HOST_VARIABLES) and not name.startswith(("XMSG_TEST_", "XMSG_FULL")):
            del os.environ[name]
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ["HOME"] = scratch
    sys.addaudithook(_audit)


if not getattr(sys, "xmsg_tests_are_safe", False):
    sys.xmsg_tests_are_safe = True
    _make_safe()


# ---------------------------------------------------------------------------------------------------- waiting

def wait_until(condition, what, seconds=10):
    """The first true answer of condition(); AssertionError after so many seconds times PATIENCE."""
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError("not in time: " + what)
        time.sleep(0.005)


def end(process):
    """Ends one process of ours, by its own pid, and waits for it."""
    if process.poll() is None:
        process.kill()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait(timeout=10 * PATIENCE)


# ---------------------------------------------------------------------------------------------------- payloads

# The keys of each host's payloads in their real order, as recorded on Claude Code 2.1.332, Codex 0.171.0 and agy 1.2.
ORDER = {
    ("claude", "SessionStart"): "session_id transcript_path cwd hook_event_name source model session_title",
    ("claude", "UserPromptSubmit"): "session_id transcript_path cwd prompt_id permission_mode hook_event_name prompt "
                                    "session_title",
    ("claude", "PreToolUse"): "session_id transcript_path cwd prompt_id permission_mode agent_id agent_type effort "
                              "hook_event_name tool_name tool_input tool_use_id",
    ("claude", "PostToolUse"): "session_id transcript_path cwd prompt_id permission_mode agent_id agent_type effort "
                               "hook_event_name tool_name tool_input tool_response tool_use_id duration_ms",
    ("claude", "Stop"): "session_id transcript_path cwd prompt_id permission_mode effort hook_event_name "
                        "stop_hook_active last_assistant_message background_tasks session_crons",
    ("claude", "FileChanged"): "session_id transcript_path cwd prompt_id hook_event_name file_path event",
    ("claude", "CwdChanged"): "session_id transcript_path cwd prompt_id hook_event_name old_cwd new_cwd",
    ("codex", "SessionStart"): "session_id transcript_path cwd hook_event_name model permission_mode source",
    ("codex", "UserPromptSubmit"): "session_id turn_id agent_id agent_type transcript_path cwd hook_event_name model "
                                   "permission_mode prompt",
    ("codex", "PreToolUse"): "session_id turn_id agent_id agent_type transcript_path cwd hook_event_name model "
                             "permission_mode tool_name tool_input tool_use_id",
    ("codex", "PostToolUse"): "session_id turn_id agent_id agent_type transcript_path cwd hook_event_name model "
                              "permission_mode tool_name tool_input tool_response tool_use_id",
    ("codex", "Stop"): "session_id turn_id transcript_path cwd hook_event_name model permission_mode stop_hook_active "
                       "last_assistant_message",
    ("agy", "SessionStart"): "artifactDirectoryPath conversationId modelName transcriptPath workspacePaths",
    ("agy", "PreInvocation"): "artifactDirectoryPath conversationId initialNumSteps invocationNum modelName "
                              "transcriptPath workspacePaths",
    ("agy", "Stop"): "artifactDirectoryPath conversationId error executionNum fullyIdle modelName terminationReason "
                     "transcriptPath workspacePaths",
}
VALUES = {
    "source": "startup", "prompt_id": "5d1c2b3a-0000-4000-8000-000000000001", "permission_mode": "default",
    "effort": {"level": "medium"}, "prompt": "go on", "tool_name": "Bash", "tool_use_id": "toolu_01",
    "tool_input": {"command": "echo hi", "description": "says hi"}, "stop_hook_active": False,
    "tool_response": {"stdout": "hi", "stderr": "", "interrupted": False}, "duration_ms": 52,
    "last_assistant_message": "done", "background_tasks": [], "session_crons": [], "event": "change",
    "turn_id": "01a22e8d-ecb4-7000-8000-000000000001", "initialNumSteps": 1, "invocationNum": 0, "error": "",
    "executionNum": 1, "fullyIdle": True, "terminationReason": "NO_TOOL_CALL", "modelName": "gemini-3-pro"}
MODELS = {"claude": "claude-opus-5-5", "codex": "gpt-5.1-codex"}
ENDINGS = {"claude": b"\n", "codex": b"", "agy": b"\n"}


def payload(host, event, session, cwd="/nowhere", **fields):
    """The bytes that a host gives to its hook. fields: values for keys of this event, or keys of its future; None
    leaves a key out. Keys that only some sessions have (session_title, agent_id) stand only if they are given."""
    values = dict(VALUES, session_id=session, conversationId=session, cwd=cwd, hook_event_name=event,
                  transcript_path="%s/transcripts/%s.jsonl" % (cwd, session), model=MODELS.get(host),
                  transcriptPath="%s/brain/%s/transcript_full.jsonl" % (cwd, session), workspacePaths=[cwd],
                  artifactDirectoryPath="%s/brain/%s" % (cwd, session), file_path="%s/mail" % cwd, old_cwd=cwd,
                  new_cwd=cwd)
    values.update(fields)
    order = ORDER.get((host, event), "session_id transcript_path cwd hook_event_name").split()
    pairs = [(key, values[key]) for key in order if values.get(key) is not None]
    pairs += [(key, value) for key, value in fields.items() if key not in order and value is not None]
    text = json.dumps(dict(pairs), separators=(",", ":"), ensure_ascii=False)
    if any("\ud800" <= char < "\ue000" for char in text):  # hosts can only escape what UTF-8 does not have
        text = json.dumps(dict(pairs), separators=(",", ":"))
    return text.encode() + ENDINGS[host]


# ---------------------------------------------------------------------------------------------------- homes

# Homes stand in memory where they can: a test of a queue waits for little but fsync.
FAST_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 64 << 20 else None


class CommandServer:
    """Runs `xmsg ARGUMENTS` as bin/xmsg does, each in a process of its own, forked from one interpreter that has
    imported everything: a tenth of the time of a start from nothing."""

    CODE = """
import json, os, sys, tempfile
sys.path.append(sys.argv[1])
import argparse, calendar, shutil, subprocess, unicodedata
import app_server, claude_delivery, codex_delivery, codex_history, host_process, transcripts
from command_line import main
for line in sys.stdin.buffer:
    job = json.loads(line)
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(bytes.fromhex(job["input"]))
    files[0].seek(0)
    child = os.fork()
    if not child:
        status = 70
        try:
            for number, file in enumerate(files):
                os.dup2(file.fileno(), number)
            os.environ.clear()
            os.environ.update(job["env"])
            os.chdir(job["cwd"])
            os.umask(job["umask"])
            status = main(job["arguments"])
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    answer = {"status": status, "out": files[1].read().hex(), "err": files[2].read().hex()}
    sys.stdout.write(json.dumps(answer) + chr(10))
    sys.stdout.flush()
"""
    running = None

    @classmethod
    def run(cls, arguments, env, cwd, umask=0o022, input=b"", seconds=20):
        """One command as a CompletedProcess with bytes."""
        if cls.running is None:
            cls.running = subprocess.Popen([PYTHON, "-I", "-S", "-X", "utf8", "-c", cls.CODE, ROOT], stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}, cwd="/")
            atexit.register(end, cls.running)
        server, arguments = cls.running, [os.fsdecode(word) for word in arguments]
        server.stdin.write(json.dumps({"arguments": arguments, "env": env, "cwd": cwd, "umask": umask,
                                       "input": input.hex()}).encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], seconds * PATIENCE)[0]:
            end(server)
            cls.running = None
            raise AssertionError("xmsg %r does not end" % arguments)
        answer = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, answer["status"], bytes.fromhex(answer["out"]),
                                           bytes.fromhex(answer["err"]))


class Home:
    """A user's empty home with a store, and xmsg as that user runs it, with an environment made from nothing."""

    def __init__(self, root=ROOT):
        self.folder, self.root = os.path.realpath(tempfile.mkdtemp(prefix="xmsg-test-", dir=FAST_DISK)), root
        self.db = os.path.join(self.folder, "store", "messages.sqlite3")
        self.env = {"PATH": "/usr/bin:/bin", "HOME": self.folder, "XMSG_DB": self.db, "LANG": "C.UTF-8",
                    "XMSG_LANG": "en"}
        self.stderr = ""
        os.mkdir(os.path.join(self.folder, "store"), 0o700)
        # The interpreter that runs the tests runs the product too.
        with open(os.path.join(self.folder, "store", "python"), "w") as file:
            file.write(PYTHON + "\n")
        os.chmod(os.path.join(self.folder, "store", "python"), 0o600)

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def hints(self):
        return self.db + ".hints"

    def hint(self, session):
        """The path of a session's mail hint."""
        return os.path.join(self.hints, "mail", session)

    def run(self, command, input=b"", env=(), umask=0o022, cwd=None, before=None, seconds=20, **options):
        """Runs a command as this user does: CompletedProcess with bytes. before: called in the child."""
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        if "stdin" not in options:
            options["input"] = input
        return subprocess.run(command, env=dict(self.env, **dict(env)), cwd=cwd or self.folder, umask=umask,
                              preexec_fn=before, timeout=seconds * PATIENCE, **options)

    def run_xmsg(self, *arguments, **options):
        """`xmsg ARGUMENTS` as a CompletedProcess with bytes."""
        return self.run([os.path.join(self.root, "bin", "xmsg"), *arguments], **options)

    def run_hook(self, host, payload, event="", **options):
        """xmsg-hook.sh as a CompletedProcess with bytes; event: its argument, not the payload's."""
        return self.run([os.path.join(self.root, "xmsg-hook.sh"), host] + ([event] if event else []), input=payload,
                        **options)

    def command(self, *arguments, text="", session=None, host="claude", umask=0o022, **env):
        """`xmsg ARGUMENTS` as a CompletedProcess with bytes. session, host: who runs it."""
        if session:
            env.update(XMSG_FROM_TOOL=host, XMSG_FROM_SESSION=session)
        if self.root != ROOT:
            return self.run_xmsg(*arguments, input=text.encode(), env=env, umask=umask)
        return CommandServer.run(arguments, dict(self.env, **env), self.folder, umask, text.encode())

    def xmsg(self, *arguments, status=0, **options):
        """What `xmsg ARGUMENTS` prints, on both streams; AssertionError at another status."""
        done = self.command(*arguments, **options)
        out = done.stdout.decode() + done.stderr.decode()
        if status is not None and done.returncode != status:
            raise AssertionError("xmsg %r: status %d\n%s" % (arguments, done.returncode, out))
        return out

    def json(self, *arguments, status=0, **options):
        """What `xmsg ARGUMENTS --json` reports."""
        done = self.command(*arguments, "--json", **options)
        if status is not None and done.returncode != status:
            raise AssertionError("xmsg %r: status %d\n%r" % (arguments, done.returncode, done))
        return json.loads(done.stdout)

    def hook(self, host, session, event, argument=None, status=0, umask=0o022, env=(), **fields):
        """The JSON that the hook answers to an event, None if it says nothing; agy's event goes by argument."""
        argument = event if host == "agy" and argument is None else argument
        return self.raw_hook([host] + ([argument] if argument else []),
                             payload(host, event, session, **dict({"cwd": self.folder}, **fields)), status, umask, env)

    def raw_hook(self, arguments, payload, status=0, umask=0o022, env=()):
        done = self.run_hook(arguments[0], payload, *arguments[1:], umask=umask, env=env)
        if done.returncode != status:
            raise AssertionError("hook %r: status %d\n%r" % (arguments, done.returncode, done.stderr))
        self.stderr = done.stderr.decode()
        return json.loads(done.stdout) if done.stdout else None

    def context(self, *arguments, **options):
        """The text that the hook adds to the model's context, None if nothing."""
        output = self.hook(*arguments, **options)
        return output["hookSpecificOutput"].get("additionalContext") if output else None

    def sql(self, statement, values=()):
        """Rows of the store, by a connection of its own; a change is committed."""
        database = sqlite3.connect(self.db, timeout=10 * PATIENCE)
        try:
            with database:
                return database.execute(statement, values).fetchall()
        finally:
            database.close()

    def states(self):
        return [row[0] for row in self.sql("select state from messages order by id")]

    def faults(self):
        """What the hooks of this home have swallowed, as text."""
        text = ""
        for ending in (".faults", ".faults.old", ".faults.shell"):
            with contextlib.suppress(OSError), open(self.db + ending) as file:
                text += file.read()
        return text

    def settings(self, **environ):
        import contract
        return contract.Settings(dict(self.env, **environ))

    def store(self, write=True, busy_seconds=2.0, **environ):
        """An open Store of this home in this process; close it."""
        import store
        return store.Store(self.settings(**environ), write, busy_seconds)


class HomeCase(unittest.TestCase):
    """A test with a home of its own, in self.home."""

    def setUp(self):
        self.home = Home()
        self.addCleanup(self.home.remove)

    def open_store(self, **options):
        """An open Store of the home, closed at the end of the test."""
        store = self.home.store(**options)
        self.addCleanup(store.close)
        return store


def message(store, target, body="text", now=None, ttl=3600, **columns):
    """Queues one message through a Store of this process, as `send` does, and returns its row."""
    import contract
    now = contract.now_ms() if now is None else now
    values = {"uid": os.urandom(8).hex(), "expires_at": now + int(ttl * 1000), "sender_kind": "agent",
              "sender_label": ADA[:8], "sender_host": "claude", "sender_session": ADA, "target": target,
              "target_host": "codex", "body": body, "priority": 0, "request_key": None, "reply_to": None}
    replace = columns.pop("replace", False)
    values.update(columns)
    with store.transaction():
        return store.add(values, now, replace)


def peer(store, session, host="codex", now=None, **columns):
    """Registers one session through a Store of this process, and returns its row."""
    import contract
    values = dict({"session": session, "host": host}, **columns)
    name = values.pop("name", None)
    row = store.register(values, contract.now_ms() if now is None else now, fresh_ms=0)
    if name:
        store.set_name(session, name)
        row = store.peer(session)
    return row


# ---------------------------------------------------------------------------------------------------- stand-ins

class FakeProc:
    """A tree in place of /proc, for XMSG_PROC_ROOT. It begins with this very process below `parent`."""

    def __init__(self, parent=0):
        self.folder = tempfile.mkdtemp(prefix="xmsg-test-proc-")
        os.mkdir(os.path.join(self.folder, "self"))
        self.add(os.getpid(), ["python3", "test"], parent, start="500", executable="/usr/bin/python3.11")

    def add(self, pid, words, parent=1, start="1000", executable=None, state="S", name=None):
        """One process. words: its arguments; executable: what its exe leads to, by default /opt/<first word>."""
        folder = os.path.join(self.folder, str(pid))
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        name = os.path.basename(words[0]) if name is None and words else name or ""
        with open(os.path.join(folder, "stat"), "w") as file:
            file.write("%d (%s) %s %d %s %s %s\n" % (pid, name, state, parent, " ".join(["0"] * 17), start,
                                                     " ".join(["0"] * 30)))
        with open(os.path.join(folder, "cmdline"), "wb") as file:
            file.write(b"".join(word.encode() + b"\0" for word in words))
        if executable != "":
            os.symlink(executable or "/opt/" + os.path.basename(words[0]), os.path.join(folder, "exe"))
        return pid

    def end(self, pid):
        shutil.rmtree(os.path.join(self.folder, str(pid)))

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class HostProcess:
    """A real, long-lived process whose program is called claude, codex or agy, and that runs commands as children.

    It is a copy of bash; word becomes its first argument (`exec`, `app-server`, `-p`), between: commands around each
    child, as hosts start hooks through a shell.
    """

    def __init__(self, home, kind="claude", word="", between=()):
        self.home, self.between, self.count = home, list(between), 0
        self.folder = tempfile.mkdtemp(prefix="xmsg-test-host-")
        program = os.path.join(self.folder, kind)
        shutil.copy("/bin/bash", program)
        script = 'while IFS= read -r job; do . "$job"; echo "$?"; done'
        self.process = subprocess.Popen(
            [program, "-c", script, word or kind] if kind == "codex" else
            [program, "--norc", "-c", script, kind] + ([word] if word else []),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=home.env, cwd=home.folder)
        self.pid = self.process.pid

    @property
    def start(self):
        import host_process
        return host_process.start_time(self.pid)

    def run(self, command, input=b"", env=()):
        """Runs a command as a child of this process."""
        self.count += 1
        files = [os.path.join(self.folder, "%s.%d" % (name, self.count)) for name in ("in", "out", "err", "job")]
        with open(files[0], "wb") as file:
            file.write(input)
        environ = ["%s=%s" % pair for pair in dict(self.home.env, **dict(env)).items()]
        words = self.between + ["/usr/bin/env", "-i", *environ, *command]
        with open(files[3], "w") as file:
            file.write("%s <%s >%s 2>%s" % (" ".join(map(_quote, words)), *map(_quote, files[:3])))
        self.process.stdin.write(files[3].encode() + b"\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        with open(files[1], "rb") as out, open(files[2], "rb") as err:
            return subprocess.CompletedProcess(command, status, out.read(), err.read())

    def hook(self, host, session, event, env=(), **fields):
        """The hook's answer as JSON, run below this process."""
        command = [os.path.join(self.home.root, "xmsg-hook.sh"), host] + ([event] if host == "agy" else [])
        done = self.run(command, payload(host, event, session, **dict({"cwd": self.home.folder}, **fields)), env)
        if done.returncode:
            raise AssertionError("hook below the host: %r" % done)
        return json.loads(done.stdout) if done.stdout else None

    def xmsg(self, *arguments, env=()):
        """`xmsg ARGUMENTS` below this process, as a CompletedProcess with bytes."""
        return self.run([os.path.join(self.home.root, "bin", "xmsg"), *arguments], env=env)

    def end(self):
        end(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)


class ClaudeStandIn:
    """fake_claude.py as a process: a registration in `config` and an inbox in `runtime` that answers as told."""

    def __init__(self, case, config, runtime, session, env=None):
        self.process = subprocess.Popen(
            [PYTHON, os.path.join(ROOT, "tests", "fake_claude.py"), str(config), str(runtime), session],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        case.addCleanup(self.end)
        self.pid, self._buffer = self.process.pid, b""
        self.socket = self.heard("socket")

    def kill(self):
        """With -9, from whichever process; returns once it is dead."""
        import host_process
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: host_process.start_time(self.pid) is None, "its death")

    def end(self):
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
        end(self.process)

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        self.heard("done")

    def heard(self, key, seconds=10):
        """The next thing of that kind that the host prints; others before it are passed over."""
        deadline = time.monotonic() + seconds * PATIENCE
        while True:
            while b"\n" not in self._buffer:
                if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                    raise AssertionError("the host said nothing of %r" % key)
                self._buffer += os.read(self.process.stdout.fileno(), 65536)
            text, _, self._buffer = self._buffer.partition(b"\n")
            record = json.loads(text)
            if key in record:
                return record if key == "line" else record[key]


def _quote(word):
    return "'" + word.replace("'", "'\\''") + "'"


def dead_process():
    """(pid, start) of a process that has ended: a holder that nobody waits for any more."""
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    import host_process
    start = host_process.start_time(process.pid)
    end(process)
    return process.pid, start


# ---------------------------------------------------------------------------------------------------- broken worlds

def copy_of_product(case, *edits):
    """A folder with a copy of the product for one test. edits: (file, old text, new text), each to be found."""
    folder = tempfile.mkdtemp(prefix="xmsg-test-copy-")
    case.addCleanup(shutil.rmtree, folder, True)
    for name in os.listdir(ROOT):
        path = os.path.join(ROOT, name)
        if os.path.isfile(path) and (name.endswith(".py") or name in PRODUCT):
            shutil.copy(path, folder)
        elif name in PRODUCT:
            shutil.copytree(path, os.path.join(folder, name))
    for name, old, new in edits:
        path = os.path.join(folder, name)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if old not in text:
            raise AssertionError("%s does not hold %r" % (name, old))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace(old, new, 1))
    return folder


def permissions_count():
    """For run(before=...): lets file modes bind root too, by dropping CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):
            if libc.prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                raise OSError(ctypes.get_errno(), "prctl")


def limit_memory(size=512 << 20):
    """For run(before=...): so many bytes of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextlib.contextmanager
def small_disk(size="1m"):
    """A folder on a file system of its own and of this size; None where this user cannot mount one."""
    folder = tempfile.mkdtemp(prefix="xmsg-test-disk-")
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=700,size=" + size, "none", folder], stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        os.rmdir(folder)


@contextlib.contextmanager
def environ(**values):
    """Variables of this very process for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def on_a_terminal(home, command, columns=80, rows=24, env=(), seconds=20, keys=b"", umask=-1):
    """(status, bytes) of a command that runs with a terminal of this size as its standard streams. keys: typed ahead."""
    import fcntl
    import pty
    import struct
    import termios
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=home.folder, start_new_session=True,
                               env=dict({"TERM": "xterm-256color"}, **dict(home.env, **dict(env))), umask=umask)
    os.close(slave)
    os.write(master, keys)
    out, deadline = b"", time.monotonic() + seconds * PATIENCE
    try:
        while True:
            if not select.select([master], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError("%r does not end: %r" % (command, out))
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux says EIO when the last user of the other end has gone
                data = b""
            if not data:
                return process.wait(timeout=10 * PATIENCE), out
            out += data
    finally:
        os.close(master)
        end(process)


def ignore_interrupts():
    """For run(before=...): a child that is started as by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
