"""Senders in Codex's own sandbox: what leaves it, how far it gets within the turn, and what is not taken.

The home lies outside of /tmp, which the sandbox lets its shell write.
"""
import json
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from hosts import CodexDaemon, wait_until
from model_server import call, directive, say, shell
from realcase import PROJECT, WRAPPER, XMSG, RealCase, context_of, per_version

sys.path.append(str(PROJECT))
import contract  # noqa: E402
import spool  # noqa: E402

MODES = ("workspace-write", "read-only")


class InASandbox(RealCase):
    folder = "/var/tmp"

    @classmethod
    def set_up_hosts(cls):
        cls.db = str(cls.home.home / ".local/share/agent-msg/messages.sqlite3")
        for folder in contract.spool_folders(cls.db, cls.home.env):
            cls.opened.callback(shutil.rmtree, folder, True)

    @classmethod
    def open_codex(cls, mode, **options):
        return cls.open_host("codex", args=["--sandbox", mode], **options)


class ASandboxedCodex(InASandbox):
    kinds = ("claude", "codex")

    @classmethod
    def set_up_hosts(cls):
        super().set_up_hosts()
        cls.claude = cls.open_host("claude")
        cls.codex = {mode: cls.open_codex(mode) for mode in MODES}
        for host in cls.codex.values():  # a Codex session registers with its first prompt
            host.prompt("hello")
            host.wait_idle()

    def goes_on(self, name):
        """A shell command that waits for the test; it writes nothing, which the sandbox might not allow."""
        return "n=0; until [ -e '%s' ] || [ $n -gt 300 ]; do sleep 0.05; n=$((n + 1)); done" % (self.home.root / name)

    def work(self, host, *commands):
        """One turn of a session, in which these commands run; what its model was told of them."""
        host.wait_idle()
        mark = "work-%s" % uuid.uuid4().hex[:8]
        host.prompt("%s %s" % (mark, directive(*[shell(command) for command in commands], say("done"))))
        host.wait_idle()
        return host.seen().rpartition(mark)[2]

    def reaches_claude_within_the_turn(self, mode):
        host, word, opened = self.codex[mode], self.word(), "opened-%s" % mode
        host.prompt("work " + directive(shell("%s send %s %s --json" % (XMSG, self.claude.session_id, word)),
                                        shell(self.goes_on(opened)), say("done")))
        self.claude.wait_seen(word)
        self.assertFalse(host.is_idle(), host.screen())
        (self.home.root / opened).touch()
        host.wait_idle()
        self.claude.wait_idle()
        sent, = self.sent(word)
        self.assertEqual(("agent", "codex", host.session_id), tuple(sent["from"][key] for key in (
            "kind", "host", "session")))
        # Its own inbox, unless the wake by its watched file was faster.
        self.assertEqual("delivered", sent["state"], sent)
        self.assertIn(sent["window"], ("uds-direct", "FileChanged"))
        self.assertEqual(1, self.claude.times_seen(word), context_of(self.claude, word))
        self.assertIn('"state": "spooled"', host.seen())
        self.assertIn(sent["from"]["label"], context_of(self.claude, word))

    def test_reaches_a_claude_session_before_its_turn_ends_by_a_file(self):
        self.reaches_claude_within_the_turn("workspace-write")

    def test_reaches_a_claude_session_before_its_turn_ends_by_a_line_of_output(self):
        self.reaches_claude_within_the_turn("read-only")

    def test_reaches_a_claude_session_from_a_command_that_outlasts_its_first_answer(self):
        """Then Codex runs no hook after it, and under read-only nothing but its rollout has what it printed."""
        host, word = self.codex["read-only"], self.word()
        command = "%s send %s %s; sleep 4" % (XMSG, self.claude.session_id, word)
        host.prompt("work " + directive(call("exec_command", cmd=command, yield_time_ms=1500), say("done")))
        self.claude.wait_seen(word)
        host.wait_idle()
        self.claude.wait_idle()
        self.assertIn("Process running", host.seen())
        self.assertEqual(1, self.claude.times_seen(word), context_of(self.claude, word))

    def test_reads_the_reports(self):
        for mode, host in self.codex.items():
            word = self.word()
            self.send(host, word)
            mine = self.send(self.claude, "to claude " + word)
            told = self.work(host, *["%s %s; echo status=$?" % (XMSG, command) for command in (
                "list", "outbox --all", "inbox", "show %d" % mine["id"], "find %s --ids-only" % self.claude.session_id)])
            self.assertEqual(5, told.count("status=0"), told)
            self.assertIn("to claude " + word, told)
            self.assertRegex(told, r"%s +claude +(idle|busy)" % self.claude.session_id)
            self.assertRegex(told, r"\]\n%s" % word, mode)
            self.assertIn("\n%s\n" % self.claude.session_id, told)

    def messages(self, session, body):
        """What `send` seals, for a thread."""
        now = int(time.time() * 1000)
        return [{"uid": uuid.uuid4().hex[:16], "created_at": now, "expires_at": now + 3600000, "sender_kind": "agent",
                 "sender_label": session[:13], "sender_host": "codex", "sender_session": session,
                 "target": self.claude.session_id, "target_host": "claude", "body": body, "priority": 0,
                 "request_key": None, "reply_to": None, "replace": False, "direct": True}]

    def test_is_believed_only_for_itself_and_with_this_stores_key(self):
        key = spool.read_key(self.db + ".key")
        one, other = self.codex["workspace-write"], self.codex["read-only"]
        for host, session in ((one, other.session_id), (other, one.session_id)):
            words = [self.word() for _ in range(3)]
            forged = [spool.seal(b"0" * 64, self.messages(host.session_id, words[0])),
                      spool.seal(key, self.messages(session, words[1]))]
            (self.home.root / "document").write_text("\n".join(forged) + "\n")
            if host is one:
                for line in forged:
                    spool.leave_line(self.db, self.home.env, host.session_id, line)
            told = self.work(host, "cat %s; %s send %s %s" % (
                self.home.root / "document", XMSG, self.claude.session_id, words[2]))
            self.assertIn("spooled", told)
            wait_until(lambda: self.sent(words[2]), "the good one", context=host.screen)
            self.assertEqual([], self.sent(words[0]) + self.sent(words[1]))
            faults = Path(self.db + ".faults")
            for text in ("not made with this store's key", "it speaks for another session"):
                self.assertIn(text, faults.read_text())
            faults.unlink()


class AnUntrustedSandboxedCodex(InASandbox):
    kinds = ("codex",)

    def test_is_told_that_nothing_was_sent_and_why(self):
        target = "7c1f0a52-0000-4000-8000-00000000000a"
        payload = {"session_id": target, "cwd": "/", "hook_event_name": "SessionStart"}
        subprocess.run([WRAPPER, "claude"], env=self.home.env, check=True, input=json.dumps(payload).encode(),
                       stdout=subprocess.DEVNULL)
        for mode in MODES:
            host = self.open_codex(mode, trust="declined")
            word = self.word()
            host.prompt("go " + directive(shell("%s send %s %s; echo status=$?" % (XMSG, target, word)), say("done")))
            host.wait_idle()
            self.assertIn("no hook of xmsg has run in this session", host.seen())
            self.assertIn("status=5", host.seen())
            self.assertEqual([], self.sent(word))
            host.stop()


class ServedByAnAppServer(InASandbox):
    kinds = ("codex",)

    def test_reaches_another_session_as_codex_shows_its_own(self):
        with CodexDaemon(self.home, self.versions["codex"]):
            sender, receiver = self.open_codex(MODES[0]), self.open_codex(MODES[0])
            for host in (sender, receiver):
                host.prompt("hello")
                host.wait_idle()
            word = self.word()
            sender.prompt("go " + directive(shell("%s send %s %s" % (XMSG, receiver.session_id, word)), say("ok")))
            receiver.wait_seen(word)
            wait_until(lambda: "Sent by Codex from task %s" % sender.session_id in receiver.screen(), "Codex's own line",
                       context=receiver.screen)
            [message] = self.sent(word)
            self.assertEqual(("delivered", "codex-delegated-tool-output"), (message["state"], message["window"]))
            receiver.wait_idle()
            self.assertEqual(1, receiver.times_seen(word))


load_tests = per_version(ASandboxedCodex, AnUntrustedSandboxedCodex, ServedByAnAppServer)
