"""Whatever stands in what xmsg reads costs its own row: every parser against tables of hostile documents and files.

PARSERS has each thing that xmsg reads and did not write; fuzz.py gives the same ones what it makes up.
What has a table of its own elsewhere: bodies in each renderer (test_rendering), payloads on the fast path (test_hook,
test_wrapper), servers that hang or flood (test_app_server, test_remote), links in the store's place and its modes
(test_store), arguments and ssh's quoting (test_command_line, test_remote), the wrapper's environment and interpreter
(test_wrapper).
"""
import collections
import contextlib
import json
import os
import random
import signal
import sqlite3
import time
import unittest
from unittest import mock

from support import ADA, AGY, BOB, PATIENCE, FakeProc, Home, environ, message, peer
from side_by_side import load_tests  # noqa: F401

import agy_delivery
import app_server
import claude_delivery
import codex_delivery
import codex_history
import contract
import forwarding
import hook_install
import host_process
import receiving
import remote
import sending
import spool
import transcripts
import xmsg

FULL = os.environ.get("XMSG_FULL") == "1"
UID = "0123456789abcdef"
KEY = b"k" * 32
SECONDS = 8.0  # for one document; those that take long take for ever


class World:
    """A home with a place for each file, and a store; read by everything below."""

    def __init__(self):
        self.home = Home()
        self.folder, self.store = self.home.folder, self.home.store()
        self.codex, self.claude = self.path(".codex"), self.path(".claude")
        self.agy = self.path(".gemini/antigravity-cli")
        for folder in (self.codex, self.claude + "/sessions", self.claude + "/projects/-w/" + ADA, self.agy,
                       self.path(".config/xmsg"), self.path("work")):
            os.makedirs(folder)
        self.pid, self.start = os.getpid(), host_process.start_time(os.getpid())
        self.proc = FakeProc()

    def path(self, name):
        return os.path.join(self.folder, name)

    def put(self, name, data):
        """Writes a file and returns its path. data None: what stands there is left, for the table of odd files."""
        path = self.path(name)
        if data is not None:
            with open(path, "wb") as file:
                file.write(data)
        return path

    def close(self):
        self.store.close()
        self.home.remove()
        self.proc.remove()


# name -> (function of a world and bytes, documents that mean something, exceptions that are a refusal, its file)
Parser = collections.namedtuple("Parser", "read samples refusals file")
PARSERS = {}


def parser(name, *samples, refuses=(), file=None):
    def register(read):
        PARSERS[name] = Parser(read, [sample if isinstance(sample, bytes) else json.dumps(sample).encode()
                                      for sample in samples], refuses, file)
        return read
    return register


# ---------------------------------------------------------------------------------------------------- hook payloads

def check_call(call):
    if call is not None:
        assert contract.is_session_id(call["session"]), call["session"]
        json.dumps({key: value for key, value in call.items() if key != "prefix"}, ensure_ascii=False).encode()


CLAUDE_CALL = {"session_id": ADA, "transcript_path": "/t/x.jsonl", "cwd": "/w", "prompt_id": "p",
               "permission_mode": "default", "hook_event_name": "UserPromptSubmit", "session_title": "t",
               "source": "startup", "agent_id": "", "stop_hook_active": False}
CODEX_CALL = {"session_id": BOB, "turn_id": "t", "transcript_path": None, "cwd": "/w", "hook_event_name": "PostToolUse",
              "model": "m", "permission_mode": "default", "tool_response": {"output": contract.SPOOL_MARK + "x"}}
AGY_CALL = {"conversationId": AGY, "initialNumSteps": 1, "invocationNum": 0, "modelName": "g", "workspacePaths": ["/w"],
            "transcriptPath": "/t/brain/x/y/z/t.jsonl", "executionNum": 1, "fullyIdle": True, "terminationReason": ""}


@parser("payload of Claude Code", CLAUDE_CALL, refuses=contract.BadPayload)
def _(world, data):
    check_call(xmsg.parse_call("claude", "", data))


@parser("payload of Codex", CODEX_CALL, refuses=contract.BadPayload)
def _(world, data):
    check_call(xmsg.parse_call("codex", "", data))


@parser("payload of agy", AGY_CALL, refuses=contract.BadPayload)
def _(world, data):
    check_call(xmsg.parse_call("agy", "PreInvocation", data))


@parser("prefix of a payload", CLAUDE_CALL, CODEX_CALL)
def _(world, data):
    prefix = xmsg.registered_prefix(data)
    assert prefix is None or data.startswith(prefix) and prefix.endswith(b'"'), prefix


# ---------------------------------------------------------------------------------------------------- Claude Code

def registration():
    return {"pid": os.getpid(), "sessionId": ADA, "cwd": "/w", "procStart": host_process.start_time(os.getpid()),
            "version": "2.1.332", "messagingSocketPath": "/r/1.sock", "name": "n", "nameSource": "user",
            "status": "idle", "updatedAt": 1}


@parser("registration of Claude Code", registration(), file=".claude/sessions/%d.json" % os.getpid())
def _(world, data):
    path = world.put(".claude/sessions/%d.json" % world.pid, data)
    if data is not None:
        os.utime(path, (1, 1))  # a fresh torn one is read three times, 5 ms apart
    for found in claude_delivery.sessions([world.claude]):
        json.dumps(found).encode()
        assert contract.is_session_id(found.session) and found.pid == world.pid
    assert claude_delivery.session_status(ADA, world.pid, [world.claude]) in ("idle", "busy", "waiting", "unknown")
    claude_delivery.find_inbox(ADA, [world.claude])


@parser("settings of Claude Code", {"crossSessionInbound": "refuse"}, file=".claude/settings.json")
def _(world, data):
    world.put(".claude/settings.json", data)
    word, _ = claude_delivery.inbound_setting(world.claude, world.path("work"), [])
    assert word is None or isinstance(word, str)
    if data is not None:
        claude_delivery.inbound_setting(world.claude, "/", ["claude", "--settings", data.decode("utf-8", "replace")])


TITLED = b'{"type":"user","message":{}}\n{"type":"custom-title","customTitle":"t","sessionId":"%s"}\n' % ADA.encode()


@parser("titles in a transcript of Claude Code", TITLED, file=".claude/projects/-w/%s.jsonl" % ADA)
def _(world, data):
    world.put(".claude/projects/-w/%s.jsonl" % ADA, data)
    assert isinstance(transcripts.claude_title(world.claude, ADA, "/w"), str)


@parser("custom-title.json of Claude Code", {"customTitle": "t"},
        file=".claude/projects/-w/%s/custom-title.json" % ADA)
def _(world, data):
    world.put(".claude/projects/-w/%s/custom-title.json" % ADA, data)
    assert isinstance(transcripts.claude_title(world.claude, ADA, "/w"), str)


def receipt(**more):
    return dict({"type": "control", "action": "peer_message_status", "orig_msg_id": claude_delivery.msg_id(UID),
                 "msgV": 1, "status": "held", "status_detail": "refused", "drop_reason": "d", "reason": "because",
                 "dropped_msg_ids": [claude_delivery.msg_id(UID)]}, **more)


@parser("receipt of Claude Code", receipt(), receipt(status="dropped"), receipt(status="expired"))
def _(world, data):
    exchange = claude_delivery.Exchange.__new__(claude_delivery.Exchange)
    exchange.message, exchange._outcomes, exchange.receipt = claude_delivery.msg_id(UID), [], None
    exchange.record = collections.namedtuple("Record", "pid start")(world.pid, world.start)
    exchange._note(data)
    claude_delivery._dropped.clear()
    for word, text in exchange._outcomes:
        assert word in contract.OUTCOME_STATES
        text.encode()


# ---------------------------------------------------------------------------------------------------- transcripts

CLAUDE_RECORDS = b"\n".join(json.dumps(record).encode() for record in (
    {"type": "attachment", "uuid": "u", "timestamp": "2026-12-01T00:00:00.000Z", "attachment": {
        "type": "hook_additional_context", "content": ["[peer x]\nhello"], "hookEvent": "PreToolUse"}},
    {"type": "user", "uuid": "v", "timestamp": "2026-12-01T00:00:01.000Z", "origin": {"kind": "task-notification",
     "msg_id": claude_delivery.msg_id(UID)}, "message": {"role": "user", "content": [{"type": "text", "text": "x"}]}})) + b"\n"
CODEX_RECORDS = b"\n".join(json.dumps(record, separators=(",", ":")).encode() for record in (
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "session_meta", "payload": {"id": BOB, "history_base": {
        "thread_id": BOB, "end_byte_offset": 3}}},
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "event_msg", "payload": {"type": "task_started"}},
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "response_item", "payload": {
        "type": "message", "role": "developer", "content": [{"type": "input_text", "text": "[peer x]\nhello"}],
        "metadata": {"kinds": ["hooks.additional_context"]}}},
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "event_msg", "payload": {"type": "item_completed", "item": {
        "type": "HookPrompt", "fragments": [{"text": "[peer x]\nhello"}]}}},
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "response_item", "payload": {
        "type": "function_call_output", "output": {"content": "text", "success": True}}},
    {"timestamp": "2026-12-01T00:00:00.000Z", "type": "response_item", "payload": {
        "type": "function_call", "name": "shell", "arguments": "{}"}})) + b"\n"
AGY_RECORDS = b"\n".join(json.dumps(record).encode() for record in (
    {"step_index": 1, "source": "SYSTEM", "type": "SYSTEM_MESSAGE", "status": "DONE", "content": "[peer x]\nhello",
     "created_at": "2026-12-01T00:00:00Z"},
    {"step_index": 2, "source": "MODEL", "type": "PLANNER_RESPONSE", "content": "ok",
     "created_at": "2026-12-01T00:00:00Z"})) + b"\n"


def look(host, path):
    rows = [{"key": 1, "id": UID if host == "codex" else claude_delivery.msg_id(UID), "text": "[peer x]\nhello", "since": 1}]
    result = transcripts.evidence(host, path, rows)
    assert set(result.found) <= {1}
    for found in result.found.values():
        found.name.encode()


@parser("transcript of Claude Code", CLAUDE_RECORDS, file="claude.jsonl")
def _(world, data):
    look("claude", world.put("claude.jsonl", data))


@parser("rollout of Codex", CODEX_RECORDS, refuses=contract.NotPossible, file=".codex/rollout.jsonl")
def _(world, data):
    path = world.put(".codex/rollout.jsonl", data)
    look("codex", path)
    assert transcripts.codex_activity(path, 0) in ("idle", "busy", "unknown")
    with codex_history.open_rollout(world.codex, path) as file:
        codex_history._history_base(file)
    for full in (False, True):
        pieces = codex_history.markdown([(codex_history.open_rollout(world.codex, path), None)], full, redact=True)
        text = "".join(pieces)
        text.encode()
        assert not any(char < " " and char not in "\n\t" for char in text)


@parser("transcript of agy", AGY_RECORDS, file="agy.jsonl")
def _(world, data):
    path = world.put("agy.jsonl", data)
    look("agy", path)
    for shape in contract.AGY_STEPS + ("continue",):
        agy_delivery.was_refused(transcripts.agy_steps_since(path, 0) or [], 0, shape, ["[peer x]"])


# ---------------------------------------------------------------------------------------------------- Codex's files

@parser("session_index.jsonl of Codex", b'{"id":"%s","thread_name":"n","updated_at":"x"}\n' % BOB.encode(),
        file=".codex/session_index.jsonl")
def _(world, data):
    world.put(".codex/session_index.jsonl", data)
    names = codex_delivery._renames(world.codex, {BOB})
    assert all(isinstance(name, str) for name in names.values())
    records = [{"session": BOB, "name": "", "model": "m", "status": "idle"}]
    codex_history.fill_gaps(world.codex, records)
    assert isinstance(records[0]["name"], str)


@parser("config.toml of Codex", b'[model_providers.a]\nname = "a"\n[hooks.state."x:stop:0:0"]\ntrusted_hash = "sha256:0"\n',
        refuses=contract.NotPossible, file=".codex/config.toml")
def _(world, data):
    world.put(".codex/config.toml", data)
    if data is not None:
        hook_install._trust_states(data.decode("utf-8", "replace"))
    codex_history.configured_providers(world.codex)


@parser("version of Codex", b"codex/0.156.1 (Debian) x", b"0.156.1")
def _(world, data):
    text = data.decode("utf-8", "replace")
    for found in (codex_delivery.parse_version(text), codex_delivery.server_version({"userAgent": text})):
        assert found is None or len(found) == 3


def handshake(key):
    return (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %s\r\n\r\n" % app_server.accept_token(key))


@parser("frames of an app-server", b"\x81\x05hello", b"\x01\x02he\x80\x03llo", b"\x88\x02\x03\xe8", b"\x89\x01p",
        b'\x81\x7e\x00\x80' + b"x" * 128, refuses=app_server.ProtocolError)
def _(world, data):
    import binascii
    socket = app_server.WebSocket(random=lambda size: b"\0" * size, max_message=1 << 16)
    socket.feed(handshake(binascii.b2a_base64(b"\0" * 16, newline=False)))
    socket.feed(data)
    while socket.next_event():
        socket.data_to_send()


@parser("handshake of an app-server", handshake(b"AAAAAAAAAAAAAAAAAAAAAA=="), refuses=app_server.ProtocolError)
def _(world, data):
    socket = app_server.WebSocket(random=lambda size: b"\0" * size)
    socket.feed(data)
    socket.next_event()


@parser("message of an app-server", {"id": 1, "result": {"userAgent": "codex/0.156.1 (x)"}},
        {"id": 1, "error": {"code": -1, "message": "m", "data": {}}}, {"method": "m", "id": "x", "params": {}},
        refuses=app_server.AppServerError)
def _(world, data):
    lines = app_server.Lines()
    lines.feed(data.replace(b"\n", b" ") + b"\n")
    answer = app_server.decode_message(lines.next_event()[1])
    if "error" in answer:
        app_server.read_error(answer["error"])
    if isinstance(answer.get("result"), dict):
        codex_delivery.server_version(answer["result"])


# ---------------------------------------------------------------------------------------------------- other machines

@parser("remotes file", b"box ssh host\nbig --spool docker exec -i 'big one'\n# no\n", refuses=contract.RemoteError,
        file=".config/xmsg/remotes")
def _(world, data):
    world.put(".config/xmsg/remotes", data)
    settings = world.home.settings()
    for found in remote.read_remotes(settings).values():
        assert remote.is_alias(found["alias"]) and found["words"]
        remote.far_command(found["words"])
    remote.bad_lines(settings)


def told(**more):
    return dict({"uid": UID, "id": 7, "state": "delivered", "window": "w", "detail": "d", "session": BOB, "host": "codex",
                 "note": "n", "evidence": "e", "events": [{"at": 1, "state": "queued", "window": None, "detail": None}]},
                **more)


@parser("answer of another machine", {"ok": [told()]}, {"ok": [told(state="UNKNOWN")]}, {"ok": [told(state="held")]},
        {"error": {"code": "usage", "message": "m", "candidates": ["c"]}}, {"ok": [{"uid": UID, "error": {"code": "x"}}]})
def _(world, data):
    answer = remote._parsed(data)
    if not remote._is_answer(answer):
        return
    store = world.store
    row = store.by_uid(UID) or message(store, "box:leader", target_host="", uid=UID, remote="box")
    with store.transaction():
        store._execute("update messages set state = 'direct-uncertain' where uid = ?", (UID,))
    row = store.by_uid(UID)
    found = forwarding._told(answer, 0, row)
    if "error" not in found:
        forwarding.follow(store, row, found)
    json.dumps(found, ensure_ascii=False).encode()
    forwarding._session(answer.get("ok"))


@parser("session of another machine", {"session": BOB, "host": "codex", "name": "n", "cwd": "/w", "project": "/w",
                                       "model": "m", "permission_mode": "", "live": True, "activity": "idle",
                                       "seen_at": "2026-12-01T00:00:00.000Z", "queued": 1, "host_queued": 0,
                                       "direct": True, "window": "hook"})
def _(world, data):
    found = forwarding._session(remote._parsed(data))
    if found:
        assert contract.is_session_id(found["session"])
        json.dumps(found, ensure_ascii=False).encode()


ASKED = {"machine": UID, "name": "box", "body": "text", "ttl": 1000, "priority": 0, "kind": "agent", "label": "ada",
         "host": "claude", "session": ADA, "direct": False, "force": False, "reply_to": None, "to": [[UID, BOB]],
         "resolution": "drop", "target": "all"}


@parser("request of another machine", *([verb, ASKED] for verb in ("send", "cancel", "resolve")))
def _(world, data):
    job = remote._parsed(data)
    if not isinstance(job, list) or len(job) != 2:
        return
    with environ(HOME=world.folder):
        answer = receiving._answer(world.store, job[0], job[1], list)
    json.dumps(answer).encode()
    code = answer.get("error", {}).get("code")
    assert code != "unexpected" and code != "store", answer


# ---------------------------------------------------------------------------------------------------- what is at hand

def unsealed(data):
    """The bytes as the content of a line that was made with the key."""
    import base64
    import zlib
    text = base64.urlsafe_b64encode(zlib.compress(data)).decode()
    return "%s%s:%s" % (contract.SPOOL_MARK, text, spool._code(KEY, text))


SPOOLED = dict({name: kind() for name, kind in {
    name: kind[0] if isinstance(kind, tuple) else kind for name, kind in spool.FIELDS.items()}.items()},
    uid=UID, sender_kind="agent", sender_host="codex", sender_label="ada", sender_session=BOB, target=ADA,
    target_host="claude", body="text")


@parser("sealed line", unsealed(b"[]").encode(), refuses=ValueError)
def _(world, data):
    spool.unseal(KEY, data.decode("utf-8", "surrogateescape"), BOB, 1, 1000)


@parser("content of a sealed line", [SPOOLED], refuses=ValueError)
def _(world, data):
    for found in spool.unseal(KEY, unsealed(data), BOB, 1, 1000):
        json.dumps(found).encode()


@parser("marked lines of a tool's output", unsealed(b"[]").encode() + b"\n...")
def _(world, data):
    assert all(len(line) <= len(data) for line in spool.marked_lines(data.decode("utf-8", "replace")))


@parser("pointer of a worktree", b"gitdir: /r/.git/worktrees/w\n", file="work/.git")
def _(world, data):
    world.put("work/.git", data)
    assert os.path.isabs(xmsg.project_root(world.path("work")))


@parser("name and arguments of a process", b"cla ude) S 1 (", b"claude\0-p\0", b"node\0/x/claude-code/cli.js\0")
def _(world, data):
    # The system gives a name of 15 bytes, whatever they are, and all else of stat itself.
    world.proc.add(4711, ["claude"])
    folder = os.path.join(world.proc.folder, "4711")
    with open(folder + "/stat", "wb") as file:
        file.write(b"4711 (%s) S 1 %s123 %s" % (data[:15], b"0 " * 17, b"0 " * 30))
    with open(folder + "/cmdline", "wb") as file:
        file.write(data)
    with environ(XMSG_PROC_ROOT=world.proc.folder):
        host_process.identify(4711)
        assert host_process.alive(4711, "123") and host_process.ancestors(4711) == [1], data[:15]


@parser("locks of the system", b"1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF\n2: POSIX ADVISORY READ 1 0:1:2 0 0\n")
def _(world, data):
    with open(os.path.join(world.proc.folder, "locks"), "wb") as file:
        file.write(data)
    with environ(XMSG_PROC_ROOT=world.proc.folder):
        host_process.flock_holder(world.folder)


@parser("note of a waiter", b"1700000000000 deadbeef")
def _(world, data):
    found = sending._failed_wake(world.put("wake", data))
    assert 0 <= sending._rest(found, ["agy"], 120) <= 120


HOOKS = {"hooks": {"Stop": [{"matcher": "*", "hooks": [{"type": "command", "command": "x", "timeout": 5}]}]}}


@parser("hook configuration", HOOKS, json.dumps(HOOKS, indent=2).encode(), b"{\n\t\"a\": 1\n}\n", refuses=hook_install.Refused)
def _(world, data):
    for host in contract.HOSTS:
        text = hook_install._decode(host, data)[1]
        after = hook_install._with_ours(host, text, world.path("xmsg-hook.sh"))
        json.loads(after)
        hook_install._faults(host, text)


# ---------------------------------------------------------------------------------------------------- tables

# What no JSON reader expects in a value's place.
ODD = [None, True, False, 0, -1, 1 << 63, 10 ** 40, 1.5, -1e308, "", " ", "\0", "\ud800", "\x1b]52;c;aGk=\x1b\\", "../../etc",
       "/", "-p", "x" * 5000, "a\u202eb\u2028c", "9" * 5000, [], [[]], [None], {}, {"a": None}, [[], {}, "x"]]
DOCUMENTS = {
    "nothing": b"", "an empty line": b"\n", "NUL": b"\0" * 99, "a BOM": b"\xef\xbb\xbf{}", "UTF-16": "{}".encode("utf-16"),
    "no UTF-8": b'{"a":"\xff\xfe\x80"}', "half a character": b'{"a":"\xe4\xb8"}', "deep arrays": b"[" * 100000,
    "deep objects": b'{"a":' * 100000, "closed deep arrays": b"[" * 20000 + b"]" * 20000, "a long number": b"9" * 100000,
    "a long number inside": b'{"pid":' + b"9" * 100000 + b"}", "NaN": b'{"pid":NaN}', "Infinity": b"[Infinity,-Infinity]",
    "a huge exponent": b'{"pid":1e999999}', "double keys": b'{"session_id":"a","session_id":"b"}', "null": b"null",
    "a text": b'"text"', "a number": b"1", "a list": b"[]", "an object": b"{}", "lone surrogates": b'{"a":"\\ud800\\udfff"}',
    "a long line": b"x" * (1 << 20), "a long text": b'{"a":"' + b"x" * (1 << 20) + b'"}', "many lines": b"\n" * 100000,
    "carriage returns": b'{"a":1}\r\n{"b":2}\r\n', "escape sequences": b"\x1b]52;c;aGk=\x07\x9b31m", "a database": b"SQLite format 3\0",
    "many objects": b"{}\n" * 10000, "many brackets": b"[],[]," * 10000, "quotes": b"'\"`\\$(x)%s%n", "spaces": b" " * 100000,
}
# What fuzz.py has found, by parser: each was a fault once.
FOUND = {
    "prefix of a payload": [b'{"session_id":"s","x":\xff"y","permission_mode":"default"}'],
    "answer of another machine": [json.dumps({"ok": [dict(told(), more="\ud800")]}).encode()]}


def mutants(sample, count=30, seed=7):
    """A sample that was cut, and with bytes turned, doubled and taken out; the same ones each time."""
    pick = random.Random(seed)
    for _ in range(count):
        data = bytearray(sample)
        for _ in range(pick.randrange(1, 4)):
            at, kind = pick.randrange(len(data) + 1), pick.randrange(5)
            if kind == 0:
                del data[at:]
            elif kind == 1 and at < len(data):
                data[at] ^= 1 << pick.randrange(8)
            elif kind == 2:
                data[at:at] = pick.choice([b"\0", b'"', b"\\", b"{", b"[", b",", b"\n", b"\xff", b"-", b"9" * 30])
            elif kind == 3:
                del data[at:at + pick.randrange(8)]
            else:
                data[at:at] = data[max(0, at - pick.randrange(20)):at]
        yield bytes(data)


def odd_ones(sample):
    """A JSON document, or lines of it, with each of its values left out, and replaced by odd ones: every second value
    by one half of them each, unless XMSG_FULL=1."""
    lines = sample.split(b"\n")
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        for turn, place in enumerate(places(value)):
            for odd in ([places] + ODD)[0 if FULL else turn % 2::1 if FULL else 2]:
                changed = json.dumps(replaced(value, place, odd), separators=(",", ":")).encode()
                yield b"\n".join(lines[:number] + [changed] + lines[number + 1:])


def places(value, above=()):
    """The way to each value inside of a JSON value."""
    for key in (list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
        yield above + (key,)
        yield from places(value[key], above + (key,))


def replaced(value, place, odd):
    """A copy with another value at a place; odd is `places` where it is to be left out."""
    if not place:
        return odd
    value = value.copy()
    if odd is places and len(place) == 1:
        del value[place[0]]
    else:
        value[place[0]] = replaced(value[place[0]], place[1:], odd)
    return value


class TooSlow(Exception):
    pass


@contextlib.contextmanager
def in_time(seconds=SECONDS):
    def late(*_):
        raise TooSlow("more than %g s" % seconds)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds * PATIENCE)
    begin = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begin > seconds * PATIENCE:  # inside of SQLite no exception comes through
        late()


def refused(world, name, data):
    """Gives a document to a parser. True if it refused it; whatever else it raises is a fault."""
    try:
        PARSERS[name].read(world, data)
    except PARSERS[name].refusals:
        return True
    return False


class Hostile(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.world = World()
        cls.addClassCleanup(cls.world.close)
        variables = environ(HOME=cls.world.folder, XMSG_DB=cls.world.home.db)
        variables.__enter__()
        cls.addClassCleanup(variables.__exit__, None, None, None)
        peer(cls.world.store, ADA, "claude", name="ada")
        peer(cls.world.store, BOB, "codex", title="bob")


KINDS = ("fifo", "folder", "endless", "loop", "link to a fifo")


@contextlib.contextmanager
def in_the_place_of(path, kind):
    """Something that is no plain file stands in a file's place."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "endless":
        os.symlink("/dev/zero", path)
    elif kind == "loop":
        os.symlink(path, path)
    else:
        if not os.path.exists(path + ".fifo"):
            os.mkfifo(path + ".fifo")
        os.symlink(path + ".fifo", path)
    try:
        yield
    finally:
        os.rmdir(path) if kind == "folder" else os.unlink(path)


class AParser(Hostile):
    def give(self, name, data):
        with in_time():
            try:
                return refused(self.world, name, data)
            except BaseException as error:
                error.args = ("%s: %r: %s" % (name, (data or b"")[:300], error),)
                raise

    def test_understands_its_samples(self):
        for name, parser in PARSERS.items():
            for sample in parser.samples:
                with self.subTest(parser=name, sample=sample[:60]):
                    self.assertFalse(self.give(name, sample))

    def test_meets_no_document_that_breaks_it(self):
        for name in PARSERS:
            with self.subTest(parser=name):
                for document in list(DOCUMENTS.values()) + FOUND.get(name, []):
                    self.give(name, document)

    def test_meets_no_value_that_breaks_it(self):
        for name, parser in PARSERS.items():
            with self.subTest(parser=name):
                for sample in parser.samples:
                    for document in odd_ones(sample):
                        self.give(name, document)

    def test_meets_no_damage_that_breaks_it(self):
        for name, parser in PARSERS.items():
            with self.subTest(parser=name):
                for sample in parser.samples:
                    for document in mutants(sample):
                        self.give(name, document)

    def test_waits_for_nothing_that_stands_in_its_files_place(self):
        """A FIFO, a folder, a device that never ends, a link to itself, one to a FIFO."""
        for name, parser in PARSERS.items():
            for kind in KINDS if parser.file else ():
                with self.subTest(parser=name, kind=kind), in_the_place_of(self.world.path(parser.file), kind):
                    self.give(name, None)


# ---------------------------------------------------------------------------------------------------- databases

THREADS = ("create table threads (id text primary key, rollout_path text, name text, preview text, first_user_message text, "
           "cwd text, title text, source text, model text, model_provider text, archived integer, updated_at integer, "
           "updated_at_ms integer, attached_thread_parent_id text)")
ITEMS = "create table queued_items (id text, thread_id text, payload_json text, created_at_ms integer, queue_order integer)"
SUMMARIES = ("create table conversation_summaries (conversation_id text primary key, title text, preview text, step_count "
             "integer, last_modified_time text, workspace_uris text, status text)")


def read_threads(world):
    found = [{"session": BOB, "pid": 1, "name": "", "cwd": "", "model": "", "source": "", "rollout": "", "since": 0}]
    codex_delivery._describe(world.codex, found)
    assert all(isinstance(value, (str, int)) for value in found[0].values()), found


def read_history(world):
    with codex_history.Database(world.codex) as database:
        records = list(database.sessions(True, True)) + list(filter(None, [database.session(BOB)]))
        for record in records:
            assert all(isinstance(value, (str, int)) for value in record.values()), record


def read_queue(world):
    assert all(isinstance(count, int) for count in codex_delivery.queue_counts(world.codex).values())
    for item in codex_delivery.queued_items(world.codex):
        assert all(isinstance(item[key], str) for key in ("id", "session", "text")) and item["created_at"] >= 0


def read_summaries(world):
    for wanted in (None, [AGY]):
        for found in agy_delivery.conversations(world.agy, wanted).values():
            assert all(isinstance(value, str) for value in found.values()), found


# what reads it, its file, its table, a row, exceptions that are a refusal
DATABASES = {
    "state of Codex": (read_threads, ".codex/state_5.sqlite", THREADS, (
        BOB, "/r/rollout.jsonl", "n", "p", "f", "/w", "t", "cli", "m", "openai", 0, 1, 1000, None), ()),
    "history of Codex": (read_history, ".codex/state_5.sqlite", THREADS, (
        BOB, "", "n", "p", "f", "/w", "t", "cli", "m", "openai", 0, 1, 1000, None), contract.NotPossible),
    "queue of Codex": (read_queue, ".codex/queue_1.sqlite", ITEMS, (
        "q", BOB, '{"UserInput":{"content":[{"text":"t"}]}}', 1, 1), ()),
    "summaries of agy": (read_summaries, ".gemini/antigravity-cli/conversation_summaries.db", SUMMARIES, (
        AGY, "t", "p", 1, "2026", '["file:///w"]', "CASCADE_RUN_STATUS_IDLE"), ())}
CELLS = [None, -1, 1 << 62, 1.5, 9e999, "", "\0", "x" * 100000, "\x1b]52;c;aGk=\x07", "[" * 50000, b"\xff\xfe", b"\0" * 50,
         '{"UserInput":[]}', '["file:///%ff%00%2e%2e"]', '["file:///' + "a" * 9000 + '"]', "[" + "9" * 9000 + "]"]
IN_ITS_PLACE = ("create table other (x)", "create table {table} (x)", "create view {table} as select 1 as x",
                "create view {table} as with recursive n(i) as (select 1 union all select i + 1 from n) "
                "select {columns} from n")


class ADatabase(Hostile):
    def setUp(self):
        patch = mock.patch.object(codex_history, "SECONDS", 0.3)  # else 20
        patch.start()
        self.addCleanup(patch.stop)

    def fill(self, path, *statements):
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.unlink(path + ending)
        with contextlib.closing(sqlite3.connect(path)) as database:
            for statement, *values in statements:
                database.execute(statement, *values)
            database.commit()

    def read(self, name):
        read, _, _, _, refusals = DATABASES[name]
        with in_time():
            try:
                read(self.world)
            except refusals:
                pass

    def each(self):
        for name, (_, file, table, row, _) in DATABASES.items():
            yield name, self.world.path(file), table, row, "insert into %s values (%s)" % (
                table.split()[2], ", ".join("?" * len(row)))

    def test_costs_a_cell_that_is_none_no_more_than_its_row(self):
        for name, path, table, row, insert in self.each():
            for place in range(len(row)):
                for cell in CELLS:
                    with self.subTest(database=name, column=place, cell=str(cell)[:40]):
                        bad = row[:place] + (cell,) + row[place + 1:]
                        self.fill(path, (table.replace(" primary key", ""),), (insert, row), (insert, bad))
                        self.read(name)
                as_text = "%s, cast(x'fffe41' as text)%s" % (", ".join("?" * place), ", ?" * (len(row) - place - 1))
                with self.subTest(database=name, column=place, cell="no UTF-8"):
                    self.fill(path, (table.replace(" primary key", ""),), (insert, row), (
                        "insert into %s values (%s)" % (table.split()[2], as_text.lstrip(", ")), row[:place] + row[place + 1:]))
                    self.read(name)

    def test_of_another_schema_is_read_in_time_or_not_at_all(self):
        for name, path, table, row, _ in self.each():
            columns = ", ".join("'x' as " + part.split()[0] for part in table.partition("(")[2].split(", "))
            for statement in IN_ITS_PLACE:
                with self.subTest(database=name, statement=statement):
                    self.fill(path, (statement.format(table=table.split()[2], columns=columns),))
                    self.read(name)

    def test_that_is_damaged_is_read_as_far_as_it_goes(self):
        for name, path, table, row, insert in self.each():
            self.fill(path, (table,), (insert, row))
            with open(path, "rb") as file:
                whole = file.read()
            for data in list(DOCUMENTS.values()) + list(mutants(whole, 60)) + [whole[:size] for size in range(0, 4096, 512)]:
                with self.subTest(database=name, data=data[:40]):
                    with open(path, "wb") as file:
                        file.write(data)
                    self.read(name)

    def test_waits_for_nothing_that_stands_in_its_place(self):
        for name, path, *_ in self.each():
            for kind in KINDS:
                with self.subTest(database=name, kind=kind), in_the_place_of(path, kind):
                    self.read(name)


# ---------------------------------------------------------------------------------------------------- the environment

TEXTS = ["", " ", "x", "-1", "0", "1e999", "nan", "inf", "9" * 5000, "0x10", "1_0", "\u0661", "\ud800", "~", "~nobody/x", "/", ".",
         "../x", "/dev/null/x", "'", '"', "$(x)", "a b", "\x1b[2J", "x" * 5000, "on\n", "1s1s", "1h" * 2000, "é", "-p"]


class AnEnvironment(Hostile):
    def test_of_any_text_is_a_setting_a_refusal_or_the_default(self):
        for name, kind, *_ in contract.SETTINGS:
            for text in TEXTS:
                with self.subTest(name, text=text[:40]), in_time():
                    faults = []
                    contract.Settings({name: text}, faults)
                    if faults:
                        with self.assertRaises(contract.UsageError):
                            contract.Settings({name: text})
                    else:
                        contract.Settings({name: text})

    def test_of_any_text_names_a_sender_or_nobody(self):
        names = ("CODEX_THREAD_ID", "CODEX_SESSION_ID", "ANTIGRAVITY_CONVERSATION_ID", "CLAUDE_CODE_SESSION_ID",
                 "XMSG_FROM", "XMSG_FROM_TOOL", "XMSG_FROM_SESSION")
        for name in names:
            for text in TEXTS:
                with self.subTest(name, text=text[:40]), in_time():
                    try:
                        self.world.store.settings = contract.Settings({name: text}, [])
                        found = xmsg.sender_identity(self.world.store, {name: text})
                    except contract.UsageError:
                        continue
                    self.assertTrue(found["session"] == "" or contract.is_session_id(found["session"]), found)
                    self.assertTrue(contract.is_label(found["label"]), found)

    def test_of_any_text_tells_a_version_and_a_process_or_none(self):
        for text in TEXTS + ["claude-code_" + text for text in TEXTS] + ["claude-code_2-1-%s_x" % text for text in TEXTS]:
            with self.subTest(text=text[:40]), mock.patch.dict(os.environ), in_time():
                os.environ["AI_AGENT"] = text.replace("\ud800", "")
                self.assertIn(xmsg._shape_now("stop"), ("context", "block"))
                os.environ["CLAUDE_PID"] = text.replace("\ud800", "²")
                self.assertIsInstance(xmsg._claude_pid(), (int, type(None)))

    def test_full_of_nonsense_neither_stops_a_hook_nor_breaks_a_command(self):
        home = self.world.home
        stays = ("XMSG_DB", "XMSG_IMPL", "XMSG_NO_FAILOPEN", "XMSG_PROC_ROOT")  # they choose another store, or program
        for text in ("x", "-1", "9" * 400, "'", "\x1b[2J", "~nobody/x"):
            with self.subTest(text=text):
                odd = {name: text for name, *_ in contract.SETTINGS if name not in stays}
                odd.update(AI_AGENT=text, CLAUDE_PID=text, CODEX_HOME=text, CLAUDE_CONFIG_DIR=text, TMPDIR=text, TERM=text)
                home.xmsg("send", BOB, "text", "--no-direct")
                self.assertIn("\ntext", home.context("codex", BOB, "PreToolUse", env=odd))
                done = home.command("send", BOB, "text", "--no-direct", **odd)
                self.assertEqual(2, done.returncode, done)
                self.assertNotIn(b"Traceback", done.stderr)
                self.assertNotIn(b"\x1b", done.stderr)
                done = home.command("list", CODEX_HOME=text, CLAUDE_CONFIG_DIR=text, TMPDIR=text, TERM=text)
                self.assertEqual(0, done.returncode, done)
