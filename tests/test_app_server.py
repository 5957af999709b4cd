"""The client of the app-server: its core by literal bytes, its JSON-RPC on real sockets with hostile servers.

The frames of the tests' own side are written and read by code that shares nothing with the implementation.
"""
import hashlib
import importlib.util
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from side_by_side import load_tests  # noqa: E402, F401
import app_server
from app_server import Connection, Lost, NotReached, ProtocolError, RpcError, WebSocket

PATIENCE = float(os.environ.get("XMSG_TEST_PATIENCE", "1"))
LONG = 20 * PATIENCE  # no test waits that long unless it fails
SHORT = 0.25 * PATIENCE  # the deadline of calls that are expected to reach it
SLACK = 1.0 * PATIENCE  # how late a call may end on a busy machine

# The example of RFC 6455, 1.3 and 4.1.
KEY, ACCEPT = b"dGhlIHNhbXBsZSBub25jZQ==", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
REQUEST = (b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
           b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
RESPONSE = (b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
MASK = bytes.fromhex("37fa213d")  # the mask of the RFC's example frame, section 5.7


def fixed_random(size):
    return {16: b"the sample nonce", 4: MASK}[size]


def open_core(**options):
    core = WebSocket(fixed_random, **options)
    core.data_to_send()
    core.feed(RESPONSE)
    assert core.next_event() == ("open",)
    return core


def events_of(core):
    """All events; the last one is ("failed", close code) if the core raised."""
    events = []
    try:
        while True:
            event = core.next_event()
            if event is None:
                return events
            events.append(event)
    except ProtocolError as error:
        return events + [("failed", error.close_code)]


def feed_in_parts(core, parts):
    events, sent = [], b""
    for part in parts:
        core.feed(part)
        events += events_of(core)
    return events, sent + core.data_to_send()


def server_frame(first, payload=b"", size_form=None):
    """An unmasked frame; first is its whole first byte."""
    size = len(payload)
    form = size_form or (1 if size < 126 else 2 if size < 1 << 16 else 8)
    if form == 1:
        return struct.pack(">BB", first, size) + payload
    if form == 2:
        return struct.pack(">BBH", first, 126, size) + payload
    return struct.pack(">BBQ", first, 127, size) + payload


def text_frame(message):
    return server_frame(0x81, json.dumps(message).encode())


def read_client_frames(data):
    """([(first byte, payload), ...], the incomplete rest) of masked frames, unmasked byte by byte."""
    frames = []
    while len(data) >= 2:
        first, size, at = data[0], data[1], 2
        assert size & 0x80, "an unmasked frame from a client"
        size &= 0x7F
        if size == 126:
            size, at = struct.unpack(">H", data[2:4])[0] if len(data) >= 4 else 1 << 62, 4
        elif size == 127:
            size, at = struct.unpack(">Q", data[2:10])[0] if len(data) >= 10 else 1 << 62, 10
        if len(data) < at + 4 + size:
            break
        mask, payload = data[at:at + 4], data[at + 4:at + 4 + size]
        frames.append((first, bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))))
        data = data[at + 4 + size:]
    return frames, data


class HandshakeTest(unittest.TestCase):
    def refused(self, response, text=""):
        """In whatever way the bytes are split."""
        for parts in (response,), [response[i:i + 1] for i in range(len(response))]:
            core = WebSocket(fixed_random)
            with self.assertRaisesRegex(ProtocolError, text):
                for part in parts:
                    core.feed(part)
                    self.assertIsNone(core.next_event())
            self.assertEqual("closed", core.state)
            self.assertEqual(REQUEST, core.data_to_send())  # no frame: there is no WebSocket
            core.feed(RESPONSE)
            self.assertIsNone(core.next_event())

    def test_the_request_is_the_bytes_of_the_rfc(self):
        core = WebSocket(fixed_random)
        self.assertEqual("connecting", core.state)
        self.assertEqual(REQUEST, core.data_to_send())
        self.assertEqual(b"", core.data_to_send())

    def test_each_connection_has_a_key_of_its_own(self):
        self.assertNotEqual(WebSocket().data_to_send(), WebSocket().data_to_send())

    def test_the_answer_opens_the_connection_split_at_any_byte(self):
        stream = RESPONSE + b"\x81\x02hi"
        for i in range(len(stream) + 1):
            core = WebSocket(fixed_random)
            core.data_to_send()
            events, sent = feed_in_parts(core, [stream[:i], stream[i:]])
            self.assertEqual(([("open",), ("text", "hi")], b""), (events, sent))
            self.assertEqual("open", core.state)

    def test_an_answer_that_lacks_any_of_its_last_bytes_is_waited_for(self):
        for i in range(len(RESPONSE)):
            core = WebSocket(fixed_random)
            core.feed(RESPONSE[:i])
            self.assertIsNone(core.next_event())
            self.assertEqual("connecting", core.state)

    def test_header_names_and_tokens_are_in_any_case_and_order(self):
        core = WebSocket(fixed_random)
        core.feed(b"HTTP/1.1 101\r\nSEC-WebSocket-Accept:\t" + ACCEPT + b" \r\nUpgrade: WebSocket\r\nX-Y:\r\n"
                  b"Connection: keep-alive\r\nConnection: x , UPGRADE\r\nSec-WebSocket-Extensions: \r\n\r\n")
        self.assertEqual(("open",), core.next_event())

    def test_another_status_is_refused_at_its_first_wrong_byte(self):
        for start in b"HTTP/1.1 2", b"HTTP/1.0", b"http", b"{", b"\r\n", b"HTTP/1.1 100", b"\x81":
            self.refused(start, "no WebSocket handshake")
        for rest in b"0 x", b"x", b" \x00", b" a\nb", b"\t":
            self.refused(RESPONSE.replace(b" Switching Protocols", rest), "no WebSocket handshake")

    def test_a_wrong_or_missing_accept_is_refused(self):
        for accept in b"", ACCEPT.lower(), ACCEPT[:-1], ACCEPT + b"x", KEY:
            self.refused(RESPONSE.replace(ACCEPT, accept), "Accept")
        self.refused(RESPONSE.replace(b"sec-websocket-accept: " + ACCEPT + b"\r\n", b""), "Accept")
        twice = b"sec-websocket-accept: " + ACCEPT + b"\r\n"
        self.refused(RESPONSE.replace(twice, twice * 2), "Accept")

    def test_a_missing_or_other_upgrade_is_refused(self):
        for line in b"", b"upgrade: h2c\r\n", b"upgrade: websocket2\r\n", b"upgrade: websocket, h2c\r\n":
            self.refused(RESPONSE.replace(b"upgrade: websocket\r\n", line), "upgrade to websocket")
        for line in b"", b"connection: close\r\n", b"connection: upgraded\r\n":
            self.refused(RESPONSE.replace(b"connection: Upgrade\r\n", line), "upgrade the connection")

    def test_extensions_and_subprotocols_that_nobody_asked_for_are_refused(self):
        for line in b"sec-websocket-extensions: permessage-deflate", b"Sec-WebSocket-Protocol: chat":
            self.refused(RESPONSE[:-2] + line + b"\r\n\r\n", "not asked for")

    def test_bad_header_lines_are_refused(self):
        for line in (b"no-colon", b": empty", b"sp ace: x", b"name : x", b" folded: x", b"x: \x00",
                     b"x: a\rb", b"x: a\nb"):
            self.refused(RESPONSE[:-2] + line + b"\r\n\r\n", "bad header line")

    def test_the_size_of_the_answer_is_limited(self):
        room = app_server.MAX_HANDSHAKE - len(RESPONSE) - len(b"x: \r\n")
        fits = RESPONSE[:-2] + b"x: " + b"y" * room + b"\r\n\r\n"
        self.assertEqual(app_server.MAX_HANDSHAKE, len(fits))
        core = WebSocket(fixed_random)
        core.feed(fits[:-1])
        self.assertIsNone(core.next_event())
        core.feed(fits[-1:])
        self.assertEqual(("open",), core.next_event())
        self.refused(fits[:-4] + b"y\r\n\r\n", "more than 8192 bytes")
        self.refused(fits[:-4] + b"yyyy", "more than 8192 bytes")

    def test_without_the_fast_sha1_hashlib_serves(self):
        spec = importlib.util.spec_from_file_location("app_server_without_sha1", app_server.__file__)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {"_sha1": None}):
            spec.loader.exec_module(module)
        self.assertIs(hashlib.sha1, module.sha1)
        self.assertEqual(ACCEPT, module.accept_token(KEY))
        self.assertEqual(ACCEPT, app_server.accept_token(KEY))

    def test_the_core_does_no_io(self):
        code = ("import sys; sys.path.insert(0, %r); sys.dont_write_bytecode = True; import app_server\n"
                "w = app_server.WebSocket(); w.feed(b'x')\n"
                "try: w.next_event()\n"
                "except app_server.ProtocolError: pass\n"
                "heavy = {'socket', 'select', 'asyncio', 'http', 'email', 'dataclasses', 'hashlib'}\n"
                "print(sorted(heavy & set(sys.modules)))" % ROOT)
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True,
                              timeout=LONG)
        self.assertEqual(("[]\n", ""), (done.stdout, done.stderr))


class FrameTest(unittest.TestCase):
    """Server frames in, by literal bytes; client frames out, by literal bytes."""

    def gives(self, data, events, sent=b"", **options):
        """The same events and bytes for the whole, for every split in two, and byte by byte."""
        splits = [[data], [data[i:i + 1] for i in range(len(data))]]
        splits += [[data[:i], data[i:]] for i in range(1, len(data))]
        for parts in splits:
            core = open_core(**options)
            self.assertEqual((events, sent), feed_in_parts(core, parts), parts)
        return core

    def fails(self, data, close_code=1002, before=(), **options):
        """At the last byte of data and not one byte sooner; the server is told why."""
        reason = b"\x88\x82" + MASK + bytes(a ^ b for a, b in zip(struct.pack(">H", close_code), MASK))
        core = self.gives(data, list(before) + [("failed", close_code)], reason, **options)
        self.assertEqual("closed", core.state)
        core = open_core(**options)
        core.feed(data[:-1])
        self.assertNotIn(("failed", close_code), events_of(core))

    def needs_more(self, data, **options):
        """Every proper start of a frame is waited for."""
        for i in range(len(data)):
            core = open_core(**options)
            core.feed(data[:i])
            self.assertIsNone(core.next_event(), i)
            self.assertEqual("open", core.state)

    def sends(self, payload, start, size=None):
        core = open_core()
        core.send_text(payload)
        sent = core.data_to_send()
        self.assertEqual(start, sent[:len(start)])
        self.assertEqual(([(0x81, payload)], b""), read_client_frames(sent))
        return sent

    def test_text_in_the_examples_of_the_rfc(self):
        self.gives(b"\x81\x05\x48\x65\x6c\x6c\x6f", [("text", "Hello")])
        self.gives(b"\x01\x03\x48\x65\x6c\x80\x02\x6c\x6f", [("text", "Hello")])
        sent = self.sends(b"Hello", b"\x81\x85" + MASK)
        self.assertEqual(b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", sent)
        self.needs_more(b"\x81\x05\x48\x65\x6c\x6c\x6f")

    def test_empty_messages(self):
        self.gives(b"\x81\x00", [("text", "")])
        self.gives(b"\x82\x00", [("binary", b"")])
        self.gives(b"\x01\x00\x00\x00\x80\x00", [("text", "")])
        self.assertEqual(b"\x81\x80\x37\xfa\x21\x3d", self.sends(b"", b""))

    def test_binary_messages_are_told_from_text(self):
        self.gives(b"\x82\x02\xff\x00", [("binary", b"\xff\x00")])
        self.gives(b"\x02\x01\xff\x80\x01\x00", [("binary", b"\xff\x00")])

    def test_each_form_of_the_length_with_its_least_and_greatest_size(self):
        for size, head in ((125, b"\x81\x7d"), (126, b"\x81\x7e\x00\x7e"), (65535, b"\x81\x7e\xff\xff"),
                           (65536, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00")):
            core = open_core()
            self.assertEqual(([("text", "x" * size)], b""), feed_in_parts(core, [head, b"x" * size]))
            self.sends(b"x" * size, head[:1] + bytes([head[1] | 0x80]) + head[2:] + MASK)
            for i in list(range(len(head))) + [len(head) + size - 1]:
                core = open_core()
                core.feed((head + b"x" * size)[:i])
                self.assertIsNone(core.next_event())
        self.gives(b"\x81\x7e\x00\x7e" + b"x" * 126, [("text", "x" * 126)])
        self.needs_more(b"\x81\x7e\x00\x7e" + b"x" * 126)

    def test_a_length_in_a_longer_form_than_needed_is_refused(self):
        self.fails(b"\x81\x7e\x00\x7d")
        self.fails(b"\x81\x7e\x00\x00")
        self.fails(b"\x81\x7f\x00\x00\x00\x00\x00\x00\xff\xff")
        self.fails(b"\x81\x7f\x80\x00\x00\x00\x00\x00\x00\x00")
        self.fails(b"\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff")

    def test_a_message_over_the_limit_is_refused_at_its_header(self):
        self.gives(b"\x81\x0a0123456789", [("text", "0123456789")], max_message=10)
        self.fails(b"\x81\x0b", 1009, max_message=10)
        self.fails(b"\x82\x7e\x01\x00", 1009, max_message=10)
        self.fails(b"\x81\x7f\x00\x00\x01\x00\x00\x00\x00\x00", 1009)
        self.assertEqual(8 << 20, app_server.MAX_MESSAGE)
        self.fails(b"\x81\x7f" + struct.pack(">Q", app_server.MAX_MESSAGE + 1), 1009)
        self.needs_more(b"\x81\x7f" + struct.pack(">Q", app_server.MAX_MESSAGE) + b"x")

    def test_fragments_count_together_against_the_limit(self):
        self.gives(b"\x01\x0501234\x00\x00\x80\x0556789", [("text", "0123456789")], max_message=10)
        self.fails(b"\x01\x0501234\x80\x06", 1009, max_message=10)
        self.fails(b"\x01\x0501234\x00\x0556789\x00\x01", 1009, max_message=10)
        # and each message begins anew
        self.gives(b"\x81\x0801234567" * 2, [("text", "01234567")] * 2, max_message=10)
        self.gives(b"\x01\x040123\x80\x044567" * 2, [("text", "01234567")] * 2, max_message=10)

    def test_control_frames_come_between_fragments_and_do_not_count(self):
        data = b"\x01\x0501234\x89\x0aPPPPPPPPPP\x8a\x0aQQQQQQQQQQ\x80\x0556789"
        events = [("ping", b"P" * 10), ("pong", b"Q" * 10), ("text", "0123456789")]
        pong = b"\x8a\x8a" + MASK + bytes(0x50 ^ MASK[i % 4] for i in range(10))
        self.gives(data, events, pong, max_message=10)

    def test_fragments_out_of_order_are_refused(self):
        self.fails(b"\x80")
        self.fails(b"\x00")
        self.fails(b"\x01\x01a\x81")
        self.fails(b"\x01\x01a\x01")
        self.fails(b"\x01\x01a\x02")
        self.fails(b"\x02\x01a\x82")
        self.fails(b"\x01\x01a\x80\x01b\x80", before=[("text", "ab")])

    def test_reserved_bits_are_refused(self):
        for bit in 0x40, 0x20, 0x10:
            for first in 0x81, 0x01, 0x82, 0x88, 0x89, 0x8A:
                self.fails(bytes([first | bit]))

    def test_unknown_opcodes_are_refused(self):
        for opcode in 3, 4, 5, 6, 7, 11, 12, 13, 14, 15:
            self.fails(bytes([0x80 | opcode]))

    def test_masked_frames_from_the_server_are_refused(self):
        for first in b"\x81", b"\x82", b"\x88", b"\x89", b"\x8a":
            for size in b"\x80", b"\x85", b"\xfe", b"\xff":
                self.fails(first + size)

    def test_control_frames_are_whole_and_short(self):
        for opcode in 0x8, 0x9, 0xA:
            self.fails(bytes([opcode]))
            for form in b"\x7e", b"\x7f":
                self.fails(bytes([0x80 | opcode]) + form)
        self.gives(b"\x8a\x7d" + b"x" * 125, [("pong", b"x" * 125)])
        self.needs_more(b"\x89\x7d" + b"x" * 125)

    def test_a_ping_is_answered_with_its_payload(self):
        self.gives(b"\x89\x05Hello", [("ping", b"Hello")], b"\x8a\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58")
        self.gives(b"\x89\x00", [("ping", b"")], b"\x8a\x80\x37\xfa\x21\x3d")
        self.gives(b"\x8a\x00", [("pong", b"")])

    def test_of_several_pings_the_newest_is_answered(self):
        core = open_core()
        core.feed(b"\x89\x01a" * 100000 + b"\x89\x01b")
        self.assertEqual(100001, len(events_of(core)))
        self.assertEqual(([(0x8A, b"b")], b""), read_client_frames(core.data_to_send()))
        self.assertEqual(b"", core.data_to_send())

    def test_text_that_is_not_utf8_is_refused(self):
        for text in b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe6\xbc", b"a\x80":
            self.fails(server_frame(0x81, text), 1007)
            self.fails(server_frame(0x01, text) + b"\x80\x00", 1007)

    def test_a_character_may_be_split_over_fragments(self):
        text = "é漢😀".encode()
        for i in range(len(text) + 1):
            data = server_frame(0x01, text[:i]) + server_frame(0x80, text[i:])
            self.gives(data, [("text", "é漢😀")])

    def test_a_close_frame_is_echoed_and_ends_everything(self):
        echo = b"\x88\x82" + MASK + bytes([0x03 ^ 0x37, 0xE8 ^ 0xFA])
        core = self.gives(b"\x88\x05\x03\xe8bye", [("close", 1000, "bye")], echo)
        self.assertEqual("closed", core.state)
        self.gives(b"\x88\x05\x03\xe8bye\x81\x02hi\xff\xff", [("close", 1000, "bye")], echo)
        core = self.gives(b"\x88\x00", [("close", 1005, "")], b"\x88\x80" + MASK)
        with self.assertRaises(ValueError):
            core.send_text(b"x")
        core.close()
        self.assertEqual(b"", core.data_to_send())

    def test_close_codes_of_the_registry_and_private_ones_are_taken(self):
        for code in [1000, 1001, 1002, 1003] + list(range(1007, 1015)) + [3000, 3999, 4000, 4999]:
            core = open_core()
            core.feed(b"\x88\x02" + struct.pack(">H", code))
            self.assertEqual(("close", code, ""), core.next_event())

    def test_bad_close_frames_are_refused(self):
        self.fails(b"\x88\x01\x03")
        for code in 0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535:
            self.fails(b"\x88\x02" + struct.pack(">H", code))
        self.fails(b"\x88\x03\x03\xe8\xff", 1007)

    def test_after_our_close_messages_still_come_and_nothing_is_sent_but_once(self):
        core = open_core()
        core.close()
        core.close()
        self.assertEqual("closing", core.state)
        self.assertEqual(([(0x88, b"\x03\xe8")], b""), read_client_frames(core.data_to_send()))
        with self.assertRaises(ValueError):
            core.send_text(b"x")
        core.feed(b"\x81\x02hi\x88\x02\x03\xe8")
        self.assertEqual([("text", "hi"), ("close", 1000, "")], events_of(core))
        self.assertEqual((b"", "closed"), (core.data_to_send(), core.state))

    def test_a_breach_after_our_close_is_not_answered(self):
        core = open_core()
        core.close()
        core.data_to_send()
        core.feed(b"\xff")
        self.assertEqual([("failed", 1002)], events_of(core))
        self.assertEqual((b"", "closed"), (core.data_to_send(), core.state))

    def test_after_a_breach_nothing_is_kept_or_understood(self):
        core = open_core()
        core.feed(b"\x01\x01a\x89\x01p\x83" + b"z" * 100)
        self.assertEqual([("ping", b"p"), ("failed", 1002)], events_of(core))
        core.feed(b"\x81\x02hi" * 1000)
        self.assertIsNone(core.next_event())
        self.assertEqual((bytearray(), bytearray()), (core._incoming, core._message))

    def test_nothing_is_sent_before_the_connection_is_open(self):
        core = WebSocket(fixed_random)
        with self.assertRaises(ValueError):
            core.send_text(b"x")
        core.close()
        self.assertEqual(REQUEST, core.data_to_send())

    def test_the_mask_is_the_one_of_the_rfc_for_every_length(self):
        for size in list(range(20)) + [1000, 65537]:
            payload = bytes(i * 7 & 0xFF for i in range(size))
            masked = bytes(byte ^ MASK[i % 4] for i, byte in enumerate(payload))
            self.assertEqual(masked, app_server.apply_mask(payload, MASK))
            self.assertEqual(payload, app_server.apply_mask(masked, MASK))

    def test_each_frame_has_a_mask_of_its_own(self):
        core = WebSocket()
        key = core.data_to_send().split(b"Key: ")[1].split(b"\r\n")[0]
        core.feed(RESPONSE.replace(ACCEPT, app_server.accept_token(key)))
        self.assertEqual(("open",), core.next_event())
        core.send_text(b"")
        core.send_text(b"")
        sent = core.data_to_send()
        self.assertEqual(12, len(sent))
        self.assertNotEqual(sent[:6], sent[6:])

    def test_any_messages_in_any_fragments_and_any_splits_come_out_as_they_went_in(self):
        chance = random.Random(6455)
        for _ in range(150):
            expected, data = [], b""
            for _ in range(chance.randrange(1, 6)):
                text = "".join(chance.choices("aé漢😀\0\n", k=chance.choice((0, 1, 5, 126, 400))))
                payload, first = text.encode(), 0x01
                while True:
                    cut = chance.randrange(len(payload) + 1)
                    last = chance.random() < 0.4
                    part, payload = (payload, b"") if last else (payload[:cut], payload[cut:])
                    data += server_frame(first | (0x80 if last else 0), part)
                    first = 0
                    if last:
                        break
                    if chance.random() < 0.3:
                        data += server_frame(0x8A, b"?" * chance.randrange(126))
                expected.append(("text", text))
            cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(12)))
            parts = [data[a:b] for a, b in zip([0] + cuts, cuts + [len(data)])]
            events, _ = feed_in_parts(open_core(max_message=1600), parts)
            self.assertEqual(expected, [event for event in events if event[0] != "pong"])

    def test_arbitrary_bytes_give_events_or_an_error_the_same_for_any_split(self):
        chance = random.Random(2011)
        for _ in range(1500):
            data = bytes(chance.choices(b"\x81\x01\x80\x88\x89\x8a\x00\x01\x02\x03\xe8~a\xc3\xa9", k=20))
            whole = feed_in_parts(open_core(), [data])
            self.assertEqual(whole, feed_in_parts(open_core(), [bytes([byte]) for byte in data]), data)


class LineTest(unittest.TestCase):
    """Where each message is a line."""

    def test_lines_come_out_as_they_went_in_split_at_any_byte(self):
        data = "{}\n\n{\"é\": 1}\nrest".encode()
        for i in range(len(data) + 1):
            core = app_server.Lines()
            self.assertEqual([("text", "{}"), ("text", ""), ("text", '{"é": 1}')],
                             feed_in_parts(core, [data[:i], data[i:]])[0])
            core.feed(b"\n")
            self.assertEqual(("text", "rest"), core.next_event())

    def test_the_length_of_a_line_and_its_bytes_are_checked(self):
        core = app_server.Lines()
        core.feed(b"x" * app_server.MAX_MESSAGE)
        self.assertIsNone(core.next_event())
        core.feed(b"x")
        with self.assertRaises(ProtocolError):
            core.next_event()
        core = app_server.Lines()
        core.feed(b"\xff\n")
        with self.assertRaises(ProtocolError):
            core.next_event()

    def test_a_call_over_the_standard_streams_of_a_process(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            def serve():
                for line in theirs.makefile("rb"):
                    message = json.loads(line)
                    if "id" in message:
                        answer = {"id": message["id"], "result": {"m": message["method"]}}
                        theirs.sendall(json.dumps(answer).encode() + b"\n")
            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            with Connection(None, time.monotonic() + LONG, lines=ours) as connection:
                self.assertEqual({"m": "ask"}, connection.request("ask"))
            thread.join(LONG)


# ---------------------------------------------------------------------------------------------------- real sockets


class Gone(Exception):
    pass


class Peer:
    """A hostile server's side of one connection. All that the client sent is in .received."""

    def __init__(self, connection, read_at_most=None, write_at_most=None):
        self._socket, self.received = connection, b""
        self._read_left = 1 << 40 if read_at_most is None else read_at_most
        self._write_left = 1 << 40 if write_at_most is None else write_at_most
        self._frames_at = None

    def send(self, data):
        part = data[:self._write_left]
        self._write_left -= len(part)
        try:
            self._socket.sendall(part)
        except OSError:
            raise Gone()
        if len(part) < len(data) or self._write_left == 0:
            raise Gone()

    def receive(self):
        if self._read_left == 0:
            raise Gone()
        try:
            data = self._socket.recv(min(1 << 16, self._read_left))
        except OSError:
            raise Gone()
        if not data:
            raise Gone()
        self._read_left -= len(data)
        self.received += data

    def drain(self):
        """Reads all there will be."""
        try:
            while True:
                self.receive()
        except Gone:
            pass

    def stop_reading(self):
        self._socket.shutdown(socket.SHUT_RD)

    def end_of_writing(self):
        self._socket.shutdown(socket.SHUT_WR)

    def shake_hands(self, change=lambda response: response):
        while b"\r\n\r\n" not in self.received:
            self.receive()
        key = self.received.split(b"Sec-WebSocket-Key: ")[1].split(b"\r\n")[0]
        self._frames_at = self.received.index(b"\r\n\r\n") + 4
        self.send(change(RESPONSE.replace(ACCEPT, app_server.accept_token(key))))

    def frames(self):
        return read_client_frames(self.received[self._frames_at:])[0] if self._frames_at else []

    def messages(self):
        return [json.loads(payload) for first, payload in self.frames() if first == 0x81]

    def wait_message(self, method):
        while True:
            for message in self.messages():
                if message.get("method") == method:
                    return message
            self.receive()

    def hello(self, result=None):
        self.shake_hands()
        message = self.wait_message("initialize")
        self.send(text_frame({"id": message["id"], "result": result or {"userAgent": "xmsg/0.171.0 (x)"}}))

    def asked(self, method="ask"):
        return self.wait_message(method)["id"]

    def answer(self, result=None):
        self.send(text_frame({"id": self.asked(), "result": result}))

    def request_bytes(self, method=b"ask"):
        """How many bytes of the request came: what follows hello and `initialized`."""
        frames, rest = read_client_frames(self.received[self._frames_at:]) if self._frames_at else ([], b"")
        names = [json.loads(p).get("method") if f == 0x81 else None for f, p in frames]
        if "initialized" not in names:
            return 0
        after = frames[names.index("initialized") + 1:]
        return len(rest) + sum(len(payload) for first, payload in after if first == 0x81)


class Server:
    """Listens on a Unix socket of this user and runs script(peer) for one connection after the other."""

    def __init__(self, script, **limits):
        self._script, self._limits, self.peers, self.faults = script, limits, [], []
        self.ended = threading.Event()
        self.quiet = threading.Event()  # never set before the end: what a silent script waits for

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="as")
        self.path = os.path.join(self.folder, "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self.quiet.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(LONG)
        self._listener.close()
        shutil.rmtree(self.folder)
        assert not self._thread.is_alive(), "the scripted server hangs"
        if self.faults and exc[0] is None:
            raise self.faults[0]

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(LONG)
                peer = Peer(connection, **self._limits)
                self.peers.append(peer)
                try:
                    self._script(peer)
                except Gone:
                    pass
                except Exception as fault:
                    self.faults.append(fault)
            self.ended.set()

    def connect(self, seconds=LONG):
        return Connection(self.path, time.monotonic() + seconds)

    @property
    def peer(self):
        """The only connection, once its script has ended."""
        assert self.ended.wait(LONG)
        return self.peers[0]


def kind_of_failure(server, seconds=LONG, params=None):
    """(error or None, whether leaving() was called, the result) of one whole call."""
    left = []
    try:
        with server.connect(seconds) as connection:
            result = connection.request("ask", params, leaving=lambda: left.append(1))
    except app_server.AppServerError as error:
        return error, bool(left), None
    return None, bool(left), result


class ConnectionTest(unittest.TestCase):
    def test_a_call_as_the_app_server_sees_it(self):
        def script(peer):
            peer.hello({"userAgent": "xmsg/0.156.1 (Debian)"})
            peer.answer({"data": ["é漢😀"]})
            peer.drain()

        with Server(script) as server:
            with server.connect() as connection:
                self.assertEqual({"userAgent": "xmsg/0.156.1 (Debian)"}, connection.server)
                self.assertFalse(connection.dirty)
                self.assertEqual({"data": ["é漢😀"]}, connection.request("ask", {"text": "é漢😀\n"}))
                self.assertTrue(connection.dirty)
            peer = server.peer
        self.assertEqual(REQUEST.split(KEY)[0], peer.received[:len(REQUEST.split(KEY)[0])])
        self.assertEqual([
            {"id": 1, "method": "initialize", "params": {
                "clientInfo": {"name": "xmsg", "title": None, "version": "1"},
                "capabilities": {"experimentalApi": True}}},
            {"method": "initialized"},
            {"id": 2, "method": "ask", "params": {"text": "é漢😀\n"}}], peer.messages())
        self.assertEqual((0x88, b"\x03\xe8"), peer.frames()[-1])

    def test_several_requests_have_ids_of_their_own_and_results_of_any_kind(self):
        results = [None, 0, [], "x", {"a": None}]

        def script(peer):
            peer.hello()
            for i, result in enumerate(results):
                peer.send(text_frame({"id": peer.asked("m%d" % i), "result": result}))
            peer.drain()

        with Server(script) as server, server.connect() as connection:
            self.assertEqual(results, [connection.request("m%d" % i) for i in range(len(results))])
            connection.close()
            self.assertEqual([1, 2, 3, 4, 5, 6], [m["id"] for m in server.peer.messages() if "id" in m])

    def test_an_error_answer_is_typed_and_the_connection_lives_on(self):
        def script(peer):
            peer.hello()
            error = {"code": -32602, "message": "m" * 9999, "data": [1]}
            peer.send(text_frame({"id": peer.asked("bad"), "error": error}))
            peer.answer("ok")

        with Server(script) as server, server.connect() as connection:
            with self.assertRaises(RpcError) as caught:
                connection.request("bad")
            error = caught.exception
            self.assertEqual((-32602, "m" * 9999, [1]), (error.code, error.message, error.data))
            self.assertTrue(error.dirty)
            self.assertLess(len(str(error)), 600)
            self.assertEqual("ok", connection.request("ask"))

    def test_notifications_are_passed_over_and_requests_declined(self):
        def script(peer):
            peer.hello()
            number = peer.asked()
            peer.send(text_frame({"method": "thread/status/changed", "params": {"id": number}}))
            peer.send(text_frame({"id": number, "method": "approve", "params": {}}))
            peer.send(text_frame({"id": "s" * 64, "method": "approve"}))
            while len(peer.messages()) < 5:
                peer.receive()
            peer.answer("ok")

        with Server(script) as server:
            self.assertEqual((None, True, "ok"), kind_of_failure(server))
            declined = server.peer.messages()[3:]
        self.assertEqual([2, "s" * 64], [message["id"] for message in declined])
        self.assertEqual({-32601}, {message["error"]["code"] for message in declined})

    def test_a_ping_in_the_middle_of_an_answer_is_answered(self):
        def script(peer):
            peer.hello()
            answer = json.dumps({"id": peer.asked(), "result": 7}).encode()
            peer.send(server_frame(0x01, answer[:3]) + b"\x89\x02pi")
            while (0x8A, b"pi") not in peer.frames():
                peer.receive()
            peer.send(server_frame(0x80, answer[3:]))

        with Server(script) as server:
            self.assertEqual((None, True, 7), kind_of_failure(server))

    def test_an_answer_in_many_fragments(self):
        def script(peer):
            peer.hello()
            answer = json.dumps({"id": peer.asked(), "result": "x" * 1000}).encode()
            parts = [answer[i:i + 1] for i in range(len(answer))]
            peer.send(b"".join(server_frame(0x01 if i == 0 else 0x00, part) for i, part in enumerate(parts)))
            peer.send(b"\x80\x00")

        with Server(script) as server:
            self.assertEqual((None, True, "x" * 1000), kind_of_failure(server))

    def test_a_large_request_and_a_large_answer_pass_while_the_other_side_only_writes(self):
        noise = text_frame({"method": "noise", "params": "n" * 1000})
        text = "漢" * (1 << 20)

        def script(peer):
            peer.hello()
            peer.wait_message("initialized")
            peer.send(noise * 4000)  # blocks until the client reads, which it does while it writes
            while len(peer.received) < len(text.encode()):
                peer.receive()
            peer.send(text_frame({"id": 2, "result": text}))

        with Server(script) as server:
            error, _, result = kind_of_failure(server, params={"text": text})
            self.assertIsNone(error)
            self.assertEqual(text, result)

    def test_what_follows_the_answer_cannot_undo_it_but_ends_the_connection(self):
        def script(peer):
            peer.hello()
            peer.send(text_frame({"id": peer.asked(), "result": 1}) + b"\xff\xff garbage")
            peer.drain()

        with Server(script) as server, server.connect() as connection:
            self.assertEqual(1, connection.request("ask"))
            with self.assertRaises(ProtocolError) as caught:
                connection.request("more", leaving=lambda: self.fail("nothing may leave"))
            self.assertFalse(caught.exception.dirty or connection.dirty)
            with self.assertRaisesRegex(NotReached, "closed"):
                connection.request("more")
            self.assertEqual(3, len(server.peer.messages()))


class LeavingTest(unittest.TestCase):
    """The caller knows whether the first byte of a request can have left."""

    def test_leaving_comes_once_and_before_the_first_byte(self):
        with Server(lambda peer: (peer.hello(), peer.answer("ok"))) as server, server.connect() as connection:
            seen = []
            connection.request("ask", {"text": "x" * (1 << 20)}, leaving=lambda: seen.append(
                (connection.dirty, b"ask" in b"".join(p for f, p in server.peers[0].frames()))))
            self.assertEqual([(False, False)], seen)
            self.assertTrue(connection.dirty)

    def test_what_leaving_raises_goes_through_and_nothing_is_sent(self):
        with Server(lambda peer: (peer.hello(), peer.drain())) as server:
            connection = server.connect()
            with self.assertRaises(ZeroDivisionError):
                connection.request("ask", leaving=lambda: 1 / 0)
            self.assertFalse(connection.dirty)
            # what is older left before leaving() was called
            self.assertEqual(["initialize", "initialized"], [m["method"] for m in server.peer.messages()])

    def test_a_deadline_that_passes_while_leaving_stops_the_request(self):
        with Server(lambda peer: (peer.hello(), peer.drain())) as server:
            deadline = time.monotonic() + SHORT
            connection = Connection(server.path, deadline)

            def leaving():
                while time.monotonic() < deadline:
                    pass

            with self.assertRaisesRegex(NotReached, "no time was left"):
                connection.request("ask", leaving=leaving)
            self.assertEqual(0, server.peer.request_bytes())

    def test_a_request_after_the_deadline_is_not_sent(self):
        for earlier in False, True:
            with Server(lambda peer: (peer.hello(), earlier and peer.answer(), peer.drain())) as server:
                deadline = time.monotonic() + SHORT
                connection = Connection(server.path, deadline)
                if earlier:
                    connection.request("ask")
                while time.monotonic() < deadline:
                    pass
                with self.assertRaises(NotReached):
                    connection.request("late", leaving=lambda: self.fail("nothing may leave"))
                self.assertNotIn("late", [message["method"] for message in server.peer.messages()])

    def test_nothing_follows_the_part_of_a_request_that_left(self):
        text = "x" * (4 << 20)

        def script(peer):
            peer.hello()
            while len(peer.received) < 1 << 20:
                peer.receive()
            peer.send(b"\xff")
            peer.drain()

        with Server(script) as server:
            error, _, _ = kind_of_failure(server, params={"text": text})
            self.assertTrue(error.dirty)
            frames, rest = read_client_frames(server.peer.received[server.peer._frames_at:])
        self.assertEqual(2, len(frames))
        mask = rest[10:14] * (len(rest) // 4)
        left = bytes(a ^ b for a, b in zip(rest[14:], mask))
        sent = b'{"id":2,"method":"ask","params":{"text":"%s"}}' % text.encode()
        self.assertTrue(sent.startswith(left))

    def test_an_end_that_came_before_the_request_is_seen_before_anything_leaves(self):
        for end in (lambda peer: None, lambda peer: peer.send(b"\x88\x05\x03\xf0bye"), Peer.end_of_writing):
            def script(peer):
                peer.hello()
                end(peer)
                ended.set()
                peer.drain() if end == Peer.end_of_writing else None

            ended = threading.Event()
            with Server(script) as server, server.connect() as connection:
                self.assertTrue(ended.wait(LONG))
                if end != Peer.end_of_writing:
                    server.peer
                with self.assertRaises(NotReached):
                    connection.request("ask")
                self.assertFalse(connection.dirty)

    def test_a_server_that_does_not_read_any_more_gets_nothing(self):
        deaf = threading.Event()

        def script(peer):
            peer.hello()
            peer.wait_message("initialized")
            peer.answer("first")
            peer.stop_reading()
            deaf.set()
            server.quiet.wait(LONG)

        with Server(script) as server, server.connect() as connection:
            self.assertEqual("first", connection.request("ask"))
            self.assertTrue(deaf.wait(LONG))
            with self.assertRaises(NotReached) as caught:
                connection.request("more")
            self.assertFalse(caught.exception.dirty or connection.dirty)

    def test_the_last_words_of_a_server_that_does_not_read_any_more_count(self):
        def script(peer):
            peer.hello()
            number = peer.asked()
            peer.stop_reading()
            peer.send(b"\x89\x00")
            server.quiet.wait(SHORT / 4)  # so that the pong is tried, and fails
            peer.send(text_frame({"id": number, "result": "last words"}))

        with Server(script) as server:
            self.assertEqual((None, True, "last words"), kind_of_failure(server))

    def test_what_no_server_can_be_told_is_not_sent(self):
        for text, reason in ("\ud800", "surrogate"), ("x" * app_server.MAX_REQUEST, "more than"):
            with Server(lambda peer: (peer.hello(), peer.drain())) as server, server.connect() as connection:
                with self.assertRaisesRegex(NotReached, reason):
                    connection.request("ask", {"text": text}, leaving=lambda: self.fail("nothing may leave"))
                self.assertEqual(0, server.peer.request_bytes())

    def test_a_server_that_ends_after_any_number_of_bytes_it_wrote(self):
        def script(peer):
            peer.hello()
            peer.answer("ok")
            written.append(1 << 40)

        written = []
        with Server(script, write_at_most=1 << 30) as server:
            self.assertIsNone(kind_of_failure(server)[0])
            total = (1 << 30) - server.peer._write_left
        hello = total - len(text_frame({"id": 2, "result": "ok"}))
        for k in range(total):
            with Server(script, write_at_most=k) as server:
                error, left, _ = kind_of_failure(server)
                self.check_truth(error, left, server.peer)
                if k < hello:
                    self.assertIsInstance(error, NotReached, k)
                    self.assertFalse(left, k)
                elif k > hello:
                    self.assertIsInstance(error, Lost, k)
        with Server(script, write_at_most=total) as server:
            self.assertEqual((None, True, "ok"), kind_of_failure(server))

    def test_a_server_that_ends_after_any_number_of_bytes_it_read(self):
        def script(peer):
            peer.hello()
            peer.asked()

        with Server(script) as server:
            self.assertIsInstance(kind_of_failure(server)[0], Lost)
            total = len(server.peer.received)
            request = len(json.dumps({"id": 2, "method": "ask", "params": {}}, separators=(",", ":"))) + 6
            initialized = len(json.dumps({"method": "initialized"}, separators=(",", ":"))) + 6
        for k in range(total):
            with Server(script, read_at_most=k) as server:
                error, left, _ = kind_of_failure(server)
                self.check_truth(error, left, server.peer)
                if k < total - request - initialized:
                    self.assertIsInstance(error, NotReached, k)
                    self.assertFalse(left, k)
                elif k > total - request:
                    self.assertIsInstance(error, Lost, k)

    def check_truth(self, error, left, peer):
        """NotReached is a promise, and so is dirty."""
        self.assertIsInstance(error, (NotReached, Lost))
        self.assertEqual(isinstance(error, Lost), error.dirty)
        if not error.dirty:
            self.assertEqual(0, peer.request_bytes())
        if peer.request_bytes():
            self.assertTrue(left)


class HostileServerTest(unittest.TestCase):
    def within(self, script, expected, seconds=SHORT, **limits):
        """The error of a whole call, which ends in time."""
        with Server(script, **limits) as server:
            self.server = server
            begin = time.monotonic()
            error, left, _ = kind_of_failure(server, seconds)
            self.assertLess(time.monotonic() - begin, seconds + SLACK)
            self.assertIsInstance(error, expected)
            self.assertEqual(error.dirty, left and not isinstance(error, NotReached))
            return error

    def test_silence_at_every_stage_ends_at_the_deadline(self):
        def silence(*stages):
            def script(peer):
                for stage in stages:
                    stage(peer)
                self.server.quiet.wait(LONG)
            return script

        self.within(silence(), NotReached)
        self.within(silence(Peer.shake_hands), NotReached)
        self.within(silence(Peer.shake_hands, lambda peer: peer.wait_message("initialize")), NotReached)
        self.within(silence(Peer.hello), Lost)
        self.within(silence(Peer.hello, Peer.asked), Lost)
        self.within(silence(Peer.hello, Peer.asked, lambda peer: peer.send(b"\x81\x7e")), Lost)

    def test_a_server_that_never_accepts_is_not_reached(self):
        with tempfile.TemporaryDirectory(prefix="as") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = os.path.join(folder, "s")
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(0)
            begin = time.monotonic()
            with self.assertRaises(NotReached):  # the first one waits in the queue
                Connection(path, begin + SHORT)
            self.assertLess(time.monotonic() - begin, SHORT + SLACK)
            waiting = []
            try:
                while True:  # fill the queue
                    waiting.append(socket.socket(socket.AF_UNIX))
                    waiting[-1].setblocking(False)
                    waiting[-1].connect(path)
            except BlockingIOError:
                pass
            with self.assertRaisesRegex(NotReached, "cannot be connected to"):
                Connection(path, time.monotonic() + LONG)
            for connection in waiting:
                connection.close()

    def test_a_byte_at_a_time_ends_at_the_deadline(self):
        def drip(peer, data):
            for i in range(len(data)):
                if self.server.quiet.wait(SHORT / 20):
                    return
                peer.send(data[i:i + 1])

        def slow_handshake(peer):
            peer.shake_hands(lambda response: (drip(peer, response), b"")[1])

        def slow_answer(peer):
            peer.hello()
            drip(peer, text_frame({"id": peer.asked(), "result": "x" * 100}))

        self.within(slow_handshake, NotReached)
        self.within(slow_answer, Lost)

    def test_a_server_that_reads_a_byte_at_a_time_ends_at_the_deadline(self):
        def script(peer):
            peer.hello()
            peer.wait_message("initialized")
            while not self.server.quiet.wait(SHORT / 20):
                peer._read_left = 1
                peer.receive()

        with Server(script) as self.server:
            begin = time.monotonic()
            error, left, _ = kind_of_failure(self.server, SHORT * 2, {"text": "x" * (1 << 20)})
            self.assertLess(time.monotonic() - begin, SHORT * 2 + SLACK)
            self.assertIsInstance(error, Lost)
            self.assertTrue(left)

    def test_a_wrong_handshake_is_refused_at_once(self):
        for change in (lambda response: b"HTTP/1.1 400 Bad Request\r\n\r\n", lambda response: b"{\"id\":1}\n",
                       lambda response: response.replace(b"accept: ", b"accept: x"),
                       lambda response: b"HTTP/1.1 101 " + b"x" * 9000):
            def script(peer):
                peer.shake_hands(change)
                self.server.quiet.wait(LONG)

            self.assertFalse(self.within(script, ProtocolError, LONG).dirty)

    def test_a_breach_before_the_request_left_is_not_dirty_and_after_it_is(self):
        breach = (
            b"\x81\x81", b"\xc1", b"\x83", b"\x09", b"\x89\x7e", b"\x80", b"\x88\x01x", b"\x88\x02\x03\xed",
            b"\x81\x01\xff", b"\x81\x7f\x00\x00\x01\x00\x00\x00\x00\x00", b"\x82\x00", b"\x81\x00",
            b"\x81\x02[]", b"\x81\x03NaN", b"\x81\x011", b"\x81\x08{\"a\":01}",
            text_frame({"method": float("inf")}), b"\x81\x34{\"method\":" + b"9" * 41 + b"}",
            server_frame(0x81, b"[" * 200000), server_frame(0x81, b"9" * 200000),
            server_frame(0x81, b"{\"method\":[" + b"[]," * 300000 + b"0]}"),
            text_frame({"id": {}, "method": "x"}), text_frame({"id": "s" * 65, "method": "x"}),
            text_frame({"id": None, "method": "x"}), text_frame({"id": 1.5, "method": "x"}))
        for data in breach:
            def early(peer):
                peer.shake_hands()
                peer.wait_message("initialize")
                peer.send(data)
                self.server.quiet.wait(LONG)

            def late(peer):
                peer.hello()
                peer.asked()
                peer.send(data)
                self.server.quiet.wait(LONG)

            self.assertFalse(self.within(early, ProtocolError, LONG).dirty, data[:20])
            self.assertTrue(self.within(late, ProtocolError, LONG).dirty, data[:20])

    def test_answers_that_answer_nothing_are_a_breach(self):
        for number in 1, 3, "2", True, 2.0, None, [2], -2, 10 ** 30, "x" * 100000, [[]] * 1000:
            def script(peer):
                peer.hello()
                peer.asked()
                peer.send(text_frame({"id": number, "result": 1}))
                self.server.quiet.wait(LONG)

            error = self.within(script, ProtocolError, LONG)
            self.assertTrue(error.dirty)
            self.assertIn("not asked", str(error))
            self.assertLess(len(str(error)), 120)

    def test_malformed_answers_are_a_breach(self):
        for answer in (
                {}, {"result": 1, "error": {"code": 1, "message": "m"}}, {"error": None}, {"error": "e"},
                {"error": {}}, {"error": {"code": "1", "message": "m"}}, {"error": {"code": 1}},
                {"error": {"code": True, "message": "m"}}, {"error": {"code": 1, "message": 2}}):
            def script(peer):
                peer.hello()
                peer.send(text_frame(dict(answer, id=peer.asked())))
                self.server.quiet.wait(LONG)

            self.assertTrue(self.within(script, ProtocolError, LONG).dirty, answer)

    def test_an_answer_that_comes_before_the_request_is_a_breach(self):
        def script(peer):
            peer.shake_hands()
            peer.wait_message("initialize")
            peer.send(text_frame({"id": 1, "result": {}}) + text_frame({"id": 2, "result": "forged"}))
            peer.drain()

        self.assertFalse(self.within(script, ProtocolError, LONG).dirty)

    def test_initialize_refused_or_answered_with_nonsense_is_not_reached(self):
        def refuses(peer):
            peer.shake_hands()
            number = peer.wait_message("initialize")["id"]
            peer.send(text_frame({"id": number, "error": {"code": -1, "message": "no"}}))
            self.server.quiet.wait(LONG)

        def answers_nonsense(peer):
            peer.hello([1])
            self.server.quiet.wait(LONG)

        self.assertIn("no (-1)", str(self.within(refuses, NotReached, LONG)))
        self.assertFalse(self.within(answers_nonsense, ProtocolError, LONG).dirty)

    def test_a_storm_of_notifications_is_survived_up_to_the_limit(self):
        note = text_frame({"method": "storm", "params": {}})

        def script(count):
            def run(peer):
                peer.hello()
                number = peer.asked()
                peer.send(note * count + text_frame({"id": number, "result": "calm"}))
                peer.drain()
            return run

        with Server(script(app_server.MAX_UNASKED)) as server:
            self.assertEqual((None, True, "calm"), kind_of_failure(server))
        self.assertTrue(self.within(script(app_server.MAX_UNASKED + 1), ProtocolError, LONG).dirty)

    def test_endless_floods_end_and_take_no_memory(self):
        """Each in a process of its own, whose peak is compared with its peak before."""
        floods = {
            "pings": (server_frame(0x89, b"p" * 125) * 400, b""),
            "pongs": (b"\x8a\x00" * 30000, b""),
            "notifications": (text_frame({"method": "m", "params": "x" * 60000}), b""),
            "requests": (text_frame({"method": "m", "id": "i" * 64}) * 600, b""),
            "empty fragments": (b"\x00\x00" * 30000, b"\x01\x00"),
            "one endless message": (server_frame(0x00, b"x" * 60000), b"\x01\x00"),
            "one huge frame": (b"x" * 60000, b"\x81\x7f\x00\x00\x00\xff\x00\x00\x00\x00"),
            "one large frame of lists": (b"[],[],[]," * 6000, b"\x81\x7f" + struct.pack(
                ">Q", app_server.MAX_MESSAGE) + b"["),
        }
        code = textwrap.dedent("""
            import resource, sys, time
            sys.path.insert(0, sys.argv[3])
            sys.dont_write_bytecode = True
            import app_server, select, socket
            def peak():  # kilobytes; ru_maxrss begins with the parent's on Linux
                try:
                    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
                except OSError:
                    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            before, begin = peak(), time.monotonic()
            try:
                app_server.Connection(sys.argv[1], begin + float(sys.argv[2])).request("ask")
            except app_server.AppServerError as error:
                print(type(error).__name__, error.dirty)
            print(time.monotonic() - begin, peak() - before)
            """)
        for name, (data, start) in floods.items():
            def script(peer):
                peer.hello()
                peer.asked()
                peer.send(start)
                while True:
                    peer.send(data)

            with self.subTest(name), Server(script) as server:
                command = [sys.executable, "-I", "-S", "-c", code, server.path, str(SHORT * 2), ROOT]
                done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
                self.assertEqual("", done.stderr)
                outcome, figures = done.stdout.splitlines()
                seconds, kilobytes = map(float, figures.split())
                if os.environ.get("XMSG_TEST_FIGURES"):
                    print(name, outcome, figures, file=sys.stderr)
                self.assertIn(outcome, ("Lost True", "ProtocolError True"))
                self.assertLess(seconds, SHORT * 2 + SLACK)
                self.assertLess(kilobytes, 64 << 10)


class SocketTest(unittest.TestCase):
    """Whose socket it is, and that it is one."""

    def setUp(self):
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="as"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = os.path.join(self.folder, "s")

    def listen(self, path):
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(4)

    def refused(self, text, path=None):
        with self.assertRaisesRegex(NotReached, text):
            app_server.connect_socket(path or self.path)

    def test_a_socket_of_ours_is_connected_to_directly_and_through_a_link(self):
        self.listen(self.path)
        app_server.connect_socket(self.path)[0].close()
        inner = os.path.join(self.folder, "control")
        os.mkdir(inner, 0o700)
        os.symlink(self.path, os.path.join(inner, "link"))
        app_server.connect_socket(os.path.join(inner, "link"))[0].close()

    def test_what_is_no_socket_is_not_reached(self):
        self.refused("no app-server socket")
        os.symlink(os.path.join(self.folder, "gone"), self.path)
        self.refused("no app-server socket")
        os.unlink(self.path)
        os.symlink(self.path, self.path)
        self.refused("socket")
        os.unlink(self.path)
        for make in (lambda: open(self.path, "w").close(), lambda: os.mkfifo(self.path)):
            make()
            self.refused("not a socket")
            os.unlink(self.path)
        os.mkdir(self.path)
        self.refused("not a socket")

    def test_a_stale_socket_is_not_reached(self):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(self.path)
        os.chmod(self.path, 0o600)
        stale.close()
        self.refused("cannot be connected to")

    def test_a_path_that_is_too_long_is_not_reached(self):
        inner = os.path.join(self.folder, "x" * 150)
        os.mkdir(inner, 0o700)
        self.listen(self.path)
        os.rename(self.path, os.path.join(inner, "s"))
        self.refused("cannot be connected to", os.path.join(inner, "s"))

    def test_no_free_file_descriptor_is_not_reached(self):
        self.listen(self.path)
        with mock.patch("socket.socket", side_effect=OSError(24, "Too many open files")):
            self.refused("Too many open files")

    def test_what_others_can_write_to_is_refused(self):
        self.listen(self.path)
        inner = os.path.join(self.folder, "control")
        os.mkdir(inner, 0o700)
        link = os.path.join(inner, "link")
        os.symlink(self.path, link)
        for name, good in (self.path, 0o600), (self.folder, 0o700), (inner, 0o700):
            for bad in 0o020, 0o002:
                os.chmod(name, good | bad)
                self.refused("others can write to it: " + name, link)
            os.chmod(name, good)
            app_server.connect_socket(link)[0].close()

    def test_what_another_user_owns_is_refused(self):
        self.listen(self.path)
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            self.refused("owned by another user")
        if os.geteuid() == 0:
            link = os.path.join(self.folder, "link")
            os.symlink(self.path, link)
            for name in self.path, self.folder, link:
                os.lchown(name, 65534, 0)
                self.refused("owned by another user", link)
                os.lchown(name, 0, 0)
            app_server.connect_socket(link)[0].close()

    @unittest.skipUnless(hasattr(socket, "SO_PEERCRED"), "the kernel does not say who listens")
    def test_a_listener_of_another_user_is_refused(self):
        self.listen(self.path)
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1), mock.patch("app_server.check_socket"):
            self.refused("belongs to another user")


if __name__ == "__main__":
    unittest.main()
