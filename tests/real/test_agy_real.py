"""xmsg with Antigravity, the whole way: the command line, the hook, and the stand-in for `agy` as real processes.

Each test has a home of its own. What the model saw is the stand-in's log of contexts, one entry a model call.
"""
import json
import os
import re
import signal
import subprocess
import sys
import time
import unittest

from hosts import PATIENCE, wait_until
from realcase import PROJECT, SOURCE, TESTER, WRAPPER, XMSG
from selftest_agy import World

OLD, NEW = "1.2.9", "1.3.0"  # the stand-in takes a systemMessage from the second on


def hook_entries():
    sys.path.insert(0, str(PROJECT))
    try:
        import hook_install
    finally:
        sys.path.remove(str(PROJECT))
    return hook_install.entries("agy", str(WRAPPER))


class AgyCase(unittest.TestCase):
    version = NEW

    def setUp(self):
        self.world = World()
        self.addCleanup(self.world.close)
        self.world.install(hook_entries())
        self.store = os.path.join(self.world.home, "store")
        self.faults = os.path.join(self.store, "messages.sqlite3.faults")
        self.xmsg_env = {"XMSG_DB": os.path.join(self.store, "messages.sqlite3"), "XMSG_LANG": "en",
                         "XMSG_AGY_WAKE_COOLDOWN": "2"}
        self.knobs = {"VERSION": self.version}

    def tearDown(self):
        if os.path.exists(self.faults):
            with open(self.faults) as file:
                self.fail("swallowed faults:\n" + file.read())

    def __str__(self):
        return "agy %s: %s" % (self.version, self._testMethodName.replace("test_", "", 1).replace("_", " "))

    # ---- agy

    def agy(self, *argv, env=(), **knobs):
        """`agy ARGV` to its end, a Run."""
        return self.world.run(*argv, env={**self.xmsg_env, **dict(env)}, **{**self.knobs, **knobs})

    def conversation(self, prompt="hello there"):
        """A conversation that agy has begun and left."""
        return json.loads(self.agy("-p", prompt, "--output-format", "json").out)["conversation_id"]

    def open(self, *argv, **knobs):
        """An agy with a terminal's manners: one prompt a line. It runs until the test ends it."""
        environ = {**self.world.env(**{**self.knobs, **knobs}), **self.xmsg_env}
        child = subprocess.Popen([self.world.agy, *argv], cwd=self.world.project, env=environ, text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.world.children.append(child)
        return child

    def prompt(self, agy, text):
        """One turn; the reply."""
        agy.stdin.write(text + "\n")
        agy.stdin.flush()
        return agy.stdout.readline().strip()

    def leave(self, agy):
        agy.stdin.close()
        agy.wait(timeout=20 * PATIENCE)

    # ---- xmsg

    def xmsg(self, *arguments, status=0, env=TESTER, **knobs):
        done = subprocess.run([XMSG, *map(str, arguments)], cwd=self.world.project, text=True, capture_output=True,
                              timeout=20 * PATIENCE, env={**self.world.env(**{**self.knobs, **knobs}), **self.xmsg_env,
                                                          **dict(env)})
        self.assertEqual(status, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def send(self, session, text, *options, **more):
        """The number of a message that waits."""
        out = self.xmsg("send", session, text, *options, **more)
        return int(re.search(r"#(\d+)", out).group(1))

    def message(self, number):
        return json.loads(self.xmsg("show", number, "--json"))

    def wait_delivered(self, *numbers):
        for number in numbers:
            wait_until(lambda: self.message(number)["state"] == "delivered", "#%d to be delivered" % number,
                       context=lambda: self.xmsg("show", number))
            self.assertTrue(self.message(number)["confirmed_at"])

    def wait_idle(self, session):
        """Until no agy and no courier has the session any more."""
        path = os.path.join(self.store, "messages.sqlite3.hints", "wake", session)

        def idle():
            with open("/proc/locks") as file:
                held = file.read()
            return not self.world.locked(session) and ":%d " % os.stat(path).st_ino not in held
        wait_until(idle, "the session to be left alone")

    # ---- what the model saw

    def calls(self, session):
        """One text a model call of a session."""
        try:
            with open(self.world.contexts_path) as file:
                entries = [json.loads(line) for line in file]
        except FileNotFoundError:
            return []
        return ["\n".join(message["content"] for message in entry["messages"]) for entry in entries
                if entry["conversation_id"] == session]

    def times(self, session, text):
        """How often each model call of a session saw a text."""
        return [call.count(text) for call in self.calls(session)]

    def assert_no_output_dropped(self, but=()):
        path = os.path.join(self.world.cli, "log", "cli-fake.log")
        if os.path.exists(path):
            with open(path) as file:
                self.assertEqual([], [line for line in file if not any(word in line for word in but)])


class Hooks(AgyCase):
    """Delivery into a session that is open."""

    def start(self, **knobs):
        agy = self.open("--dangerously-skip-permissions", **knobs)
        self.prompt(agy, "begin")
        session = wait_until(lambda: [peer["session"] for peer in json.loads(self.xmsg("list", "--json"))["sessions"]],
                             "the session")[0]
        return agy, session

    def test_a_message_is_seen_by_the_turn_and_after_a_resume(self):
        agy, session = self.start(TOOL_ROUNDS=2)
        number = self.send(session, "the word alpha")
        self.assertIn("agy is running, next PreInvocation", self.xmsg("outbox"))
        self.prompt(agy, "go on")
        self.wait_delivered(number)
        self.leave(agy)
        before = len(self.calls(session))
        self.agy("--conversation", session, "-p", "and now")
        seen = self.times(session, "%s\nthe word alpha" % SOURCE)
        self.assertLessEqual(max(seen), 1, "two visible copies")
        if self.version == NEW:
            self.assertEqual([0] * 3 + [1] * (len(seen) - 3), seen)
            self.assertIn("did not write this", self.calls(session)[-1].split(SOURCE)[0][-120:])
        else:
            # What that build dropped at the first call came by the other shape at the second one.
            self.assertEqual([0, 0, 0, 0, 1, 0] + [0] * (len(seen) - 6), seen)
            later = self.send(session, "the word beta", "--no-direct")
            self.agy("--conversation", session, "-p", "more")
            self.assertEqual([0] * (len(seen)) + [1], self.times(session, "the word beta"))
            self.wait_delivered(later)
        self.assertGreater(len(self.calls(session)), before)

    def test_other_tools_hooks_in_any_order_and_absent_zero_fields_change_nothing(self):
        self.world.install({"other": self.world.events(PreInvocation={"injectSteps": [{"ephemeralMessage": "noise"}]}),
                            **hook_entries(), "third": self.world.events(PreInvocation=None, Stop={})})
        for seed in (1, 2, 3):
            with self.subTest(seed):
                agy, session = self.start(SEED=seed, OMIT_EMPTY=1, TOOL_ROUNDS=1)
                number = self.send(session, "word-%d" % seed)
                self.prompt(agy, "go on")
                self.wait_delivered(number)
                self.leave(agy)
                seen = self.times(session, "word-%d" % seed)
                self.assertEqual(1, max(seen))
                self.assertEqual(1 if self.version == NEW or seed == 1 else 0, seen[-1])

    def test_what_comes_in_the_last_call_is_taken_at_the_stop(self):
        agy, session = self.start(TURN_MS=600)
        agy.stdin.write("go on\n")
        agy.stdin.flush()
        calls = len(self.calls(session))
        wait_until(lambda: len(self.calls(session)) > calls, "the model call")
        number = self.send(session, "a late word")
        agy.stdout.readline()
        self.wait_delivered(number)
        self.assertEqual("Stop", self.message(number)["window"])
        self.assertEqual([0, 0, 1], self.times(session, "%s\na late word" % SOURCE))

    def test_stops_are_few_and_the_rest_waits_for_the_next_turn(self):
        self.xmsg_env["XMSG_MAX_PER_INJECT"] = "1"
        agy, session = self.start()
        numbers = [self.send(session, "word-%d." % number) for number in range(9)]
        self.prompt(agy, "go on")
        self.wait_delivered(*numbers[:7 if self.version == NEW else 6])
        states = [self.message(number)["state"] for number in numbers]
        self.assertEqual(["queued"] * 2, states[7:])
        self.prompt(agy, "and on")
        self.wait_delivered(*numbers)
        self.assertEqual(1, max(count for number in range(9) for count in self.times(session, "word-%d." % number)))

    def test_a_stop_with_an_error_keeps_the_message(self):
        agy, session = self.start()
        self.leave(agy)
        agy = self.open("--conversation", session, TURN_MS=700, MODEL_ERROR="quota")
        agy.stdin.write("go on\n")
        agy.stdin.flush()
        calls = len(self.calls(session))
        wait_until(lambda: len(self.calls(session)) > calls, "the model call")
        number = self.send(session, "kept")
        self.assertIn("AGY_ERROR", agy.stdout.readline())
        self.assertEqual("queued", self.message(number)["state"])
        self.leave(agy)
        self.agy("--conversation", session, "-p", "again")
        self.wait_delivered(number)

    def test_a_death_between_hook_and_model_is_unknown_and_resolved(self):
        agy, session = self.start()
        self.leave(agy)
        number = self.send(session, "lost", "--no-direct")
        self.assertEqual(-signal.SIGKILL, self.agy("--conversation", session, "-p", "x", DIE_AT="post-hook").rc)
        self.assertIn("UNKNOWN", self.xmsg("outbox"))
        self.agy("--conversation", session, "-p", "y")
        self.assertTrue(self.message(number)["unknown"], "never shown again by itself")
        self.assertEqual(0, sum(self.times(session, "lost")))
        self.xmsg("resolve", number, "--requeue")
        self.agy("--conversation", session, "-p", "z")
        self.wait_delivered(number)

    def test_a_death_in_the_model_call_is_settled_by_the_transcript(self):
        agy, session = self.start()
        self.leave(agy)
        self.xmsg_env["XMSG_AGY_WAKE_COOLDOWN"] = "0"
        number = self.send(session, "found", "--no-direct")
        agy = self.open("--conversation", session, TURN_MS=60000)
        agy.stdin.write("go\n")
        agy.stdin.flush()
        wait_until(lambda: self.message(number)["state"] != "queued" and len(self.calls(session)) == 2, "the model call")
        agy.kill()
        agy.wait()
        if self.version == NEW:
            self.wait_delivered(number)
        else:
            self.assertTrue(self.message(number)["unknown"], "that build had dropped it, and nothing went on without it")


class OldHooks(Hooks):
    version = OLD


class Wakes(AgyCase):
    """A session that has left is resumed, and its own hook takes the message."""

    def argv_of(self, session, **knobs):
        """The command line of the wake that is under way."""
        def found():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open("/proc/%s/cmdline" % pid) as file:
                        words = file.read().split("\0")[:-1]
                except OSError:
                    continue
                if "--conversation" in words and session in words:
                    return int(pid), words
        return wait_until(found, "the woken agy")

    def test_a_session_that_left_is_woken_and_has_the_message_once(self):
        session = self.conversation()
        number = self.send("hello there", "the secret word", env={**TESTER, "XMSG_AGY_WAKE_TIMEOUT": "20"}, TURN_MS=500)
        pid, words = self.argv_of(session)
        with open("/proc/%d/environ" % pid) as file:
            names = {pair.partition("=")[0] for pair in file.read().split("\0")}
        self.wait_delivered(number)
        self.wait_idle(session)
        self.assertEqual("20s", words[words.index("--print-timeout") + 1])
        self.assertFalse(any("secret" in word or "skip-permissions" in word for word in words), words)
        self.assertFalse({"XMSG_FROM", "XMSG_FROM_TOOL", "XMSG_FROM_SESSION"} & names)
        self.assertEqual([0, 1], self.times(session, "%s\nthe secret word" % SOURCE))
        story = self.xmsg("show", number)
        self.assertRegex(story, r"agy-wake started: pid %d, log .*agy-wake\.log" % pid)
        log = os.path.join(self.store, "agy-wake.log")
        self.assertEqual(0o600, os.stat(log).st_mode & 0o777)
        self.assert_no_output_dropped()

    def test_a_session_that_is_there_is_not(self):
        agy = self.open()
        self.prompt(agy, "hello there")
        out = self.xmsg("send", "hello there", "word")
        self.assertIn("agy is running", out)
        session = json.loads(self.xmsg("list", "--json"))["sessions"][0]["session"]
        self.assertFalse(os.path.exists(os.path.join(self.store, "agy-wake.log")))
        self.prompt(agy, "next")
        self.assertEqual([0, 1], self.times(session, "word"))

    def test_ten_racing_senders_wake_it_once(self):
        session = self.conversation()
        environ = {**self.world.env(VERSION=NEW, TURN_MS=4000), **self.xmsg_env, **TESTER}
        senders = [subprocess.Popen([XMSG, "send", session, "word-%d." % number], env=environ, cwd=self.world.project,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for number in range(10)]
        self.assertEqual([0] * 10, [sender.wait(timeout=30 * PATIENCE) for sender in senders])
        self.wait_delivered(*range(1, 11))
        self.wait_idle(session)
        with open(os.path.join(self.store, "agy-wake.log")) as file:
            self.assertEqual(1, file.read().count("== " + session))
        self.assertEqual([1] * 10, [self.times(session, "word-%d." % number)[-1] for number in range(10)])

    def test_a_second_message_within_the_cooldown_arrives_too(self):
        self.xmsg_env["XMSG_AGY_WAKE_COOLDOWN"] = "600"
        session = self.conversation()
        first = self.send(session, "one")
        self.wait_delivered(first)
        self.wait_idle(session)
        second = self.send(session, "two")
        self.wait_delivered(second)

    def test_a_message_at_the_very_end_of_a_wake_is_not_stranded(self):
        self.xmsg_env["XMSG_AGY_WAKE_COOLDOWN"] = "600"
        gate = os.path.join(self.world.root, "gate")
        held = "touch %s.reached; until [ -e %s ]; do sleep 0.05; done" % (gate, gate)
        session = self.conversation()
        # Another tool's Stop hook runs after ours in this order, when no hook of ours will run any more.
        self.world.install({**hook_entries(), "other": {"Stop": [self.world.entry("Stop", held)]}})
        seed = next(seed for seed in range(20) if self._ours_first(seed))
        first = self.send(session, "one", SEED=seed)
        wait_until(lambda: os.path.exists(gate + ".reached"), "the last hook of the wake")
        out = self.xmsg("send", session, "two")
        self.assertIn("agy is running", out)
        open(gate, "w").close()
        self.wait_delivered(first, 2)
        self.wait_idle(session)
        with open(os.path.join(self.store, "agy-wake.log")) as file:
            self.assertEqual(2, file.read().count("== " + session))

    def _ours_first(self, seed):
        import random
        dice = random.Random(str(seed))
        return dice.random() < dice.random()

    def test_a_build_that_drops_it_in_a_turn_without_a_stop_is_woken_once_more(self):
        self.knobs["VERSION"] = OLD
        session = self.conversation()
        # The tool is denied without permissions, and then no Stop hook runs.
        number = self.send(session, "word", TOOL_ROUNDS=1)
        self.wait_delivered(number)
        self.assertEqual([0, 0, 1], self.times(session, "word"))

    def test_a_death_of_the_woken_agy_is_unknown_and_not_repeated(self):
        session = self.conversation()
        number = self.send(session, "word", DIE_AT="post-hook")
        wait_until(lambda: self.message(number)["state"] == "hook-inflight", "the claim")
        self.wait_idle(session)
        self.assertTrue(self.message(number)["unknown"])
        self.assertEqual(1, len(self.calls(session)))

    def test_failures_are_told(self):
        session = self.conversation()
        self.assertIn("set XMSG_AGY_BIN", self.xmsg("send", session, "a", env={**TESTER, "XMSG_AGY_BIN": "/nowhere/agy"}))
        out = self.xmsg("send", session, "b", status=2, env={**TESTER, "XMSG_AGY_WAKE_TIMEOUT": "ten minutes"})
        self.assertEqual("", out)
        number = self.send(session, "c", env={**TESTER, "XMSG_AGY_WAKE_ARGS": "--no-such-flag"})
        wait_until(lambda: "agy-wake failed: it left with status 2" in self.xmsg("outbox"), "the failure")
        self.assertEqual("queued", self.message(number)["state"])
        self.wait_idle(session)

    def test_the_woken_sessions_own_send_is_agys_and_a_wake_holds_nobodys_output(self):
        session, other = self.conversation("hello there"), self.conversation("the other one")
        command = "%s send '%s' answer" % (XMSG, other)
        begin = time.monotonic()
        number = self.send(session, "question", TOOL_ROUNDS=1, TOOL=command,
                           env={**TESTER, "XMSG_AGY_WAKE_ARGS": "--dangerously-skip-permissions"})
        self.wait_delivered(number)
        answer = wait_until(lambda: [message for message in json.loads(self.xmsg(
            "outbox", "--all", "--json", env={}))["messages"] if message["body"] == "answer"], "the answer")[0]
        self.assertEqual(("agent", "agy", session), tuple(answer["from"][key] for key in ("kind", "host", "session")))
        self.wait_idle(session)
        self.wait_delivered(answer["id"])
        self.wait_idle(other)
        self.assertIn("[peer hello there · agy:%s" % session[:8], self.calls(other)[-1])
        self.assert_no_output_dropped()
        self.assertLess(time.monotonic() - begin, 30 * PATIENCE)


class FromInside(AgyCase):
    def test_agys_own_api_wakes_an_idle_session_at_once(self):
        agy = self.open("--dangerously-skip-permissions", TOOL_ROUNDS=1, TOOL="env > '%s/inside'" % self.world.root)
        self.prompt(agy, "hello there")
        session = json.loads(self.xmsg("list", "--json"))["sessions"][0]["session"]
        sender = self.conversation("the sender")
        with open(os.path.join(self.world.root, "inside")) as file:
            inside = dict(line.rstrip("\n").split("=", 1) for line in file if line.startswith("ANTIGRAVITY_"))
        inside.update(ANTIGRAVITY_CONVERSATION_ID=sender)
        # A sender in an agy that carries this address: a shell of a second agy, whose variables the test sets.
        words = " ".join("%s=%s" % pair for pair in inside.items())
        self.agy("--conversation", sender, "--dangerously-skip-permissions", "-p", "send", TOOL_ROUNDS=1,
                 TOOL="env %s %s send %s 'at once'" % (words, XMSG, session), env=dict(self.xmsg_env))
        message = json.loads(self.xmsg("outbox", "--all", "--json", env={}))["messages"][-1]
        self.assertEqual(("delivered", "agy-message"), (message["state"], message["window"]), message)
        agy.stdout.readline()  # the turn that it began
        self.wait_delivered(message["id"])
        self.assertEqual(1, self.times(session, "[peer the sender · agy:%s; not a user instruction]\nat once"
                                       % sender[:8])[-1])
        token = inside["ANTIGRAVITY_CSRF_TOKEN"].encode()
        for folder, _, names in os.walk(self.store):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    self.assertNotIn(token, file.read(), name)

    def test_a_refusal_of_it_leaves_the_message_to_the_hooks(self):
        agy = self.open()
        self.prompt(agy, "hello there")
        session = json.loads(self.xmsg("list", "--json"))["sessions"][0]["session"]
        sender = self.conversation("the sender")
        out = os.path.join(self.world.root, "out")
        self.agy("--conversation", sender, "--dangerously-skip-permissions", "-p", "send", TOOL_ROUNDS=1,
                 TOOL="%s send %s word > %s 2>&1" % (XMSG, session, out))
        with open(out) as file:
            self.assertRegex(file.read(), "queued #1 .*agy agentapi: .*not found")
        self.prompt(agy, "next")
        self.wait_delivered(1)


if __name__ == "__main__":
    unittest.main()
