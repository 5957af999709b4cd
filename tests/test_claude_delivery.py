"""Claude Code's inbox, against a stand-in process with a real socket. The real hosts are in tests/real."""
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from pathlib import Path
from unittest import mock

from support import PATIENCE, ClaudeStandIn, wait_until
from side_by_side import load_tests  # noqa: F401

import claude_delivery
import host_process

PROJECT = Path(__file__).resolve().parents[1]
UID = "0123456789abcdef"
MESSAGE = "01234567-89ab-8000-8000-786d7367cdef"
HELD, DELIVERED, DENIED = {"status": "held"}, {"status": "delivered"}, {"status": "denied"}


def hosts_reading(content):
    """What the host's own parser makes of an envelope: its attributes and body, None if it would not take it."""
    match = re.match(r'<cross-session-message(?: from="([A-Za-z0-9%:_/.\\-]+)")?(?: from-name="([^"<>\n\r]+)")?'
                     r'(?: from-mode="(bypass|prompting)")?>\n(.*)\n</cross-session-message>\Z', content, re.S)
    if not match or re.search(r"</?cross-session-message", match.group(4), re.I):
        return None
    return match.groups()


class EnvelopeTest(unittest.TestCase):
    def test_carries_the_sender_the_label_and_the_mode_in_the_hosts_order(self):
        self.assertEqual(
            claude_delivery.envelope("hello", "uds:/run/cc-socks/7.sock", "alpha two", "bypass"),
            '<cross-session-message from="uds:/run/cc-socks/7.sock" from-name="alpha two" from-mode="bypass">\n'
            "hello\n</cross-session-message>")

    def test_without_an_address_the_label_is_where_a_reply_goes(self):
        self.assertEqual(hosts_reading(claude_delivery.envelope("b", None, "leader"))[:2], ("leader", "leader"))

    def test_an_attribute_that_the_host_would_not_take_is_dropped_alone(self):
        name = "alpha"
        for address, label, mode, expected in [
                ("uds:/a b", name, "bypass", (name, name, "bypass")),
                ("user@host", "two words", None, (None, "two words", None)),
                ("uds:/" + "x" * 296, name, None, (name, name, None)),
                ("uds:/a", 'say "x"', "bypass", ("uds:/a", None, "bypass")),
                ("uds:/a", "a<b", None, ("uds:/a", None, None)),
                ("uds:/a", "two\nlines", None, ("uds:/a", None, None)),
                ("uds:/a", name, "default", ("uds:/a", name, None)),
                ("uds:/a", "", "prompting", ("uds:/a", None, "prompting")),
                ("uds:/a", None, None, ("uds:/a", None, None)),
                (None, "名前 & co", None, (None, "名前 & co", None))]:
            with self.subTest(address=address, label=label, mode=mode):
                self.assertEqual(hosts_reading(claude_delivery.envelope("b", address, label, mode)), expected + ("b",))

    def test_a_name_that_the_host_would_clean_is_dropped(self):
        for label in (" lead", "trail ", "a" * 65, "zero\u200dwidth", "bidi\u202e", "tab\there", "\u00a0nb",
                      "soft\u00ad", "line\u2028", "\x85x", "\ufeffbom"):
            with self.subTest(label=label):
                self.assertNotIn("from-name", claude_delivery.envelope("b", "uds:/a", label))
        for label in ("a" * 64, "it's", "naïve 名前", "thumb 👍"):
            with self.subTest(label=label):
                self.assertIn(' from-name="%s"' % label, claude_delivery.envelope("b", "uds:/a", label))

    def test_a_body_can_neither_close_nor_open_an_envelope(self):
        for tag in ("</cross-session-message>", "<cross-session-message from=\"x\">", "</CROSS-session-MESSAGE >",
                    "< / cross-session-message>", "<\u200b/cross-session-message>", "</cross\u200b-session-message>",
                    "</cross_session_message>"):
            with self.subTest(tag=tag):
                content = claude_delivery.envelope("a %s b" % tag, "uds:/a", "n")
                self.assertEqual(hosts_reading(content)[3], "a <\\%s b" % tag[1:])

    def test_a_body_is_otherwise_bare(self):
        for body in ("x", "y" * 8000, "<system-reminder>", "/help", "!ls", "a\r\nb\n\n", "\n lead",
                     "<\\/cross-session-message", "👩‍👩‍👧", "a < b / cross-session-message", "</teammate-message>"):
            with self.subTest(body=body[:20]):
                self.assertEqual(hosts_reading(claude_delivery.envelope(body, "uds:/a", "n"))[3], body)

    def test_a_message_id_is_a_uuid_that_holds_our_uid(self):
        self.assertEqual(claude_delivery.msg_id(UID), MESSAGE)
        self.assertEqual(str(uuid.UUID(MESSAGE)), MESSAGE)
        self.assertNotEqual(claude_delivery.msg_id("0123456789abcdee"), MESSAGE)
        for uid in ("", "0123456789ABCDEF", "0123456789abcdef\n", "0" * 17):
            with self.assertRaises(ValueError):
                claude_delivery.msg_id(uid)

    def test_the_line_is_exactly_these_bytes(self):
        self.assertEqual(claude_delivery.line("é\n", MESSAGE, "s-1", "uds:/r.sock"), (
            '{"msgV":1,"msg_id":"%s","type":"user","message":{"role":"user","content":"é\\n"},"priority":"next",'
            '"from":"uds:/r.sock","session_id":"s-1"}\n' % MESSAGE).encode())
        first, second, rest = claude_delivery.line("x", MESSAGE, "s", "uds:/r", "ab" * 16).split(b"\n")
        self.assertEqual((first, rest), (b'{"type":"auth","token":"%s"}' % (b"ab" * 16), b""))
        self.assertEqual(json.loads(second)["message"], {"role": "user", "content": "x"})

    def test_a_lone_surrogate_does_not_stop_a_line(self):
        json.loads(claude_delivery.line("a\ud800b", MESSAGE, "s", "uds:/r"))

    def test_an_address_is_encoded_as_the_host_does_it(self):
        self.assertEqual(claude_delivery.address("/run/a-b_c.d/7.sock"), "uds:/run/a-b_c.d/7.sock")
        self.assertEqual(claude_delivery.address("/a b/50%~é.sock"), "uds:/a%20b/50%25%7E%C3%A9.sock")

    def test_a_permission_class_is_told_of_known_modes_alone(self):
        for mode, word in (("bypassPermissions", "bypass"), ("default", "prompting"), ("acceptEdits", "prompting"),
                           ("auto", "prompting"), ("dontAsk", "prompting"), ("plan", None), ("", None), (None, None),
                           ("new", None)):
            self.assertEqual(word, claude_delivery.from_mode(mode))


class HostCase(unittest.TestCase):
    """Tests with a configuration directory, a socket directory and stand-in hosts."""

    def setUp(self):
        self.base = Path(tempfile.mkdtemp(prefix="xm"))
        self.addCleanup(shutil.rmtree, self.base, ignore_errors=True)
        self.config, self.runtime = self.base / "config", self.base / "cc-socks"
        (self.config / "sessions").mkdir(parents=True)
        self.runtime.mkdir(mode=0o700)
        claude_delivery._dropped.clear()

    def host(self, session="session-1", **answer):
        host = ClaudeStandIn(self, self.config, self.runtime, session)
        if answer:
            host.tell(do="answer", **answer)
        return host

    def register(self, pid, start=None, **fields):
        """Writes a registration by hand; a start of None is that of the process that runs."""
        record = {"pid": pid, "sessionId": "session-1", "procStart": start or host_process.start_time(pid),
                  "messagingSocketPath": str(self.runtime / ("%d.sock" % pid)), "status": "idle", "updatedAt": 1,
                  **fields}
        path = self.config / "sessions" / ("%d.json" % pid)
        path.write_text(json.dumps(record))
        return path

    def deliver(self, session="session-1", **options):
        options = dict(uid=UID, body="hello", label="leader", config_dirs=[str(self.config)], timeout=5 * PATIENCE, **options)
        return claude_delivery.deliver(session, **options)

    def known_courier(self):
        """Couriers call themselves as this process, so that a test knows their socket's name."""
        known = mock.patch.object(os, "getpid", lambda pid=os.getpid(): pid)
        known.start()
        self.addCleanup(known.stop)

    def socket_names(self):
        return sorted(os.listdir(self.runtime))


class RegistryTest(HostCase):
    def test_a_running_session_is_listed_with_what_its_host_registered(self):
        host = self.host()
        found, = claude_delivery.sessions([str(self.config)])
        self.assertEqual(found._replace(updated_at=0), (
            "session-1", host.pid, host_process.start_time(host.pid), "/w", "alpha two", "user", "idle", "2.1.332",
            host.socket, str(self.config), 0))
        self.assertGreater(found.updated_at, 1 << 40)

    def test_hostile_files_cost_their_own_row_only(self):
        host, folder, me = self.host(), self.config / "sessions", os.getpid()
        other = "%d.json" % (me + 100000)
        for name, content in [("1.json", "{"), (other, ""), ("2.json", "[" * 60000), ("3.json", "null"),
                              ("4.json", json.dumps({"pid": 4, "sessionId": "x", "pad": "x" * 70000})), ("x.json", "{}"),
                              ("5.json", json.dumps({"pid": 5})), ("99999999999.json", "{}"), ("notes.txt", "x")]:
            (folder / name).write_text(content)
        os.mkfifo(folder / "6.json")
        (folder / "7.json").symlink_to(folder / ("%d.json" % host.pid))
        (folder / "8.json").mkdir()
        record = self.register(me)
        record.rename(self.base / "real.json")
        record.symlink_to(self.base / "real.json")
        self.assertEqual([found.pid for found in claude_delivery.sessions([str(self.config)])], [host.pid])
        record.unlink()
        for fields in ({"sessionId": "../../etc"}, {"sessionId": "x" * 129}, {"sessionId": 7}, {"sessionId": ".hidden"},
                       {"procStart": "1"}, {"procStart": 5}, {"pid": me + 1}, {"pid": float(me)}):
            with self.subTest(fields=fields):
                self.register(me)
                record.write_text(json.dumps({**json.loads(record.read_text()), **fields}))
                self.assertEqual([found.pid for found in claude_delivery.sessions([str(self.config)])], [host.pid])

    def test_odd_values_of_a_running_session_become_unknown(self):
        self.register(os.getpid(), status="dancing", name=["x"], cwd=5, version=None, updatedAt="now",
                      messagingSocketPath="relative.sock")
        found, = claude_delivery.sessions([str(self.config)])
        self.assertEqual((found.status, found.name, found.cwd, found.version, found.updated_at, found.socket),
                         ("unknown", None, None, "", 0, None))
        self.assertEqual(claude_delivery.find_inbox("session-1", [str(self.config)])[0], None)

    def test_a_name_with_a_lone_surrogate_can_be_encoded(self):
        path = self.register(os.getpid())
        path.write_text(path.read_text().replace('"status"', '"name": "a\\ud800", "status"'))
        claude_delivery.sessions([str(self.config)])[0].name.encode()

    def test_a_recycled_pid_is_nobody(self):
        self.host()
        self.register(os.getpid(), start="1", sessionId="session-2")
        self.assertEqual(claude_delivery.find_inbox("session-2", [str(self.config)]),
                         (None, "no running Claude Code has this session open"))

    def test_a_file_that_vanishes_or_a_directory_that_is_missing_is_no_error(self):
        self.assertEqual(claude_delivery.sessions(["/nonexistent", str(self.config / "sessions" / "1.json")]), [])
        self.assertEqual(claude_delivery.session_status("s", 1, ["/nonexistent"]), "unknown")

    def test_a_status_is_read_from_one_file(self):
        self.register(os.getpid(), status="waiting")
        dirs = ["/nonexistent", str(self.config)]
        self.assertEqual(claude_delivery.session_status("session-1", os.getpid(), dirs), "waiting")
        self.assertEqual(claude_delivery.session_status("session-2", os.getpid(), dirs), "unknown")
        self.register(os.getpid(), status=["busy"])
        self.assertEqual(claude_delivery.session_status("session-1", os.getpid(), dirs), "unknown")

    def test_a_torn_registration_is_read_again(self):
        path = self.register(os.getpid())
        whole = path.with_suffix(".whole")
        whole.write_text(path.read_text())
        path.write_text('{"pid"')
        looked = []
        real = claude_delivery._read_json

        def read(*arguments):
            looked.append(real(*arguments))
            if len(looked) == 1:
                os.replace(whole, path)
            return looked[-1]

        claude_delivery._read_json = read
        self.addCleanup(setattr, claude_delivery, "_read_json", real)
        self.assertEqual(claude_delivery.session_status("session-1", os.getpid(), [str(self.config)]), "idle")

    def test_of_two_processes_with_one_session_the_one_written_last_is_taken(self):
        first, second = self.host(), self.host()
        found, _ = claude_delivery.find_inbox("session-1", [str(self.config)])
        self.assertEqual(found.pid, second.pid)
        self.assertNotEqual(first.pid, second.pid)

    def test_the_directories_are_the_chosen_one_the_default_and_the_reported_ones_each_once(self):
        (self.base / "link").symlink_to(self.config)
        home = str(self.base)
        environ = {"HOME": home, "CLAUDE_CONFIG_DIR": str(self.config)}
        reported = [str(self.base / "link"), "relative", None, home + "/x\0"]
        self.assertEqual(claude_delivery.config_dirs(environ, reported),
                         [str(self.config), home + "/.claude"])
        self.assertEqual(claude_delivery.config_dirs({}), [])

    def test_a_transcript_path_tells_its_configuration_directory(self):
        self.assertEqual(claude_delivery.config_dir_of("/h/.claude/projects/-w/x.jsonl"), "/h/.claude")
        self.assertEqual([claude_delivery.config_dir_of(path) for path in ("/h/x.jsonl", "", None)], [None] * 3)


class GuardTest(HostCase):
    """A socket that must not be written to is NOT_SENT, at once and with its reason."""

    def assert_not_sent(self, words, **options):
        left = []
        begin = time.monotonic()
        (word, reason), _ = self.deliver(leave=lambda: left.append(1), **options)
        self.assertEqual((word, left), ("NOT_SENT", []), reason)
        self.assertIn(words, reason)
        self.assertLess(time.monotonic() - begin, 1 * PATIENCE)

    def listen(self, path):
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(str(path))
        listener.listen(1)
        return listener

    def test_nobody_has_the_session_open(self):
        self.assert_not_sent("no running Claude Code")

    def test_a_session_without_an_inbox(self):
        self.register(os.getpid(), messagingSocketPath=None)
        self.assert_not_sent("no inbox")

    def test_a_socket_that_is_gone(self):
        self.register(os.getpid())
        self.assert_not_sent("cannot be reached")

    def test_a_socket_that_a_killed_host_left_behind(self):
        path = self.register(os.getpid())
        self.listen(self.runtime / ("%d.sock" % os.getpid())).close()
        self.assertTrue(path.exists())
        self.assert_not_sent("nobody listens")

    def test_a_fifo_a_file_and_a_symlink_in_the_sockets_place(self):
        self.register(os.getpid())
        place = self.runtime / ("%d.sock" % os.getpid())
        for make in (os.mkfifo, Path.touch, lambda path: path.symlink_to(self.host("other").socket)):
            make(place)
            self.assert_not_sent("is no socket")
            place.unlink()

    def test_a_directory_that_others_can_write(self):
        self.host()
        for mode in (0o777, 0o770, 0o1777):
            os.chmod(self.runtime, mode)
            self.assert_not_sent("others can write")
        os.chmod(self.runtime, 0o700)

    def test_a_directory_that_is_a_symlink(self):
        host = self.host()
        (self.base / "link").symlink_to(self.runtime)
        self.register(host.pid, messagingSocketPath=str(self.base / "link" / Path(host.socket).name))
        self.assert_not_sent("others can write")

    @unittest.skipIf(os.geteuid(), "needs root to give a file away")
    def test_a_socket_of_another_user(self):
        host = self.host()
        os.chown(host.socket, 12345, -1)
        self.assert_not_sent("another user")

    def test_a_socket_on_which_another_process_listens(self):
        host = self.host()
        self.register(os.getpid(), sessionId="session-2", messagingSocketPath=host.socket)
        self.assert_not_sent("another process (%d)" % host.pid, session="session-2")

    def test_a_path_that_is_too_long(self):
        self.register(os.getpid(), messagingSocketPath="/" + "x" * 103)
        self.assert_not_sent("too long")

    def test_the_senders_own_session(self):
        host = self.host()
        self.assert_not_sent("own session", own_pids=(1, host.pid))

    def test_a_line_that_is_longer_than_the_host_takes(self):
        self.host()
        options = dict(uid=UID, label="l", config_dirs=[str(self.config)])
        outcome, _ = claude_delivery.deliver("session-1", body="x" * 1000000, **options)
        self.assertEqual(outcome, ("NOT_SENT", "the message is too long for the host's inbox"))

    def test_a_host_that_takes_no_connections(self):
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        self.register(os.getpid())
        listener.bind(str(self.runtime / ("%d.sock" % os.getpid())))
        listener.listen(0)
        waiting = []
        try:
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                self.addCleanup(waiting[-1].close)
                waiting[-1].setblocking(False)
                waiting[-1].connect(listener.getsockname())
        except BlockingIOError:
            pass
        outcome, _ = claude_delivery.deliver("session-1", UID, "x", "l", config_dirs=[str(self.config)], timeout=0.2)
        self.assertEqual(outcome, ("NOT_SENT", "the host does not take connections"))

    def test_no_place_for_a_reply_socket(self):
        host = self.host()
        self.known_courier()
        for name in ("%d.sock" % os.getpid(), "%d-%s.sock" % (os.getpid(), UID[:8])):
            (self.runtime / name).touch()
        self.assert_not_sent("receipt beside")
        self.assertTrue(os.path.exists(host.socket))

    def test_nothing_of_ours_is_left_behind(self):
        host = self.host()
        self.deliver()
        self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])


class DeliveryTest(HostCase):
    def test_silence_of_a_host_that_goes_on_is_acceptance(self):
        host = self.host()
        outcome, facts = self.deliver(reply_address="uds:/x", mode="prompting")
        self.assertEqual(outcome, ("ACCEPTED", "uds-direct"))
        self.assertEqual(facts, {"msg_id": MESSAGE, "pid": host.pid, "socket": host.socket, "version": "2.1.332",
                                 "receipt": None, "courier": None})
        heard = host.heard("line")
        self.assertNotEqual(os.getpid(), heard["pid"])
        self.assertEqual(heard["line"], {
            "msgV": 1, "msg_id": MESSAGE, "type": "user", "priority": "next", "session_id": "session-1",
            "from": "uds:%s/%d.sock" % (self.runtime, heard["pid"]),
            "message": {"role": "user", "content": claude_delivery.envelope("hello", "uds:/x", "leader", "prompting")}})
        self.assertEqual(0o600, heard["reply_mode"])

    def test_leaving_is_told_once_and_before_anything_is_written(self):
        host, left = self.host(), []

        def leave():
            left.append(select.select([host.process.stdout], [], [], 0)[0])
        self.assertEqual(self.deliver(leave=leave)[0][0], "ACCEPTED")
        self.assertEqual(left, [[]])

    def test_if_leaving_fails_nothing_is_written(self):
        host = self.host()

        def leave():
            raise RuntimeError("the reservation was lost")
        self.assertEqual(("NOT_SENT", "RuntimeError: the reservation was lost"), self.deliver(leave=leave)[0])
        self.assertEqual(select.select([host.process.stdout], [], [], 0.05)[0], [])
        self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])

    def test_each_receipt_has_its_outcome(self):
        for receipt, expected in [
                (HELD, ("HELD", "because")), (DELIVERED, ("ACCEPTED", "uds-direct")), (DENIED, ("REFUSED", "because")),
                ({"status": "expired", "status_detail": "refused"}, ("REFUSED", "because")),
                ({"status": "refused"}, ("REFUSED", "because")), ({"status": "expired"}, ("REFUSED", "because")),
                ({"status": "dropped", "drop_reason": "queue-full"}, ("NOT_SENT", "the host dropped it: queue-full")),
                ({"status": "dropped", "orig_msg_id": "x", "dropped_msg_ids": [MESSAGE], "drop_reason": "rate-limited"},
                 ("NOT_SENT", "the host dropped it: rate-limited")),
                ({"status": "denied", "reason": 7}, ("REFUSED", "the receiving user declined it")),
                ({"status": "held", "torn": True}, ("HELD", "because")),
                ({"status": "held", "junk": "x\n[[[\n\n{}\n"}, ("HELD", "because"))]:
            with self.subTest(receipt=receipt):
                claude_delivery._dropped.clear()
                host = self.host(receipts=[receipt])
                outcome, facts = self.deliver()
                self.assertEqual((outcome, facts["receipt"]), (expected, receipt["status"]))
                host.end()

    def test_what_is_no_receipt_for_this_message_changes_nothing(self):
        for receipt in ({"status": "held", "orig_msg_id": "another"}, {"status": "held", "action": "peer_idle_notice"},
                        {"status": "dancing"}, {"status": "held", "orig_msg_id": None}):
            with self.subTest(receipt=receipt):
                host = self.host(receipts=[receipt])
                self.assertEqual(self.deliver()[0], ("ACCEPTED", "uds-direct"))
                host.end()

    def test_a_receipt_of_another_process_is_not_believed(self):
        self.host(close=False)
        self.known_courier()
        forged = json.dumps({"action": "peer_message_status", "orig_msg_id": MESSAGE, "status": "delivered"})
        program = ("import socket, sys, time\nprint('ready', flush=True)\nend = time.monotonic() + 10\n"
                   "while True:\n    try:\n"
                   "        s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); break\n    except OSError:\n"
                   "        assert time.monotonic() < end; time.sleep(0.01)\n"
                   "try:\n    s.sendall(sys.argv[2].encode() + b'\\n')\nexcept OSError: pass  # it hung up on us\n")
        path = self.runtime / ("%d.sock" % os.getpid())
        forger = subprocess.Popen([sys.executable, "-c", program, str(path), forged], stdout=subprocess.PIPE)
        self.addCleanup(forger.stdout.close)
        self.addCleanup(forger.wait)
        self.assertEqual(forger.stdout.readline(), b"ready\n")
        outcome, _ = claude_delivery.deliver("session-1", UID, "x", "l", config_dirs=[str(self.config)],
                                             timeout=0.7 * PATIENCE)
        self.assertEqual(outcome, ("UNKNOWN", "the host has not read it in time"))
        self.assertEqual(forger.wait(), 0)

    def test_a_late_receipt_still_comes_before_silence_while_the_hosts_loop_is_slow(self):
        # The stand-in, too, dials from the loop that closes the connections: what is due is dialled in between.
        self.host(receipts=[DENIED], delay=0.0005)
        self.assertEqual(self.deliver()[0][0], "REFUSED")

    def test_a_host_that_never_reads_is_unknown(self):
        host = self.host(close=False)
        outcome, _ = claude_delivery.deliver("session-1", UID, "x", "l", config_dirs=[str(self.config)], timeout=0.2)
        self.assertEqual(outcome, ("UNKNOWN", "the host has not read it in time"))
        self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])

    def test_a_stopped_host_is_unknown_also_with_a_message_larger_than_the_sockets_buffer(self):
        host = self.host()
        os.kill(host.pid, signal.SIGSTOP)
        for body in ("x", "x" * 900000):
            outcome, _ = claude_delivery.deliver("session-1", UID, body, "l", config_dirs=[str(self.config)],
                                                 timeout=0.3)
            self.assertEqual(outcome[0], "UNKNOWN")

    def test_another_session_in_the_hosts_place_is_unknown(self):
        self.host(become="session-2")
        outcome, _ = self.deliver()
        self.assertEqual(outcome, ("UNKNOWN", "the host went over to another session while it was written to"))

    def test_a_host_that_takes_its_registration_away_is_unknown(self):
        self.host(become="")
        self.assertEqual(self.deliver()[0], claude_delivery.ENDED)

    def during(self, name, act, before):
        """Lets something happen before or after a step of the exchange."""
        real = getattr(claude_delivery.Exchange, name)

        def step(*arguments):
            if before:
                act()
            result = real(*arguments)
            if not before:
                act()
            return result
        setattr(claude_delivery.Exchange, name, step)
        self.addCleanup(setattr, claude_delivery.Exchange, name, real)

    def test_a_host_killed_before_the_connection_is_not_sent(self):
        host = self.host()
        self.during("open", host.kill, before=True)
        self.assertEqual(self.deliver()[0][0], "NOT_SENT")

    def test_a_host_killed_between_connection_and_write_is_unknown(self):
        host = self.host()
        self.during("write", host.kill, before=True)
        self.assertEqual(self.deliver()[0][0], "UNKNOWN")

    def test_a_host_killed_after_the_write_is_unknown(self):
        host = self.host()
        self.during("write", host.kill, before=False)
        self.assertEqual(self.deliver()[0][0], "UNKNOWN")

    def test_a_host_killed_after_it_has_read_is_unknown(self):
        host = self.host()
        self.during("_is_silent", host.kill, before=True)
        self.assertEqual(self.deliver()[0], claude_delivery.ENDED)

    def test_after_a_drop_this_process_writes_nothing_to_that_host_for_a_minute(self):
        self.host(receipts=[{"status": "dropped", "drop_reason": "rate-limited"}])
        self.assertEqual(self.deliver()[0][0], "NOT_SENT")
        self.assertEqual("the host has dropped a message of this sender less than a minute ago", self.deliver()[0][1])
        host = next(iter(claude_delivery._dropped))
        claude_delivery._dropped[host] = time.monotonic() - 1
        self.assertIn("rate-limited", self.deliver()[0][1])

    def test_the_key_file_of_the_host_becomes_an_auth_line(self):
        for mode, start, expected in [(0o600, None, "auth"), (0o644, None, "user"), (0o600, "1", "user")]:
            with self.subTest(mode=oct(mode), start=start):
                host = self.host()
                key = self.config / "sessions" / ("%d.%s.key" % (host.pid, "a" * 64))
                start = start or host_process.start_time(host.pid)
                key.write_text(json.dumps({"peerToken": "ab" * 16, "procStart": start}))
                os.chmod(key, mode)
                self.assertEqual(self.deliver()[0][0], "ACCEPTED")
                self.assertEqual(host.heard("line")["line"]["type"], expected)
                host.end()


class CourierTest(HostCase):
    """Any message may be held: a process of its own writes it and hears the receipts."""

    def setUp(self):
        super().setUp()
        self.log = self.base / "outcomes"
        self.couriers = []
        self.addCleanup(self.reap)

    def reap(self):
        for pid in self.couriers:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except OSError:
                pass

    def send(self, session="session-1", on_receipt=None, **options):
        def note(outcome):
            with open(self.log, "a") as file:
                file.write(json.dumps([os.getpid(), *outcome]) + "\n")
            return True
        options = {"config_dirs": [str(self.config)], "timeout": 5 * PATIENCE, "on_receipt": on_receipt or note,
                   **options}
        outcome, facts = claude_delivery.deliver(session, UID, "hello", "leader", **options)
        if facts["courier"]:
            self.couriers.append(facts["courier"])
        return outcome, facts

    def outcomes(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def test_the_courier_writes_and_is_gone_once_the_message_is_accepted(self):
        host = self.host()
        outcome, facts = self.send()
        self.assertEqual((outcome, facts["courier"]), (("ACCEPTED", "uds-direct"), None))
        heard = host.heard("line")
        self.assertNotEqual(heard["pid"], os.getpid())
        self.assertEqual(heard["line"]["from"], "uds:%s/%d.sock" % (self.runtime, heard["pid"]))
        self.assertFalse(os.path.exists("/proc/%d" % heard["pid"]))
        self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])
        self.assertEqual(self.outcomes(), [])

    def test_leaving_is_told_in_the_callers_process(self):
        self.host()
        told = []
        self.assertEqual(self.send(leave=lambda: told.append(os.getpid()))[0][0], "ACCEPTED")
        self.assertEqual(told, [os.getpid()])

    def test_what_the_receiving_user_decides_comes_through_the_courier(self):
        for receipt, word in ((DELIVERED, "ACCEPTED"), (DENIED, "REFUSED"), ({"status": "expired"}, "REFUSED"),
                              ({"status": "dropped", "drop_reason": "queue-full"}, "NOT_SENT")):
            with self.subTest(word=word):
                self.log.write_text("")
                host = self.host(receipts=[HELD])
                outcome, facts = self.send()
                self.assertEqual(outcome, ("HELD", "because"))
                host.tell(do="receipts", receipts=[receipt])
                wait_until(self.outcomes, "the outcome")
                self.assertEqual([line[:2] for line in self.outcomes()], [[facts["courier"], word]])
                os.waitpid(facts["courier"], 0)
                self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])
                host.end()
                os.unlink(host.socket)

    def test_a_courier_outlives_the_process_that_sent_and_holds_none_of_its_files(self):
        host = self.host(receipts=[HELD])
        program = ("import sys; sys.path.insert(0, %r); import claude_delivery\n"
                   "def note(outcome):\n    open(%r, 'a').write(repr(outcome)); return True\n"
                   "print(claude_delivery.deliver('session-1', %r, 'x', 'l', config_dirs=[%r], on_receipt=note)[0][0])"
                   % (str(PROJECT), str(self.log), UID, str(self.config)))
        # Were its standard output held by the courier, this would not come back.
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=10 * PATIENCE)
        self.assertEqual(done.stdout, b"HELD\n")
        host.tell(do="receipts", receipts=[DELIVERED])
        wait_until(lambda: self.log.exists() and "ACCEPTED" in self.log.read_text(), "the outcome")
        wait_until(lambda: self.socket_names() == ["%d.sock" % host.pid], "the end of the courier")

    def test_a_courier_is_none_of_the_terminals_that_it_was_started_from(self):
        host = self.host(receipts=[HELD])
        courier = self.send()[1]["courier"]
        self.assertEqual(courier, os.getsid(courier))
        os.kill(courier, signal.SIGHUP)
        host.tell(do="receipts", receipts=[DELIVERED])
        wait_until(self.outcomes, "the outcome")

    def test_the_end_of_the_receiver_ends_a_hold(self):
        host = self.host(receipts=[HELD])
        self.send()
        host.process.kill()
        host.process.wait()
        wait_until(self.outcomes, "the outcome")
        self.assertEqual(self.outcomes()[0][1:],
                         ["NOT_SENT", "the receiving session ended before its user had decided"])

    def test_a_courier_ends_with_the_time_to_live_and_says_nothing(self):
        host = self.host(receipts=[HELD])
        _, facts = self.send(hold_for=0.1)
        os.waitpid(facts["courier"], 0)
        self.assertEqual((self.outcomes(), self.socket_names()), ([], ["%d.sock" % host.pid]))

    def test_a_waiting_courier_does_not_burn_the_processor(self):
        self.host(receipts=[HELD])
        _, facts = self.send()

        def ticks():
            fields = Path("/proc/%d/stat" % facts["courier"]).read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        before = ticks()
        time.sleep(0.5)  # what is measured is this time itself
        self.assertLess(ticks() - before, 10)

    def test_an_outcome_is_offered_until_it_is_taken(self):
        host, attempts = self.host(receipts=[HELD]), self.base / "attempts"

        def busy_store(outcome):
            with open(attempts, "a") as file:
                file.write("x")
            if os.path.getsize(attempts) == 1:
                raise OSError("locked")
            if os.path.getsize(attempts) == 2:
                return False
            self.log.write_text(json.dumps([0, *outcome]))
            return True
        _, facts = self.send(on_receipt=busy_store)
        host.tell(do="receipts", receipts=[DENIED])
        os.waitpid(facts["courier"], 0)
        self.assertEqual((self.outcomes()[0][1], attempts.read_text()), ("REFUSED", "xxx"))

    def test_a_host_that_reads_late_is_unknown_first_and_known_later(self):
        host = self.host()
        os.kill(host.pid, signal.SIGSTOP)
        outcome, _ = self.send(timeout=0.3)
        self.assertEqual(outcome, ("UNKNOWN", "the host has not read it in time"))
        os.kill(host.pid, signal.SIGCONT)
        wait_until(self.outcomes, "the outcome")
        self.assertEqual(self.outcomes()[0][1:], ["ACCEPTED", "uds-direct"])

    def test_a_stopped_host_may_hold_it_later(self):
        host = self.host(receipts=[HELD])
        os.kill(host.pid, signal.SIGSTOP)
        self.assertEqual(self.send(timeout=0.3)[0][0], "UNKNOWN")
        os.kill(host.pid, signal.SIGCONT)
        wait_until(self.outcomes, "the first outcome")
        host.tell(do="receipts", receipts=[DELIVERED])
        wait_until(lambda: len(self.outcomes()) == 2, "the second outcome")
        self.assertEqual([line[1] for line in self.outcomes()], ["HELD", "ACCEPTED"])

    def test_without_anybody_to_tell_no_courier_stays(self):
        host = self.host(receipts=[HELD])
        outcome, facts = claude_delivery.deliver("session-1", UID, "x", "l", config_dirs=[str(self.config)])
        self.assertEqual((outcome[0], facts["courier"], self.socket_names()), ("HELD", None, ["%d.sock" % host.pid]))

    def test_a_courier_that_dies_before_it_may_write_is_not_sent_and_after_it_unknown(self):
        real = claude_delivery.Exchange.write

        def die_before(*_):
            os._exit(3)

        def die_after(exchange, *arguments):
            real(exchange, *arguments)
            os._exit(3)
        self.addCleanup(setattr, claude_delivery.Exchange, "write", real)
        self.host()
        for death, word in ((die_before, "NOT_SENT"), (die_after, "UNKNOWN")):
            claude_delivery.Exchange.write = death
            self.assertEqual(self.send()[0][0], word)

    def test_a_courier_that_hangs_is_killed_and_what_is_said_stays_true(self):
        host = self.host()
        real = claude_delivery.Exchange.write

        def hang_before(*_):
            time.sleep(60)

        def hang_after(exchange, *arguments):
            real(exchange, *arguments)
            time.sleep(60)
        self.addCleanup(setattr, claude_delivery.Exchange, "write", real)
        for hang, word in ((hang_before, "NOT_SENT"), (hang_after, "UNKNOWN")):
            claude_delivery.Exchange.write = hang
            self.assertEqual(self.send(timeout=0.1)[0][0], word)
        self.assertEqual(self.socket_names(), ["%d.sock" % host.pid])

    def test_several_receivers_are_served_side_by_side_and_a_hung_one_holds_up_nobody(self):
        hosts = [self.host("session-%d" % number) for number in range(6)]
        for hung in hosts[:3]:
            os.kill(hung.pid, signal.SIGSTOP)
        jobs = [dict(target_session="session-%d" % number, uid="%016x" % number, body="b", label="l",
                     config_dirs=[str(self.config)]) for number in (0, 1, 2, 3, 4, 5, 9)]
        begin = time.monotonic()
        results = claude_delivery.deliver_all(jobs, timeout=1.5 * PATIENCE, at_once=4)
        self.assertLess(time.monotonic() - begin, 2.5 * PATIENCE)
        self.assertEqual([outcome[0] for outcome, _ in results], ["UNKNOWN"] * 3 + ["ACCEPTED"] * 3 + ["NOT_SENT"])
        self.assertEqual([facts["msg_id"][-1] for _, facts in results], list("0123459"))


if __name__ == "__main__":
    unittest.main()
