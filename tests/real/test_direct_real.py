"""`xmsg send` straight into a running Claude Code, from the command line to the transcript.

The adapter has tests of its own in test_claude_real.py; here the whole way is tried, with the store and its words.
"""
import contextlib
import json
import sqlite3
import time
import uuid

from hosts import PATIENCE, ClaudeHost, wait_until
from model_server import directive, say, shell
from realcase import XMSG, Gate, RealCase, install_xmsg, per_version, xmsg


class DirectDelivery(RealCase):
    kinds = ("claude",)

    @classmethod
    def set_up_hosts(cls):
        """Each test has hosts of its own."""

    def claude(self, **options):
        host = ClaudeHost(self.home, self.versions["claude"], hooks=install_xmsg, **options)
        self.addCleanup(host.stop)
        host.start()
        return host

    def send(self, *arguments, status=0, env=()):
        return json.loads(xmsg(self.home, "send", *arguments, "--json", status=status, env=env))["messages"][0]

    def state(self, message):
        return json.loads(xmsg(self.home, "show", message["uid"], "--json"))

    def test_an_idle_session_has_it_within_two_seconds_once_and_confirmed(self):
        host, word = self.claude(), "word-%s" % uuid.uuid4().hex[:8]
        begin = time.monotonic()
        sent = self.send(host.session_id, word)
        host.wait_seen(word, 2)
        self.assertLess(time.monotonic() - begin, 2 * PATIENCE)
        self.assertEqual(("delivered", "uds-direct"), (sent["state"], sent["window"]))
        host.wait_idle()
        sent = self.send(host.session_id, "and-" + word, "--wait", "10")
        self.assertTrue(sent["confirmed_at"] and sent["evidence"])
        host.wait_idle()
        self.assertEqual(2, host.times_seen(word))
        self.assertEqual(1, host.times_seen("and-" + word))
        self.assertIn("<cross-session-message", host.seen())

    def test_a_busy_session_is_not_interrupted_and_has_it_in_a_later_request(self):
        host, word = self.claude(), "word-%s" % uuid.uuid4().hex[:8]
        gate = Gate(self.home)
        host.prompt("work " + directive(shell(gate.command), say("done")))
        gate.wait_reached()
        sent = self.send(host.session_id, word)
        self.assertEqual("delivered", sent["state"])
        gate.open()
        host.wait_idle()
        self.assertEqual(1, host.times_seen(word))
        self.assertIn(gate.over, host.seen())
        self.assertTrue(self.state(sent)["confirmed_at"])

    def test_a_bypassing_session_holds_an_undeclared_sender_and_its_user_decides(self):
        for state, seen, keys in (("delivered", 1, ("Down", "Enter")), ("refused", 0, ("Enter",))):
            host, word = self.claude(mode="bypass"), "word-%s" % uuid.uuid4().hex[:8]
            if state == "refused":  # as when its user has switched since its last hook
                with contextlib.closing(sqlite3.connect(self.home.home / ".local/share/agent-msg/messages.sqlite3")) as store, store:
                    store.execute("update peers set permission_mode = 'default' where session = ?", (host.session_id,))
            sent = self.send(host.session_id, word)
            self.assertEqual("held", sent["state"])
            self.assertIn("held", xmsg(self.home, "outbox"))
            wait_until(lambda: host.registration().get("status") == "waiting", "a dialog", context=host.screen)
            self.decide(host, keys)
            wait_until(lambda: self.state(sent)["state"] == state, "the state %s" % state,
                       context=lambda: json.dumps(self.state(sent)) + host.screen())
            host.wait_idle()
            self.assertEqual(seen, host.times_seen(word))
            host.stop()

    def decide(self, host, keys):
        """Answers the dialog, whose default is Deny."""
        time.sleep(1)  # a key that comes with the dialog gets lost
        for key in keys:
            host.press(key)
            time.sleep(0.4)

    def test_a_verified_bypassing_sender_goes_straight_through_and_the_same_claim_from_elsewhere_is_held(self):
        receiver, sender = self.claude(mode="bypass"), self.claude(mode="bypass")
        word = "word-%s" % uuid.uuid4().hex[:8]
        sender.prompt("go " + directive(shell("%s send %s %s" % (XMSG, receiver.session_id, word)), say("sent")))
        receiver.wait_seen(word)
        sender.wait_idle()
        claim = {"XMSG_FROM_TOOL": "claude", "XMSG_FROM_SESSION": sender.session_id}
        other = self.send(receiver.session_id, "claimed", env=claim)
        self.assertEqual("held", other["state"])

    def test_a_session_that_was_killed_gets_it_queued_at_once(self):
        host = self.claude()
        session = host.session_id
        host.kill9()
        sent = self.send(session, "too late")
        self.assertEqual("queued", sent["state"])

    def test_refusal_is_refused_and_never_goes_round(self):
        host = self.claude(inbound="refuse")
        sent = self.send(host.session_id, "unwanted", status=7)
        self.assertEqual("refused", sent["state"])
        host.prompt("hello")
        host.wait_idle()
        self.assertNotIn("unwanted", host.seen())

    def test_thirty_six_in_a_row_all_arrive_once(self):
        host, word = self.claude(), "word-%s" % uuid.uuid4().hex[:8]
        for number in range(36):
            self.send(host.session_id, "%s-%02d." % (word, number))
        texts = ["%s-%02d." % (word, number) for number in range(36)]
        wait_until(lambda: all(host.times_seen(text) for text in texts), "all of them", 60, host.screen)
        host.wait_idle()
        self.assertEqual([1] * 36, [host.times_seen(text) for text in texts])


load_tests = per_version(DirectDelivery)
