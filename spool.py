"""Messages out of a sandbox, on their way to the store.

Codex's default sandbox lets an agent's shell read nearly everything, but write neither the store nor a socket.
Measured on 0.156.1 and 0.171.0: under workspace-write a file below the temp directory comes out (one in /dev/shm does
not, which is the sandbox's own); under read-only nothing does but what a command prints, which PostToolUse's hook,
outside, gets as `tool_response`, cut in its middle at 10,000 bytes. So `xmsg send` leaves a file, else prints a marked
line, and the sender's own next hook takes it into the store. After a command that is still running when Codex first
answers for it no PostToolUse comes at all; so its PreToolUse leaves a note, and while that is there the session's hooks
look for the line in the rollout. Both carry an HMAC by a key beside the store: nobody
else's file and no printed document is taken for one. A message's uid makes it idempotent, however often it is found.
"""
import errno
import json
import os
import time

from contract import HOSTS, SPOOL_MARK, UsageError, is_label, is_session_id, now_ms, spool_folders
from store import note_fault

LONGEST_LINE = 9000  # characters; Codex keeps 10,000 bytes of what a command prints
LARGEST_FILE = 8 << 20
MOST_FILES = 200  # of one session that one run looks at, and the most sessions
LONGEST_NOTE = 8192
NOTE = "call."  # a file of this name and a tool call's id: the call may yet print a line
NOTE_SECONDS = 24 * 3600  # the longest that it is waited for
UNFINISHED_SECONDS = 60  # a file that its writer has not put in place after this never will be
FIELDS = {"uid": str, "created_at": int, "expires_at": int, "sender_kind": str, "sender_label": str, "sender_host": str,
          "sender_session": str, "target": str, "target_host": str, "body": str, "priority": int,
          "request_key": (str, type(None)), "reply_to": (str, type(None)), "replace": bool, "direct": bool}


def sandboxed(environ):
    """Whether this process runs in the sandbox of a Codex thread, where it sees no session's process.

    Codex says so by a variable where it denies the network too, and on macOS by another. Else on Linux the process at
    the top of the sandbox's PID namespace tells: `codex-linux-sandbox`, where a shell without one has the session.
    """
    if not (environ.get("CODEX_THREAD_ID") or environ.get("CODEX_SESSION_ID")):
        return False
    if environ.get("CODEX_SANDBOX_NETWORK_DISABLED") or environ.get("CODEX_SANDBOX"):
        return True
    import host_process
    nearest = host_process.nearest_host()
    return nearest is not None and (nearest.kind, nearest.role) == ("codex", "other")


# ---------------------------------------------------------------------------------------------------- the seal

def make_key(path):
    """Makes the key beside the store, once: whole or not at all."""
    scratch = "%s.%d.new" % (path, os.getpid())
    descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, os.urandom(32).hex().encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(scratch)


def read_key(path):
    """The key's bytes; None if there is none that only its owner can read."""
    try:
        return _read_private(path, 1024).strip() or None
    except (OSError, ValueError):
        return None


def _read_private(path, most):
    """The bytes of a plain file of ours that nobody else can reach. OSError, or ValueError with what is wrong."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_mode & 0o170000 != 0o100000 or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("not a plain file of one's own with mode 0600")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError("more than %d bytes" % most)
    return content


def _code(key, text):
    import hmac
    return hmac.new(key, b"xmsg spool 1 " + text.encode(), "sha256").hexdigest()


def seal(key, messages):
    """The messages as one line that says by whom it was made."""
    import base64
    import zlib
    text = base64.urlsafe_b64encode(zlib.compress(json.dumps(messages, separators=(",", ":")).encode(), 9)).decode()
    return "%s%s:%s" % (SPOOL_MARK, text, _code(key, text))


def unseal(key, line, session, now, retain_ms):
    """The messages of a line that this session has sealed. ValueError with what is wrong with it.

    retain_ms: the store remembers a uid for so long, and an older line might be a second copy.
    """
    import base64
    import hmac
    import zlib
    text, _, code = line[len(SPOOL_MARK):].partition(":")
    if not line.startswith(SPOOL_MARK) or not text.isascii() or not code.isascii() or not hmac.compare_digest(
            _code(key, text), code):
        raise ValueError("it was not made with this store's key, or it is not whole")
    reader = zlib.decompressobj()
    content = reader.decompress(base64.urlsafe_b64decode(text), LARGEST_FILE)
    try:
        messages = json.loads(content) if reader.eof else None
    except RecursionError:
        messages = None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError("it does not hold what this version of xmsg writes")
    if any(message["sender_session"] != session for message in messages):
        raise ValueError("it speaks for another session")
    if any(now - message["created_at"] >= retain_ms for message in messages):
        raise ValueError("it is too old")
    return messages


def _is_message(message):
    return (isinstance(message, dict) and message.keys() == FIELDS.keys()
            and all(isinstance(message[name], kind) for name, kind in FIELDS.items())
            and len(message["uid"]) == 16 and set(message["uid"]) <= set("0123456789abcdef")
            and message["sender_kind"] == "agent" and message["sender_host"] == "codex"
            and is_label(message["sender_label"]) and is_session_id(message["target"])
            and message["target_host"] in HOSTS + ("",) and bool(message["body"].strip()))


# ---------------------------------------------------------------------------------------------------- files

def leave(db, environ, session, key, messages):
    """Leaves the messages in a file for the session's next hook. OSError if no folder takes one."""
    leave_line(db, environ, session, seal(key, messages))


def leave_line(db, environ, session, line):
    """Leaves a sealed line in a file, as it is."""
    fault = None
    for folder in spool_folders(db, environ):
        try:
            return _leave_in(folder, session, os.urandom(8).hex(), line.encode() + b"\n")
        except OSError as error:
            fault = error
    raise fault


def _leave_in(base, session, name, content):
    folder = os.path.join(base, session)
    scratch = os.path.join(folder, ".%s.%d" % (name, os.getpid()))
    for attempt in range(20):
        try:
            for path in (base, folder):
                _make_private(path)
            descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            break
        except FileNotFoundError:  # a hook that found the folder empty has just removed it
            if attempt == 19:
                raise
    try:
        try:
            while content:
                content = content[os.write(descriptor, content):]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(scratch, os.path.join(folder, name))
    except OSError:
        os.unlink(scratch)
        raise
    for path in (folder, base, os.path.dirname(base)):
        _sync(path)


def _sync(folder):
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_private(folder):
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    if not _is_private(folder):
        os.lstat(folder)  # or it is gone again
        raise PermissionError(errno.EPERM, "not a folder of one's own with mode 0700", folder)


def _is_private(folder):
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return status.st_mode & 0o170077 == 0o040000 and status.st_uid == os.geteuid()


def sessions(db, environ):
    """The sessions for which files lie there."""
    found = []
    for base in spool_folders(db, environ):
        try:
            names = os.listdir(base)[:MOST_FILES]
            found += [name for name in names if is_session_id(name) and _is_private(base)]
            if not names:  # the hook that emptied it has died
                os.rmdir(base)
        except OSError:
            pass
    return found


def note_call(db, environ, session, call, rollout):
    """Notes that a tool call begins which may leave a line in what it prints, and where its rollout ends now."""
    try:
        note = {"rollout": rollout, "at": os.path.getsize(rollout)}
        if is_session_id(call):
            _leave_in(spool_folders(db, environ)[0], session, NOTE + call, json.dumps(note).encode())
    except OSError:
        pass  # a rollout that is not there yet is none that a line could be read from


def forget_call(db, environ, session, call):
    """The tool call has ended, and its hook got all that it printed."""
    if is_session_id(call):
        _remove(os.path.join(spool_folders(db, environ)[0], session, NOTE + call))


def _late_lines(base, session, gone):
    """The marked lines that noted tool calls have printed by now. Notes that are done with go, others move on."""
    import transcripts
    folder, found = os.path.join(base, session), []
    try:
        names = os.listdir(folder)[:MOST_FILES] if _is_private(base) and _is_private(folder) else []
    except OSError:
        return []
    for name in names:
        path = os.path.join(folder, name)
        if not name.startswith(NOTE):
            continue
        try:
            note = json.loads(_read_private(path, LONGEST_NOTE))
            lines, end, ended = transcripts.codex_output_since(note["rollout"], note["at"], name[len(NOTE):],
                                                               SPOOL_MARK)
            found += [line for text in lines for line in marked_lines(text)]
            ended = ended or gone or time.time() - os.lstat(path).st_mtime > NOTE_SECONDS
            if lines and not ended:
                _leave_in(base, session, name, json.dumps(dict(note, at=end)).encode())
        except (OSError, ValueError, TypeError, KeyError):
            ended = True
        if ended:
            _remove(path)
    return found


# ---------------------------------------------------------------------------------------------------- into the store

def take(store, environ, session, printed="", gone=False):
    """Takes what a session has left, in files and in a printed text, into the store: at most once, in order.

    gone: the session will print nothing more.
    Returns the uids of those that now wait and may go by a direct window. What is no message of this session is
    removed, and written down as a fault. StoreError leaves the files.
    """
    files = [path for base in spool_folders(store.path, environ) for path in _files(base, session)]
    lines = marked_lines(printed) if printed else []
    for base in spool_folders(store.path, environ):
        lines += _late_lines(base, session, gone)
    key = read_key(store.path + ".key") if files or lines else None
    if key is None:
        return []
    messages, done = [], []
    for line in lines:
        try:
            messages += _unsealed(store, key, session, line)
        except ValueError as error:
            _refuse(store, session, error)
    for path in files:
        try:
            messages += _unsealed(store, key, session, _read_private(path, LARGEST_FILE).decode().strip())
            done.append(path)
        except FileNotFoundError:
            pass  # another hook was faster
        except (OSError, ValueError) as error:
            _refuse(store, session, error)
            # What another look may still read stays.
            done += [path] if isinstance(error, ValueError) or error.errno == errno.ELOOP else []
    with store.transaction():
        waiting = [_add(store, message, now_ms()) for message in sorted(
            messages, key=lambda message: message["created_at"])]
    for path in done:
        _remove(path)
    return [uid for uid in waiting if uid]


def marked_lines(text):
    """The marked lines that a text holds, wherever they stand, whole or cut."""
    import re
    return re.findall(SPOOL_MARK + "[A-Za-z0-9_=:-]{20,}", text)[:MOST_FILES]


def _files(base, session):
    """The whole files of a session's folder. What no writer will finish goes, and so does an empty folder."""
    folder = os.path.join(base, session)
    try:
        names = sorted(os.listdir(folder))[:MOST_FILES] if _is_private(base) and _is_private(folder) else None
        for name in names or ():
            path = os.path.join(folder, name)
            if name.startswith(".") and time.time() - os.lstat(path).st_mtime > UNFINISHED_SECONDS:
                _remove(path)
    except FileNotFoundError:  # another hook was faster
        return []
    if names == []:
        _remove_empty(folder)
    return [os.path.join(folder, name) for name in names or () if not name.startswith((".", NOTE))]


def _unsealed(store, key, session, line):
    return unseal(key, line, session, now_ms(), store.settings.retain_seconds * 1000)


def _refuse(store, session, error):
    note_fault(store.settings, "a spooled message of %s is not taken" % session, error)


def _add(store, message, now):
    """Makes a message queued, or expired if it comes too late; its uid if it waits now and did not before."""
    message = dict(message)
    replace, direct, expired = message.pop("replace"), message.pop("direct"), message["expires_at"] <= now
    del message["created_at"]
    try:
        known = store.by_uid(message["uid"])
        row = store.add(message, now, replace)
    except UsageError as error:  # the uid is another message's
        return _refuse(store, message["sender_session"], error)
    if known or row["uid"] != message["uid"] or row["state"] != "queued":
        return None
    if expired:
        store.move(row, "expired", now, detail="its time ran out before it left the sandbox")
        return None
    return row["uid"] if direct else None


def _remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass
    _remove_empty(os.path.dirname(path))


def _remove_empty(folder):
    """The session's folder, then the store's, each if nothing is in it: while one is there, no hook of it is fast."""
    try:
        os.rmdir(folder)
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass


def start_delivery(settings, uids, host=0):
    """Starts `xmsg deliver` for these messages: a process of its own session that holds nothing of this one open.

    host: the pid of the Codex whose hook took the messages of its own session, 0 for what somebody else took.
    """
    command = os.path.join(os.path.dirname(os.path.realpath(__file__)), "bin", "xmsg")
    if os.fork():
        return
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.execve(command, [command, "deliver", str(host), *uids], dict(os.environ, XMSG_DB=settings.db))
    finally:
        os._exit(1)
