"""Hosts' transcripts: where they are, and the evidence in them that a message reached a session's model.

Evidence by id is proof: Claude Code writes our message id into `origin.msg_id`, Codex our clientUserMessageId into
`client_id`. Evidence by text counts only in a record that the host writes for what a hook or a peer injected (never
in what a model, a tool or a person wrote), not older than the message's claim, one occurrence for one message,
oldest first.

Everything here is bounded in bytes and time, reads the newest records first and changes nothing. A torn, huge or
foreign line costs itself only. Record shapes: Claude Code 2.1.281 and 2.1.332, Codex 0.156.1 and 0.171.0 (all
measured), agy's as its documents have them.
"""
import json
import os
import re
import stat
import time
from collections import namedtuple

SESSION_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}\Z")
BLOCK = 256 * 1024
LINE_LIMIT = 4 * 1024 * 1024
# Records are written in the order of their times, give or take the time that a queued one waited for a running tool.
DISORDER_MS = 10 * 60 * 1000
FOLDERS_LIMIT = 5000
TITLE_BYTES = 128 * 1024
ACTIVITY_BYTES = 64 * 1024
_TIME = rb'"(?:timestamp|created_at)": ?"([^"]{1,40})"'  # compiled where it is used, as all below: 3 ms for a `list`

Evidence = namedtuple("Evidence", "by at name")
Evidence.__doc__ = """Where a message was found. by: "id" or "text". at: the record's time in ms, None if it has none.
name: the occurrence's own name, to be kept, so that it never counts for a second message."""

Result = namedtuple("Result", "found complete")
Result.__doc__ = """found: {key: Evidence}. complete: whether everything since the oldest claim was read, so that
what is not found is not there yet."""

# One text that a host injected. offset: of its record in the file; at: ms; part: its number in the record.
_Injection = namedtuple("_Injection", "kind at offset part text")


# ---- where a transcript is -------------------------------------------------------------------------------------------

def transcript_path(host, session, roots, cwd=None):
    """The transcript of a session, None if there is none. The newest, should several roots hold one.

    roots: Claude's configuration directories, Codex's homes, or agy's data directories. cwd: Claude's project, a
    shortcut.
    """
    if not SESSION_ID.match(session or ""):
        return None
    finder = {"claude": _claude_paths, "codex": _codex_paths, "agy": _agy_paths}[host]
    found = {}
    for root in roots:
        for path in finder(root, session, cwd):
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[path] = status.st_mtime_ns
    return max(found, key=found.get) if found else None


def _claude_paths(root, session, cwd):
    """`projects/<slug>/<id>.jsonl`; the slug is the cwd with everything but letters and digits as a dash."""
    projects, name = os.path.join(root, "projects"), session + ".jsonl"
    slug = re.sub("[^0-9A-Za-z]", "-", cwd or "")
    if slug and os.path.exists(os.path.join(projects, slug, name)):
        return [os.path.join(projects, slug, name)]
    return [os.path.join(projects, folder, name) for folder in _folders(projects)]


def _codex_paths(root, session, cwd):
    """`sessions/Y/M/D/rollout-<local time>-<id>.jsonl`, or archived. An id of version 7 tells the day, to a day."""
    ending = "-%s.jsonl" % session
    sessions = os.path.join(root, "sessions")
    days = []
    if re.match(r"[0-9a-f]{8}-[0-9a-f]{4}-7", session):
        born = int(session[:8] + session[9:13], 16) // 1000
        try:
            days = [time.strftime("%Y/%m/%d", time.gmtime(born + shift)) for shift in (0, -86400, 86400)]
        except (ValueError, OverflowError):
            pass
    found = [path for day in days for path in _rollouts(os.path.join(sessions, day), ending)]
    if not found:
        found = _rollouts(os.path.join(root, "archived_sessions"), ending)
    if not found:
        folders = [sessions]
        for _ in ("year", "month", "day"):
            folders = [os.path.join(folder, name) for folder in folders for name in _folders(folder)]
        found = [path for folder in folders for path in _rollouts(folder, ending)]
    return found


def _agy_paths(root, session, cwd):
    return [os.path.join(root, "brain", session, ".system_generated", "logs", "transcript_full.jsonl")]


def _rollouts(folder, ending):
    names = (name for name in _folders(folder) if name.startswith("rollout-") and name.endswith(ending))
    return [os.path.join(folder, name) for name in names]


def _folders(path):
    """The names in a directory, newest names first, none if it cannot be read."""
    try:
        return sorted(os.listdir(path), reverse=True)[:FOLDERS_LIMIT]
    except OSError:
        return []


# ---- what a session is called, and does ------------------------------------------------------------------------------

def claude_title(config, session, cwd, path=None):
    """The title that a user gave a Claude Code session, "" if none is found.

    The newest custom-title record at the end of its transcript (`--name`, `/rename`; written again after every turn),
    else the custom-title.json that /rename leaves beside it. path: the transcript, else it is looked for where a
    session that began in cwd has it.
    """
    if not SESSION_ID.match(session or ""):
        return ""
    path = path or os.path.join(config, "projects", re.sub("[^0-9A-Za-z]", "-", cwd or ""), session + ".jsonl")
    tail = newest_bytes(path, TITLE_BYTES)
    end = tail.rfind(b'"custom-title"')
    while end >= 0:
        start = tail.rfind(b"\n", 0, end) + 1
        record = _parse(tail[start:].partition(b"\n")[0]) or {}
        if record.get("type") == "custom-title" and record.get("sessionId") == session:
            return record["customTitle"] if isinstance(record.get("customTitle"), str) else ""
        end = tail.rfind(b'"custom-title"', 0, start)
    record = _parse(newest_bytes(path[:-len(".jsonl")] + "/custom-title.json", TITLE_BYTES)) or {}
    return record["customTitle"] if isinstance(record.get("customTitle"), str) else ""


def codex_activity(path, since):
    """What an open Codex thread does by the last turn in its rollout: idle or busy; unknown if its end tells of none.

    since: when the thread was opened, in seconds; a turn that began before has ended with its process.
    """
    tail, mark = newest_bytes(path, ACTIVITY_BYTES), b'"type":"event_msg","payload":{"type":"'
    began = tail.rfind(mark + b'task_started"')
    ended = max(tail.rfind(mark + word) for word in (b'task_complete"', b'turn_aborted"'))
    if ended > began:
        return "idle"
    record = _parse(tail[tail.rfind(b"\n", 0, began) + 1:].partition(b"\n")[0]) if began >= 0 else None
    at = _milliseconds(record.get("timestamp")) if record else None
    return "unknown" if at is None else "busy" if at >= int(since) * 1000 else "idle"


def newest_bytes(path, size):
    """The last bytes of a regular file, b"" if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        size = min(size, status.st_size)
        return os.pread(descriptor, size, status.st_size - size)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


# ---- what a message left there ---------------------------------------------------------------------------------------

def evidence(host, path, rows, taken=(), max_bytes=8 * 1024 * 1024, seconds=0.5):
    """Looks in a transcript for messages; a Result, empty if the file cannot be read.

    rows: dicts with `key`; `id`, the id that the host was given, or None; `text`, what was injected as it was
    rendered (one item: source line and body), or several renderings of it, or None; `since`, ms, when the row was
    claimed. Give it every row of the session that is open or unconfirmed. taken: names of occurrences that have
    confirmed rows already. Of rows with equal texts none is confirmed by text: nobody can tell them apart.
    """
    rows = [dict(row, texts=_texts(row.get("text"))) for row in rows]
    since = min((row.get("since") or 0 for row in rows), default=0)
    ids = {row["id"] for row in rows if row.get("id")}
    reader, found, injections = _READERS[host], {}, []
    complete, deadline, torn, first, next_step = False, time.monotonic() + seconds, False, True, None
    wanted = [re.escape(word.encode("utf-8", "replace")) for word in ids]
    if any(row["texts"] for row in rows):
        wanted += reader.kinds
    if not wanted:
        return Result({}, False)
    interesting = re.compile(b"|".join(wanted))
    try:
        for offset, line in _lines_backwards(path, max_bytes, deadline):
            if offset is None:
                complete = line
                break
            torn, first = torn or first and _parse(line) is None, False
            if interesting.search(line):
                record = _parse(line) or {}
                for name, identifier, at in reader.ids(record):
                    if identifier in ids:
                        found[identifier] = Evidence("id", at, "%s %s" % (name, identifier))
                # A model reads it in one call of its own: only an answer after it proves that there was one.
                injections += [_Injection(kind, at, offset, part, text)
                               for part, (kind, at, text) in enumerate(reader.texts(record))
                               if kind != "ephemeral_message" or next_step == "MODEL"]
                if record.get("source") == "MODEL" or record.get("type") in ("ERROR_MESSAGE", "USER_INPUT"):
                    next_step = record.get("source")
            if reader.ordered(line) and _is_older(line, since - DISORDER_MS):
                complete = True
                break
    except OSError:
        pass
    by_key = {row["key"]: found[row["id"]] for row in rows if row.get("id") in found}
    rest = [row for row in rows if row["key"] not in by_key and row["texts"]]
    by_key.update(_by_text(rest, injections[::-1], set(taken), reader.resolution))
    return Result(by_key, complete and not torn)


def _by_text(rows, injections, taken, resolution):
    """{key: Evidence} for rows whose text stands in an injection, as a whole or as one item of a batch.

    The longest texts go first and use up their place, so that a message is not found inside another one.
    """
    shared = {}
    for row in rows:
        for text in row["texts"]:
            shared.setdefault(text, set()).add(row["key"])
    found, used = {}, {}
    for row in sorted(rows, key=lambda row: -max(map(len, row["texts"]))):
        claimed = (row.get("since") or 0) // resolution * resolution
        equal = any(len(shared[text]) > 1 for text in row["texts"])
        for injection in injections:
            if injection.at is None or injection.at < claimed:
                continue
            spans = used.setdefault((injection.offset, injection.part), [])
            for start, end in _items(injection.text, row["texts"]):
                name = "%s %d.%d+%d" % (injection.kind, injection.offset, injection.part, start)
                if name in taken or any(start < other_end and other_start < end for other_start, other_end in spans):
                    continue
                spans.append((start, end))
                if not equal:
                    found[row["key"]] = Evidence("text", injection.at, name)
                break
            else:
                continue
            break
    return found


def _items(text, wanted):
    """Where one of the wanted texts stands in a text: from its start or an empty line, up to its end or an empty
    line.

    A host may put one line in brackets before it. (Our source lines are in brackets too, but no body can have one.)
    """
    second = text.find("\n") + 1 if text.startswith("[") else 0
    for word in wanted:
        start = text.find(word)
        while start >= 0:
            end = start + len(word)
            begins = start == 0 or text.endswith("\n\n", 0, start) or start == second and word.startswith("[")
            if begins and (end == len(text) or text.startswith("\n\n", end)):
                yield start, end
            start = text.find(word, start + 1)


def _texts(text):
    """The renderings as a tuple, without the line ends around them, which no host keeps."""
    several = (text,) if isinstance(text, str) else tuple(text or ())
    return tuple(filter(None, (one.strip("\n") for one in several)))


def agy_steps_since(path, offset, max_bytes=8 * 1024 * 1024):
    """agy's steps that stand in a transcript from an offset on, as (index, source, type, text), oldest first.

    None if not every one of them can be read: a file that was cut, a line that is being written, one that is none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not 0 <= status.st_size - offset <= max_bytes:
            return None
        data = os.pread(descriptor, max_bytes, offset)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    *lines, rest = data.split(b"\n")
    records = [_parse(line) for line in lines if line]
    if rest or not all(isinstance(_at({"at": record}, "at").get("step_index"), int) for record in records):
        return None
    return [(record["step_index"], str(record.get("source")), str(record.get("type")), str(record.get("content")))
            for record in records]


def codex_output_since(path, offset, call, mark, max_bytes=8 * 1024 * 1024):
    """What stands in a Codex rollout from an offset on of what tools have printed: (texts that hold mark, the offset
    behind the last whole line, whether the tool call has ended). OSError if it cannot be read.

    The answer for a call that is still running says so in words (0.156.1, 0.171.0); when it ends, its item is complete.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < offset:
            raise OSError("no rollout that only grew: %s" % path)
        begin = max(offset, status.st_size - max_bytes)
        data = os.pread(descriptor, max_bytes, begin)
    finally:
        os.close(descriptor)
    texts, ended = [], False
    data = data[:data.rfind(b"\n") + 1]
    for line in data.split(b"\n"):
        if mark.encode() not in line and call.encode() not in line:
            continue
        record = _parse(line) or {}
        payload, item = _at(record, "payload"), _codex_item(record)
        output, number = payload.get("output"), payload.get("call_id")
        if item.get("type") == "CommandExecution":
            output, number = item.get("aggregated_output"), item.get("id")
        elif payload.get("type") != "function_call_output":
            continue
        if not isinstance(output, str):
            output = json.dumps(output)
        texts += [output] * (mark in output)
        runs = item == {} and re.search("^Process running with session ID", output, re.M)
        ended = ended or number == call and not runs
    return texts, begin + len(data), ended


# ---- reading ---------------------------------------------------------------------------------------------------------

def _lines_backwards(path, max_bytes, deadline):
    """(offset, line) of a regular file, newest first, then (None, whether that was all of it).

    A last line without its line end is torn, or being written: it comes like any other and will not parse.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("no regular file: %s" % path)
        position, bottom, tail, dropping = status.st_size, max(0, status.st_size - max_bytes), b"", False
        while position > bottom:
            if time.monotonic() > deadline:
                yield None, False
                return
            size = min(BLOCK, position - bottom)
            position -= size
            block = os.pread(descriptor, size, position)
            if len(block) < size:
                raise OSError("the file was cut while it was read: %s" % path)
            *_, rest = pieces = block.split(b"\n")
            if len(pieces) == 1:
                tail, dropping = (b"", True) if dropping or len(tail) + size > LINE_LIMIT else (block + tail, False)
                continue
            # The last piece begins the line whose end came before; the first one belongs to a line that begins
            # further up.
            start = position + size - len(rest)
            if not dropping and (rest or tail):
                yield start, rest + tail
            for piece in pieces[-2:0:-1]:
                start -= len(piece) + 1
                if piece:
                    yield start, piece
            tail, dropping = pieces[0], False
        if tail and not dropping and bottom == 0:
            yield 0, tail
        yield None, bottom == 0
    finally:
        os.close(descriptor)


def _parse(line):
    if len(line) > LINE_LIMIT:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_older(line, limit):
    """Whether a record's own time lies before the limit, in ms. A tool's arguments may hold times of their own."""
    times = (_milliseconds(found.decode("ascii", "replace")) for found in re.findall(_TIME, line))
    if not any(found is not None and found < limit for found in times):
        return False
    record = _parse(line) or {}
    at = _milliseconds(record.get("timestamp", record.get("created_at")))
    return at is not None and at < limit


def _milliseconds(text):
    """ISO 8601 in UTC, with or without fractions, as ms; None for anything else."""
    match = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)\Z", text) \
        if isinstance(text, str) else None
    if not match:
        return None
    from calendar import timegm
    try:
        seconds = timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return seconds * 1000 + int((match.group(7) or "0").ljust(3, "0")[:3])


def _at(record, key):
    """The value at a key, {} for what is no dict, so that a hostile shape ends in nothing found."""
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, dict) else {}


def _strings(value):
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


# ---- the hosts' records ----------------------------------------------------------------------------------------------
# kinds: what a line must hold to be worth parsing. ids, texts: what a record says. ordered: whether a line's time
# tells how far back we are. resolution: of the records' times, in ms.

_Reader = namedtuple("_Reader", "kinds ids texts ordered resolution")

# The text that FileChanged (or an asyncRewake at SessionStart) wrote to stderr, in what the host makes of it.
_WAKE = r'(?s)Stop hook blocking error from command "[^"\n]{1,200}": (.*?)\n*</system-reminder>\s*\Z'
_DELEGATION = (r"(?s)<codex_delegation>\s*<source_thread_id>[^<]*</source_thread_id>\s*<input>(.*)</input>\s*"
               r"</codex_delegation>\s*\Z")
# A Stop hook's reason stands behind words of the host's own, whose wording changes.
_AGY_LEAD = r"(?:\[[^\n]*\]\n)?[^\n\[\]]{1,300}: ?(?=\[)"
_AGY_FRAME = r"(?s)\s*<([A-Z_]{3,40})>\n?(.*?)\n?</\1>\s*\Z"


def _claude_ids(record):
    """A peer message that began a turn is a user record; one that came into a running turn, an attachment."""
    for kind, holder in (("user", record), ("attachment", _at(record, "attachment"))):
        origin = _at(holder, "origin")
        if record.get("type") == kind and origin.get("kind") == "peer" and isinstance(origin.get("msg_id"), str):
            yield "peer", origin["msg_id"], _milliseconds(record.get("timestamp"))


def _claude_texts(record):
    at, attachment = _milliseconds(record.get("timestamp")), _at(record, "attachment")
    wake = None
    if record.get("type") == "attachment":
        kind = attachment.get("type")
        if kind == "hook_additional_context":
            for text in _strings(attachment.get("content")):
                yield kind, at, text.strip("\n")
        elif kind == "hook_blocking_error" and isinstance(_at(attachment, "blockingError").get("blockingError"), str):
            yield kind, at, attachment["blockingError"]["blockingError"].strip("\n")
        elif kind == "queued_command" and attachment.get("commandMode") == "task-notification":
            wake = attachment.get("prompt")
    elif record.get("type") == "user" and _at(record, "origin").get("kind") == "task-notification":
        wake = _at(record, "message").get("content")
    match = re.search(_WAKE, wake) if isinstance(wake, str) else None
    if match:
        yield "wake", at, match.group(1).strip("\n")


def _codex_ids(record):
    item = _codex_item(record)
    if item.get("type") == "UserMessage" and isinstance(item.get("client_id"), str):
        yield "user_message", item["client_id"], _milliseconds(record.get("timestamp"))


def _codex_texts(record):
    at, item, payload = _milliseconds(record.get("timestamp")), _codex_item(record), _at(record, "payload")
    if (record.get("type"), payload.get("type"), payload.get("role")) == ("response_item", "message", "developer"):
        content = payload.get("content") if isinstance(payload.get("content"), list) else []
        kinds = _at(payload, "internal_chat_message_metadata_passthrough").get("content_item_kinds")
        for number, part in enumerate(content):
            known = isinstance(kinds, list) and number < len(kinds)
            text = _at({"part": part}, "part").get("text")
            # Older versions do not name the kind; then the developer's role alone tells that no person wrote it.
            if isinstance(text, str) and (not known or kinds[number] == "hooks.additional_context"):
                yield "hook_context", at, text.strip("\n")
    elif item.get("type") == "HookPrompt":
        for fragment in item.get("fragments") if isinstance(item.get("fragments"), list) else []:
            text = _at({"fragment": fragment}, "fragment").get("text")
            if isinstance(text, str):
                yield "hook_prompt", at, text.strip("\n")
    elif item.get("type") == "FunctionCallOutput" and isinstance(item.get("output"), str):
        # Only output that came from outside has a name here; a tool's has a call instead.
        if isinstance(item.get("name"), str) and isinstance(item.get("namespace"), str):
            match = re.match(_DELEGATION, item["output"])
            text = item["output"] if not match else _unescape(match.group(1))
            yield "tool_output", at, text.strip("\n")


def _codex_item(record):
    payload = _at(record, "payload")
    if record.get("type") == "event_msg" and payload.get("type") == "item_completed":
        return _at(payload, "item")
    return {}


def _unescape(text):
    for entity, letter in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        text = text.replace(entity, letter)
    return text


def _agy_texts(record):
    """A step that the system added; its text stands in a frame of the step's name, or bare."""
    if record.get("type") in ("SYSTEM_MESSAGE", "EPHEMERAL_MESSAGE") and isinstance(record.get("content"), str) \
            and str(record.get("source")).startswith("SYSTEM"):
        match = re.match(_AGY_FRAME, record["content"])
        text = match.group(2) if match else record["content"]
        lead = re.match(_AGY_LEAD, text)
        text = text[lead.end():] if lead else text
        yield record["type"].lower(), _milliseconds(record.get("created_at")), text.strip("\n")


_READERS = {
    "claude": _Reader((b"hook_additional_context", b"hook_blocking_error", b"task-notification"), _claude_ids,
                      _claude_texts, lambda line: b'"attachment"' not in line, 1),
    "codex": _Reader((b'"developer"', b'"HookPrompt"', b'"FunctionCallOutput"'), _codex_ids, _codex_texts,
                     lambda line: True, 1),
    "agy": _Reader((b"SYSTEM_MESSAGE", b"EPHEMERAL_MESSAGE", b'"MODEL"', b"ERROR_MESSAGE", b"USER_INPUT"),
                   lambda record: (), _agy_texts, lambda line: True, 1000),
}
