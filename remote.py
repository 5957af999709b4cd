"""Other machines: which there are, and one bounded conversation with the `xmsg receive` of one of them.

The only file that knows how another machine is reached: by a command of the user's own, as `ssh otherhost`, that runs
`xmsg receive` there. All else is lines of JSON: the far side first says who it is, then answers every line of jobs with
one line. No byte of a message leaves before the far side has spoken, so a link that is down is never in doubt.
"""
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
import time

from contract import RESERVED_NAMES, RemoteError, UsageError, clean_text, clip, name_key, one_line, open_plain

PROTOCOL = 1
LONGEST_ALIAS = 32
ALIAS_CHARS = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._-")
LONGEST_FILE = 64 << 10  # bytes
LONGEST_LINE = 16 << 20  # bytes of one line of the conversation
LONGEST_NOISE = 64 << 10  # bytes that a login may print before the far side speaks
FAREWELL_SECONDS = 2  # for the command to end by itself; one that others share a connection with must not be killed


# ---------------------------------------------------------------------------------------------------- which there are

def remotes_path():
    return os.path.expanduser("~/.config/xmsg/remotes")


def is_alias(text):
    """Whether a text can stand before the colon of a target as the name of a machine."""
    return (0 < len(text) <= LONGEST_ALIAS and ALIAS_CHARS.issuperset(text) and text[0] not in "._-"
            and name_key(text) not in RESERVED_NAMES)


def read_remotes(settings):
    """The machines that are set up, as {alias in lower case: {alias, words, spool, up}}, `peer` last.

    The file holds one `ALIAS [--spool] COMMAND...` a line, `#` begins a comment. XMSG_REMOTE, or a program `peer`, is
    the machine `peer`. RemoteError for a file that others may write: its commands are run.
    """
    return _read(settings)[0]


def bad_lines(settings):
    """What is wrong with lines of the file, a text each. Such a line costs its own machine only."""
    return _read(settings)[1]


def _read(settings):
    remotes, faults, seen = {}, [], set()
    for number, line in enumerate(_lines(), 1):
        where = "line %d of %s" % (number, remotes_path())
        try:
            words = _words(line, where)
        except RemoteError as error:
            faults.append(str(error))
            continue
        if not words or words[0].startswith("#"):
            continue
        alias, spool = words.pop(0), words[:1] == ["--spool"]
        words = words[1:] if spool else words
        if not is_alias(alias) or not words or name_key(alias) in seen:
            faults.append(where + " is not one `ALIAS COMMAND...` of its own; correct it")
            remotes.pop(name_key(alias), None)  # of two nobody knows which is meant
            continue
        seen.add(name_key(alias))
        remotes[name_key(alias)] = {"alias": alias, "words": words, "spool": spool, "up": []}
    words = _words(settings.remote, "XMSG_REMOTE") or list(filter(None, [shutil.which("peer")]))
    if words:
        up = _words(settings.remote_up, "XMSG_REMOTE_UP") or list(filter(None, [shutil.which("peer-up")]))
        remotes["peer"] = {"alias": "peer", "words": words, "spool": False, "up": up}
    return remotes, faults


def _words(text, where):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RemoteError("%s: %s; quote it as for a shell" % (where, str(error).lower()))


def _lines():
    try:
        with open(open_plain(remotes_path()), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(LONGEST_FILE + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RemoteError("cannot read %s: %s" % (remotes_path(), error.strerror))
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or len(content) > LONGEST_FILE:
        raise RemoteError("%s is not a short file that only you can write, and its commands are run; look at it, then "
                          "`chmod go-w` it" % remotes_path())
    text = clean_text(content.decode("utf-8", "replace"))
    return text[:-1 if text.endswith("\n") else None].split("\n") if text else []


def add_remote(settings, alias, words, spool):
    """Writes a machine into the file. UsageError for an alias that cannot be one or is there already."""
    if not is_alias(alias):
        raise UsageError("%s cannot be the name of a machine: it is one word of up to %d letters, digits, dots and "
                         "dashes, and none of %s" % (one_line(alias)[:40], LONGEST_ALIAS, ", ".join(RESERVED_NAMES)))
    if name_key(alias) in read_remotes(settings):
        raise UsageError("there is a machine %s already; `xmsg remote remove %s` first" % (alias, alias))
    line = shlex.join([alias] + ["--spool"] * spool + words)
    if "\n" in line:
        raise UsageError("the command is one line")
    _write(_lines() + [line])


def remove_remote(settings, alias):
    """Takes a machine out of the file. RemoteError if it is not there."""
    lines = _lines()
    kept = [line for line in lines if name_key(line.split(None, 1)[0] if line.split() else "") != name_key(alias)]
    if len(kept) == len(lines):
        raise RemoteError("%s names no machine; `xmsg remote list` shows which there are" % remotes_path()
                          if alias != "peer" else "the machine peer is XMSG_REMOTE, or the program `peer`")
    _write(kept)


def _write(lines):
    path = os.path.realpath(remotes_path())
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    scratch = "%s.%d.new" % (path, os.getpid())
    descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    os.rename(scratch, path)


def find_remote(settings, alias):
    """The machine of this name. RemoteError if there is none."""
    remotes, faults = _read(settings)
    if name_key(alias) not in remotes:
        raise RemoteError("there is no machine %s; %s" % (one_line(alias)[:40], faults[0] if faults else
                          "`xmsg remote list` shows which there are, `xmsg remote add` adds one"))
    return remotes[name_key(alias)]


def far_command(words):
    """The arguments that run `xmsg receive` there.

    ssh joins them to the line that the far shell reads, docker and kubectl take them as they are; two words that need
    no quoting are the same to both. `{}` stands for the whole line where a command wants it as one argument. A command
    that ends with the path of xmsg itself is only given the word `receive`.
    """
    if "{}" in words:
        return [shlex.join(["xmsg", "receive"]) if word == "{}" else word for word in words]
    return words + (["receive"] if os.path.basename(words[-1]) == "xmsg" else ["xmsg", "receive"])


# ---------------------------------------------------------------------------------------------------- the near side

def open_link(remote, seconds):
    """(Link, "") once the far side has said who it is, within so many seconds; else (None, why not)."""
    deadline = time.monotonic() + seconds
    if remote["up"]:
        try:
            subprocess.run(remote["up"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, timeout=seconds / 2)
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        link = Link(remote, deadline)
    except OSError as error:
        return None, "cannot run %s: %s" % (remote["words"][0], error.strerror)
    reason = link.meet()
    if reason:
        link.close()
        return None, reason
    return link, ""


class Link:
    """A conversation with the far side, until its deadline (time.monotonic). far: what it said of itself."""

    def __init__(self, remote, deadline):
        self.deadline, self.far, self._rest = deadline, {}, b""
        # A pipe for stderr would be held open by the connection that ssh leaves behind for others (ControlPersist).
        self._errors = tempfile.TemporaryFile()
        # In a session of its own it can ask nobody for a password, and all of it can be ended.
        self._process = subprocess.Popen(far_command(remote["words"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._errors, bufsize=0, start_new_session=True)
        os.set_blocking(self._process.stdin.fileno(), False)

    def meet(self):
        """Reads what the far side says of itself; the reason if it is none that can be talked to, "" if it is."""
        noise = 0
        while noise <= LONGEST_NOISE:
            line, reason = self._read_line()
            if reason:
                return reason
            noise += len(line) + 1
            far = _parsed(line)
            if not isinstance(far, dict) or "xmsg" not in far:
                continue
            if far["xmsg"] != PROTOCOL:
                return "its xmsg speaks another protocol (%s, this one %d); update the older of the two" % (
                    one_line(str(far["xmsg"]))[:20], PROTOCOL)
            if not all(isinstance(far.get(key), str) and 0 < len(far[key]) <= 256
                       for key in ("machine", "name", "version")):
                return "its xmsg does not say who it is"
            self.far = {key: one_line(far[key]) for key in ("machine", "name", "version")}
            return ""
        return "it says other things than xmsg would"

    def ask(self, jobs):
        """Sends one line of jobs, [[verb, argument], ...], and waits for its line of answers.

        ("ACCEPTED", answers), one {"ok": ...} or {"error": {code, message}} for each job; ("NOT_SENT", reason);
        ("UNKNOWN", reason) once a byte may have left.
        """
        data, dirty = memoryview(json.dumps({"jobs": jobs}).encode() + b"\n"), False
        poll = select.poll()
        poll.register(self._process.stdin, select.POLLOUT)
        reason = ""
        while data and not reason:
            event = poll.poll(max(0, self.deadline - time.monotonic()) * 1000)
            if not event:
                reason = "it takes nothing"
            elif event[0][1] & (select.POLLERR | select.POLLHUP):
                reason = self._end_reason()
            else:
                dirty = True
                try:
                    data = data[os.write(self._process.stdin.fileno(), data):]
                except BrokenPipeError:
                    reason = self._end_reason()
                except BlockingIOError:
                    pass
        line, reason = (b"", reason) if reason else self._read_line()
        if reason:
            return ("UNKNOWN" if dirty else "NOT_SENT"), reason
        answer = _parsed(line)
        answers = answer.get("answers") if isinstance(answer, dict) else None
        if not isinstance(answers, list) or len(answers) != len(jobs) or not all(map(_is_answer, answers)):
            return "UNKNOWN", "it gave an answer that cannot be read"
        return "ACCEPTED", answers

    def _read_line(self):
        """(a line, "") or (b"", why none comes)."""
        out = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST_LINE:
                return b"", "it says too much"
            if not select.select([out], [], [], max(0, self.deadline - time.monotonic()))[0]:
                return b"", "no answer in time (XMSG_REMOTE_TIMEOUT)"
            data = os.read(out, 1 << 16)
            if not data:
                return b"", self._end_reason()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line, ""

    def _end_reason(self):
        """Why the command has ended or hung up: its own last word on stderr, and what its status means."""
        try:
            status = self._process.wait(timeout=min(FAREWELL_SECONDS, max(0.1, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            status = None
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        text = self._errors.read(4096).decode("utf-8", "replace")
        last = clip(([line for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1], 160)
        if status in (126, 127):
            return "it finds no xmsg there (%s); end the command with its path, as .local/bin/xmsg" % last
        if "receive" in text and ("invalid choice" in text or "no command" in text):
            return "its xmsg is too old to know `receive`; update it"
        return last if status is None else "%s (status %d)" % (last, status)

    def close(self):
        """Hangs up. Whatever does not end by itself then is ended."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=min(FAREWELL_SECONDS, max(0, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            _end_group(self._process)
        self._process.stdout.close()
        self._errors.close()


def _end_group(process):
    import signal
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _parsed(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_answer(answer):
    if not isinstance(answer, dict):
        return False
    error = answer.get("error")
    return "ok" in answer or (isinstance(error, dict) and isinstance(error.get("code"), str)
                              and isinstance(error.get("message"), str))


def side_by_side(remotes, talk):
    """{alias: talk(remote)} of several machines at once, each in a thread of its own."""
    found = {}

    def run(remote):
        found[remote["alias"]] = talk(remote)
    threads = [threading.Thread(target=run, args=(remote,), daemon=True) for remote in remotes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ask_once(remote, jobs, seconds):
    """One conversation of one line: (outcome, answers or reason, what the far side said of itself)."""
    link, reason = open_link(remote, seconds)
    if not link:
        return "NOT_SENT", reason, {}
    try:
        return link.ask(jobs) + (link.far,)
    finally:
        link.close()


# ---------------------------------------------------------------------------------------------------- the far side

def serve(about, answer, seconds):
    """The far side on stdin and stdout: says who it is, then answers lines of jobs until there are no more.

    about: machine, name, version. answer(jobs) -> answers. It leaves when nothing comes for so many seconds.
    """
    _write_line(dict(about, xmsg=PROTOCOL))
    rest = b""
    while True:
        while b"\n" not in rest:
            if len(rest) > LONGEST_LINE or not select.select([0], [], [], seconds)[0]:
                return
            data = os.read(0, 1 << 16)
            if not data:
                return
            rest += data
        line, _, rest = rest.partition(b"\n")
        request = _parsed(line)
        jobs = request.get("jobs") if isinstance(request, dict) else None
        if not isinstance(jobs, list) or not all(
                isinstance(job, list) and len(job) == 2 and isinstance(job[0], str) for job in jobs):
            return
        _write_line({"answers": answer(jobs)})


def _write_line(value):
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(1, data):]
