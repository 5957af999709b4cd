"""A client of Codex's app-server: a WebSocket core that does no I/O, and JSON-RPC over it on a Unix socket.

The app-server speaks JSON-RPC (without its "jsonrpc" key), one object in each text message of a WebSocket
(RFC 6455), or in each line where it was started for one client. What comes from it is hostile: every size has a
limit, and the first breach ends the connection.
"""
import binascii
import json
import os
import re
import stat
import sys
import time

try:
    from _sha1 import sha1  # hashlib loads OpenSSL, which costs more than all the rest of this file
except ImportError:
    from hashlib import sha1

# ---------------------------------------------------------------------------------------------------- errors

class AppServerError(Exception):
    """dirty: a byte of the request that failed can have left, so only the server knows what became of it."""

    dirty = False


class NotReached(AppServerError):
    """Nothing of the request was sent."""


class Lost(AppServerError):
    """The request has left, wholly or in part, and no answer came."""

    dirty = True


class RpcError(AppServerError):
    """The server's own answer: it did not do what it was asked for. Has its code, message, data (or None)."""

    dirty = True

    def __init__(self, code, message, data=None):
        super().__init__("%s (%d)" % (message[:500], code))
        self.code, self.message, self.data = code, message, data


class ProtocolError(AppServerError):
    """The server broke the protocol; dirty says whether a byte of the request had left by then.

    close_code: the status of RFC 6455, 7.4.1 that tells the server so.
    """

    def __init__(self, text, close_code=1002):
        super().__init__(text)
        self.close_code = close_code


# ---------------------------------------------------------------------------------------------------- WebSocket

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
OPCODES = {CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG}
CONNECTING, OPEN, CLOSING, CLOSED = "connecting", "open", "closing", "closed"

# Security limits, in bytes.
MAX_HANDSHAKE = 8192
MAX_CONTROL = 125  # RFC 6455, 5.5
MAX_MESSAGE = 8 << 20  # received, all its fragments together

STATUS = b"HTTP/1.1 101"
STATUS_LINE = re.compile(rb"HTTP/1\.1 101(?: [\t\x20-\x7e\x80-\xff]*)?")
HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
# RFC 6455, 7.4 with the IANA registry: the others are unassigned or never on the wire.
CLOSE_CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014}


def accept_token(key):
    """What a server answers to a Sec-WebSocket-Key (RFC 6455, 4.2.2)."""
    return binascii.b2a_base64(sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest(), newline=False)


def apply_mask(payload, mask):
    """The payload XOR the repeated four bytes (RFC 6455, 5.3), as one operation on long integers."""
    size = len(payload)
    stream = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(stream, "little")).to_bytes(size, "little")


def build_frame(opcode, payload, mask):
    """A whole message as one masked frame."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8, "big")
    return head + mask + apply_mask(payload, mask)


class WebSocket:
    """The client's side of one connection, from the handshake on.

    feed() takes what came, next_event() says what it means, data_to_send() gives what must be sent for it.
    How the bytes were split makes no difference to the events. random(n) gives n bytes for the key and masks.
    """

    def __init__(self, random=os.urandom, max_message=MAX_MESSAGE):
        key = binascii.b2a_base64(random(16), newline=False)
        self.state = CONNECTING
        self._random, self._max_message, self._accept = random, max_message, accept_token(key)
        self._outgoing = bytearray(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: %s\r\nSec-WebSocket-Version: 13\r\n\r\n" % key)
        self._pong = None
        self._incoming = bytearray()
        self._opcode, self._message = None, bytearray()

    def feed(self, data):
        """Bytes that came. What follows a Close frame is dropped (RFC 6455, 1.4)."""
        if self.state != CLOSED:
            self._incoming += data

    def next_event(self):
        """("open",), ("text", str), ("binary", bytes), ("ping", bytes), ("pong", bytes),
        ("close", code, reason), or None: more bytes are needed. Raises ProtocolError, which ends it all.
        """
        try:
            if self.state == CONNECTING:
                return self._read_handshake()
            while self.state != CLOSED:
                frame = self._read_frame()
                if frame is None:
                    return None
                event = self._take_frame(*frame)
                if event is not None:
                    return event
            return None
        except ProtocolError as error:
            if self.state == OPEN:
                self._queue_frame(CLOSE, error.close_code.to_bytes(2, "big"))
            self._end()
            raise

    def data_to_send(self):
        """Takes the bytes that wait to be sent."""
        if self._pong is not None:
            self._queue_frame(PONG, self._pong)
            self._pong = None
        data, self._outgoing = bytes(self._outgoing), bytearray()
        return data

    def send_text(self, data):
        """Queues a text message, given as UTF-8."""
        if self.state != OPEN:
            raise ValueError("the connection is %s" % self.state)
        self._queue_frame(TEXT, data)

    def close(self, code=1000):
        """Queues a Close frame, on an open connection."""
        if self.state == OPEN:
            self._queue_frame(CLOSE, code.to_bytes(2, "big"))
            self.state = CLOSING

    def _queue_frame(self, opcode, payload):
        self._outgoing += build_frame(opcode, payload, self._random(4))

    def _end(self):
        self.state, self._pong, self._opcode = CLOSED, None, None
        self._incoming, self._message = bytearray(), bytearray()

    def _read_handshake(self):
        data = self._incoming
        start = bytes(data[:len(STATUS)])
        if start != STATUS[:len(start)]:
            raise ProtocolError("no WebSocket handshake: %r" % bytes(data[:40]))
        end = data.find(b"\r\n\r\n", 0, MAX_HANDSHAKE)
        if end < 0:
            if len(data) >= MAX_HANDSHAKE:
                raise ProtocolError("a handshake of more than %d bytes" % MAX_HANDSHAKE)
            return None
        check_handshake(bytes(data[:end]).split(b"\r\n"), self._accept)
        del data[:end + 4]
        self.state = OPEN
        return ("open",)

    def _read_frame(self):
        """(final, opcode, payload) of a frame that is complete and allowed here, or None.

        Each check comes as soon as its bytes are there, so that nothing forbidden is waited for or kept.
        """
        data = self._incoming
        if not data:
            return None
        final, opcode = data[0] & 0x80, data[0] & 0x0F
        control = opcode & 0x08
        if data[0] & 0x70:
            raise ProtocolError("reserved bits set in a frame")
        if opcode not in OPCODES:
            raise ProtocolError("a frame of the unknown opcode %d" % opcode)
        if control and not final:
            raise ProtocolError("a fragmented control frame")
        if not control and (opcode == CONTINUATION) != (self._opcode is not None):
            raise ProtocolError("fragments out of order")
        if len(data) < 2:
            return None
        if data[1] & 0x80:
            raise ProtocolError("a masked frame from a server")
        start, size = 2, data[1]
        if control and size > MAX_CONTROL:
            raise ProtocolError("a control frame of more than %d bytes" % MAX_CONTROL)
        if size > 125:
            start, least = (4, 126) if size == 126 else (10, 1 << 16)
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start], "big")
            if not least <= size < 1 << 63:
                raise ProtocolError("a frame length in a form that is not allowed: %d" % size)
        if not control and len(self._message) + size > self._max_message:
            raise ProtocolError("a message of more than %d bytes" % self._max_message, 1009)
        if len(data) < start + size:
            return None
        payload = bytes(data[start:start + size])
        del data[:start + size]
        return final, opcode, payload

    def _take_frame(self, final, opcode, payload):
        """The event that the frame makes; None: it is a fragment that is not the last."""
        if opcode == PING:
            self._pong = payload  # only the newest needs an answer (RFC 6455, 5.5.3), so none pile up
            return "ping", payload
        if opcode == PONG:
            return "pong", payload
        if opcode == CLOSE:
            return self._take_close(payload)
        self._message += payload
        if opcode != CONTINUATION:
            self._opcode = opcode
        if not final:
            return None
        opcode, message = self._opcode, bytes(self._message)
        self._opcode, self._message = None, bytearray()
        if opcode == BINARY:
            return "binary", message
        return "text", decode_utf8(message)

    def _take_close(self, payload):
        code, reason = 1005, ""  # no status on the wire (RFC 6455, 7.1.5)
        if payload:  # a single byte, which is not allowed, is below every code
            code, reason = int.from_bytes(payload[:2], "big"), decode_utf8(payload[2:])
            if code not in CLOSE_CODES and not 3000 <= code <= 4999:
                raise ProtocolError("a Close frame with status %d" % code)
        if self.state == OPEN:
            self._queue_frame(CLOSE, payload[:2])
        self._end()
        return "close", code, reason


def check_handshake(lines, accept):
    """Raises ProtocolError unless a server's header lines open the connection that was asked for."""
    if not STATUS_LINE.fullmatch(lines[0]):
        raise ProtocolError("no WebSocket handshake: %r" % lines[0][:40])
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not (colon and HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value)):
            raise ProtocolError("a bad header line: %r" % line[:40])
        name, value = name.lower(), value.strip(b" \t")
        headers[name] = headers[name] + b"," + value if name in headers else value
    if headers.get(b"upgrade", b"").lower() != b"websocket":
        raise ProtocolError("a handshake that does not upgrade to websocket")
    connection = headers.get(b"connection", b"").lower()
    if b"upgrade" not in [token.strip(b" \t") for token in connection.split(b",")]:
        raise ProtocolError("a handshake that does not upgrade the connection")
    if headers.get(b"sec-websocket-accept") != accept:
        raise ProtocolError("a wrong Sec-WebSocket-Accept")
    for name in b"sec-websocket-extensions", b"sec-websocket-protocol":
        if headers.get(name):
            raise ProtocolError("a handshake with something that was not asked for: %s" % name.decode())


def decode_utf8(data):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("text that is not UTF-8", 1007) from None


class Lines:
    """The client's side where each message is a line, with the methods and events of WebSocket."""

    def __init__(self):
        self._incoming, self._outgoing, self._seen = bytearray(), bytearray(), 0

    def feed(self, data):
        self._incoming += data

    def next_event(self):
        """("text", str), or None: more bytes are needed. Raises ProtocolError."""
        end = self._incoming.find(b"\n", self._seen)
        if end < 0:
            self._seen = len(self._incoming)
            if self._seen > MAX_MESSAGE:
                raise ProtocolError("a line of more than %d bytes" % MAX_MESSAGE)
            return None
        line, self._seen = bytes(self._incoming[:end]), 0
        del self._incoming[:end + 1]
        return "text", decode_utf8(line)

    def data_to_send(self):
        data, self._outgoing = bytes(self._outgoing), bytearray()
        return data

    def send_text(self, data):
        self._outgoing += data + b"\n"

    def close(self):
        """A line has no goodbye."""


# ---------------------------------------------------------------------------------------------------- JSON-RPC

INITIALIZE = {"clientInfo": {"name": "xmsg", "title": None, "version": "1"},
              # Without it thread/read does not say canAcceptDirectInput, and 0.149 has no thread/turns/list.
              "capabilities": {"experimentalApi": True}}
UNSUPPORTED = -32601
# What 0.156 and later take as one frame (their header x-codex-websocket-max-unfragmented-message-bytes).
MAX_REQUEST = 16 << 20
# Messages, pings and pongs that are no answer to us, on one connection: a fraction of a second of work.
MAX_UNASKED = 10000
MAX_ID = 64  # characters of a server's request id, which goes back to it
MAX_DIGITS = 40  # reading an integer takes quadratic time
# Brackets and commas in the text of one message. 8 MiB of "[],[]," would take seconds and 300 MB to read.
MAX_PARTS = 500000
READ_SIZE = 1 << 16


def check_socket(path):
    """Raises NotReached unless the path is a socket that nobody but this user can have made or replaced.

    Since 0.156 it is a symbolic link into /tmp/codex-daemon-<uid>/: link, socket and the directories of both
    count.
    """
    try:
        path, target = os.path.abspath(path), os.path.realpath(path)
        names = os.path.dirname(path), path, os.path.dirname(target), target
        found = [(name, os.lstat(name)) for name in names]
    except OSError as error:
        raise NotReached("no app-server socket: %s" % error.strerror) from None
    if not stat.S_ISSOCK(found[-1][1].st_mode):
        raise NotReached("not a socket: %s" % target)
    for name, status in found:
        if status.st_uid != os.geteuid():
            raise NotReached("owned by another user: %s" % name)
        if status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode):
            raise NotReached("others can write to it: %s" % name)


def connect_socket(path):
    """(socket, pid of its server): non-blocking, and connected to a process of this user. Raises NotReached.

    The pid is None where the system does not tell.
    """
    import socket

    check_socket(path)
    pid = None
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(path)  # at once, or EAGAIN where the queue is full; never "in progress"
            if hasattr(socket, "SO_PEERCRED"):  # Linux: (pid, uid, gid) of who called listen()
                listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid = int.from_bytes(listener[:4], sys.byteorder)
                if int.from_bytes(listener[4:8], sys.byteorder) != os.geteuid():
                    raise NotReached("the app-server belongs to another user")
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise NotReached("the app-server cannot be connected to: %s" % (error.strerror or error)) from None
    return connection, pid


def read_integer(digits):
    if len(digits) > MAX_DIGITS:
        raise ValueError("an integer of %d digits" % len(digits))
    return int(digits)


def refuse_constant(name):
    raise ValueError("%s is not JSON" % name)


DECODER = json.JSONDecoder(parse_int=read_integer, parse_constant=refuse_constant)


def decode_message(text):
    """The object that a message holds. Raises ProtocolError."""
    if text.count("[") + text.count("{") + text.count(",") > MAX_PARTS:
        raise ProtocolError("a message of more than %d parts" % MAX_PARTS, 1009)
    try:
        message = DECODER.decode(text)
    except (ValueError, RecursionError):
        raise ProtocolError("a message that is not JSON: %r" % text[:40], 1008) from None
    if not isinstance(message, dict):
        raise ProtocolError("a message that is not an object: %r" % text[:40], 1008)
    return message


def encode_message(message):
    """Bytes of a message. Raises NotReached for what no server can be told."""
    try:
        data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:
        raise NotReached("a request with a lone surrogate") from None
    if len(data) > MAX_REQUEST:
        raise NotReached("a request of %d bytes, more than the app-server takes" % len(data))
    return data


class Connection:
    """An initialized connection, all of whose life ends by the deadline (in seconds of time.monotonic()).

    server: the app-server's answer to `initialize`; pid: its process, None if the system does not tell. dirty: a byte
    of the latest request can have left.
    Any failure but an RpcError closes the connection.
    """

    def __init__(self, path, deadline, lines=None):
        """Connects and initializes. Raises NotReached, or ProtocolError that is not dirty.

        lines: instead of a path, a socket whose other end is the standard input and output of an app-server.
        """
        import select

        self.dirty = False
        self.deadline = deadline
        self._web, self._pending = Lines() if lines else WebSocket(), memoryview(b"")
        self._last_id = self._unasked = 0
        self._opened, self._mute = bool(lines), False  # mute: the server does not read any more
        self._answer, self._leaving, self._fresh = None, None, False  # fresh: no byte of the request has left
        self._socket, self.pid = (lines, None) if lines else connect_socket(path)
        self._socket.setblocking(False)
        try:
            self._poll, self._readable, self._writable = select.poll(), select.POLLIN, select.POLLOUT
            self._poll.register(self._socket)
            while not self._opened:
                self._exchange()
            self.server = self._ask("initialize", INITIALIZE, None)
            if not isinstance(self.server, dict):
                raise ProtocolError("an answer to initialize that is not an object")
            self._web.send_text(encode_message({"method": "initialized"}))
            self.dirty = False
        except BaseException as error:
            self.close()
            if isinstance(error, (Lost, RpcError)):
                raise NotReached("not initialized: %s" % error) from None
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def request(self, method, params=None, leaving=None):
        """The result, as the server gave it.

        leaving() is called at most once, just before the first byte of the request can leave; what it raises
        goes through, and nothing is sent then. Raises NotReached, RpcError, Lost or ProtocolError.
        """
        self.dirty = False
        if self._socket is None:
            raise NotReached("the connection is closed")
        try:
            return self._ask(method, params or {}, leaving)
        except RpcError:
            raise
        except BaseException as error:
            if isinstance(error, ProtocolError):
                error.dirty = self.dirty
            self.close()
            raise

    def close(self):
        """Ends the connection, with a goodbye if that needs no waiting; never sends the rest of a request."""
        if self._socket is None:
            return
        connection, self._socket = self._socket, None
        try:
            if not self._pending and not self._mute:
                self._web.close()
                connection.send(self._web.data_to_send())
        except OSError:
            pass
        connection.close()

    def _ask(self, method, params, leaving):
        self._last_id += 1
        data = encode_message({"id": self._last_id, "method": method, "params": params})
        self._handle_events()
        while self._fill_pending():
            self._exchange()
        self._web.send_text(data)
        self._pending = memoryview(self._web.data_to_send())
        self._leaving, self._fresh = leaving, True
        while self._answer is None:
            self._exchange()
        (result, error), self._answer = self._answer, None
        if error is not None:
            raise error
        return result

    def _exchange(self):
        """Waits until bytes can move, then reads and writes once; reads first, so as to learn of an end."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._gone("the app-server did not answer in time")
        writable = self._writable if self._fill_pending() else 0
        self._poll.modify(self._socket, self._readable | writable)
        ready = self._poll.poll(left * 1000)
        flags = ready[0][1] if ready else 0
        if flags & ~self._writable:
            self._read()
        if flags & self._writable and self._answer is None:
            self._write()

    def _fill_pending(self):
        """Whether bytes wait to be sent. A new frame begins only after the last byte of the one before."""
        if not self._pending and not self._mute:
            self._pending = memoryview(self._web.data_to_send())
        return bool(self._pending)

    def _read(self):
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone("the app-server is gone: %s" % error.strerror) from None
        if not data:
            raise self._gone("the app-server closed the connection")
        self._web.feed(data)
        self._handle_events()

    def _write(self):
        """The kernel takes what it returns as sent; of a send that fails it has taken nothing."""
        first = self._fresh
        if first:
            self._announce()
            self.dirty = True
        try:
            sent = self._socket.send(self._pending)
        except BlockingIOError:
            self.dirty = self.dirty and not first
            return
        except OSError as error:
            if first:
                self.dirty = False
                raise self._gone("the app-server is gone: %s" % error.strerror) from None
            self._pending, self._mute = memoryview(b""), True  # its last words may still be read
            return
        self._fresh = False
        self._pending = self._pending[sent:]

    def _announce(self):
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()
            if time.monotonic() >= self.deadline:
                raise self._gone("no time was left to send the request")

    def _gone(self, text):
        return (Lost if self.dirty else NotReached)(text)

    def _handle_events(self):
        """Up to the answer: what follows it cannot undo it."""
        while self._answer is None:
            event = self._web.next_event()
            if event is None:
                return
            self._handle(*event)

    def _handle(self, kind, payload=None, reason=""):
        if kind == "open":
            self._opened = True
            return
        if kind == "close":
            raise self._gone("the app-server closed the connection: %d %s" % (payload, reason))
        if kind == "text":
            message = decode_message(payload)
            if "method" not in message:
                self._take_answer(message)
                return
            if "id" in message:
                self._decline(message["id"])
        elif kind == "binary":
            raise ProtocolError("a binary message", 1003)
        self._unasked += 1
        if self._unasked > MAX_UNASKED:
            raise ProtocolError("more than %d messages that were not asked for" % MAX_UNASKED, 1008)

    def _take_answer(self, message):
        number = message.get("id")
        if type(number) is not int or number != self._last_id or not self.dirty:  # True == 1 == 1.0 in Python
            raise ProtocolError("an answer to what was not asked: %s" % name_id(number), 1008)
        if ("result" in message) == ("error" in message):
            raise ProtocolError("an answer with neither or both of result and error", 1008)
        if "error" in message:
            self._answer = None, read_error(message["error"])
        else:
            self._answer = message["result"], None

    def _decline(self, number):
        """Answers a request of the server, which is one that only a client with a user can meet."""
        if type(number) is not int and not (isinstance(number, str) and len(number) <= MAX_ID):
            raise ProtocolError("a request with a bad id: %s" % name_id(number), 1008)
        error = {"code": UNSUPPORTED, "message": "xmsg answers no requests"}
        self._web.send_text(json.dumps({"id": number, "error": error}).encode("ascii"))


def name_id(number):
    """A hostile id, in a few characters: the whole of it could be megabytes, or nested too deep to print."""
    if isinstance(number, str):
        return repr(number[:40])
    return str(number) if type(number) is int else type(number).__name__


def read_error(error):
    """The RpcError that an answer holds. Raises ProtocolError."""
    if not isinstance(error, dict):
        raise ProtocolError("a malformed error answer", 1008)
    code, message = error.get("code"), error.get("message")
    if type(code) is not int or not isinstance(message, str):
        raise ProtocolError("a malformed error answer", 1008)
    return RpcError(code, message, error.get("data"))
