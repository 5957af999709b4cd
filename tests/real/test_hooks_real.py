"""Hook delivery on real hosts: what the model saw is read from the scripted model server's log.

Every send here says --no-direct: the hooks alone carry the message.
"""
import random
import re
import shlex
import subprocess
import threading
import time
import uuid

from hosts import PASTE_PAUSE, CodexDaemon, CodexHost, wait_until
from install_hosts import install
from model_server import call, directive, say, shell
from realcase import (SOURCE, TESTER, TESTER_SESSION, XMSG, Gate, RealCase, context_of, install_xmsg,
                      per_version, told_by, xmsg)

START_OFFSETS = (0, 0.2, 0.4, 0.6, 0.8, 1.0)  # seconds after SessionStart's hooks began
STOPS_A_TURN = 3


def chinese(characters):
    """Exactly that many Chinese characters, which no other call returns."""
    start = random.randrange(1 << 20)
    return "".join(chr(0x4E00 + (start + n * n) % 0x5000) for n in range(characters))


def xmsg_command(*arguments):
    """A shell command that runs xmsg, by absolute path: Codex's shell may have another PATH."""
    return " ".join(shlex.quote(str(word)) for word in (XMSG,) + arguments)


def start_subagent(kind, errand):
    """The step with which a model starts a subagent, whose prompt is "errand" and this directive."""
    if kind == "claude":
        return call("Agent", description="errand", prompt="errand " + errand, subagent_type="general-purpose")
    return call("spawn_agent", message="errand " + errand)


class OneSession(RealCase):
    """A session that all tests of the class share, restarted after a failure."""

    kind = None
    spoiled = False

    @classmethod
    def set_up_hosts(cls):
        cls.host = cls.open_host(cls.kind)
        cls.host.prompt("good morning")
        cls.host.wait_idle()

    def setUp(self):
        if self.spoiled:
            type(self).spoiled = False
            self.host.start()
            self.host.prompt("good morning again")
        self.host.wait_idle()

    def resume(self, session):
        """Starts the host again in an earlier conversation."""
        self.host.start(*{"claude": ["--resume", session], "codex": ["resume", session]}[self.kind])

    def enter_gate(self, *after):
        """A turn that is in a tool call now, followed by these steps."""
        gate = Gate(self.home)
        self.host.prompt("work " + directive(shell(gate.command), *(after or (say("done"),))))
        gate.wait_reached()
        return gate

    def clear(self):
        """The user's /clear."""
        self.host.press("-l", "/clear")
        time.sleep(PASTE_PAUSE)
        self.host.press("Enter")

    def other_tool_is_slow(self, event, seconds):
        file = self.home.root / ("%s.sleep" % event)
        file.write_text(str(seconds))
        self.addCleanup(file.unlink)


class EveryHost:
    """What holds for either host."""

    def test_a_message_sent_while_a_tool_runs_is_in_the_next_request(self):
        gate, word = self.enter_gate(), self.word()
        message = self.send(self.host, word)
        time.sleep(1.5)  # the watched file is seen to change by now, but the session is busy
        self.assertEqual(self.shown(message)["state"], "queued")
        gate.open()
        self.host.wait_idle()
        told = next(text for text in map(told_by, self.requests(self.host)) if gate.over in text)
        self.assertTrue(SOURCE + "\n" + word in told, context_of(self.host, word))
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "PostToolUse")

    def test_a_message_before_the_end_of_a_turn_restarts_it_exactly_once(self):
        word, before = self.word(), len(self.requests(self.host))
        self.host.prompt("talk " + directive(say("slowly", slow=2), say("a reply to it")))
        self.wait_replying(self.host, before)
        message = self.send(self.host, word)
        self.host.wait_seen(word)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assertEqual(len(self.requests(self.host)) - before, 2)
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "Stop")

    def test_a_message_waiting_at_the_start_is_seen_with_the_first_prompt(self):
        session, word = self.host.session_id, self.word()
        self.host.stop()
        message = self.send(session, word)
        self.resume(session)
        time.sleep(3)  # nothing may take it away in the meantime: no turn has begun
        before = len(self.requests(self.host))
        self.host.prompt("hello again")
        self.host.wait_idle()
        self.assertTrue(word in told_by(self.requests(self.host)[before]), context_of(self.host, word))
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "SessionStart", "UserPromptSubmit")

    def test_a_subagents_tool_calls_take_nothing(self):
        word, mark = self.word(), self.word()
        inner, outer = Gate(self.home), Gate(self.home)
        errand = directive(shell(inner.command), shell("echo errand-$((40 + 2))"), say("errand done"))
        delegate = start_subagent(self.kind, errand)
        self.host.prompt(mark + " " + directive(delegate, shell(outer.command), say("all done")))
        inner.wait_reached()
        outer.wait_reached()
        message = self.send(self.host, word)
        inner.open()
        wait_until(lambda: any("errand-42" in told for told in self.errands(mark)),
                   "the errand's second tool call", context=self.host.screen)
        self.assertEqual(self.shown(message)["state"], "queued")
        outer.open()
        self.host.wait_seen(word)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assertEqual([told for told in self.errands(mark) if word in told], [])
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "PostToolUse")

    def errands(self, mark):
        """What the subagent's model heard: a conversation with the task, without the session's prompt."""
        every = [told_by(request) for request in self.host.log.requests() if request["session"]]
        return [told for told in every if "errand MODEL-STEPS" in told and mark not in told]

    def test_a_message_during_another_tools_slow_stop_hook_is_not_stranded(self):
        self.other_tool_is_slow("Stop", 4)
        word, before = self.word(), len(self.stops())
        self.host.prompt("a short turn")
        wait_until(lambda: len(self.stops()) > before, "the other tool's hook", context=self.host.screen)
        time.sleep(1)  # xmsg's own hook at this Stop has come and gone
        message = self.send(self.host, word)
        self.host_goes_on_after_the_stop(word)
        self.host.wait_idle()
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message)

    def stops(self):
        log = self.home.root / "other-tool.log"
        return [line for line in log.read_text().splitlines() if line == "Stop"] if log.exists() else []

    def test_twenty_sends_in_a_row_arrive_in_order(self):
        gate = self.enter_gate(say("done"), say("done"), say("done"))
        words = [self.word() for _ in range(20)]
        sender = " && ".join("%s >/dev/null" % xmsg_command("send", "--no-direct", self.host.session_id, word)
                             for word in words)
        self.run_as_tester(sender)
        gate.open()
        self.host.wait_seen(words[-1])
        self.host.wait_idle()
        seen = self.host.seen()
        self.assertEqual(sorted(words, key=seen.index), words)
        for word in words:
            self.assert_seen_once(self.host, word)

    def run_as_tester(self, command):
        done = subprocess.run(["/bin/sh", "-c", command], env=dict(self.home.env, **TESTER), text=True,
                              capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def send_long(self):
        """8,000 Chinese characters and, behind them, a short message."""
        self.long, self.short = chinese(8000), self.word()
        return self.send(self.host, self.long), self.send(self.host, self.short)

    def assert_long_was_shown(self, long, short, *windows):
        """The long one came whole, or cut with a line that says how to read it; the short one came too."""
        self.host.wait_seen(self.short)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assert_delivered(long, *windows)
        self.assert_delivered(short)
        self.assert_seen_once(self.host, self.short)
        whole = xmsg(self.home, "inbox", long["id"], env=self.host.child_variables())
        self.assertTrue(self.long in whole, whole[-300:])
        head = "%s\n%s" % (SOURCE, self.long[:300])
        self.assertEqual(self.host.times_seen(head), 1, context_of(self.host, self.long[:60]))
        self.assertFalse("truncated output" in self.host.seen(), "cut by the host")
        if self.kind == "claude":
            self.assertEqual(self.host.times_seen(self.long), 1)
        else:
            self.assertEqual(self.host.times_seen("xmsg inbox %s" % long["id"]), 1)
            shown, missing = self.host.seen().partition(SOURCE + "\n" + self.long[:300])[2].split("\n")[:2]
            shown = self.long[:300] + shown
            self.assertTrue(self.long.startswith(shown), "not the beginning of the text")
            self.assertGreater(len(shown), 2500)
            self.assertIn(str(8000 - len(shown)), missing)

    def test_8000_chinese_characters_pass_PreToolUse(self):
        before = len(self.requests(self.host))
        self.host.prompt("work " + directive(shell("echo worked", slow=3), say("done")))
        self.wait_replying(self.host, before)
        long, short = self.send_long()
        self.assert_long_was_shown(long, short, "PreToolUse")

    def test_8000_chinese_characters_pass_PostToolUse(self):
        gate = self.enter_gate()
        long, short = self.send_long()
        gate.open()
        self.assert_long_was_shown(long, short, "PostToolUse")

    def test_8000_chinese_characters_pass_Stop(self):
        before = len(self.requests(self.host))
        self.host.prompt("talk " + directive(say("slowly", slow=3), say("a reply to it")))
        self.wait_replying(self.host, before)
        long, short = self.send_long()
        self.assert_long_was_shown(long, short, "Stop")


class ClaudeIsWoken(EveryHost, OneSession):
    """Claude Code with its wake-ups on."""

    kinds = ("claude",)
    kind = "claude"

    def host_goes_on_after_the_stop(self, word):
        self.host.wait_seen(word, timeout=15)

    def test_an_idle_session_that_never_had_a_prompt_is_woken_and_answers(self):
        self.host.start()
        time.sleep(3)  # the second look after SessionStart is over: only the watched file is left
        self.assertEqual(self.requests(self.host), [])
        answer, word = self.word(), self.word()
        reply = xmsg_command("send", "--no-direct", "--force", TESTER_SESSION, answer)
        message = self.send(self.host, word + " " + directive(shell(reply), say("answered")))
        self.host.wait_seen(word)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assert_delivered(message, "FileChanged")
        self.assert_seen_once(self.host, message["body"])
        self.assertEqual([one["from"]["session"] for one in self.sent(answer)], [self.host.session_id])

    def test_an_idle_session_is_woken_by_one_message_after_the_other(self):
        words = [self.word() for _ in range(3)]
        for word in words:
            message = self.send(self.host, word)
            self.host.wait_seen(word)
            self.host.wait_idle()
            self.assert_delivered(message, "FileChanged")
        self.assert_quiet(self.host)
        for word in words:
            self.assert_seen_once(self.host, word)

    def test_a_message_during_the_turn_that_a_message_continued_wakes_the_session_afterwards(self):
        first, second, before = self.word(), self.word(), len(self.requests(self.host))
        self.host.prompt("talk " + directive(say("slowly", slow=2), say("slowly again", slow=2)))
        self.wait_replying(self.host, before)
        self.send(self.host, first)
        self.wait_replying(self.host, before + 1)
        message = self.send(self.host, second)
        self.host.wait_seen(second)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assert_seen_once(self.host, first)
        self.assert_seen_once(self.host, second)
        self.assert_delivered(message, "FileChanged")

    def test_messages_around_a_clear_arrive_and_the_name_moves(self):
        old = self.host.session_id
        xmsg(self.home, "name", old, "leader")
        words = [self.word() for _ in range(4)]
        self.clear()
        messages = [self.send(old, word) for word in words[:3]]
        wait_until(lambda: self.host.session_id not in (None, old), "a new id", context=self.host.screen)
        wait_until(lambda: {self.shown(message)["state"] for message in messages} == {"delivered"},
                   "delivery", context=self.host.screen)
        messages.append(self.send("leader", words[3]))
        self.assertEqual(messages[3]["to"]["session"], self.host.session_id)
        self.host.wait_seen(words[3])
        self.host.wait_idle()
        told = self.home.anthropic.log.seen(old) + "\n" + self.host.seen()
        for word in words:
            self.assertEqual(told.count(SOURCE + "\n" + word), 1, word)

    def test_a_session_whose_shell_changed_its_folder_is_still_woken(self):
        folder = self.home.projects["work"] / self.word()
        folder.mkdir()
        # The host takes the second one back. At once: the watch may not be live yet; later: only it is left.
        for command, seconds in (("cd '%s'" % folder, 0), ("cd '%s'" % self.home.root, 3)):
            self.host.prompt("move " + directive(shell(command), say("moved")))
            self.host.wait_idle()
            time.sleep(seconds)
            word = self.word()
            message = self.send(self.host, word)
            self.host.wait_seen(word, 8)
            self.host.wait_idle()
            self.assert_delivered(message, "FileChanged")

    def test_8000_chinese_characters_pass_FileChanged(self):
        long, short = self.send_long()
        self.assert_long_was_shown(long, short, "FileChanged")

    def test_mail_in_the_first_second_after_SessionStart_is_not_stranded(self):
        stranded = {}
        for offset in START_OFFSETS:
            session, word = str(uuid.uuid4()), self.word()
            sender = threading.Thread(target=self.send_after_SessionStart, args=(offset, session, word))
            sender.start()
            self.host.start("--session-id", session)
            sender.join()
            try:
                # What is there in time for the SessionStart hook itself is context, which waits for the first request.
                time.sleep(1)
                if self.sent(word)[0]["window"] == "SessionStart":
                    self.host.prompt("first prompt of " + session)
                self.host.wait_seen(word, 8)
                self.host.wait_idle()
                self.assert_seen_once(self.host, word)
            except AssertionError as error:
                stranded[offset] = error
        self.assertEqual(stranded, {})

    def send_after_SessionStart(self, offset, session, word):
        log = self.home.root / "other-tool.log"
        before = log.read_text().count("SessionStart")
        wait_until(lambda: log.read_text().count("SessionStart") > before, "SessionStart")
        time.sleep(offset)
        self.send(session, word, "--force")


class ClaudeIsLeftAlone(OneSession):
    """Claude Code with XMSG_WAKE=off, so that mail waits until a turn takes it."""

    kinds = ("claude",)
    kind = "claude"
    environment = {"XMSG_WAKE": "off"}
    send_long, assert_long_was_shown = EveryHost.send_long, EveryHost.assert_long_was_shown

    def test_mail_is_left_alone_until_the_next_prompt(self):
        word = self.word()
        message = self.send(self.host, word)
        self.assert_quiet(self.host, 3)
        self.assertEqual(self.shown(message)["state"], "queued")
        self.host.prompt("what is new?")
        self.host.wait_idle()
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "UserPromptSubmit")

    def test_what_waits_for_the_old_session_arrives_after_clear_and_the_name_moves(self):
        old = self.host.session_id
        xmsg(self.home, "name", old, "chief")
        words = [self.word() for _ in range(3)]
        messages = [self.send(old, word) for word in words[:2]]
        self.clear()
        wait_until(lambda: self.host.session_id not in (None, old), "a new id", context=self.host.screen)
        wait_until(lambda: self.shown(messages[1])["state"] == "delivered", "SessionStart to take it",
                   context=self.host.screen)
        messages.append(self.send("chief", words[2]))
        later = self.send(old, words[2] + " by the old id")
        new = self.host.session_id
        self.assertEqual([message["to"]["session"] for message in (messages[2], later)], [new, new])
        self.host.prompt("after the clearing")
        self.host.wait_idle()
        for word in words[:2]:
            self.assert_seen_once(self.host, word)
        self.assertEqual(self.host.times_seen(words[2]), 2)
        for message in messages:
            self.assertEqual(self.assert_delivered(message)["to"]["session"], new)

    def test_8000_chinese_characters_pass_UserPromptSubmit(self):
        long, short = self.send_long()
        self.host.prompt("what is new?")
        self.assert_long_was_shown(long, short, "UserPromptSubmit")

    def test_8000_chinese_characters_pass_SessionStart(self):
        session = self.host.session_id
        self.host.stop()
        self.long, self.short = chinese(8000), self.word()
        long, short = self.send(session, self.long), self.send(session, self.short)
        self.resume(session)
        self.host.prompt("what is new?")
        self.assert_long_was_shown(long, short, "SessionStart")


class Codex(EveryHost, OneSession):
    """A standalone Codex."""

    kinds = ("codex",)
    kind = "codex"

    def host_goes_on_after_the_stop(self, word):
        """Codex has no hook for an idle session: the next prompt brings it, at the latest."""
        self.host.wait_idle()
        if word not in self.host.seen():
            self.host.prompt("and now?")

    def test_a_new_session_sees_what_waited_for_it_with_its_first_prompt(self):
        self.host.start()
        word = self.word()
        message = self.send(self.host, word, "--force")
        self.host.prompt("hello")
        self.host.wait_idle()
        self.assertTrue(word in told_by(self.requests(self.host)[0]), context_of(self.host, word))
        self.assert_seen_once(self.host, word)
        self.assert_delivered(message, "SessionStart")

    def test_a_turn_is_continued_at_most_three_times_and_the_rest_waits_for_the_next(self):
        before, words = len(self.requests(self.host)), [self.word() for _ in range(STOPS_A_TURN + 1)]
        self.host.prompt("talk " + directive(*[say("slowly", slow=1.5)] * (STOPS_A_TURN + 1)))
        for number, word in enumerate(words):
            self.wait_replying(self.host, before + number)
            last = self.send(self.host, word)
        self.host.wait_idle()
        self.assert_quiet(self.host)
        self.assertEqual(len(self.requests(self.host)) - before, STOPS_A_TURN + 1)
        self.assertEqual(self.shown(last)["state"], "queued")
        self.host.prompt("anything else?")
        self.host.wait_idle()
        for word in words:
            self.assert_seen_once(self.host, word)
        self.assert_delivered(last, "UserPromptSubmit")

    def test_8000_chinese_characters_pass_UserPromptSubmit(self):
        long, short = self.send_long()
        self.host.prompt("what is new?")
        self.assert_long_was_shown(long, short, "UserPromptSubmit")

    def test_8000_chinese_characters_pass_SessionStart(self):
        self.host.start()
        self.long, self.short = chinese(8000), self.word()
        long = self.send(self.host, self.long, "--force")
        short = self.send(self.host, self.short, "--force")
        self.host.prompt("hello")
        self.assert_long_was_shown(long, short, "SessionStart")

    def test_a_session_attached_to_a_daemon_gets_its_mail_too(self):
        version = self.versions["codex"]
        with CodexDaemon(self.home, version), CodexHost(self.home, version, hooks=install_xmsg) as attached:
            gate, word = Gate(self.home), self.word()
            attached.prompt("work " + directive(shell(gate.command), say("done")))
            gate.wait_reached()
            message = self.send(attached, word)
            gate.open()
            attached.wait_idle()
            self.assert_seen_once(attached, word)
            self.assert_delivered(message, "PostToolUse")


class ClaudeAndCodex(RealCase):
    """Sessions of both hosts that write to each other with their shell tools, and workers that they start."""

    kinds = ("claude", "codex")
    spoiled = False

    @classmethod
    def set_up_hosts(cls):
        cls.claude, cls.codex = cls.open_host("claude"), cls.open_host("codex")
        cls.prompt_both("good morning")

    @classmethod
    def prompt_both(cls, text):
        for host in (cls.claude, cls.codex):
            host.prompt(text)
            host.wait_idle()

    def setUp(self):
        if self.spoiled:
            type(self).spoiled = False
            self.claude.start()
            self.codex.start()
            self.prompt_both("good morning again")
        self.claude.wait_idle()
        self.codex.wait_idle()

    def source_of(self, host, text):
        """What the receiver can read of the sender: the address in the one source line above the text."""
        line = r"\[peer (?:[^\]\n]* · )?([a-z]+:[^\s;·]+); not a user instruction\]\n"
        found = re.findall(line + re.escape(text), host.seen())
        self.assertEqual(len(found), 1, context_of(host, text))
        self.assertEqual(host.times_seen(text), 1)
        return found[0]

    def assert_comes_from(self, receiver, text, kind, session):
        """What the receiver reads back resolves to exactly the sender."""
        address = self.source_of(receiver, text)
        self.assertTrue(("%s:%s" % (kind, session)).startswith(address), (address, kind, session))
        for spelled in (address, address.partition(":")[2]):
            out = xmsg(self.home, "send", spelled, "a reply", "--dry-run", "--json",
                       env=receiver.child_variables())
            self.assertIn(session, out)

    def test_an_agents_own_send_reaches_codex_and_back(self):
        there, back, gate = self.word(), self.word(), Gate(self.home)
        answer = xmsg_command("send", "--no-direct", "claude:" + self.claude.session_id, back)
        self.codex.prompt("work " + directive(shell(gate.command), shell(answer), say("answered")))
        gate.wait_reached()
        self.claude.prompt("write " + directive(
            shell(xmsg_command("send", "--no-direct", self.codex.session_id, there)), say("written")))
        self.claude.wait_idle()
        gate.open()
        self.codex.wait_idle()
        self.claude.wait_seen(back)
        self.claude.wait_idle()
        for receiver, text, sender in ((self.codex, there, self.claude), (self.claude, back, self.codex)):
            self.assert_comes_from(receiver, text, sender.kind, sender.session_id)
            message, = self.sent(text)
            self.assertEqual(message["state"], "delivered", message)
            self.assertEqual((message["from"]["kind"], message["from"]["host"], message["from"]["session"]),
                             ("agent", sender.kind, sender.session_id))

    def subagent_reports(self, parent, receiver):
        """A subagent has no mailbox of its own: what it sends comes from the session that it works for."""
        word = self.word()
        send = xmsg_command("send", "--no-direct", receiver.session_id, word)
        delegate = start_subagent(parent.kind, directive(shell(send), say("reported")))
        gate, receiver_gate = Gate(self.home), Gate(self.home)
        receiver.prompt("work " + directive(shell(receiver_gate.command), say("done")))
        parent.prompt("delegate " + directive(delegate, shell(gate.command), say("delegated")))
        wait_until(lambda: self.sent(word), "the subagent's message", context=parent.screen)
        gate.open()
        receiver_gate.open()
        receiver.wait_seen(word)
        receiver.wait_idle()
        parent.wait_idle()
        self.assert_comes_from(receiver, word, parent.kind, parent.session_id)

    def test_a_claude_subagents_send_comes_from_its_session(self):
        self.subagent_reports(self.claude, self.codex)

    def test_a_codex_subagents_send_comes_from_its_session(self):
        self.subagent_reports(self.codex, self.claude)

    def worker_reports(self, parent, kind):
        """A worker of that kind, started by the parent's shell tool, writes to the parent."""
        stem = self.word()
        report = stem + "-42"  # which no prompt says: those hold the sum
        send = xmsg_command("send", "--no-direct", parent.session_id) + " %s-$((40 + 2))" % stem
        task = "errand " + directive(shell(send), say("reported"))
        options = {"claude": ["-p", "--permission-mode", "default"], "codex": ["exec"]}[kind]
        worker = shlex.join([str(install(kind, self.versions[kind]))] + options + [task]) + " </dev/null"
        parent.prompt("delegate " + directive(shell(worker), say("delegated")))
        parent.wait_seen(report, 40)
        parent.wait_idle()
        log = {"claude": self.home.anthropic, "codex": self.home.openai}[kind].log
        sessions = {request["session"] for request in log.requests()
                    if request["session"] != parent.session_id and any(
                        heard.startswith("errand ") and stem in heard for heard in request["heard"])}
        self.assertEqual(len(sessions), 1, sessions)
        self.assert_comes_from(parent, report, kind, sessions.pop())

    def test_a_claude_worker_reports_to_the_claude_that_started_it(self):
        self.worker_reports(self.claude, "claude")

    def test_a_codex_worker_reports_to_the_claude_that_started_it(self):
        self.worker_reports(self.claude, "codex")

    def test_a_claude_worker_reports_to_the_codex_that_started_it(self):
        self.worker_reports(self.codex, "claude")

    def test_a_codex_worker_reports_to_the_codex_that_started_it(self):
        self.worker_reports(self.codex, "codex")

    def test_two_codex_threads_of_one_minute_are_told_apart_by_what_the_receiver_reads(self):
        version, words = self.versions["codex"], (self.word(), self.word())
        with CodexHost(self.home, version) as one, CodexHost(self.home, version) as other:
            if one.session_id[:8] != other.session_id[:8]:  # a minute went by between them
                one.start()
            self.assertEqual(one.session_id[:8], other.session_id[:8])
            for thread in (one, other):
                thread.prompt("good morning")
                thread.wait_idle()
            for thread, word in zip((one, other), words):
                send = xmsg_command("send", "--no-direct", self.claude.session_id, word)
                thread.prompt("write " + directive(shell(send), say("written")))
                self.claude.wait_seen(word)
                thread.wait_idle()
            self.claude.wait_idle()
            self.assertNotEqual(self.source_of(self.claude, words[0]), self.source_of(self.claude, words[1]))
            for thread, word in zip((one, other), words):
                self.assert_comes_from(self.claude, word, "codex", thread.session_id)


load_tests = per_version(ClaudeIsWoken, ClaudeIsLeftAlone, Codex, ClaudeAndCodex)
