#!/usr/bin/env python3
"""Proves that fake_agy.py keeps its contract: one line per check, grouped by contract point.

Run it from anywhere: `python3 selftest_agy.py`.  Everything happens in a temporary HOME; the stand-in runs as a
process, through a symlink named `agy`.  Exit status 1 when a check fails.
"""
import fcntl
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
WAIT = 20.0 * float(os.environ.get("XMSG_TEST_PATIENCE", "1"))
CHECKS = []                                 # (point, sentence, function)
UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def check(point, sentence):
    def register(function):
        CHECKS.append((point, sentence, function))
        return function
    return register


class Run:
    def __init__(self, done):
        self.rc, self.out, self.err = done.returncode, done.stdout, done.stderr


class World:
    """A home, a project, and hooks that write down what they were given."""

    def __init__(self):
        self.root = tempfile.mkdtemp(prefix="fake-agy-")
        self.home, self.bin, self.project = (os.path.join(self.root, name) for name in ("home", "bin", "project"))
        for directory in (self.home, self.bin, self.project):
            os.mkdir(directory)
        self.agy = os.path.join(self.bin, "agy")
        os.symlink(os.path.join(HERE, "fake_agy.py"), self.agy)
        os.symlink(sys.executable, os.path.join(self.bin, "python3"))
        self.cli = os.path.join(self.home, ".gemini", "antigravity-cli")
        self.log = os.path.join(self.root, "hooks.log")
        self.contexts_path = os.path.join(self.root, "contexts.jsonl")
        self.children = []

    def env(self, **knobs):
        return {"HOME": self.home, "PATH": self.bin + ":/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1",
                "FAKE_AGY_CONTEXT_LOG": self.contexts_path, **{"FAKE_AGY_" + key: str(value) for key, value in knobs.items()}}

    def run(self, *argv, stdin="", env=None, **knobs):
        return Run(subprocess.run([self.agy, *argv], cwd=self.project, env={**self.env(**knobs), **(env or {})}, text=True,
                                  input=stdin, capture_output=True, timeout=WAIT))

    def start(self, *argv, **knobs):
        child = subprocess.Popen([self.agy, *argv], cwd=self.project, env=self.env(**knobs), text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.children.append(child)
        return child

    def json(self, *argv, **knobs):
        return json.loads(self.run(*argv, "--output-format", "json", **knobs).out)

    def close(self):
        for child in self.children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout, child.stderr):
                pipe.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # hooks -------------------------------------------------------------------------------------------------
    def hook(self, tag, output=None, extra="", once=False):
        """A shell command that logs `tag` and its payload, then prints `output` (an object, or text as it stands)."""
        name = os.path.join(self.root, re.sub(r"\W", "_", tag))
        with open(name + ".out", "w", encoding="utf-8") as file:
            file.write(output if isinstance(output, str) else "" if output is None else json.dumps(output))
        say = f"cat '{name}.out'"
        if once:
            say = f"[ -e '{name}.done' ] || {{ {say}; : > '{name}.done'; }}"
        return (f"payload=$(cat); printf '%s\\t%s\\t%s\\t%s\\n' '{tag}' \"$PWD\" "
                f"\"$ANTIGRAVITY_CONVERSATION_ID,$ANTIGRAVITY_AGENT\" \"$payload\" >> '{self.log}'; {say}; {extra or ':'}")

    def events(self, *names, **outputs):
        """{event: [handler]} that logs every named event; outputs by event name."""
        return {name: [self.entry(name, self.hook(name, outputs.get(name)))] for name in [*names, *outputs]}

    @staticmethod
    def entry(event, command, **more):
        handler = {"type": "command", "command": command, **more}
        return {"matcher": "*", "hooks": [handler]} if event in ("PreToolUse", "PostToolUse") else handler

    def install(self, document, where=None):
        where = where or os.path.join(self.home, ".gemini", "config")
        os.makedirs(where, exist_ok=True)
        path = os.path.join(where, "hooks.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(document if isinstance(document, str) else json.dumps(document))
        return path

    # what happened -----------------------------------------------------------------------------------------
    def logged(self):
        try:
            with open(self.log, encoding="utf-8") as file:
                rows = [line.rstrip("\n").split("\t") for line in file]
        except FileNotFoundError:
            return []
        return [{"tag": tag, "cwd": cwd, "env": env, "raw": raw, "payload": json.loads(raw) if raw else None}
                for tag, cwd, env, raw in rows]

    def tags(self):
        return [row["tag"] for row in self.logged()]

    def payloads(self, tag):
        return [row["payload"] for row in self.logged() if row["tag"] == tag]

    def contexts(self):
        """One string per model call: everything the model saw."""
        try:
            with open(self.contexts_path, encoding="utf-8") as file:
                return ["\n".join(message["content"] for message in json.loads(line)["messages"]) for line in file]
        except FileNotFoundError:
            return []

    def transcript(self, conversation):
        path = os.path.join(self.cli, "brain", conversation, ".system_generated", "logs", "transcript_full.jsonl")
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def locked(self, conversation):
        path = os.path.join(self.cli, "presence", conversation + ".lock")
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def locks(self):
        try:
            return [name[:-5] for name in os.listdir(os.path.join(self.cli, "presence"))]
        except FileNotFoundError:
            return []

    def cli_log(self):
        try:
            with open(os.path.join(self.cli, "log", "cli-fake.log"), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""


def until(condition, what):
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("waited in vain for " + what)


def same(got, wanted):
    assert got == wanted, f"got {got!r}, wanted {wanted!r}"


def steps(**kinds):
    return {"injectSteps": [{key: {"systemMessage": text} if key == "systemMessage" else text}
                            for key, text in kinds.items()]}


# ---- 1 command line -------------------------------------------------------------------------------------------

@check(1, "-x v, --x v and -x=v are the same flag")
def _(w):
    for argv in (["-p", "hi", "-output-format", "json"], ["--print", "hi", "--output-format=json"],
                 ["-prompt=hi", "-output-format=json"]):
        same(json.loads(w.run(*argv).out)["response"], "ok")


@check(1, "an unknown flag, a flag without value and a stray word end with usage on stderr and 2")
def _(w):
    for argv, text in ((["-p", "x", "-nope"], "flag provided but not defined: -nope"),
                       (["--print"], "flag needs an argument: -print"), (["-p", "x", "stray"], "stray")):
        run = w.run(*argv)
        same((run.rc, run.out), (2, ""))
        assert text in run.err.splitlines()[0] and "Usage of agy" in run.err, run.err


@check(1, "a bare number for --print-timeout gives the exact line, usage, and 2")
def _(w):
    run = w.run("-p", "x", "--print-timeout", "20")
    same((run.rc, run.err.splitlines()[0]),
         (2, 'invalid value "20" for flag -print-timeout: time: missing unit in duration "20"'))


@check(1, "Go durations pass (10m, 1h30m, 1.5s, 250ms, 0), other spellings do not")
def _(w):
    for text in ("10m", "1h30m", "1.5s", "250000ms", "0", "90000000us"):
        same(w.run("-p", "x", "--print-timeout", text).rc, 0)
    for text in ("", "5x", "abc", "10 m", "600"):
        same(w.run("-p", "x", "--print-timeout", text).rc, 2)


@check(1, "-p takes the next word even if it looks like a flag")
def _(w):
    w.run("-p", "--version")
    assert "--version" in w.contexts()[0]


# ---- 2 version, read-back -------------------------------------------------------------------------------------

@check(2, "--version prints the bare number and nothing else")
def _(w):
    same(w.run("--version").out, "1.3.0\n")
    same((w.run("--version", VERSION="1.2.2").out, w.run("--version").rc), ("1.2.2\n", 0))


@check(2, "-p /hooks --output-format json reads the hooks back without a turn")
def _(w):
    path = w.install({"a": {"Stop": [w.entry("Stop", "true", timeout=7)]},
                      "b": {"enabled": False, "PreToolUse": [{"matcher": "run_.*", "hooks": [{"command": "x"}]}]}})
    document = w.json("-p", "/hooks")
    hooks = {hook["name"]: hook for hook in document["command"]["data"]["hooks"]}
    same(hooks["a"]["source"], path)
    same(hooks["a"]["actions"], [{"event": "Stop", "type": "command", "command": "true", "timeout_seconds": 7, "matcher": ""}])
    same((hooks["b"]["enabled"], hooks["b"]["actions"][0]["timeout_seconds"], hooks["b"]["actions"][0]["matcher"]),
         (False, 30, "run_.*"))
    same((w.contexts(), w.locks()), ([], []))


# ---- 3 presence lock ------------------------------------------------------------------------------------------

@check(3, "the lock is an exclusive flock held while the process lives, and the file stays")
def _(w):
    child = w.start("-p", "x", TURN_MS=60000)
    conversation = until(w.locks, "a lock file")[0]
    until(lambda: w.locked(conversation), "the lock to be held")
    child.kill()
    child.wait()
    same(w.locked(conversation), False)
    same(os.path.getsize(os.path.join(w.cli, "presence", conversation + ".lock")), 0)


@check(3, "the lock is visible in /proc/locks by device and inode")
def _(w):
    w.start("-p", "x", TURN_MS=60000)
    conversation = until(w.locks, "a lock file")[0]
    until(lambda: w.locked(conversation), "the lock")
    inode = os.stat(os.path.join(w.cli, "presence", conversation + ".lock")).st_ino
    with open("/proc/locks", encoding="ascii") as file:
        assert any("FLOCK" in line and "WRITE" in line and f":{inode} " in line for line in file)


@check(3, "a child that a hook leaves behind does not keep the lock")
def _(w):
    w.install({"x": {"PreInvocation": [w.entry("PreInvocation", "sleep 30 >/dev/null 2>&1 </dev/null & echo $! > pid")]}})
    conversation = w.json("-p", "x")["conversation_id"]
    with open(os.path.join(w.home, ".gemini", "config", "pid"), encoding="ascii") as file:
        pid = int(file.read())
    os.kill(pid, 0)
    same(w.locked(conversation), False)
    os.kill(pid, signal.SIGKILL)


@check(3, "a second process gets a remark and goes on; both write steps by index, so one overwrites the other")
def _(w):
    conversation = w.json("-p", "first")["conversation_id"]
    slow = w.start("--conversation", conversation, "-p", "slow", TURN_MS=1500, REPLY="from-slow")
    until(lambda: w.locked(conversation), "the lock")
    until(lambda: any(step["content"].find("slow") > 0 for step in w.transcript(conversation)), "the slow prompt")
    quick = w.run("--conversation", conversation, "-p", "quick", REPLY="from-quick", TURN_MS=3000)
    same(quick.rc, 0)
    slow.wait()
    assert "open in another" in quick.err, quick.err
    db = sqlite3.connect(os.path.join(w.cli, "conversations", conversation + ".db"))
    stored = [json.loads(payload)["content"] for (payload,) in db.execute("select payload from steps order by idx")]
    db.close()
    assert len(stored) < len(w.transcript(conversation)), stored


@check(3, "FAKE_AGY_NO_LOCK takes no lock")
def _(w):
    same((w.json("-p", "x", NO_LOCK=1)["status"], w.locks()), ("SUCCESS", []))


# ---- 4 conversations ------------------------------------------------------------------------------------------

@check(4, "a known conversation is resumed with its context")
def _(w):
    conversation = w.json("-p", "remember-me")["conversation_id"]
    assert re.fullmatch(UUID4, conversation)
    again = w.json("--conversation", conversation, "-p", "next")
    same(again["conversation_id"], conversation)
    assert "remember-me" in w.contexts()[1]


@check(4, "an unknown conversation is a warning and a new id")
def _(w):
    run = w.run("--conversation", "11111111-2222-4333-8444-555555555555", "-p", "x", "--output-format", "json")
    same((run.rc, run.err), (0, 'warning: conversation "11111111-2222-4333-8444-555555555555" not found\n'))
    assert json.loads(run.out)["conversation_id"] != "11111111-2222-4333-8444-555555555555"


@check(4, "an id with a slash never leaves the conversations folder")
def _(w):
    w.run("-p", "x")
    assert "not found" in w.run("--conversation", "../conversation_summaries", "-p", "x").err


@check(4, "-c resumes the last conversation of this folder")
def _(w):
    first = w.json("-p", "x")["conversation_id"]
    same(w.json("-c", "-p", "y")["conversation_id"], first)


@check(4, "interactive mode takes the lock at the first prompt, moves it with /new, frees it at the end of stdin")
def _(w):
    child = w.start()
    time.sleep(0.3)
    same(w.locks(), [])
    child.stdin.write("hello\n")
    child.stdin.flush()
    same(child.stdout.readline(), "ok\n")
    first, = w.locks()
    same(w.locked(first), True)
    child.stdin.write("/new\nagain\n")
    child.stdin.flush()
    same(child.stdout.readline(), "ok\n")
    second, = set(w.locks()) - {first}
    same((w.locked(first), w.locked(second)), (False, True))
    child.stdin.close()
    same((child.wait(WAIT), w.locked(second)), (0, False))


# ---- 5 storage ------------------------------------------------------------------------------------------------

@check(5, "steps database, summaries and last_conversations are written")
def _(w):
    conversation = w.json("-p", "a title", REPLY="the answer")["conversation_id"]
    db = sqlite3.connect(os.path.join(w.cli, "conversations", conversation + ".db"))
    same(db.execute("select idx, step_type from steps order by idx").fetchall(), [(0, 14), (1, 15)])
    same(db.execute("pragma journal_mode").fetchone(), ("wal",))
    db.close()
    db = sqlite3.connect(os.path.join(w.cli, "conversation_summaries.db"))
    same(db.execute("select conversation_id, title, preview, step_count, status, not_fully_idle from conversation_summaries")
         .fetchall(), [(conversation, "a title", "the answer", 2, "CASCADE_RUN_STATUS_IDLE", 0)])
    db.close()
    with open(os.path.join(w.cli, "cache", "last_conversations.json"), encoding="utf-8") as file:
        same(json.load(file), {os.path.realpath(w.project): conversation})


@check(5, "the transcript holds an injected step before the model is called")
def _(w):
    w.install({"x": w.events(PreInvocation=steps(systemMessage="needle-1"))})
    child = w.start("-p", "x", TURN_MS=60000)
    conversation = until(w.locks, "a lock file")[0]
    until(w.contexts, "the model call")
    found = [step for step in w.transcript(conversation) if "needle-1" in step["content"]]
    same([(step["source"], step["type"], step["status"]) for step in found], [("SYSTEM", "SYSTEM_MESSAGE", "DONE")])
    same(set(found[0]), {"step_index", "source", "type", "status", "created_at", "content"})
    child.kill()


@check(5, "the summary says RUNNING while a turn runs")
def _(w):
    w.start("-p", "x", TURN_MS=60000)
    until(w.contexts, "the model call")
    db = sqlite3.connect(os.path.join(w.cli, "conversation_summaries.db"))
    same(db.execute("select status from conversation_summaries").fetchall(), [("CASCADE_RUN_STATUS_RUNNING",)])
    db.close()


# ---- 6 which hooks --------------------------------------------------------------------------------------------

@check(6, "global, --add-dir and plug-in files count; other places do not")
def _(w):
    gemini = os.path.join(w.home, ".gemini")
    for tag, where in (("global", os.path.join(gemini, "config")), ("ws", os.path.join(w.project, ".agents")),
                       ("plugin", os.path.join(gemini, "config", "plugins", "p")), ("no1", gemini),
                       ("no2", os.path.join(gemini, "antigravity-cli"))):
        w.install({tag: {"Stop": [w.entry("Stop", w.hook(tag))]}}, where)
    w.run("-p", "x")
    same(sorted(w.tags()), ["global", "plugin"])
    w.run("-p", "x", "--add-dir", w.project)
    same(sorted(w.tags()), ["global", "global", "plugin", "plugin", "ws"])


@check(6, "interactive mode counts the current folder as a workspace")
def _(w):
    w.install({"ws": {"Stop": [w.entry("Stop", w.hook("ws"))]}}, os.path.join(w.project, ".agents"))
    w.run(stdin="hello\n")
    same(w.tags(), ["ws"])
    same(w.payloads("ws")[0]["workspacePaths"], [os.path.realpath(w.project)])


@check(6, "any defect drops the whole file, with one log line and exit 0")
def _(w):
    good = {"good": {"Stop": [w.entry("Stop", w.hook("good"))]}}
    bad = [{"$schema": "https://example.org"}, {"b": {"Stop": [{"command": "true", "timeout": 5.0}]}},
           {"b": {"Stop": [{"type": "http", "command": "true"}]}}, {"b": {"Stop": [{"type": "command"}]}},
           {"b": {"Stop": {"command": "true"}}}, {"b": {"enabled": "yes"}}]
    for number, defect in enumerate(bad):
        w.install({**good, **defect})
        same(w.run("-p", "x").rc, 0)
        same((w.tags(), w.cli_log().count("hooks file ignored")), ([], number + 1))
    for text in (json.dumps(good)[:-1], "// comment\n" + json.dumps(good), "[]"):
        w.install(text)
        w.run("-p", "x")
        same(w.tags(), [])
    w.install(good)
    w.run("-p", "x")
    same(w.tags(), ["good"])


@check(6, "unknown events, unknown handler fields, description and type prompt are tolerated")
def _(w):
    handler = w.entry("Stop", w.hook("good"), description="d", colour="red")
    w.install({"x": {"Stop": [handler, {"type": "prompt", "prompt": "p"}], "Notification": [{"command": "true"}], "note": "n"}})
    w.run("-p", "x")
    same(w.tags(), ["good"])


@check(6, "a byte order mark is accepted from 1.3.1 on")
def _(w):
    w.install("\ufeff" + json.dumps({"x": w.events("Stop")}))
    w.run("-p", "x", VERSION="1.3.0")
    same(w.tags(), [])
    w.run("-p", "x", VERSION="1.3.1")
    same(w.tags(), ["Stop"])


@check(6, "enabled:false skips; flat PreToolUse is ignored; the matcher must match the whole name")
def _(w):
    tool = lambda tag, matcher: {"matcher": matcher, "hooks": [{"command": w.hook(tag, {"decision": "allow"})}]}
    w.install({"off": {"enabled": False, **w.events("Stop")},
               "on": {"PreToolUse": [{"command": w.hook("flat")}, tool("half", "run"), tool("all", ""), tool("re", "run_.*")]}})
    w.run("-p", "x", TOOL_ROUNDS=1)
    same(w.tags(), ["all", "re"])


@check(6, "the same hook name in two files runs twice")
def _(w):
    w.install({"same": {"PreInvocation": [w.entry("", w.hook("one"))]}})
    w.install({"same": {"PreInvocation": [w.entry("", w.hook("two"))]}}, os.path.join(w.project, ".agents"))
    w.run("-p", "x", "--add-dir", w.project)
    same(sorted(w.tags()), ["one", "two"])


@check(6, "the order of hook names is random, and a seed fixes it")
def _(w):
    w.install({name: {"PreInvocation": [w.entry("", w.hook(name))]} for name in "abcdef"})
    orders = set()
    for seed in range(4):
        w.run("-p", "x", SEED=seed)
        w.run("-p", "x", SEED=seed)
        tags = w.tags()[-12:]
        same(tags[:6], tags[6:])
        orders.add("".join(tags[:6]))
    assert len(orders) > 1, orders


@check(6, "an edit counts from the next user turn, not within one")
def _(w):
    replace = os.path.join(w.home, ".gemini", "config", "hooks.json")
    w.install({"x": {"PreInvocation": [w.entry("", w.hook("old", extra=f"cp '{w.root}/new.json' '{replace}'"))]}})
    with open(os.path.join(w.root, "new.json"), "w", encoding="utf-8") as file:
        json.dump({"x": {"PreInvocation": [w.entry("", w.hook("new"))]}}, file)
    w.run("--dangerously-skip-permissions", stdin="one\ntwo\n", TOOL_ROUNDS=1)
    same(w.tags(), ["old", "old", "new", "new"])


# ---- 7 running a handler --------------------------------------------------------------------------------------

@check(7, "a handler runs under sh in the folder of its file with one variable added")
def _(w):
    w.install({"x": w.events("Stop")})
    conversation = w.json("-p", "x")["conversation_id"]
    row, = w.logged()
    same((row["cwd"], row["env"]), (os.path.realpath(os.path.join(w.home, ".gemini", "config")), conversation + ","))


@check(7, "the payload is camelCase with sorted keys and without the event's name")
def _(w):
    w.install({"x": w.events("SessionStart", "PreInvocation", "Stop")})
    conversation = w.json("-p", "x")["conversation_id"]
    brain = os.path.join(w.cli, "brain", conversation)
    common = {"conversationId": conversation, "workspacePaths": [], "modelName": "fake-model",
              "transcriptPath": os.path.join(brain, ".system_generated", "logs", "transcript_full.jsonl"),
              "artifactDirectoryPath": brain}
    same(w.payloads("SessionStart"), [common])
    same(w.payloads("PreInvocation"), [{**common, "invocationNum": 0, "initialNumSteps": 1}])
    same(w.payloads("Stop"), [{**common, "executionNum": 0, "terminationReason": "NO_TOOL_CALL", "error": "",
                               "fullyIdle": True}])
    for row in w.logged():
        same(list(row["payload"]), sorted(row["payload"]))
        assert row["tag"] not in row["raw"]


@check(7, "zero and empty fields can be left out, as protojson may")
def _(w):
    w.install({"x": w.events("PreInvocation")})
    w.run("-p", "x", OMIT_EMPTY=1)
    assert not {"invocationNum", "workspacePaths"} & set(w.payloads("PreInvocation")[0])


@check(7, "a hook that never reads its stdin is fine")
def _(w):
    w.install({"x": {"PreInvocation": [w.entry("", "echo '" + json.dumps(steps(systemMessage="unread")) + "'")]}})
    w.run("-p", "x")
    assert "unread" in w.contexts()[0]


@check(7, "exit 1, exit 2, text before the JSON, an array, an unknown key and a wrong type void the whole output")
def _(w):
    good = steps(systemMessage="VOID")
    cases = [(good, "exit 1"), (good, "exit 2"), ("hello\n" + json.dumps(good), ""), ([good], ""),
             ({**good, "extra": 1}, ""), ({"injectSteps": [*good["injectSteps"], {"ephemeralMessage": 5}]}, ""),
             ({"injectSteps": [*good["injectSteps"], {"toolCall": {}}]}, ""), ({"injectSteps": good["injectSteps"][0]}, ""),
             ({"injectSteps": [{"systemMessage": "VOID"}]}, ""), (json.dumps(good) + json.dumps(good), "")]
    for number, (output, extra) in enumerate(cases):
        w.install({"x": {"PreInvocation": [w.entry("", w.hook(f"case{number}", output if not isinstance(output, list)
                                                               else json.dumps(output), extra))]}})
        same((w.run("-p", "x").rc, "VOID" in w.contexts()[-1]), (0, False))
    same(w.cli_log().count("output dropped"), len(cases))


@check(7, "a timeout kills the shell only, drops the output, and the turn goes on")
def _(w):
    pid_file = os.path.join(w.root, "pid")
    w.install({"x": {"PreInvocation": [w.entry("", w.hook("slow", steps(systemMessage="LATE"),
                                                         f"sleep 25 & echo $! > '{pid_file}'; wait"), timeout=1)]}})
    started = time.monotonic()
    same(w.run("-p", "x").out, "ok\n")
    assert time.monotonic() - started < 15 and "LATE" not in w.contexts()[0]
    with open(pid_file, encoding="ascii") as file:
        pid = int(file.read())
    os.kill(pid, 0)                                 # the child outlived its shell
    os.kill(pid, signal.SIGKILL)


@check(7, "a background child that keeps stdout (or stderr) open costs about a second and the output")
def _(w):
    for number, redirect in enumerate(("2>/dev/null", ">/dev/null", ">/dev/null 2>&1")):
        w.install({"x": {"PreInvocation": [w.entry("", w.hook(f"h{number}", steps(systemMessage="HELD"),
                                                             f"sleep 4 </dev/null {redirect} &"))]}})
        started = time.monotonic()
        w.run("-p", "x")
        took = time.monotonic() - started
        same("HELD" in w.contexts()[-1], number == 2)
        assert number == 2 or 1.0 <= took < 4.0, took


@check(7, "what a hook says on stderr goes to the log only")
def _(w):
    w.install({"x": {"Stop": [w.entry("", "echo noise >&2")]}})
    run = w.run("-p", "x")
    same((run.out, run.err), ("ok\n", ""))
    assert "noise" in w.cli_log()


# ---- 8 order --------------------------------------------------------------------------------------------------

ALL = ("SessionStart", "PreInvocation", "PreToolUse", "PostToolUse", "PostInvocation", "Stop")


@check(8, "a turn with one tool runs the events in the documented order")
def _(w):
    w.install({"x": w.events(*ALL, PreToolUse={"decision": "allow"}, PostToolUse={})})
    conversation = w.json("-p", "x", TOOL_ROUNDS=1)["conversation_id"]
    same(w.tags(), ["SessionStart", "PreInvocation", "PreToolUse", "PostToolUse", "PostInvocation", "PreInvocation",
                    "PostInvocation", "Stop"])
    same([p["invocationNum"] for p in w.payloads("PreInvocation")], [0, 1])
    same([p["invocationNum"] for p in w.payloads("PostInvocation")], [0, 1])
    w.run("--conversation", conversation, "-p", "again")
    same(w.tags()[8:], ["PreInvocation", "PostInvocation", "Stop"])
    same(w.payloads("PreInvocation")[-1]["invocationNum"], 0)


@check(8, "initialNumSteps counts the steps so far and one context line is logged per model call")
def _(w):
    w.install({"x": w.events("PreInvocation")})
    w.run("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=2)
    same(([p["initialNumSteps"] for p in w.payloads("PreInvocation")], len(w.contexts())), ([1, 3, 5], 3))


@check(8, "tool payloads carry name, args and stepIdx; only PostToolUse has error, toolAction and toolSummary")
def _(w):
    w.install({"x": w.events("PreToolUse", "PostToolUse")})
    w.run("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=1, TOOL="exit 3")
    before, after = w.payloads("PreToolUse")[0], w.payloads("PostToolUse")[0]
    same((before["toolCall"]["name"], set(before["toolCall"]["args"]), before["stepIdx"]),
         ("run_command", {"CommandLine", "Cwd"}, 2))
    same((set(after["toolCall"]["args"]), after["error"], "error" in before),
         ({"CommandLine", "Cwd", "toolAction", "toolSummary"}, "exit status 3", False))


@check(8, "PreToolUse: empty output runs the tool; {}, a failure, no JSON and deny deny it")
def _(w):
    mark = os.path.join(w.root, "ran")
    for number, (output, extra, runs) in enumerate((("", "", True), ({"decision": "allow"}, "", True), ({}, "", False),
                                                    ("", "exit 1", False), ("nonsense", "", False),
                                                    ({"decision": "deny", "reason": "r"}, "", False))):
        w.install({"x": {"PreToolUse": [w.entry("PreToolUse", w.hook(f"p{number}", output, extra))]}})
        same(w.run("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=1, TOOL=f": > '{mark}'").out, "ok\n")
        same((number, os.path.exists(mark)), (number, runs))
        if runs:
            os.unlink(mark)


@check(8, "PostInvocation: force_continue re-enters at once without a Stop; terminate ends the turn")
def _(w):
    w.install({"x": {**w.events("Stop"), "PostInvocation": [w.entry("", w.hook(
        "again", {"terminationBehavior": "force_continue", **steps(systemMessage="more")}, once=True))]}})
    w.run("-p", "x")
    same((w.tags(), len(w.contexts())), (["again", "again", "Stop"], 2))
    assert "more" not in w.contexts()[0] and "more" in w.contexts()[1]
    w.install({"x": w.events("Stop", PostInvocation={"terminationBehavior": "terminate"})})
    w.run("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=3)
    same(([p["terminationReason"] for p in w.payloads("Stop")][-1], len(w.contexts())), ("TERMINAL_CUSTOM_HOOK", 3))


# ---- 9 what the model sees ------------------------------------------------------------------------------------

def seen(w, output):
    """In which of three model calls (two of one turn, one after resume) does the model see `MARK`?"""
    w.install({"x": {"PreInvocation": [w.entry("", w.hook("inject", output, once=True))]}})
    conversation = w.json("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=1)["conversation_id"]
    w.run("--conversation", conversation, "-p", "next")
    return conversation, ["MARK" in context for context in w.contexts()]


@check(9, "ephemeralMessage is seen in one model call only, unframed, and is in the transcript")
def _(w):
    conversation, calls = seen(w, steps(ephemeralMessage="MARK"))
    same(calls, [True, False, False])
    assert w.contexts()[0].endswith("\nMARK")
    same([step["type"] for step in w.transcript(conversation) if step["content"] == "MARK"], ["EPHEMERAL_MESSAGE"])


@check(9, "systemMessage is seen in every later call and after resume, framed as not the user's")
def _(w):
    same(seen(w, steps(systemMessage="MARK"))[1], [True, True, True])
    assert re.search(r"<SYSTEM_MESSAGE>\n\[.*user did not write.*\]\nMARK\n</SYSTEM_MESSAGE>", w.contexts()[0])


@check(9, "userMessage is seen in every later call, dressed as a user's request")
def _(w):
    same(seen(w, steps(userMessage="MARK"))[1], [True, True, True])
    assert "<USER_REQUEST>\nMARK\n</USER_REQUEST>" in w.contexts()[0]


@check(9, "injected text is not escaped")
def _(w):
    body = "MARK</SYSTEM_MESSAGE><USER_REQUEST>&amp;"
    seen(w, steps(systemMessage=body))
    assert body in w.contexts()[0]


@check(9, "a step over 49,152 bytes is cut with a note, whole characters only; userMessage is not cut")
def _(w):
    for kind in ("systemMessage", "ephemeralMessage"):
        for text, missing in (("a" * 49152, 0), ("a" * 49153, 1), ("é" * 30000, 60000 - 49152)):
            w.install({"x": w.events(PreInvocation=steps(**{kind: text}))})
            w.run("-p", "x")
            same(f"<truncated {missing} bytes>" in w.contexts()[-1], missing > 0)
            same(w.contexts()[-1].count(text[0] * (49152 // len(text[0].encode()))), 1)
    w.install({"x": w.events(PreInvocation=steps(userMessage="b" * 60000))})
    w.run("-p", "x")
    assert "b" * 60000 in w.contexts()[-1]


@check(9, "below 1.3.0 systemMessage is an unknown key and voids the output; ephemeral still works")
def _(w):
    w.install({"x": w.events(PreInvocation=steps(systemMessage="MARK"))})
    w.run("-p", "x", VERSION="1.2.7")
    w.install({"x": w.events(PreInvocation=steps(ephemeralMessage="MARK"))})
    w.run("-p", "x", VERSION="1.2.7")
    same(["MARK" in context for context in w.contexts()], [False, True])


@check(9, "half a surrogate pair in a step voids the output")
def _(w):
    w.install({"x": w.events(PreInvocation='{"injectSteps":[{"ephemeralMessage":"MARK\\ud800"}]}')})
    w.run("-p", "x")
    assert "MARK" not in w.contexts()[0]


@check(9, "what SessionStart injects is there in the first call, and it runs once per conversation")
def _(w):
    w.install({"x": w.events(SessionStart=steps(systemMessage="MARK"))})
    conversation = w.json("-p", "x")["conversation_id"]
    w.run("--conversation", conversation, "-p", "y")
    same((w.tags(), ["MARK" in context for context in w.contexts()]), (["SessionStart"], [True, True]))


# ---- 10 Stop --------------------------------------------------------------------------------------------------

@check(10, "continue and block re-enter with the reason as a system message; numbers go on")
def _(w):
    for decision in ("continue", "block"):
        w.install({"x": {**w.events("PreInvocation"), "Stop": [w.entry("", w.hook(
            "Stop", {"decision": decision, "reason": "because-" + decision}, once=True))]}})
        conversation = w.json("-p", "x")["conversation_id"]
        assert "because-" + decision in w.contexts()[-1] and "because-" + decision not in w.contexts()[-2]
        same([p["executionNum"] for p in w.payloads("Stop")][-2:], [0, 1])
        same([p["invocationNum"] for p in w.payloads("PreInvocation")][-2:], [0, 1])
        same([step["type"] for step in w.transcript(conversation) if "because" in step["content"]], ["SYSTEM_MESSAGE"])
        os.unlink(os.path.join(w.root, "Stop.done"))


@check(10, "without a reason the next call has no new text and misses the previous answer")
def _(w):
    w.install({"x": {"Stop": [w.entry("", w.hook("Stop", {"decision": "continue"}, once=True))]}})
    w.run("-p", "x", REPLY="the-answer")
    same(w.contexts()[1], w.contexts()[0])


@check(10, "ten continuations are honoured, the eleventh is not; the cap can be set")
def _(w):
    w.install({"x": w.events(Stop={"decision": "continue", "reason": "r"})})
    same((w.run("-p", "x").rc, len(w.contexts()), len(w.tags())), (0, 11, 11))
    w.run("-p", "x", STOP_CAP=2)
    same(len(w.contexts()), 11 + 3)


@check(10, "the first handler that continues hides the others")
def _(w):
    w.install({"x": {"Stop": [w.entry("", w.hook("first", {"decision": "continue", "reason": "r"}, once=True)),
                              w.entry("", w.hook("second"))]}})
    w.run("-p", "x")
    same(w.tags(), ["first", "first", "second"])


@check(10, "injectSteps, exit 1 or exit 2 void a Stop decision; {} and other decisions allow the stop")
def _(w):
    good = {"decision": "continue", "reason": "r"}
    for number, (output, extra) in enumerate((({**good, **steps(ephemeralMessage="e")}, ""), (good, "exit 1"),
                                              (good, "echo r >&2; exit 2"), ({}, ""), ({"decision": "stop"}, ""), ("", ""))):
        w.install({"x": {"Stop": [w.entry("", w.hook(f"s{number}", output, extra))]}})
        w.run("-p", "x")
        same(len(w.contexts()), number + 1)


# ---- 11 endings -----------------------------------------------------------------------------------------------

@check(11, "text, json and stream-json answers")
def _(w):
    same(w.run("-p", "x", REPLY="héllo").out, "héllo\n")
    document = w.json("-p", "x")
    same((document["status"], document["response"], document["num_turns"], document["denied_actions"]),
         ("SUCCESS", "ok", 1, []))
    assert set(document) == {"conversation_id", "status", "response", "duration_seconds", "num_turns", "usage",
                             "denied_actions"}
    lines = [json.loads(line) for line in w.run("-p", "x", "--output-format", "stream-json").out.splitlines()]
    same(([line["event"] for line in lines], lines[-1]["response"]), (["init", "result"], "ok"))


@check(11, "stream-json input is one turn per user event")
def _(w):
    events = "".join(json.dumps({"event": "user", "message": {"content": text}}) + "\n" for text in ("one", "two"))
    run = w.run("--input-format", "stream-json", "--output-format", "json", stdin=events)
    same((json.loads(run.out)["num_turns"], len(w.contexts())), (2, 2))


@check(11, "SIGINT and SIGTERM: exit 1 and no Stop hook")
def _(w):
    w.install({"x": w.events("PreInvocation", "Stop")})
    for number, name in enumerate((signal.SIGINT, signal.SIGTERM)):
        child = w.start("-p", "x", TURN_MS=60000)
        until(lambda: len(w.contexts()) > number, "the model call")
        child.send_signal(name)
        same(child.wait(WAIT), 1)
    same(w.tags(), ["PreInvocation", "PreInvocation"])


@check(11, "a model error: Stop with ERROR and the text, then AGY_ERROR on stderr and 3")
def _(w):
    w.install({"x": w.events("Stop")})
    run = w.run("-p", "x", MODEL_ERROR="quota gone")
    same((run.rc, run.out), (3, ""))
    same(json.loads(run.err.removeprefix("AGY_ERROR: ")), {"message": "quota gone"})
    same([(p["terminationReason"], p["error"]) for p in w.payloads("Stop")], [("ERROR", "quota gone")])
    same(w.run("-p", "x", MODEL_ERROR="e", VERSION="1.2.5").rc, 1)


@check(11, "continue after an ERROR is honoured and repeats the failing call")
def _(w):
    w.install({"x": {"Stop": [w.entry("", w.hook("Stop", {"decision": "continue", "reason": "burnt"}, once=True))]}})
    same((w.run("-p", "x", MODEL_ERROR="e").rc, len(w.contexts()), len(w.tags())), (3, 2, 2))


@check(11, "print timeout: partial output and 0 from 1.1.28 on, an error and 1 before; 0 means none")
def _(w):
    w.install({"x": w.events("Stop")})
    run = w.run("-p", "x", "--print-timeout", "700ms", TURN_MS=60000)
    same((run.rc, run.out, run.err.strip()),
         (0, "", "[agy] print timeout after 700ms with turn in progress; returning partial output"))
    run = w.run("-p", "x", "--print-timeout", "700ms", TURN_MS=60000, VERSION="1.1.27")
    same((run.rc, run.err.strip()), (1, "Error: timeout waiting for response"))
    same(w.run("-p", "x", "--print-timeout", "1s", TURN_MS=60000, PRINT_TIMEOUT_MODE="error").rc, 1)
    same(w.tags(), [])
    same(w.run("-p", "x", "--print-timeout", "0s", TURN_MS=300).rc, 0)


# ---- 12 and 13 tools ------------------------------------------------------------------------------------------

@check(12, "a tool without permission is denied: note on stderr, denied_actions, no Stop, 0")
def _(w):
    w.install({"x": w.events("Stop")})
    mark = os.path.join(w.root, "ran")
    run = w.run("-p", "x", "--output-format", "json", TOOL_ROUNDS=1, TOOL=f": > '{mark}'")
    document = json.loads(run.out)
    same((run.rc, document["response"], document["denied_actions"], os.path.exists(mark)),
         (0, "", [{"tool": "run_command", "permission": "command"}], False))
    assert 'jetski: no output produced — a tool required the "command" permission' in run.err
    same(w.tags(), [])


@check(13, "a tool is a real shell command that knows the conversation")
def _(w):
    out = os.path.join(w.root, "env")
    conversation = w.json("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=1,
                          TOOL=f"env > '{out}'; echo tool-said-this")["conversation_id"]
    with open(out, encoding="utf-8") as file:
        env = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    same([env["ANTIGRAVITY_" + name] for name in ("AGENT", "CONVERSATION_ID", "TRAJECTORY_ID")],
         ["1", conversation, conversation])
    assert "tool-said-this" in w.contexts()[1]


# ---- 14 crashes, process name ---------------------------------------------------------------------------------

@check(14, "attach, pre, post-hook and stop kill the process there, and the kernel frees the lock")
def _(w):
    w.install({"x": w.events("PreInvocation", "Stop", PreInvocation=steps(systemMessage="MARK"))})
    for point, tags, calls in (("attach", [], 0), ("pre", [], 0), ("post-hook", ["PreInvocation"], 0),
                               ("stop", ["PreInvocation", "Stop"], 1)):
        before, calls_before, known = len(w.tags()), len(w.contexts()), set(w.locks())
        same(w.run("-p", "x", DIE_AT=point).rc, -signal.SIGKILL)
        same((point, w.tags()[before:], len(w.contexts()) - calls_before), (point, tags, calls))
        conversation, = set(w.locks()) - known
        same(w.locked(conversation), False)
        if point == "post-hook":
            assert not any("MARK" in step["content"] for step in w.transcript(conversation))


@check(14, "the turn lasts as long as asked and the process is called agy")
def _(w):
    child = w.start("-p", "x", TURN_MS=60000)
    until(w.contexts, "the model call")
    with open(f"/proc/{child.pid}/comm", encoding="utf-8") as file:
        same(file.read(), "agy\n")
    started = time.monotonic()
    w.run("-p", "x", TURN_MS=400)
    assert time.monotonic() - started >= 0.4


# ---- 15 agentapi ----------------------------------------------------------------------------------------------

@check(15, "agentapi without the two variables: 1 and an error object; hooks do not get them")
def _(w):
    run = w.run("agentapi", "send-message", "id", "text")
    same((run.rc, list(json.loads(run.out))), (1, ["error"]))
    w.install({"x": {"PreInvocation": [w.entry("", f"env > '{w.root}/env'")]}})
    w.run("-p", "x")
    with open(os.path.join(w.root, "env"), encoding="utf-8") as file:
        assert "ANTIGRAVITY_LS_ADDRESS" not in file.read()


@check(15, "a message sent during a turn becomes a system message of the next turn")
def _(w):
    w.run("-p", "x", "--dangerously-skip-permissions", TOOL_ROUNDS=1,
          TOOL='[ -e sent ] || { : > sent; agy agentapi send-message --title=t "$ANTIGRAVITY_CONVERSATION_ID" from-a-peer; }')
    found = [bool(re.search(r"\[Message\] timestamp=\S+ sender=" + UUID4 + r" priority=MESSAGE_PRIORITY_HIGH "
                            r"content=from-a-peer", context)) for context in w.contexts()]
    same(found[:3], [False, False, True])


@check(15, "an idle interactive session wakes for a message; a wrong token or conversation is refused")
def _(w):
    env_file = os.path.join(w.root, "env")
    child = w.start("--dangerously-skip-permissions", TOOL_ROUNDS=1, TOOL=f"env > '{env_file}'")
    child.stdin.write("hello\n")
    child.stdin.flush()
    same(child.stdout.readline(), "ok\n")
    with open(env_file, encoding="utf-8") as file:
        env = {key: value for key, _, value in (line.rstrip("\n").partition("=") for line in file)
               if key.startswith("ANTIGRAVITY_")}
    wrong = {**env, "ANTIGRAVITY_CSRF_TOKEN": "0" * 32}
    same(w.run("agentapi", "send-message", env["ANTIGRAVITY_CONVERSATION_ID"], "no", env=wrong).rc, 1)
    same(w.run("agentapi", "send-message", "another-id", "no", env=env).rc, 1)
    same(w.run("agentapi", "send-message", env["ANTIGRAVITY_CONVERSATION_ID"], "wake-up", env=env).rc, 0)
    same(child.stdout.readline(), "ok\n")
    assert "wake-up" in w.contexts()[-1]


def main():
    only = sys.argv[1:]
    passed = failed = 0
    for point, sentence, function in CHECKS:
        if only and str(point) not in only:
            continue
        world = World()
        try:
            function(world)
            print(f"ok   {point:2}  {sentence}", flush=True)
            passed += 1
        except Exception:
            print(f"FAIL {point:2}  {sentence}\n{traceback.format_exc()}", flush=True)
            failed += 1
        finally:
            world.close()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
