#!/usr/bin/env python3
"""A stand-in for Google's Antigravity CLI `agy`, as a real process.

The real program cannot be installed from any package registry, so xmsg's tests run this file instead, through a
symlink named `agy`.  It has the command line, the files, the presence lock, the hook engine and the exit codes of
the real one; only the model is missing: each "model call" waits FAKE_AGY_TURN_MS and answers FAKE_AGY_REPLY.

Where the facts come from: Google's public documentation and changelog, public reports about `agy` 1.1 to 1.3, and
observation of the published agent engine (PyPI google-antigravity 0.1.22, whose stock SDK build keeps JSON hooks
switched off) against a scripted model server.

Faithful: flag syntax and its errors; --version; the /hooks read-back; the presence lock (flock, kept until exit,
never unlinked, not enforced); unknown conversations; which hooks.json files count, and that a slightly wrong one
is dropped whole; `sh -c`, cwd, environment, payload, timeouts, and the strict reading of a hook's output; the order
of events; what each kind of injected step does to the model's context, for how long, and where it is cut; the Stop
decision, its cap and its short circuit; transcript, steps database, summaries, last conversation; signals and exit
codes; two writers overwriting each other's steps.

Where sources disagree, the reading that is harder on xmsg was taken: a failed PreToolUse hook denies the tool; a
headless permission denial ends the turn without a Stop hook; the same hook name in two files runs twice; Stop
`continue` is honoured ten times; hook names run in random order; a held stderr voids an output as a held stdout does.

Not faithful: step payloads are JSON, not protobuf, and only step types 14, 15 and 90 carry the real numbers; the
framing around injected text is our own wording (never match on it); below version 1.3.0 `systemMessage` counts as an
unknown key (assumed, not observed); folder trust, sign-in, background tasks, subagents, sandbox, MCP, plug-in
management and the terminal interface are missing: interactive mode is one prompt a line on stdin, plus /new,
/resume ID and /exit; the agentapi server speaks plain HTTP and serves only its own process's conversation; print
timeout 0 always means no limit; force_continue ends at MAX_INVOCATIONS here, so that no test can run for ever.

Environment: FAKE_AGY_VERSION (1.3.0), _REPLY (ok), _TURN_MS (0, per model call), _TOOL_ROUNDS (0), _TOOL (shell
command of a tool round, `true`), _STOP_CAP (10), _SEED (order of hook names), _CONTEXT_LOG (file: one JSON line per
model call, all that the model saw), _MODEL_ERROR (text: every model call fails), _DIE_AT (attach, pre, post-hook or
stop: kill -9 oneself there), _PRINT_TIMEOUT_MODE (error or partial; by default what the version does), _NO_LOCK (1:
no presence lock, as old builds), _OMIT_EMPTY (1: leave zero and empty fields out of payloads, as protojson may).
"""
import errno
import fcntl
import glob
import http.client
import http.server
import json
import os
import queue
import random
import re
import secrets
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid

FLAT_EVENTS = ("SessionStart", "PreInvocation", "PostInvocation", "Stop")
GROUPED_EVENTS = ("PreToolUse", "PostToolUse")
STEP_LIMIT = 49_152                     # bytes of one injected step that reach the model
HOOK_TIMEOUT = 30                       # seconds, when a handler names none
PIPE_GRACE = 1.0                        # seconds the engine waits for a pipe that a background child keeps open
MAX_INVOCATIONS = 100
STEP_TYPES = {"USER_INPUT": 14, "PLANNER_RESPONSE": 15, "EPHEMERAL_MESSAGE": 90,
              "SYSTEM_MESSAGE": 901, "RUN_COMMAND": 902, "ERROR_MESSAGE": 903}      # 9xx: ours
SUBCOMMANDS = ("agent", "agents", "agentapi", "changelog", "help", "install", "mcp", "mic-serve", "models", "plugin",
               "remote-control", "update")


# ---- knobs ----------------------------------------------------------------------------------------------------

def knob(name, default=""):
    return os.environ.get("FAKE_AGY_" + name, default)


def version():
    return knob("VERSION", "1.3.0")


def at_least(wanted):
    parts = lambda text: tuple(int(n) for n in re.findall(r"\d+", text)[:3])
    return parts(version()) >= parts(wanted)


def die_at(point):
    if knob("DIE_AT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


# ---- the command line, as Go's flag package reads it ----------------------------------------------------------

class Usage(Exception):
    """Exit 2, with the message and the usage text on stderr."""


UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
BOOLS = ("continue", "dangerously-skip-permissions", "disable-slash-commands", "help", "new-project", "remote-control",
         "sandbox", "version")
STRINGS = ("print", "prompt-interactive", "conversation", "print-timeout", "output-format", "input-format",
           "json-schema", "add-dir", "model", "effort", "mode", "agent", "project", "log-file")
ALIASES = {"p": "print", "prompt": "print", "i": "prompt-interactive", "c": "continue", "h": "help"}
CHOICES = {"output-format": ("text", "json", "stream-json"), "input-format": ("text", "stream-json"),
           "mode": ("accept-edits", "plan")}


def parse_duration(text):
    """Seconds in a Go duration ("10m", "1h30m", "0").  A bare number has no unit and is refused."""
    quoted = json.dumps(text, ensure_ascii=False)
    rest = text[1:] if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0.0
    if not rest:
        raise ValueError(f"time: invalid duration {quoted}")
    total = 0.0
    while rest:
        number = re.match(r"\d+\.?\d*|\.\d+", rest)
        if not number:
            raise ValueError(f"time: invalid duration {quoted}")
        rest = rest[number.end():]
        unit = re.match(r"[^0-9.]+", rest)
        if not unit:
            raise ValueError(f"time: missing unit in duration {quoted}")
        if unit.group() not in UNITS:
            raise ValueError(f"time: unknown unit {json.dumps(unit.group())} in duration {quoted}")
        total += float(number.group()) * UNITS[unit.group()]
        rest = rest[unit.end():]
    return -total if text.startswith("-") else total


def format_duration(seconds):
    """As Go prints it: 8s, 1m30s, 10m0s, 1h0m0s, 1.5s, 250ms."""
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{hours:.0f}h" if hours else "") + (f"{minutes:.0f}m" if hours or minutes else "") + f"{rest:g}s"


def parse_flags(argv):
    """{flag: value}; `-x v`, `--x v` and `-x=v` are the same, a bool takes no word, the first bare word ends flags."""
    flags = {"add-dir": []}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            words.insert(0, word)
            break
        given, has_value, value = word.lstrip("-").partition("=")
        name = ALIASES.get(given, given)
        if word.startswith("---") or not given:
            raise Usage(f"bad flag syntax: {word}")
        if name in BOOLS:
            if has_value and value not in ("1", "t", "true", "TRUE", "True", "0", "f", "false", "FALSE", "False"):
                raise Usage(f"invalid boolean value {json.dumps(value)} for -{given}: parse error")
            flags[name] = not has_value or value[0] in "1tT"
        elif name in STRINGS:
            if not has_value:
                if not words:
                    raise Usage(f"flag needs an argument: -{given}")
                value = words.pop(0)
            if name in CHOICES and value not in CHOICES[name]:
                raise Usage(f"invalid value {json.dumps(value)} for flag -{given}: not one of " + ", ".join(CHOICES[name]))
            if name == "print-timeout":
                try:
                    flags[name] = parse_duration(value)
                except ValueError as bad:
                    raise Usage(f"invalid value {json.dumps(value, ensure_ascii=False)} for flag -{given}: {bad}")
            elif name == "add-dir":
                flags[name].append(os.path.abspath(value))
            else:
                flags[name] = value
        else:
            raise Usage(f"flag provided but not defined: -{given}")
    if words:
        raise Usage(f"unexpected argument {json.dumps(words[0], ensure_ascii=False)}")
    return flags


def usage_text():
    return "Usage of agy:\n" + "".join(f"  -{name}\n" for name in sorted(BOOLS + STRINGS + tuple(ALIASES)))


# ---- files ----------------------------------------------------------------------------------------------------

class Home:
    """Every path agy uses.  HOME decides; nothing else does."""

    def __init__(self):
        self.gemini = os.path.join(os.environ["HOME"], ".gemini")
        self.cli = os.path.join(self.gemini, "antigravity-cli")
        self.log_path = os.path.join(self.cli, "log", "cli-fake.log")

    def at(self, *parts):
        path = os.path.join(self.cli, *parts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def log(self, line):
        os.makedirs(os.path.dirname(self.log_path), exist_ok=True)
        with open(self.log_path, "a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")

    def last_conversations(self):
        try:
            with open(self.at("cache", "last_conversations.json"), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}

    def remember_conversation(self, conversation):
        path = self.at("cache", "last_conversations.json")
        known = {**self.last_conversations(), os.getcwd(): conversation}
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(file.name, path)


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ---- one conversation -----------------------------------------------------------------------------------------

class Conversation:
    """Its lock, its steps on disk, and what the model would see of them."""

    def __init__(self, home, wanted=None):
        self.home = home
        self.new = not (wanted and "/" not in wanted and os.path.exists(home.at("conversations", wanted + ".db")))
        if wanted and self.new:
            print(f"warning: conversation {json.dumps(wanted, ensure_ascii=False)} not found", file=sys.stderr)
        self.id = str(uuid.uuid4()) if self.new else wanted
        self.lock = self.db = None
        self.fleeting = []                      # texts that only the next model call sees
        self.skip_answer = False
        self.brain = os.path.join(home.cli, "brain", self.id)
        self.transcript = os.path.join(self.brain, ".system_generated", "logs", "transcript_full.jsonl")

    def attach(self):
        """Take the presence lock.  A lock that somebody else holds is only remarked upon: agy does not enforce it."""
        if self.lock is None and not knob("NO_LOCK"):
            path = self.home.at("presence", self.id + ".lock")
            self.lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as taken:
                if taken.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                print(f"warning: conversation {self.id} is open in another agy process", file=sys.stderr)
        die_at("attach")
        os.makedirs(os.path.dirname(self.transcript), exist_ok=True)
        self.db = sqlite3.connect(self.home.at("conversations", self.id + ".db"), isolation_level=None, timeout=5)
        self.db.execute("pragma journal_mode = wal")
        self.db.execute("create table if not exists steps (idx integer primary key, step_type integer, payload blob)")
        self.db.execute("create table if not exists trajectory_meta (cascade_id text)")
        if not self.db.execute("select 1 from trajectory_meta").fetchone():
            self.db.execute("insert into trajectory_meta values (?)", (self.id,))
        self.steps = [json.loads(payload) for (payload,) in self.db.execute("select payload from steps order by idx")]
        self.home.remember_conversation(self.id)

    def detach(self):
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        if self.db:
            self.db.close()

    def add(self, source, kind, content):
        """One step: in memory, in the database (by index, so a second writer overwrites), in the transcripts."""
        step = {"step_index": len(self.steps), "source": source, "type": kind, "status": "DONE", "created_at": now(),
                "content": content}
        self.steps.append(step)
        self.db.execute("insert or replace into steps values (?, ?, ?)",
                        (step["step_index"], STEP_TYPES[kind], json.dumps(step).encode()))
        for name in ("transcript_full.jsonl", "transcript.jsonl"):
            with open(os.path.join(os.path.dirname(self.transcript), name), "a", encoding="utf-8") as file:
                file.write(json.dumps(step, ensure_ascii=False) + "\n")

    def inject(self, steps, event):
        for kind, text in steps:
            if kind == "userMessage":
                self.add("USER_EXPLICIT", "USER_INPUT", f"<USER_REQUEST>\n{text}\n</USER_REQUEST>")
            elif kind == "systemMessage":
                self.system(text, f"text of a {event} hook")
            else:
                self.add("SYSTEM", "EPHEMERAL_MESSAGE", cut(text))
                self.fleeting.append(cut(text))

    def system(self, text, origin):
        self.add("SYSTEM", "SYSTEM_MESSAGE", f"<SYSTEM_MESSAGE>\n[{origin}, the user did not write this]\n{cut(text)}\n"
                                             "</SYSTEM_MESSAGE>")

    def context(self):
        """What the next model call sees.  Reading it uses up the fleeting texts."""
        seen = [step for step in self.steps if step["type"] != "EPHEMERAL_MESSAGE"]
        if self.skip_answer and seen and seen[-1]["type"] == "PLANNER_RESPONSE":
            seen.pop()
        roles = {"PLANNER_RESPONSE": "assistant", "RUN_COMMAND": "tool"}
        messages = [{"role": roles.get(step["type"], "user"), "content": step["content"]} for step in seen]
        messages += [{"role": "user", "content": text} for text in self.fleeting]
        self.fleeting, self.skip_answer = [], False
        return messages

    def summarise(self, status):
        """The row of conversation_summaries.db from which a conversation is found by its title."""
        said = [step["content"] for step in self.steps if step["type"] == "USER_INPUT"]
        title = re.sub(r"</?USER_REQUEST>", "", said[0] if said else "").strip()[:60]
        db = sqlite3.connect(self.home.at("conversation_summaries.db"), isolation_level=None, timeout=5)
        db.execute("pragma journal_mode = wal")
        db.execute("create table if not exists conversation_summaries (conversation_id text primary key, title text,"
                   " preview text, step_count integer, last_modified_time text, workspace_uris text, status text,"
                   " not_fully_idle integer, killed integer)")
        db.execute("insert or replace into conversation_summaries values (?, ?, ?, ?, ?, ?, ?, ?, 0)",
                   (self.id, title, self.steps[-1]["content"][:200], len(self.steps), now(),
                    json.dumps(["file://" + os.getcwd()]), "CASCADE_RUN_STATUS_" + status, int(status == "RUNNING")))
        db.close()


def cut(text):
    raw = text.encode("utf-8", "replace")
    if len(raw) <= STEP_LIMIT:
        return text
    return raw[:STEP_LIMIT].decode("utf-8", "ignore") + f"<truncated {len(raw) - STEP_LIMIT} bytes>\n[cut by the host]"


# ---- hooks: which ones ----------------------------------------------------------------------------------------

class Defect(Exception):
    """The whole file, or the whole output, is dropped."""


def read_hooks_file(path):
    """[(hook name, event, matcher, handler, enabled)] of one hooks.json.  Any defect drops all of it."""
    with open(path, "rb") as file:
        raw = file.read()
    if raw.startswith(b"\xef\xbb\xbf") and at_least("1.3.1"):
        raw = raw[3:]
    try:
        document = json.loads(raw.decode("utf-8"))
    except ValueError as bad:
        raise Defect(f"not JSON: {bad}")
    if not isinstance(document, dict):
        raise Defect("not an object")
    found = []
    for name, spec in document.items():
        if not isinstance(spec, dict):
            raise Defect(f"{name}: not an object")
        enabled = spec.get("enabled", True)
        if not isinstance(enabled, bool):
            raise Defect(f"{name}: enabled is not a bool")
        for event in FLAT_EVENTS + GROUPED_EVENTS:
            entries = spec.get(event, [])
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise Defect(f"{name}.{event}: not a list of objects")
            for entry in entries:
                grouped = event in GROUPED_EVENTS
                if grouped and "hooks" not in entry:
                    continue                                    # flat shape here: silently ignored
                matcher = entry.get("matcher", "") if grouped else ""
                handlers = entry["hooks"] if grouped else [entry]
                if not isinstance(matcher, str) or not isinstance(handlers, list):
                    raise Defect(f"{name}.{event}: bad group")
                for handler in handlers:
                    if check_handler(handler, f"{name}.{event}"):
                        found.append((name, event, matcher, handler, enabled))
    return found


def check_handler(handler, where):
    """True for a command, False for what the engine accepts and this program cannot run."""
    if not isinstance(handler, dict):
        raise Defect(f"{where}: handler is not an object")
    kind = handler.get("type", "command")
    if kind not in ("command", "prompt"):
        raise Defect(f"{where}: unknown handler type {kind!r}")
    timeout = handler.get("timeout", HOOK_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, int):
        raise Defect(f"{where}: timeout is not an integer")
    if kind == "command" and not (isinstance(handler.get("command"), str) and handler["command"]):
        raise Defect(f"{where}: no command")
    return kind == "command"


class Hooks:
    """All configured handlers, in the order in which this process runs them."""

    def __init__(self, home, workspaces):
        self.home, self.workspaces = home, workspaces
        self.rank = {}
        self.dice = random.Random(knob("SEED") or None)
        self.entries = []

    def reload(self):
        """Read again at each user turn, never within one.  The order of hook names is random per process."""
        paths = [os.path.join(self.home.gemini, "config", "hooks.json")]
        paths += [os.path.join(directory, ".agents", "hooks.json") for directory in self.workspaces]
        paths += sorted(glob.glob(os.path.join(self.home.gemini, "config", "plugins", "*", "hooks.json")))
        self.entries = []
        for path in paths:
            try:
                entries = read_hooks_file(path)
            except FileNotFoundError:
                continue
            except (Defect, OSError) as bad:
                self.home.log(f"hooks file ignored: {path}: {bad}")
                continue
            self.entries += [(path, *entry) for entry in entries]
        for path, name, *_ in self.entries:
            self.rank.setdefault((path, name), self.dice.random())
        self.entries.sort(key=lambda entry: self.rank[entry[0], entry[1]])

    def for_event(self, event, tool=""):
        for path, _, kind, matcher, handler, enabled in self.entries:
            if kind == event and enabled and (matcher in ("", "*") or self.matches(matcher, tool)):
                yield path, handler

    def matches(self, matcher, tool):
        try:
            return re.fullmatch(matcher, tool) is not None
        except re.error as bad:
            self.home.log(f"matcher {matcher!r} is no regular expression: {bad}")
            return False

    def describe(self):
        """The document behind `agy -p /hooks --output-format json`."""
        hooks = {}
        for path, name, event, matcher, handler, enabled in self.entries:
            hook = hooks.setdefault((path, name), {"name": name, "enabled": enabled, "source": path, "actions": []})
            hook["actions"].append({"event": event, "type": handler.get("type", "command"), "matcher": matcher,
                                    "command": handler["command"], "timeout_seconds": handler.get("timeout", HOOK_TIMEOUT)})
        return {"command": {"name": "hooks", "data": {"hooks": list(hooks.values())}}}


# ---- hooks: running one and reading its answer ----------------------------------------------------------------

class Failed(Exception):
    """The handler timed out, exited with an error, or said something that cannot be read."""


def run_handler(path, handler, payload, conversation):
    """The handler's output as an object ({} for nothing).  Any doubt about it raises Failed."""
    env = {**os.environ, "ANTIGRAVITY_CONVERSATION_ID": conversation.id}
    process = subprocess.Popen(["sh", "-c", handler["command"]], cwd=os.path.dirname(path), env=env, close_fds=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answers = {"out": None, "err": None}
    exited = threading.Event()

    def drain(key, pipe):
        answers[key] = pipe.read()

    def feed():
        try:
            process.stdin.write(payload)
            process.stdin.close()
        except OSError:
            pass                                    # a hook need not read its stdin

    def wait():
        process.wait()
        exited.set()

    readers = [threading.Thread(target=drain, args=pair, daemon=True)
               for pair in (("out", process.stdout), ("err", process.stderr))]
    for thread in readers + [threading.Thread(target=feed, daemon=True), threading.Thread(target=wait, daemon=True)]:
        thread.start()
    try:
        in_time = exited.wait(handler.get("timeout", HOOK_TIMEOUT))
    finally:
        if not exited.is_set():
            process.kill()                          # the shell only: its children live on
            exited.wait()
    until = time.monotonic() + PIPE_GRACE
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    if answers["err"]:
        conversation.home.log("hook stderr: " + answers["err"].decode("utf-8", "replace"))
    if not in_time:
        raise Failed("timed out")
    if answers["out"] is None or answers["err"] is None:
        raise Failed("a background child kept its output open")
    if process.returncode:
        raise Failed(f"exit status {process.returncode}")
    if not answers["out"].strip():
        return None
    try:
        output = json.loads(answers["out"].decode("utf-8"))
    except ValueError as bad:
        raise Failed(f"not JSON: {bad}")
    if not isinstance(output, dict):
        raise Failed("not an object")
    return output


def read_output(event, output):
    """The output with its steps as [(kind, text)].  An unknown key or a wrong type anywhere raises Failed."""
    known = {"SessionStart": {"injectSteps": list}, "PreInvocation": {"injectSteps": list},
             "PostInvocation": {"injectSteps": list, "terminationBehavior": str},
             "Stop": {"decision": str, "reason": str}, "PostToolUse": {},
             "PreToolUse": {"decision": str, "reason": str, "permissionOverrides": list, "overwrite": dict}}[event]
    answer = {"injectSteps": []}
    for key, value in output.items():
        if key not in known:
            raise Failed(f"unknown key {key!r}")
        if value is None:
            continue
        if not isinstance(value, known[key]):
            raise Failed(f"{key} has the wrong type")
        answer[key] = [read_step(step) for step in value] if key == "injectSteps" else value
    return answer


def read_step(step):
    if not isinstance(step, dict) or len(step) != 1:
        raise Failed("a step is an object with one key")
    (kind, value), = step.items()
    if kind == "systemMessage" and at_least("1.3.0"):
        if not isinstance(value, dict) or not set(value) <= {"systemMessage", "metadata"}:
            raise Failed("systemMessage has the wrong shape")
        value = value.get("systemMessage")
    elif kind not in ("ephemeralMessage", "userMessage"):
        raise Failed(f"unknown step {kind!r}")
    if not isinstance(value, str):
        raise Failed(f"{kind} is not a string")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Failed(f"{kind} holds half a surrogate pair")      # assumed: protojson refuses it
    return kind, value


# ---- one turn -------------------------------------------------------------------------------------------------

class ModelError(Exception):
    pass


class Denied(Exception):
    """A tool needed a permission that nobody could give: the turn ends there, with no Stop hook."""


class Session:
    """One agy process: flags, hooks, the open conversation."""

    def __init__(self, home, flags):
        self.home, self.flags = home, flags
        self.interactive = "print" not in flags and "input-format" not in flags
        self.workspaces = flags["add-dir"] or ([os.getcwd()] if self.interactive else [])
        self.hooks = Hooks(home, self.workspaces)
        self.conversation = None
        self.api = None
        self.mail = queue.SimpleQueue()
        self.turns, self.denied, self.reply = 0, [], ""

    def open(self, wanted=None):
        self.close()
        self.conversation = Conversation(self.home, wanted)
        self.conversation.attach()
        if self.api is None:
            self.api = Api(self)

    def close(self):
        if self.conversation:
            self.conversation.detach()

    def ask(self, event, tool="", **fields):
        """Run the handlers of one event in order; yields (raw output or None, answer, failure or None) of each."""
        conversation = self.conversation
        payload = {"conversationId": conversation.id, "workspacePaths": self.workspaces, "modelName": "fake-model",
                   "transcriptPath": conversation.transcript, "artifactDirectoryPath": conversation.brain, **fields}
        if knob("OMIT_EMPTY"):
            payload = {key: value for key, value in payload.items() if value not in (0, "", [], False)}
        data = json.dumps(payload, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        for path, handler in list(self.hooks.for_event(event, tool)):
            try:
                output = run_handler(path, handler, data, conversation)
                yield output, read_output(event, output or {}), None
            except Failed as why:
                self.home.log(f"{event} hook output dropped: {handler['command']}: {why}")
                yield None, {"injectSteps": []}, str(why)

    def model_call(self, execution, invocation):
        conversation = self.conversation
        messages = conversation.context()
        if knob("CONTEXT_LOG"):
            with open(knob("CONTEXT_LOG"), "a", encoding="utf-8") as file:
                file.write(json.dumps({"pid": os.getpid(), "conversation_id": conversation.id, "executionNum": execution,
                                       "invocationNum": invocation, "messages": messages}, ensure_ascii=False) + "\n")
        time.sleep(int(knob("TURN_MS", "0")) / 1000)
        if knob("MODEL_ERROR"):
            conversation.add("SYSTEM", "ERROR_MESSAGE", knob("MODEL_ERROR"))
            raise ModelError(knob("MODEL_ERROR"))

    def tool_round(self):
        conversation, command = self.conversation, knob("TOOL", "true")
        conversation.add("MODEL", "PLANNER_RESPONSE", f"[calls run_command: {command}]")
        args = {"CommandLine": command, "Cwd": (self.workspaces or [os.getcwd()])[0]}
        step = len(conversation.steps)
        verdict = ""
        for output, answer, failure in self.ask("PreToolUse", "run_command", stepIdx=step,
                                                toolCall={"name": "run_command", "args": args}):
            if failure or (output is not None and not answer.get("decision")):
                verdict = "deny"                                # fail-closed; and `{}` is no permission either
            elif output is not None and verdict != "deny":
                verdict = answer["decision"]
                args.update(answer.get("overwrite", {}))
        error = ""
        if verdict == "deny":
            error = "denied by a hook"
            conversation.add("MODEL", "RUN_COMMAND", error)
        elif verdict != "allow" and not self.flags.get("dangerously-skip-permissions"):
            self.denied.append({"tool": "run_command", "permission": "command"})
            raise Denied
        else:
            env = {**os.environ, "ANTIGRAVITY_AGENT": "1", "ANTIGRAVITY_CONVERSATION_ID": conversation.id,
                   "ANTIGRAVITY_TRAJECTORY_ID": conversation.id, **self.api.environment()}
            done = subprocess.run(["sh", "-c", args["CommandLine"]], cwd=args["Cwd"], env=env, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            error = f"exit status {done.returncode}" if done.returncode else ""
            conversation.add("MODEL", "RUN_COMMAND", done.stdout.decode("utf-8", "replace") + error)
        for _ in self.ask("PostToolUse", "run_command", stepIdx=step, error=error, toolCall={
                "name": "run_command", "args": {**args, "toolAction": "Running a command", "toolSummary": command}}):
            pass

    def turn(self, prompt=None):
        """From one user prompt (None: mail that waits in the conversation) to the last Stop.  True if the model failed."""
        conversation = self.conversation
        self.turns += 1
        self.reply = ""
        self.hooks.reload()
        if prompt is not None:
            conversation.add("USER_EXPLICIT", "USER_INPUT", f"<USER_REQUEST>\n{prompt}\n</USER_REQUEST>")
            with open(self.home.at("history.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps({"display": prompt, "timestamp": int(time.time() * 1000), "workspace": os.getcwd(),
                                       "conversationId": conversation.id}, ensure_ascii=False) + "\n")
        conversation.summarise("RUNNING")
        if conversation.new:
            conversation.new = False
            for _, answer, _ in self.ask("SessionStart"):
                conversation.inject(answer["injectSteps"], "SessionStart")
        try:
            return self.executions()
        except Denied:
            return False
        finally:
            conversation.summarise("IDLE")

    def executions(self):
        conversation = self.conversation
        invocation, execution, tools = 0, 0, int(knob("TOOL_ROUNDS", "0"))
        while True:
            reason, error = "NO_TOOL_CALL", ""
            while True:
                die_at("pre")
                for _, answer, _ in list(self.ask("PreInvocation", invocationNum=invocation,
                                                  initialNumSteps=len(conversation.steps))):
                    die_at("post-hook")
                    conversation.inject(answer["injectSteps"], "PreInvocation")
                try:
                    self.model_call(execution, invocation)
                except ModelError as bad:
                    reason, error, again = "ERROR", str(bad), False
                else:
                    again = tools > 0
                    if again:
                        tools -= 1
                        self.tool_round()
                    else:
                        self.reply = knob("REPLY", "ok")
                        conversation.add("MODEL", "PLANNER_RESPONSE", self.reply)
                    for _, answer, _ in self.ask("PostInvocation", invocationNum=invocation,
                                                 initialNumSteps=len(conversation.steps)):
                        conversation.inject(answer["injectSteps"], "PostInvocation")
                        if answer.get("terminationBehavior") == "force_continue":
                            again = True
                        elif answer.get("terminationBehavior") == "terminate":
                            again, reason = False, "TERMINAL_CUSTOM_HOOK"
                invocation += 1
                if not again:
                    break
                if invocation >= MAX_INVOCATIONS:
                    reason = "MAX_INVOCATIONS"
                    break
            if not self.stop(execution, reason, error):
                return bool(error)
            execution += 1

    def stop(self, execution, reason, error):
        """Run the Stop hooks; True re-enters the loop.  The first handler that continues hides the others."""
        for _, answer, _ in self.ask("Stop", executionNum=execution, terminationReason=reason, error=error, fullyIdle=True):
            die_at("stop")
            if answer.get("decision") in ("continue", "block"):
                if execution >= int(knob("STOP_CAP", "10")):
                    self.home.log("Stop decision ignored: too many continuations in a row")
                    return False
                if answer.get("reason"):
                    self.conversation.system("Stop hook blocked termination: " + answer["reason"], "Stop hook")
                else:
                    self.conversation.skip_answer = True
                return True
        die_at("stop")
        return False


# ---- agentapi -------------------------------------------------------------------------------------------------

class Api:
    """The loopback server behind `agy agentapi`.  Its address and secret reach tool shells only, never hooks."""

    def __init__(self, session):
        self.token = secrets.token_hex(16)
        self.wake_read, self.wake_write = os.pipe()
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer = 403, {"error": "bad csrf token"}
                if secrets.compare_digest(self.headers.get("x-codeium-csrf-token", ""), api.token):
                    request = json.loads(body)
                    if request["conversation_id"] != session.conversation.id:
                        status, answer = 404, {"error": "conversation not found"}
                    else:
                        session.mail.put("[Message] timestamp={} sender={} priority=MESSAGE_PRIORITY_HIGH content={}".format(
                            now(), request["sender"], request["content"]))
                        os.write(api.wake_write, b"m")
                        status, answer = 200, {"status": "sent"}
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def environment(self):
        return {"ANTIGRAVITY_LS_ADDRESS": "127.0.0.1:%d" % self.server.server_port, "ANTIGRAVITY_CSRF_TOKEN": self.token}


def agentapi(words):
    """`agy agentapi send-message [--title=T] <conversation id> <content>`; 1 and {"error": ...} when it cannot."""
    def fail(why):
        print(json.dumps({"error": why}))
        return 1

    address, token = os.environ.get("ANTIGRAVITY_LS_ADDRESS"), os.environ.get("ANTIGRAVITY_CSRF_TOKEN")
    if not address or not token:
        return fail("ANTIGRAVITY_LS_ADDRESS and ANTIGRAVITY_CSRF_TOKEN are not set")
    rest = [word for word in words[1:] if not word.startswith("--title")]
    if words[:1] != ["send-message"] or len(rest) != 2:
        return fail("usage: agy agentapi send-message [--title=T] <conversation_id> <content>")
    request = {"conversation_id": rest[0], "content": rest[1],
               "sender": os.environ.get("ANTIGRAVITY_CONVERSATION_ID", "unknown")}
    try:
        connection = http.client.HTTPConnection(address, timeout=5)
        connection.request("POST", "/", json.dumps(request), {"x-codeium-csrf-token": token})
        response = connection.getresponse()
        answer = response.read().decode()
    except OSError as bad:
        return fail(str(bad))
    print(answer)
    return 0 if response.status == 200 else 1


# ---- modes ----------------------------------------------------------------------------------------------------

class Stopped(BaseException):
    """SIGINT or SIGTERM: no Stop hook, exit 1."""


class TimedOut(BaseException):
    """--print-timeout ran out in the middle of a turn."""


def on_signal(*_):
    raise Stopped


def on_alarm(*_):
    raise TimedOut


def take_mail(session):
    """Put what agentapi delivered into the conversation; True if there was something."""
    found = False
    while not session.mail.empty():
        session.conversation.add("SYSTEM", "SYSTEM_MESSAGE", f"<SYSTEM_MESSAGE>\n{session.mail.get()}\n</SYSTEM_MESSAGE>")
        found = True
    return found


def wanted_conversation(home, flags):
    if flags.get("continue"):
        return home.last_conversations().get(os.getcwd())
    return flags.get("conversation")


def stdin_events():
    for line in sys.stdin:
        if line.strip():
            event = json.loads(line)
            if event.get("event") == "user":
                content = event["message"]["content"]
                yield content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def print_mode(home, flags):
    session = Session(home, flags)
    style = flags.get("output-format", "text")
    if flags.get("print", "").strip() == "/hooks" and not flags.get("disable-slash-commands"):
        session.hooks.reload()
        document = session.hooks.describe()
        print(json.dumps(document) if style != "text" else
              "\n".join(hook["name"] for hook in document["command"]["data"]["hooks"]))
        return 0
    started = time.monotonic()
    limit = flags.get("print-timeout", 300.0)
    partial = knob("PRINT_TIMEOUT_MODE", "partial" if at_least("1.1.28") else "error") == "partial"
    session.open(wanted_conversation(home, flags))
    if style == "stream-json":
        print(json.dumps({"event": "init", "conversation_id": session.conversation.id}), flush=True)
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, max(0.0, limit))
    failed = False
    try:
        for prompt in stdin_events() if flags.get("input-format") == "stream-json" else [flags.get("print", "")]:
            failed = session.turn(prompt)
            while take_mail(session):
                failed = session.turn()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TimedOut:
        if not partial:
            print("Error: timeout waiting for response", file=sys.stderr)
            return 1
        print(f"[agy] print timeout after {format_duration(limit)} with turn in progress; returning partial output",
              file=sys.stderr)
    if failed:
        print("AGY_ERROR: " + json.dumps({"message": knob("MODEL_ERROR")}), file=sys.stderr)
    elif session.denied:
        print('jetski: no output produced — a tool required the "command" permission; '
              "--dangerously-skip-permissions would grant it", file=sys.stderr)
    result = {"conversation_id": session.conversation.id, "status": "ERROR" if failed else "SUCCESS",
              "response": session.reply, "duration_seconds": round(time.monotonic() - started, 3),
              "num_turns": session.turns, "usage": {}, "denied_actions": session.denied}
    session.close()
    if style == "text":
        if session.reply:
            print(session.reply)
    else:
        print(json.dumps({"event": "result", **result} if style == "stream-json" else result, ensure_ascii=False))
    return (3 if at_least("1.2.6") else 1) if failed else 0


def interactive_mode(home, flags):
    """One prompt a line.  The conversation, and its lock, begin with the first prompt."""
    session = Session(home, flags)
    wanted = wanted_conversation(home, flags)
    waiting = [flags["prompt-interactive"]] if "prompt-interactive" in flags else []
    buffer, open_stdin = b"", True

    def show(turn_failed):
        print("AGY_ERROR: " + knob("MODEL_ERROR") if turn_failed else session.reply, flush=True)

    while waiting or open_stdin:
        if waiting:
            line = waiting.pop(0)
            command, _, rest = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                break
            if command in ("/new", "/resume"):
                session.close()
                session.conversation, wanted = None, rest or None
                if command == "/resume":
                    session.open(wanted)
            elif line.strip():
                if session.conversation is None:
                    session.open(wanted)
                show(session.turn(line))
                while take_mail(session):
                    show(session.turn())
            continue
        watched = [0] + ([session.api.wake_read] if session.api else [])
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready:
            data = os.read(0, 65536)
            open_stdin = bool(data)
            *lines, buffer = (buffer + data).split(b"\n")
            waiting += [line.decode("utf-8", "replace") for line in lines]
        if len(watched) > 1 and watched[1] in ready:
            os.read(watched[1], 65536)
            while session.conversation and take_mail(session):
                show(session.turn())
    session.close()
    return 0


def main(argv):
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    name = os.path.basename(argv[0])
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name[:15])                   # a process list shows the real program as `agy`
    except OSError:
        pass
    if argv[1:2] == ["agentapi"]:
        return agentapi(argv[2:])
    if argv[1:2] == ["help"]:
        print(usage_text(), end="")
        return 0
    if argv[1:2] and argv[1] in SUBCOMMANDS:
        print(f"{name}: {argv[1]} is not part of this stand-in", file=sys.stderr)
        return 1
    try:
        flags = parse_flags(argv[1:])
    except Usage as bad:
        print(f"{bad}\n{usage_text()}", end="", file=sys.stderr)
        return 2
    if flags.get("help"):
        print(usage_text(), end="", file=sys.stderr)
        return 0
    if flags.get("version"):
        print(version())
        return 0
    home = Home()
    if "log-file" in flags:
        home.log_path = os.path.abspath(flags["log-file"])
    try:
        if "print" in flags or "input-format" in flags:
            return print_mode(home, flags)
        return interactive_mode(home, flags)
    except Stopped:
        return 1


if __name__ == "__main__":
    status = main(sys.argv)
    sys.stdout.flush()
    os._exit(status)                                # as the real one: nothing waits for a hook's stray children
