"""Claude Code's inbox socket: which sessions run, what to write to one, and what the host says about it.

A running Claude Code (2.1.281 and 2.1.332 were measured, on Linux) listens on a Unix socket of its own and says so in
`<config>/sessions/<pid>.json`. It takes one JSON object a line. On that connection it says nothing; what it *refuses,
holds or drops* it reports on a connection of its own to the address in the line's `from`, if that is a socket beside
its own inbox, owned by the process that wrote. An accepted message gets no receipt, so acceptance is silence, and the
question is when silence is an answer. See ROUNDS.

Nothing here knows the queue. An outcome is a plain pair (WORD, text); WORD is ACCEPTED, HELD, REFUSED, NOT_SENT,
UNKNOWN.
"""
import json
import os
import re
import stat
import sys
import time
from collections import namedtuple

import host_process

WINDOW = "uds-direct"
STATUSES = ("idle", "busy", "waiting")
SESSION_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}\Z")
RECORD_LIMIT = 64 * 1024
RECORDS_LIMIT = 1000
KEY_LIMIT = 4096
SETTINGS_LIMIT = 1 << 20
# Linux takes 107 bytes, macOS 103, and Claude Code itself stops at 103.
PATH_LIMIT = 103
# The host drops the connection on a line of more than 1,048,576 characters.
LINE_LIMIT = 1000000
RECEIPT_LIMIT = 64 * 1024
DIALS_LIMIT = 16
# When silence is an answer. The host closes its end once it has handled what came on a connection: after 1 to 30 ms
# when it is quiet, 70 to 170 ms when it starts a turn, 260 ms seen with every core taken. A receipt is dialled by
# the same event loop, but behind a look at the file system: 0 to 10 ms after that close, 38 ms once. So the wait
# goes by the host's own steps: empty connections, one after the other, each opened and closed by that loop (0.3 to
# 0.7 ms each on a quiet host, tens of ms on one that starts a turn; it ignores them otherwise). In 650 receipts,
# idle and loaded machine, never more than 5 of them came back before the receipt. So: 16 rounds, or QUIET_SECONDS
# and FEWEST_ROUNDS, whatever is sooner. A host that stops in between never gets there, and then the outcome is
# UNKNOWN.
ROUNDS = 16
FEWEST_ROUNDS = 3
QUIET_SECONDS = 0.1
# The host reports the first drop of a sender (by address, pid and reason) at once. A further one within a minute it
# reports 5 s late, and after 40 such reports in a minute, whoever sent, it is silent (2.1.332). So after a drop
# nothing is written to that host from here for a minute, or silence would be taken for acceptance.
DROP_SECONDS = 60.0
RETRY_SECONDS = 0.01
# How long a courier offers an outcome to a caller that cannot take it yet.
REPORT_SECONDS = 30.0
ENDED = ("UNKNOWN", "the host ended before it could be seen to take the message")
LIVENESS_SECONDS = 1.0

_dropped = {}  # (pid, start) of a host: until when it may drop without saying so

Session = namedtuple("Session", "session pid start cwd name name_source status version socket config_dir updated_at")
Session.__doc__ = """A running session, as its host registered it.

status: idle, busy, waiting or unknown. socket: the path of its inbox, None if it has none. updated_at: ms, 0 unknown.
name_source: "user", "peer" (renamed by a message), "derived" (made up by the host) or None.
"""


class NotSent(Exception):
    """Nothing has left; the text says why."""


# ---- the words on the wire -------------------------------------------------------------------------------------------

# The host parses an envelope, renders it again and compares the bytes: one bad attribute voids the whole of it, and
# with it the sender's name and mode (2.1.281, 2.1.332). Hence the host's own character classes.
ADDRESS = re.compile(r"[A-Za-z0-9%:_/.\\-]{1,300}\Z")
REPLY_ADDRESS_LIMIT = 200
NAME_LIMIT = 64
MODES = ("bypass", "prompting")
# Characters that the host looks through when it looks for its tags.
_FILLER = ("\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
           "\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff")
# A pattern and no compiled one: compiling it takes 7 ms, which most messages and a hook need not pay.
_TAG = "(?i)<(?!\\\\)(?=[%s\\s]*/?[%s\\s]*%s)" % (
    _FILLER, _FILLER, ("[%s]*" % _FILLER).join("[-_\u2010-\u2015]" if letter == "-" else letter
                                               for letter in "cross-session-message"))


def msg_id(uid):
    """The host's message id for one of our uids (16 hex): a UUID, version 8, that holds the uid and spells "xmsg"."""
    if not re.match(r"[0-9a-f]{16}\Z", uid):
        raise ValueError("not a uid: %r" % (uid,))
    return "%s-%s-8000-8000-786d7367%s" % (uid[:8], uid[8:12], uid[12:])


def address(path):
    """The host's address of a socket; what its class forbids is percent-encoded byte by byte, as the host does it."""
    def encoded(match):
        return "".join("%%%02X" % byte for byte in os.fsencode(match.group()))
    return "uds:" + re.sub(r"[^A-Za-z0-9:_/.\\-]", encoded, path)


def from_mode(permission_mode):
    """What a session in this permission mode may claim of itself: bypass, prompting, or None for no claim.

    The host counts `plan` as bypass where bypassing is available, which nobody outside can know.
    """
    if permission_mode == "bypassPermissions":
        return "bypass"
    return "prompting" if permission_mode in ("default", "acceptEdits", "auto", "dontAsk") else None


def neutralised(body):
    """The body with the envelope's own tags broken, as the host itself breaks them: `<\\/cross-session-message`."""
    return re.sub(_TAG, r"<\\", body) if "<" in body else body


def envelope(body, from_address=None, label=None, mode=None):
    """The text of a message with its sender, such that the host can parse it.

    from_address: where the receiver's natural reply goes; without one, the label stands there. An attribute that the
    host would not take is dropped alone.
    """
    sender = next((word for word in (from_address, label) if word and ADDRESS.match(word)), None)
    attributes = ""
    if sender:
        attributes += ' from="%s"' % sender
    if label and _is_name(label):
        attributes += ' from-name="%s"' % label
    if mode in MODES:
        attributes += ' from-mode="%s"' % mode
    return "<cross-session-message%s>\n%s\n</cross-session-message>" % (attributes, neutralised(body))


def line(content, message, session, reply_address, token=None):
    """The bytes for the inbox: an auth line if there is a token, then the message.

    priority "next" waits for the running step; "now" would abort the reply. session: the host drops the line
    without a word if another session has taken its place.
    """
    record = {"msgV": 1, "msg_id": message, "type": "user", "message": {"role": "user", "content": content},
              "priority": "next", "from": reply_address, "session_id": session}
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
    if token:
        text = json.dumps({"type": "auth", "token": token}, separators=(",", ":")) + "\n" + text
    return text.encode("utf-8", "replace")


def _is_name(label):
    """Whether the host's rendering leaves this from-name as it is.

    Measured: a quote, angle bracket or line end voids the envelope; so do more than 64 characters, blanks at the
    ends and invisible characters (categories Cc, Cf, Cs, Zl, Zp), because the host cleans them away and then
    compares.
    """
    import unicodedata
    if len(label) > NAME_LIMIT or label != label.strip() or label.startswith("\ufeff") or re.search('["<>]', label):
        return False
    return not any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in label)


# ---- the registry of running sessions --------------------------------------------------------------------------------

def config_dirs(environ, reported=()):
    """The configuration directories to look in: CLAUDE_CONFIG_DIR, the default one, those that hooks reported."""
    home = environ.get("HOME") or ""
    wanted = [environ.get("CLAUDE_CONFIG_DIR"), home and os.path.join(home, ".claude"), *reported]
    found = {}
    for path in wanted:
        if path and os.path.isabs(path) and "\0" not in path:
            found.setdefault(os.path.realpath(path), os.path.normpath(path))
    return list(found.values())


def config_dir_of(transcript):
    """The configuration directory that a transcript path `<config>/projects/<slug>/<id>.jsonl` lies in, else None."""
    projects = (transcript or "").rpartition("/")[0].rpartition("/")[0]
    config, _, name = projects.rpartition("/")
    return config or None if name == "projects" else None


def sessions(config_dirs):
    """The running sessions. A file that is torn, hostile, huge or gone, or whose process is gone, costs its own row
    only."""
    found = []
    for config in config_dirs:
        folder = os.path.join(config, "sessions")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        pids = sorted(int(name[:-5]) for name in names if re.match(r"[1-9][0-9]{0,9}\.json\Z", name))
        found += filter(None, (_session(config, pid) for pid in pids[:RECORDS_LIMIT]))
    return found


def session_status(session, pid, config_dirs):
    """idle, busy, waiting or unknown, by reading the one file that a pid may have in each directory."""
    for config in config_dirs:
        record = _record(config, pid)
        if record and record.get("sessionId") == session:
            return record["status"] if record.get("status") in STATUSES else "unknown"
    return "unknown"


def find_inbox(session, config_dirs, records=None):
    """(Session, None), or (None, reason) if nothing can be written to it. Of several, the one that was written last.

    records: what sessions() has just told; read anew without them.
    """
    candidates = [record for record in (sessions(config_dirs) if records is None else records)
                  if record.session == session]
    if not candidates:
        return None, "no running Claude Code has this session open"
    record = max(candidates, key=lambda found: (found.socket is not None, found.updated_at))
    if not record.socket:
        return None, "this Claude Code has no inbox (its host switches cross-session messages off)"
    fault = socket_fault(record.socket)
    return (None, fault) if fault else (record, None)


def socket_fault(path):
    """Why a socket must not be written to, None if it may be: ours, and in a directory that only we can write."""
    if len(os.fsencode(path)) > PATH_LIMIT:
        return "the path of the inbox is too long: %s" % path
    try:
        found, folder = os.lstat(path), os.lstat(os.path.dirname(path))
    except OSError as error:
        return "the inbox %s cannot be reached: %s" % (path, error.strerror)
    if not stat.S_ISSOCK(found.st_mode):
        return "%s is no socket" % path
    if found.st_uid != os.geteuid():
        return "the inbox %s belongs to another user" % path
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        return "others can write to the directory of the inbox %s" % path
    return None


INBOUND_KEY = "crossSessionInbound"
INBOUND = ("accept", "hold", "refuse")  # from the loosest to the strictest
MANAGED = "/Library/Application Support/ClaudeCode" if sys.platform == "darwin" else "/etc/claude-code"


def inbound_setting(config_dir, cwd, arguments):
    """(word, where) of the crossSessionInbound that a session obeys: accept, hold or refuse; None without one.

    arguments: those of its process. where: the file or option that decides; "" for none. A word that the host does not
    know counts as hold, and is returned as it stands. Measured on 2.1.281 and 2.1.332: --settings beats the user's
    file, and a project's files can only make it stricter. That the managed file beats both is read in their code.
    """
    def of_file(*path):
        path = os.path.join(*path)
        return _inbound(_read_json(path, SETTINGS_LIMIT, owners=(os.geteuid(), 0))[0]), path
    option = _inbound(_settings_option(arguments)), "--settings"
    deciding = of_file(MANAGED, "managed-settings.json"), option, of_file(config_dir, "settings.json")
    word, where = next((pair for pair in deciding if pair[0]), (None, ""))
    for found, path in (of_file(cwd or "/", ".claude", name) for name in ("settings.json", "settings.local.json")):
        if _strictness(found) > _strictness(word):
            word, where = found, path
    return word, where


def _strictness(word):
    return INBOUND.index(word if word in INBOUND else "hold") if word else 0


def _inbound(settings):
    value = (settings or {}).get(INBOUND_KEY)
    return value if value is None else str(value)[:40] or "(empty)"


def _settings_option(arguments):
    """The object that `--settings FILE-OR-JSON` gives, {} without one."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--settings":
            value = value if equals else (arguments[at + 1:] + [""])[0]
            try:
                found = json.loads(value) if value.lstrip().startswith("{") else _read_json(value, SETTINGS_LIMIT)[0]
            except (ValueError, RecursionError):
                found = None
            return found if isinstance(found, dict) else {}
    return {}


def _session(config, pid):
    record = _record(config, pid)
    if not record:
        return None
    session, start = record.get("sessionId"), record.get("procStart")
    if not isinstance(session, str) or not SESSION_ID.match(session) or not isinstance(start, str):
        return None
    if not host_process.alive(pid, start):
        return None
    path, updated = _text(record.get("messagingSocketPath"), 4096), record.get("updatedAt")
    return Session(
        session=session, pid=pid, start=start, cwd=_text(record.get("cwd"), 4096), name=_text(record.get("name"), 300),
        name_source=_text(record.get("nameSource"), 32), version=_text(record.get("version"), 64) or "",
        status=record["status"] if record.get("status") in STATUSES else "unknown",
        socket=path if path and os.path.isabs(path) and "\0" not in path else None,
        config_dir=config, updated_at=updated if type(updated) is int and 0 <= updated < 1 << 53 else 0)


def _record(config, pid):
    """The registration of a pid, None if it has none. The host writes in place, so a fresh torn file gets two more
    looks."""
    path = os.path.join(config, "sessions", "%d.json" % pid)
    for last in (False, False, True):
        found, modified = _read_json(path, RECORD_LIMIT)
        if found is not None:
            return found if found.get("pid") == pid and type(found["pid"]) is int else None
        if last or not modified or abs(time.time() - modified) > 1:
            return None
        time.sleep(0.005)


def _read_json(path, limit, forbidden=0, owners=None):
    """(object, mtime), the object None unless a regular file of ours holds a JSON object of at most `limit` bytes.

    owners: the user ids whose file is trusted; then it may also be a symlink, as dotfile managers make them.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | (0 if owners else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None, None
    try:
        found = os.fstat(descriptor)
        trusted = found.st_uid in (owners or (os.geteuid(),)) and not found.st_mode & forbidden
        if not stat.S_ISREG(found.st_mode) or not trusted:
            return None, None
        value = json.loads(os.read(descriptor, limit))
        return (value if isinstance(value, dict) else None), found.st_mtime
    except (ValueError, RecursionError):
        return None, found.st_mtime
    except OSError:
        return None, None
    finally:
        os.close(descriptor)


def _text(value, limit):
    """The string, its lone surrogates replaced; None for anything else, for "" and for what is too long."""
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        return None
    return value.encode("utf-8", "replace").decode("utf-8")


def _token(record):
    """The token for the auth line, None without a key file of ours. Linux hosts take a line without one as well."""
    folder = os.path.join(record.config_dir, "sessions")
    try:
        names = [name for name in os.listdir(folder) if re.match(r"%d\.[0-9a-f]{64}\.key\Z" % record.pid, name)]
    except OSError:
        return None
    if len(names) != 1:
        return None
    key, _ = _read_json(os.path.join(folder, names[0]), KEY_LIMIT, forbidden=0o077)
    token = key.get("peerToken") if key else None
    usable = isinstance(token, str) and re.match(r"[0-9a-f]{16,128}\Z", token) and key.get("procStart") == record.start
    return token if usable else None


# ---- one exchange with a host ----------------------------------------------------------------------------------------

class Exchange:
    """One message on its way: our connection to the inbox, our reply socket, and what the host has said so far.

    The only state that matters to the queue is `dirty`: false until the first byte can leave, true ever after.
    """

    def __init__(self, record, uid, leave=None):
        self.record, self.message, self.dirty, self.receipt = record, msg_id(uid), False, None
        self._leave, self._uid, self._rounds = leave, uid, 0
        self._closed_at = None
        self._listener = self._inbox = self._reply_path = None
        self._dials, self._outcomes = {}, []

    def open(self, deadline):
        """Binds the reply socket and connects; raises NotSent."""
        fault = socket_fault(self.record.socket)
        if fault:
            raise NotSent(fault)
        self._bind()
        self._inbox = self._connect()
        while self._inbox is None:
            if time.monotonic() > deadline:
                raise NotSent("the host does not take connections")
            time.sleep(RETRY_SECONDS)
            self._inbox = self._connect()
        pid, uid = _peer(self._inbox)
        if pid is not None and pid != self.record.pid or uid is not None and uid != os.geteuid():
            raise NotSent("another process (%s) listens on the inbox %s" % (pid, self.record.socket))

    def write(self, content, deadline):
        """Writes the line and half-closes; raises OSError with `dirty` set, NotSent without."""
        import select
        data = line(content, self.message, self.record.session, address(self._reply_path), _token(self.record))
        if len(data) > LINE_LIMIT:
            raise NotSent("the message is too long for the host's inbox")
        if self._leave:
            self._leave()
        self.dirty = True
        while data:
            try:
                data = data[self._inbox.send(data):]
            except BlockingIOError:
                if not select.select([], [self._inbox], [], max(0, deadline - time.monotonic()))[1]:
                    raise TimeoutError("the host does not read its inbox")
        self._inbox.shutdown(1)

    def answer(self, deadline):
        """The outcome, as soon as the host has given one by receipt or by silence; None at the deadline.

        To be called again after HELD and after None, and after nothing else.
        """
        import select
        while not self._outcomes:
            pause = deadline - time.monotonic()
            if pause <= 0:
                return None
            # What the host dials comes first: its word counts, however many rounds are over, and ends them.
            counting = self.receipt is None and not self._dials
            if counting and not self._inbox:
                pause = min(pause, RETRY_SECONDS)
            reading = [self._listener, *self._dials] + ([self._inbox] if counting and self._inbox else [])
            ready = select.select(reading, [], [], pause)[0]
            if self._listener in ready:
                self._accept()
            for dial in [dial for dial in self._dials if dial in ready]:
                self._hear(dial)
            if counting and not self._dials and not self._outcomes and (not self._inbox or self._inbox in ready):
                self._step()
        return self._outcomes.pop(0)

    def close(self):
        for opened in [self._inbox, self._listener, *self._dials]:
            if opened:
                opened.close()
        if self._reply_path:
            try:
                os.unlink(self._reply_path)
            except OSError:
                pass

    def _bind(self):
        """Our reply socket: beside the inbox and named as the host names sockets, else it dials none."""
        import socket
        self._listener = socket.socket(socket.AF_UNIX)
        folder, fault = os.path.dirname(self.record.socket), None
        for name in ("%d.sock" % os.getpid(), "%d-%s.sock" % (os.getpid(), self._uid[:8])):
            path = os.path.join(folder, name)
            if len(os.fsencode(path)) > PATH_LIMIT or len(address(path)) > REPLY_ADDRESS_LIMIT:
                fault = "its path is too long"
                continue
            try:
                self._listener.bind(path)
                self._reply_path = path
                os.chmod(path, 0o600)
                self._listener.listen(DIALS_LIMIT)
                self._listener.setblocking(False)
                return
            except OSError as error:
                fault = error.strerror
        raise NotSent("there can be no socket for the host's receipt beside %s: %s" % (self.record.socket, fault))

    def _connect(self):
        """A connection to the inbox, None while its backlog is full; raises NotSent."""
        import socket
        found = socket.socket(socket.AF_UNIX)
        found.setblocking(False)
        try:
            found.connect(self.record.socket)
            return found
        except BlockingIOError:
            found.close()
        except OSError as error:
            found.close()
            raise NotSent("nobody listens on the inbox %s: %s" % (self.record.socket, error.strerror))

    def _step(self):
        """The host has closed our connection, or there is none: the next round, or the outcome of silence."""
        import select
        try:
            if self._inbox:
                if self._inbox.recv(4096):
                    return
                self._inbox.close()
                self._inbox = None
                self._closed_at = self._closed_at or time.monotonic()
                self._rounds += 1
            if not self._is_silent():
                self._inbox = self._connect()
                if self._inbox:
                    self._inbox.shutdown(1)
            elif not select.select([self._listener], [], [], 0)[0]:
                self._outcomes.append(self._silence())
        except BlockingIOError:
            pass
        except OSError as error:
            self._outcomes.append(("UNKNOWN", "the host broke the connection: %s" % error.strerror))
        except NotSent:
            self._outcomes.append(ENDED)

    def _is_silent(self):
        rounds = self._rounds - 1  # the first close is that of the message itself
        return rounds >= ROUNDS or rounds >= FEWEST_ROUNDS and time.monotonic() - self._closed_at >= QUIET_SECONDS

    def _silence(self):
        """The outcome when the host took the line and reported nothing.

        The host drops a line for another session without a word (a /clear between our look at the registry and its
        reading), so only an unchanged registration makes silence an acceptance.
        """
        now = _session(self.record.config_dir, self.record.pid)
        if now is None:
            return ENDED
        if (now.session, now.start) != (self.record.session, self.record.start):
            return "UNKNOWN", "the host went over to another session while it was written to"
        return "ACCEPTED", WINDOW

    def _accept(self):
        try:
            dial, _ = self._listener.accept()
        except OSError:
            return
        pid, _ = _peer(dial)
        if pid is not None and pid != self.record.pid or len(self._dials) >= DIALS_LIMIT:
            dial.close()
            return
        dial.setblocking(False)
        self._dials[dial] = b""

    def _hear(self, dial):
        """Reads from a connection of the host and notes the receipts for our message."""
        try:
            data = dial.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *texts, rest = (self._dials[dial] + data).split(b"\n")
        if not data or len(rest) > RECEIPT_LIMIT:
            dial.close()
            del self._dials[dial]
            texts.append(rest)
        else:
            self._dials[dial] = rest
        for text in texts:
            self._note(text)

    def _note(self, text):
        try:
            receipt = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(receipt, dict) or receipt.get("action") != "peer_message_status":
            return
        # Drops that follow each other are reported in one receipt, which names the first and lists the others.
        others = receipt.get("dropped_msg_ids")
        if receipt.get("orig_msg_id") != self.message and not (isinstance(others, list) and self.message in others):
            return
        status = receipt.get("status")
        outcome = _meaning(status, receipt.get("status_detail"), receipt.get("drop_reason"), receipt.get("reason"))
        if outcome:
            if status == "dropped":
                _dropped[self.record.pid, self.record.start] = time.monotonic() + DROP_SECONDS
            self.receipt = status
            self._outcomes.append(outcome)


def _meaning(status, detail, drop_reason, reason):
    """The outcome that a receipt stands for; None for a status that we do not know."""
    said = _text(reason, 500)
    if status == "held":
        return "HELD", said or "the receiving host asks its user"
    if status == "delivered":
        return "ACCEPTED", WINDOW
    if status == "denied":
        return "REFUSED", said or "the receiving user declined it"
    if status == "refused" or status == "expired" and detail == "refused":
        return "REFUSED", said or "this session takes no messages of other sessions"
    if status == "expired":
        return "REFUSED", said or "the receiving session ended before its user had decided"
    if status == "dropped":
        return "NOT_SENT", "the host dropped it: %s" % (_text(drop_reason, 64) or said or "no reason given")
    return None


def _peer(connection):
    """(pid, uid) of the process at the other end, each None where the system does not tell."""
    import socket
    import struct
    try:
        if hasattr(socket, "SO_PEERCRED"):
            return struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]
        return struct.unpack("i", connection.getsockopt(0, 2, 4))[0], None  # macOS: SOL_LOCAL, LOCAL_PEERPID
    except (OSError, struct.error):
        return None, None


# ---- delivery, and the courier that outlives it ----------------------------------------------------------------------

def deliver(target_session, uid, body, label, reply_address=None, mode=None, config_dirs=(), timeout=1.5, own_pids=(),
            leave=None, on_receipt=None, hold_for=3600.0):
    """Delivers one message; (outcome, facts). See deliver_all."""
    job = dict(target_session=target_session, uid=uid, body=body, label=label, reply_address=reply_address, mode=mode,
               config_dirs=config_dirs, own_pids=own_pids, leave=leave, on_receipt=on_receipt,
               hold_for=hold_for)
    return deliver_all([job], timeout)[0]


def deliver_all(jobs, timeout=1.5, at_once=8):
    """Delivers messages to several sessions side by side; [(outcome, facts)] in the order of the jobs.

    Each job is a dict of deliver's arguments; no two may be for one session if their order matters. timeout: seconds
    for each; at_once: how many run at a time, so that a host that hangs holds up nobody else. facts: msg_id, pid,
    socket, version, receipt (the host's last status or None), courier (its pid while it waits for a receipt, or None).

    leave() is called here, in the caller's process, before the first byte of the message can leave; if it raises,
    none does, and the outcome is NOT_SENT.

    A detached courier, forked before it binds and connects, writes each line, because the host sends receipts to the
    writing process and to no heir, and whether it will ask its user nobody knows before: its mode may have changed
    since its last hook, and a setting can hold everything. The courier lives until the last receipt, the receiver's
    end or `hold_for` seconds. What comes after the first answer it offers to on_receipt(outcome), again and again for
    REPORT_SECONDS until that returns true, since the caller may still be recording the first answer; NOT_SENT then
    means that the receiving process ended with the message unseen. Without on_receipt no courier stays.

    Couriers are forks: no thread may run in the caller, and on_receipt must not open an SQLite file that the caller
    had open (SQLite keeps state by file in the process, and a fork inherits it): let it start a process.
    """
    results, waiting, running = [None] * len(jobs), list(range(len(jobs)))[::-1], {}
    while waiting or running:
        while waiting and len(running) < at_once:
            index = waiting.pop()
            record, facts, outcome = _prepare(**jobs[index])
            if outcome:
                results[index] = outcome, facts
            else:
                courier = _Courier(record, facts, jobs[index], timeout)
                running[courier.pipe] = index, courier
        for index, courier in _finished(running):
            del running[courier.pipe]
            results[index] = courier.result()
    return results


def _prepare(target_session, uid, config_dirs=(), own_pids=(), **_):
    """(Session, facts, None), or (None, facts, outcome) if there is nobody to write to."""
    facts = {"msg_id": msg_id(uid), "pid": None, "socket": None, "version": "", "receipt": None, "courier": None}
    record, reason = find_inbox(target_session, config_dirs)
    if reason:
        return None, facts, ("NOT_SENT", reason)
    facts.update(pid=record.pid, socket=record.socket, version=record.version)
    if record.pid in own_pids:
        return None, facts, ("NOT_SENT", "this is the sender's own session")
    if _dropped.get((record.pid, record.start), 0) > time.monotonic():
        return None, facts, ("NOT_SENT", "the host has dropped a message of this sender less than a minute ago")
    return record, facts, None


def _attempt(exchange, job, deadline):
    """Writes and waits for the first answer: (outcome, whether the host may still say more). Raises nothing."""
    content = envelope(job["body"], job.get("reply_address"), job.get("label"), job.get("mode"))
    try:
        exchange.open(deadline)
        exchange.write(content, deadline)
        outcome = exchange.answer(deadline)
    except NotSent as error:
        return ("NOT_SENT", str(error)), False
    except Exception as error:  # whatever it was, the outcome depends on one thing only
        word = "UNKNOWN" if exchange.dirty else "NOT_SENT"
        return (word, getattr(error, "strerror", None) or "%s: %s" % (type(error).__name__, error)), False
    if outcome is None:
        return ("UNKNOWN", "the host has not read it in time"), True
    return outcome, outcome[0] == "HELD"


class _Courier:
    """A forked process with one message, seen from the process that waits for its first answer.

    Before the first byte of the message can leave, the courier asks ("D") and waits until we say go ("G"); at last it
    sends one line with the answer.
    """

    def __init__(self, record, facts, job, timeout):
        import socket
        self._host, self._leave, self._fault = (record.pid, record.start), job.get("leave"), None
        self.facts, self.deadline = facts, time.monotonic() + timeout + 0.5
        self.pipe, theirs = socket.socketpair()
        self._heard, self._dirty, self._pid = b"", False, os.fork()
        if not self._pid:
            _run_courier(record, job, timeout, theirs)
        theirs.close()

    def step(self):
        """Takes what has come; true when there is nothing more to wait for."""
        data = self.pipe.recv(65536)
        self._heard += data
        if self._heard == b"D" and not self._dirty:
            try:
                if self._leave:
                    self._leave()
            except Exception as error:
                self._fault = "%s: %s" % (type(error).__name__, error)
                return True
            self._dirty = True
            try:
                self.pipe.send(b"G")
            except OSError:
                return True
        return not data or data.endswith(b"\n")

    def result(self):
        """(outcome, facts). A courier without an answer is killed first, so that what we say stays true."""
        answered = self._heard.endswith(b"\n")
        answer = json.loads(self._heard.lstrip(b"D")) if answered else {"stays": False, "receipt": None}
        self.pipe.close()
        if not answered:
            self._kill()
        if not answer["stays"]:
            os.waitpid(self._pid, 0)
        if answer["receipt"] == "dropped":
            _dropped[self._host] = time.monotonic() + DROP_SECONDS
        facts = dict(self.facts, receipt=answer["receipt"], courier=self._pid if answer["stays"] else None)
        if answered:
            return tuple(answer["outcome"]), facts
        if self._dirty:
            return ("UNKNOWN", "the courier ended without an answer"), facts
        return ("NOT_SENT", self._fault or "the courier ended before it could write"), facts

    def _kill(self):
        import signal
        os.kill(self._pid, signal.SIGKILL)
        try:
            os.unlink(os.path.join(os.path.dirname(self.facts["socket"]), "%d.sock" % self._pid))
        except OSError:
            pass


def _finished(running):
    """[(index, courier)] of those that have answered, ended or run out of time; waits for at least one, if any runs."""
    import select
    found = {}
    while running and not found:
        pause = min(courier.deadline for _, courier in running.values()) - time.monotonic()
        ready = select.select(list(running), [], [], max(0, pause))[0]
        found = {pipe: running[pipe] for pipe in ready if running[pipe][1].step()}
        found.update((pipe, pair) for pipe, pair in running.items() if pair[1].deadline <= time.monotonic())
    return list(found.values())


def _run_courier(record, job, timeout, pipe):
    """The life of a courier. It holds on to nothing of its parent: no terminal, no directory, no open file."""
    status = 1

    def ask():
        pipe.send(b"D")
        if pipe.recv(1) != b"G":
            raise NotSent("the sender gave up before anything was written")

    try:
        _detach(pipe.fileno())
        exchange = Exchange(record, job["uid"], ask)
        try:
            outcome, more = _attempt(exchange, job, time.monotonic() + timeout)
            stays = bool(more and job.get("on_receipt"))
            answer = {"outcome": outcome, "receipt": exchange.receipt, "stays": stays}
            try:
                pipe.send(json.dumps(answer).encode() + b"\n")
            except OSError:
                # Whoever started us is gone and will record nothing.
                if job.get("on_receipt"):
                    _report(job["on_receipt"], outcome)
            pipe.close()
            if stays:
                _stay(exchange, job["on_receipt"], time.monotonic() + job.get("hold_for", 3600.0))
        finally:
            exchange.close()
        status = 0
    finally:
        os._exit(status)


def _detach(keep):
    import signal
    import sys
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:
                pass
    os.chdir("/")


def _stay(exchange, on_receipt, end):
    """Waits for what the host says later and reports it, until its last word, the receiver's end or the time."""
    while time.monotonic() < end:
        outcome = exchange.answer(min(end, time.monotonic() + LIVENESS_SECONDS))
        if outcome is None and not host_process.alive(exchange.record.pid, exchange.record.start):
            # The host's last words may still wait in our backlog.
            outcome = exchange.answer(time.monotonic() + RETRY_SECONDS) or ENDED
            if outcome == ENDED and exchange.receipt == "held":
                outcome = "NOT_SENT", "the receiving session ended before its user had decided"
        if outcome:
            _report(on_receipt, outcome)
            if outcome[0] != "HELD":
                return


def _report(on_receipt, outcome):
    end = time.monotonic() + REPORT_SECONDS
    while time.monotonic() < end:
        try:
            if on_receipt(outcome):
                return
        except Exception:  # the store may be locked, and there is nobody to tell
            pass
        time.sleep(0.1)
