"""Real hosts for tests: Claude Code and Codex CLI in tmux, each with its user's home made for the test.

    with Home(tmp) as home, ClaudeHost(home, "2.1.332") as claude, CodexHost(home, "0.171.0") as codex:
        claude.prompt("go " + directive(shell("xmsg send ..."), say("sent")))
        codex.wait_seen("what was sent")

Nothing here reads or writes the real user's configuration, and nothing leaves the machine: the hosts run with an
environment of their own, dummy keys, scripted model servers on loopback, and proxies that lead nowhere.
"""
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from codex_rpc import CodexRpc
from install_hosts import install
from mock_anthropic import MockAnthropic
from mock_openai import MockOpenAI

# One factor stretches every wait on a slow machine.
PATIENCE = float(os.environ.get("XMSG_TEST_PATIENCE", "1"))
# An Enter sooner after a paste can become a line break in it.
PASTE_PAUSE = 0.4
# A host shows its state late: what looks idle has to look so for this long.
SETTLED = 0.3
# The path of a Unix socket ends at 103 bytes (macOS); the longest one below the root is Codex's control socket.
LONGEST_ROOT = 103 - len("/home/.codex/app-server-control/app-server-control.sock")
TMUX_CONFIG = "set -g remain-on-exit on\nset -g status off\nset -g history-limit 10000\n"
CODEX_STATUS = re.compile(r"^ *(\w+) · ([0-9a-f-]{36})\b", re.M)
CODEX_CONFIG = """\
model = "gpt-5.1-codex"
model_provider = "scripted"
check_for_update_on_startup = false
approval_policy = "never"
sandbox_mode = "danger-full-access"

[features]
plugins = false
apps = false
daemon_auto_start = false

[analytics]
enabled = false

[tui]
status_line = ["run-state", "session-id"]

[model_providers.scripted]
name = "scripted"
base_url = "%s/v1"
wire_api = "responses"
"""
_serial = itertools.count(1)


class Timeout(AssertionError):
    pass


def wait_until(condition, what, timeout=20, context=str):
    """The first true answer of condition(). If none comes: Timeout, which quotes context()."""
    deadline = time.monotonic() + timeout * PATIENCE
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise Timeout("not within %g s: %s\n%s" % (timeout * PATIENCE, what, context()))
        time.sleep(0.05)


def ps(*options):
    return subprocess.run(["ps", *map(str, options)], capture_output=True, text=True).stdout


def started(pid):
    """When the process started, which tells it from a later one with its number; "" for a zombie or none."""
    state, _, start = ps("-o", "stat=,lstart=", "-p", pid).strip().partition(" ")
    return "" if state.startswith("Z") else start.strip()


def descendants(pid):
    """The processes below pid, parents first."""
    pairs = [tuple(map(int, line.split())) for line in ps("-A", "-o", "pid=,ppid=").splitlines()]
    family = [pid]
    for member in family:
        family += [child for child, parent in pairs if parent == member]
    return family[1:]


class Process:
    """A process that the kit started; no signal ever reaches a later one with the same number."""

    def __init__(self, pid):
        self.pid, self._started = pid, started(pid)

    def alive(self):
        return self._started != "" and started(self.pid) == self._started

    def kill(self, number, patience=20):
        if self.alive():
            os.kill(self.pid, number)
        wait_until(lambda: not self.alive(), "the end of process %d" % self.pid, patience)

    def end(self):
        try:
            self.kill(signal.SIGTERM, patience=5)
        except Timeout:
            self.kill(signal.SIGKILL)


def native_codex(wrapper):
    """npm's `codex` is a Node script; the host itself is its child."""
    return next(iter(descendants(wrapper)), None)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


class Home:
    """One user of one machine: a home with both hosts' configuration, a runtime folder, projects, two model servers.

    Hosts that share a Home can find each other, as the sessions of one user can.
    """

    def __init__(self, base=None, projects=("work",)):
        self.root = Path(tempfile.mkdtemp(prefix="rh", dir=base)).resolve()
        if len(str(self.root)) > LONGEST_ROOT:
            self.root.rmdir()
            raise ValueError("socket paths below %s would be too long; take a shorter base" % self.root)
        self.home = self.root / "home"
        self.claude_config = self.home / ".claude"
        self.codex_home = self.home / ".codex"
        self.runtime = self.root / "run"
        self.scratch = self.root / "tmp"
        for folder in (self.claude_config, self.codex_home, self.runtime, self.scratch):
            folder.mkdir(parents=True, mode=0o700)
        self.projects = {name: self._project(name) for name in projects}
        self.anthropic = MockAnthropic(self.root / "anthropic.jsonl")
        self.openai = MockOpenAI(self.root / "openai.jsonl")
        self.env = {
            "PATH": ":".join([os.path.dirname(sys.executable), os.path.dirname(shutil.which("node")),
                              "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.scratch),
            "CLAUDE_CODE_TMPDIR": str(self.scratch), "TERM": "xterm-256color", "LANG": "C.UTF-8",
            "CLAUDE_CONFIG_DIR": str(self.claude_config), "CODEX_HOME": str(self.codex_home),
            "ANTHROPIC_BASE_URL": self.anthropic.url, "ANTHROPIC_API_KEY": "dummy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # without it Claude Code does not let root bypass permissions
            "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost",
        }
        self._configure_claude()
        self._configure_codex()

    def __enter__(self):
        self.anthropic.__enter__()
        self.openai.__enter__()
        return self

    def __exit__(self, *exc):
        self.anthropic.__exit__(*exc)
        self.openai.__exit__(*exc)

    def _project(self, name):
        folder = self.root / name
        folder.mkdir()
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        return folder

    def _configure_claude(self):
        trusted = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
        write_json(self.claude_config / ".claude.json", {
            "hasCompletedOnboarding": True, "theme": "dark",
            "customApiKeyResponses": {"approved": ["dummy"], "rejected": []},
            "projects": {str(folder): trusted for folder in self.projects.values()}})
        write_json(self.claude_config / "settings.json", {
            "skipDangerousModePermissionPrompt": True, "permissions": {"allow": ["Bash"]}})

    def _configure_codex(self):
        trusted = ['\n[projects."%s"]\ntrust_level = "trusted"\n' % folder for folder in self.projects.values()]
        (self.codex_home / "config.toml").write_text(CODEX_CONFIG % self.openai.url + "".join(trusted))


class Host:
    """An interactive session of one host, in a tmux server of its own.

    hooks: the entries {event: [entry, ...]} to write into the home's configuration, or a function of the host that
    installs them. args: more arguments for the host's command line.
    """

    def __init__(self, home, version, project="work", hooks=None, args=()):
        self.home, self.version, self.args = home, version, list(args)
        self.cwd, self.env = home.projects[project], dict(home.env)
        self.binary, self.log = install(self.kind, version), self.model.log
        self._label = self._process = None
        if callable(hooks):
            hooks(self)
        elif hooks is not None:
            self.write_hooks(hooks)

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc):
        self.stop()

    def start(self, *args):
        """Starts the TUI and waits until it takes prompts; also once more, as with "--resume", ID for ClaudeHost."""
        self.stop()
        self._label = "realhosts-%d-%d" % (os.getpid(), next(_serial))
        config = self.home.root / "tmux.conf"
        config.write_text(TMUX_CONFIG)
        self._tmux("-f", config, "new-session", "-d", "-x", "160", "-y", "50", "-c", self.cwd,
                   self.binary, *self.command_line(), *self.args, *args)
        pane = int(self._tmux("display-message", "-p", "#{pane_pid}"))
        self._process = Process(self._wait(lambda: self.host_below(pane), "its process"))
        self._wait(self.is_ready, "a TUI that takes prompts", 30)

    def stop(self):
        """Lets the host exit as it does at SIGTERM, and makes sure of it."""
        if self._process:
            self._process.end()
        if self._label:
            self._tmux("kill-server")

    def kill9(self):
        """A crash: no signal handler and no hook of the host gets to run."""
        self._process.kill(signal.SIGKILL)

    def prompt(self, text, wait=True):
        """Enters one line. Waits until the model has it, which a busy host or a hook that blocks can prevent.

        The line comes as a bracketed paste: of a long text typed at this speed, hosts lose the start or the Enter.
        """
        if "\n" in text:
            raise ValueError("one line only: %r" % text)
        before = self.times_seen(text)
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p")
        time.sleep(PASTE_PAUSE)
        self.press("Enter")
        if wait:
            self._wait(lambda: self.times_seen(text) > before, "the model to get %r" % text)

    def press(self, *keys):
        """Keys by their names in tmux, such as "Escape"; ("-l", text) types a text."""
        self._tmux("send-keys", *keys)

    def wait_idle(self, timeout=30):
        """Waits for the end of the turn, its Stop hooks included."""
        self._wait(self._is_settled, "an idle session", timeout)

    def wait_seen(self, text, timeout=20):
        self._wait(lambda: text in self.seen(), "the model to see %r" % text, timeout)

    def seen(self):
        """All that the model of this session has been told so far."""
        return self.log.seen(self.session_id)

    def times_seen(self, text):
        return self.log.times_seen(self.session_id, text)

    def screen(self):
        return self._tmux("capture-pane", "-p")

    def child_env(self):
        """The environment of a child of this session's shell tool, as far as other tools care."""
        return dict(self.env, **self.child_variables())

    @property
    def pid(self):
        return self._process.pid

    def is_ready(self):
        return self.is_idle()

    def _is_settled(self):
        requests, end = len(self.log.requests()), time.monotonic() + SETTLED
        while self.is_idle() and not self.model.is_replying(self.session_id) and len(self.log.requests()) == requests:
            if time.monotonic() > end:
                return True
            time.sleep(0.05)
        return False

    def _tmux(self, *command):
        """TMUX_TMPDIR keeps the server's socket in the home; what runs in the pane inherits this environment."""
        return subprocess.run(["tmux", "-L", self._label, *map(str, command)], capture_output=True, text=True,
                              env=dict(self.env, TMUX_TMPDIR=str(self.home.runtime))).stdout

    def _wait(self, condition, what, timeout=20):
        return wait_until(condition, "%s %s: %s" % (self.kind, self.version, what), timeout, self.screen)


class ClaudeHost(Host):
    """mode: "bypass" or one of Claude Code's own words. inbound: crossSessionInbound, one of accept, hold, refuse."""

    kind = "claude"

    def __init__(self, home, version, mode="default", inbound=None, **options):
        self.mode, self.inbound, self.model = mode, inbound, home.anthropic
        super().__init__(home, version, **options)

    def command_line(self):
        # Never unset: 2.1.332 then starts in auto mode, which asks the model for verdicts that no script can give.
        line = ["--dangerously-skip-permissions"] if self.mode == "bypass" else ["--permission-mode", self.mode]
        if self.inbound:
            line += ["--settings", json.dumps({"crossSessionInbound": self.inbound})]
        return line

    def write_hooks(self, hooks):
        path = self.home.claude_config / "settings.json"
        write_json(path, dict(json.loads(path.read_text()), hooks=hooks))

    def host_below(self, pane):
        return pane

    def registration(self):
        """The session's entry in the host's registry; {} while there is none."""
        try:
            return json.loads((self.home.claude_config / "sessions" / ("%d.json" % self.pid)).read_text())
        except (FileNotFoundError, ValueError):
            return {}

    @property
    def session_id(self):
        return self.registration().get("sessionId")

    def is_idle(self):
        return self.registration().get("status") == "idle"

    def child_variables(self):
        return {"CLAUDECODE": "1", "CLAUDE_CODE_ENTRYPOINT": "cli", "CLAUDE_CODE_CHILD_SESSION": "1",
                "CLAUDE_CODE_SESSION_ID": self.session_id, "CLAUDE_PID": str(self.pid),
                "CLAUDE_CODE_MESSAGING_SOCKET": self.registration()["messagingSocketPath"]}

    def deliver(self, content, **fields):
        """Writes a message to the session's inbox socket, as another process of its user can; returns its msg_id."""
        line = {"type": "user", "message": {"role": "user", "content": content}, "msg_id": str(uuid.uuid4()), **fields}
        with socket.socket(socket.AF_UNIX) as inbox:
            inbox.connect(self.registration()["messagingSocketPath"])
            inbox.sendall(json.dumps(line).encode() + b"\n")
        return line["msg_id"]


class CodexHost(Host):
    """Attached to the home's CodexDaemon if one runs, else standalone.

    trust: what becomes of the hooks, which Codex runs only once its user has confirmed them. "confirmed": they are;
    "declined": they are not, and do not run; "bypass": they run all the same, but such a TUI attaches to no daemon.
    """

    kind = "codex"

    def __init__(self, home, version, trust="confirmed", **options):
        self.trust, self.model, self._session = trust, home.openai, None
        super().__init__(home, version, **options)

    def start(self, *args):
        """As Host.start; "resume", ID goes on with an earlier session."""
        if self.trust == "confirmed":
            confirm_hooks_for_tests(self.home, self.version)
        super().start(*args)

    def command_line(self):
        return ["--dangerously-bypass-hook-trust"] if self.trust == "bypass" else []

    def write_hooks(self, hooks):
        write_json(self.home.codex_home / "hooks.json", {"hooks": hooks})

    def host_below(self, pane):
        return native_codex(pane)

    def is_ready(self):
        if self.trust == "declined" and "Hooks need review" in self.screen():
            self.press("Escape")
            time.sleep(1)  # the first key can get lost, and a second one too soon ends the TUI
        return self.is_idle()

    def _status(self):
        """(run state, session id), from the status line that CODEX_CONFIG asks for and that a popup can cover."""
        shown = CODEX_STATUS.findall(self.screen())
        return shown[-1] if shown else (None, None)

    @property
    def session_id(self):
        self._session = self._status()[1] or self._session
        return self._session

    def is_idle(self):
        return self._status()[0] == "Ready"

    def child_variables(self):
        return {"CODEX_THREAD_ID": self.session_id, "CODEX_CI": "1"}


class CodexDaemon:
    """The shared app-server of a home: every TUI that starts later attaches to the one on the control socket."""

    def __init__(self, home, version, socket_path=None):
        self.home, self.version = home, version
        self.socket = socket_path or home.codex_home / "app-server-control" / "app-server-control.sock"
        self._listen = "unix://%s" % (socket_path or "")

    def __enter__(self):
        log = self.home.root / "app-server.log"
        command = [install("codex", self.version), "app-server", "--listen", self._listen]
        with open(log, "ab") as output:
            self._wrapper = subprocess.Popen(command, env=self.home.env, cwd=self.home.home, stdin=subprocess.DEVNULL,
                                             stdout=output, stderr=output, start_new_session=True)
        what = "codex %s: an app-server that answers" % self.version
        self._process = Process(wait_until(lambda: native_codex(self._wrapper.pid), what, context=log.read_text))
        try:
            wait_until(self._answers, what, context=log.read_text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        self._process.end()
        self._wrapper.wait()

    @property
    def pid(self):
        return self._process.pid

    def call(self, method, **params):
        with CodexRpc(self.socket) as rpc:
            return rpc.call(method, params)

    def start_turn(self, thread, text):
        return self.call("turn/start", threadId=thread, input=[{"type": "text", "text": text}])

    def _answers(self):
        try:
            return self.call("thread/loaded/list")
        except OSError:
            return None


def confirm_hooks_for_tests(home, version):
    """Confirms every hook of a test's home, as its user would in /hooks. Never do this to a real user's home."""
    folders = [str(folder) for folder in home.projects.values()]
    with CodexDaemon(home, version, home.runtime / "confirm.sock") as server:
        listed = server.call("hooks/list", cwds=folders)["data"]
        state = {hook["key"]: {"trusted_hash": hook["currentHash"]} for entry in listed for hook in entry["hooks"]}
        server.call("config/batchWrite", edits=[{"keyPath": "hooks.state", "value": state, "mergeStrategy": "upsert"}])


def claude_print(home, version, prompt, args=(), timeout=60):
    """`claude -p`; the finished process with its output."""
    return _run_once(home, [install("claude", version), "-p", "--permission-mode", "default", *args, prompt], timeout)


def codex_exec(home, version, prompt, args=(), timeout=60):
    """`codex exec`; the finished process with its output."""
    return _run_once(home, [install("codex", version), "exec", *args, prompt], timeout)


def _run_once(home, command, timeout):
    folder = next(iter(home.projects.values()))
    return subprocess.run(command, env=home.env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout * PATIENCE)
