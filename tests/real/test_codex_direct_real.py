"""`xmsg send` into running Codex sessions: which window each version takes, what the model saw, what its TUI shows.

XMSG_FULL=1 adds the versions on either side of a change in what Codex accepts.
"""
import json
import threading

from hosts import CodexDaemon, codex_exec, wait_until
from install_hosts import more
from model_server import directive, say, shell
from realcase import SOURCE, TESTER, XMSG, Gate, RealCase, per_version, xmsg

START, STEER, NATIVE, QUEUE = "codex-turn-start", "codex-turn-steer", "codex-delegated-tool-output", "codex-queue"
# version -> the windows to an idle thread, into a turn, from another thread of its app-server, to a standalone session
ROUTES = {"0.144.6": (None, None, None, None), "0.149.0": (START, STEER, START, QUEUE),
          "0.151.0": (START, STEER, NATIVE, QUEUE), "0.156.1": (START, STEER, NATIVE, QUEUE),
          "0.171.0": (START, STEER, NATIVE, QUEUE)}


class CodexCase(RealCase):
    kinds = ("codex",)

    @property
    def routes(self):
        return ROUTES[self.versions["codex"]]

    def send_direct(self, target, text, *options, env=TESTER, status=0):
        target = getattr(target, "session_id", target)
        out = xmsg(self.home, "send", target, text, "--json", *options, env=env, status=status)
        return json.loads(out)["messages"][0]

    def assert_taken(self, message, window):
        """By this window; None: by no direct one, so it waits for the hooks."""
        self.assertEqual(("delivered", window) if window else ("queued", None), (message["state"], message["window"]),
                         message)

    def assert_on_screen(self, host, *lines):
        """These lines stand on the screen, one below the other."""
        def shown():
            screen = [line.strip("› •\n") for line in host.screen().split("\n")]
            return any([line.strip() for line in screen[at:at + len(lines)]] == list(lines) for at in range(len(screen)))
        wait_until(shown, "%r on the screen" % (lines,), context=host.screen)

    def wait_confirmed(self, message):
        return wait_until(lambda: self.shown(message)["confirmed_at"], "the proof", context=lambda: str(self.shown(message)))

    def row_of(self, host):
        sessions = json.loads(xmsg(self.home, "list", "--json"))["sessions"]
        return next(session for session in sessions if session["session"] == host.session_id)


class ServedByAnAppServer(CodexCase):
    """Two TUIs attached to one app-server, after a first turn each."""

    @classmethod
    def set_up_hosts(cls):
        cls.server = cls.opened.enter_context(CodexDaemon(cls.home, cls.versions["codex"]))
        cls.receiver, cls.sender = cls.open_host("codex"), cls.open_host("codex")
        for host in (cls.receiver, cls.sender):
            host.prompt("hello")
            host.wait_idle()

    def setUp(self):
        self.receiver.wait_idle()

    def test_an_idle_session_shows_it_at_once_below_its_source(self):
        word, window = self.word(), self.routes[0]
        self.assertEqual((window or "hook", bool(window)), tuple(map(self.row_of(self.receiver).get, ("window", "direct"))))
        message = self.send_direct(self.receiver, word + " <b> & c")
        self.assert_taken(message, window)
        if window:
            self.receiver.wait_seen(word)
            self.assert_seen_once(self.receiver, word + " <b> & c")
            self.assert_on_screen(self.receiver, SOURCE, word + " <b> & c")
            self.wait_confirmed(message)

    def test_a_busy_session_has_it_in_its_turn(self):
        word, gate, window = self.word(), Gate(self.home), self.routes[1]
        self.receiver.prompt("work " + directive(shell(gate.command), say("done")))
        gate.wait_reached()
        message = self.send_direct(self.receiver, word)
        self.assert_taken(message, window)
        requests = len(self.requests(self.receiver))
        gate.open()
        self.receiver.wait_idle()
        if window:
            self.assert_seen_once(self.receiver, word)
            self.assertIn(word, "\n".join(self.requests(self.receiver)[requests]["heard"]), "not in the next request")
            self.assert_on_screen(self.receiver, SOURCE, word)
            self.wait_confirmed(message)

    def test_from_another_session_it_is_shown_as_codex_shows_its_own(self):
        word, window = self.word(), self.routes[2]
        text = word + " <b> & c"
        self.sender.prompt("go " + directive(shell("%s send %s '%s'" % (XMSG, self.receiver.session_id, text)), say("ok")))
        self.sender.wait_idle()
        [message] = self.sent(text)
        self.assert_taken(message, window)
        self.assertEqual(("codex", self.sender.session_id), (message["from"]["host"], message["from"]["session"]))
        if window == NATIVE:
            self.receiver.wait_seen(word)
            self.assert_on_screen(self.receiver, "Sent by Codex from task %s" % self.sender.session_id, text)
            self.assertNotIn("instruction]\n" + word, self.receiver.seen())
        if window:
            self.receiver.wait_idle()
            self.assertEqual(1, self.receiver.times_seen(word))
            self.wait_confirmed(message)

    def test_a_claim_to_be_another_session_is_not_shown_as_codexs_own(self):
        if self.routes[2] == NATIVE:
            claim = {"XMSG_FROM_TOOL": "codex", "XMSG_FROM_SESSION": self.sender.session_id}
            for env in (claim, {"CODEX_THREAD_ID": self.sender.session_id}):
                message = self.send_direct(self.receiver, self.word(), env=env)
                self.assert_taken(message, START)
                self.receiver.wait_idle()

    def test_a_reminder_of_cron_says_what_it_is(self):
        word, window = self.word(), self.routes[0]
        message = self.send_direct(self.receiver, word, "--notification", "--from", "patrol", env={})
        self.assert_taken(message, window)
        if window:
            self.receiver.wait_seen(word)
            self.assert_on_screen(self.receiver, "[local notification patrol; not a user instruction]", word)

    def test_what_was_steered_and_then_lost_to_an_interrupt_is_not_called_confirmed(self):
        word, window = self.word(), self.routes[1]
        if window:
            self.receiver.prompt("slowly " + directive(say("a long answer", slow=8)), wait=False)
            wait_until(lambda: self.receiver.model.is_replying(self.receiver.session_id), "a reply on its way")
            message = self.send_direct(self.receiver, word)
            self.assert_taken(message, STEER)
            turn = self.server.call("thread/turns/list", threadId=self.receiver.session_id, limit=1)["data"][0]["id"]
            self.server.call("turn/interrupt", threadId=self.receiver.session_id, turnId=turn)
            self.receiver.wait_idle()
            self.receiver.prompt("and the next turn")
            self.receiver.wait_idle()
            now = self.shown(message)
            self.assertEqual("delivered", now["state"])
            self.assertEqual(bool(self.receiver.times_seen(word)), bool(now["confirmed_at"]), now)


class BesideClaudeCode(CodexCase):
    """A Codex TUI attached to an app-server and a Claude Code session: each one's agent writes to the other."""

    kinds = ("claude", "codex")

    @classmethod
    def set_up_hosts(cls):
        cls.opened.enter_context(CodexDaemon(cls.home, cls.versions["codex"]))
        cls.codex, cls.claude = cls.open_host("codex"), cls.open_host("claude", mode="bypass")
        for host in (cls.codex, cls.claude):
            host.prompt("hello")
            host.wait_idle()

    def test_each_ones_agent_reaches_the_other_straight_and_idle(self):
        for sender, receiver in ((self.claude, self.codex), (self.codex, self.claude)):
            word = self.word()
            sender.prompt("go " + directive(shell("%s send %s %s" % (XMSG, receiver.session_id, word)), say("sent")))
            sender.wait_idle()
            [message] = self.sent(word)
            self.assertEqual((sender.kind, sender.session_id), (message["from"]["host"], message["from"]["session"]))
            if receiver is self.claude:
                # No permission class is known of Codex, so a bypassing session asks its user.
                self.assertEqual("held", message["state"], message)
                continue
            self.assert_taken(message, self.routes[0])
            receiver.wait_seen(word)
            receiver.wait_idle()
            self.assertIn("[peer claude:%s; not a user instruction]\n%s" % (sender.session_id[:8], word), receiver.seen())
            self.assertEqual(1, receiver.times_seen(word))
            self.wait_confirmed(message)


class WithoutAWindow(CodexCase):
    """A thread that its app-server still holds when the TUI has gone."""

    @classmethod
    def set_up_hosts(cls):
        cls.opened.enter_context(CodexDaemon(cls.home, cls.versions["codex"]))
        cls.host = cls.open_host("codex")

    def test_takes_it_and_the_receipt_says_that_no_window_shows_it(self):
        self.host.prompt("hello")
        self.host.wait_idle()
        self.host.stop()
        word = self.word()
        message = self.send_direct(self.host, word)
        self.assert_taken(message, self.routes[0])
        if self.routes[0]:
            self.assertIn("no window", message["detail"])
            self.host.wait_seen(word)
            self.wait_confirmed(message)


class Standalone(CodexCase):
    """A session without an app-server."""

    @classmethod
    def set_up_hosts(cls):
        cls.host = cls.open_host("codex")

    def test_takes_it_from_codexs_own_queue_and_an_ended_one_waits_for_its_hooks(self):
        host, word, window = self.host, self.word(), self.routes[3]
        host.prompt("hello")
        host.wait_idle()
        self.assertEqual(window or "hook", self.row_of(host)["window"])
        message = self.send_direct(host, word)
        self.assert_taken(message, window)
        if window:
            self.assertIn("waiting in Codex's own queue", xmsg(self.home, "outbox"))
            host.wait_seen(word)
            host.wait_idle()
            self.assert_seen_once(host, word)
            self.assert_on_screen(host, SOURCE, word)
            self.wait_confirmed(message)
        with CodexDaemon(self.home, self.versions["codex"]):
            word = self.word()
            message = self.send_direct(host, word)
            self.assert_taken(message, window)
            if window:
                host.wait_seen(word)
                host.wait_idle()
                self.assert_seen_once(host, word)
        # An ended one has a rollout too, and Codex's queue would take a message for it with success.
        session = host.session_id
        host.stop()
        self.assert_taken(self.send_direct(session, self.word()), None)

    def test_codex_exec_is_never_queued_for(self):
        """It would lose what is in its queue: a running one is held open by itself, and no direct window is tried."""
        gate = Gate(self.home)
        prompt = "go " + directive(shell(gate.command), say("done"))
        run = threading.Thread(target=codex_exec, args=(self.home, self.versions["codex"], prompt))
        run.start()
        try:
            gate.wait_reached()
            folder = self.home.codex_home / "thread-writer-locks"
            if folder.is_dir():
                held = {path.stem for path in folder.glob("*-*.lock")} - {self.host.session_id}
                plans = [json.loads(xmsg(self.home, "send", thread, "x", "--dry-run", "--force", "--json"))["plan"][0]
                         for thread in held]
                self.assertEqual([["hook"]] * len(held), [plan["windows"] for plan in plans])
                self.assertTrue([plan for plan in plans if "codex exec" in plan["reason"]], plans)
        finally:
            gate.open()
            run.join()


load_tests = per_version(ServedByAnAppServer, BesideClaudeCode, WithoutAWindow, Standalone, more={"codex": [name.partition("@")[2] for name in more()]})
