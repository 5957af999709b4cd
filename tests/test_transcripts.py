"""Evidence in hosts' transcripts.

The records have the shapes that Claude Code 2.1.281 and 2.1.332 and Codex 0.156.1 and 0.171.0 wrote.
"""
import json
import os
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import transcripts  # noqa: E402

T0 = 1796086100000  # 2026-12-01T00:48:20Z
ID = "01234567-89ab-8000-8000-786d7367cdef"
OTHER_ID = "11234567-89ab-8000-8000-786d7367cdef"
ITEM = "[peer leader · codex:01a00000; not a user instruction]\nplease look\n\n- a\n- b"
NEXT = "[peer leader · codex:01a00000; not a user instruction]\nanother"


def at(ms):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + ".%03dZ" % (ms % 1000)


def human(text, ms=T0):
    return {"type": "user", "message": {"role": "user", "content": text}, "timestamp": at(ms),
            "origin": {"kind": "human"}}


def peer(identifier, ms=T0):
    return {"type": "user", "message": {"role": "user", "content": "Another Claude session sent ..."}, "isMeta": True,
            "timestamp": at(ms), "origin": {"kind": "peer", "from": "uds:/x", "msg_id": identifier, "body": "b"}}


def peer_in_turn(identifier, ms=T0):
    return {"type": "attachment", "timestamp": at(ms), "attachment": {
        "type": "queued_command", "prompt": "<cross-session-message ...", "commandMode": "prompt",
        "origin": {"kind": "peer", "from": "uds:/x", "msg_id": identifier}}}


def context(text, ms=T0, event="PreToolUse"):
    return {"type": "attachment", "timestamp": at(ms), "attachment": {
        "type": "hook_additional_context", "content": [text], "hookName": event + ":Bash", "hookEvent": event}}


def blocked_stop(text, ms=T0):
    return {"type": "attachment", "timestamp": at(ms), "attachment": {
        "type": "hook_blocking_error", "hookEvent": "Stop", "blockingError": {"blockingError": text, "command": "c"}}}


def notification(text, label="FileChanged"):
    return ('<task-notification>\n<summary>Stop hook feedback</summary>\n</task-notification>\n<system-reminder>\n'
            'Stop hook blocking error from command "%s": %s\n\n</system-reminder>' % (label, text))


def wake(text, ms=T0, label="FileChanged"):
    return {"type": "user", "message": {"role": "user", "content": notification(text, label)}, "timestamp": at(ms),
            "origin": {"kind": "task-notification"}, "promptSource": "system"}


def wake_in_turn(text, ms=T0):
    return {"type": "attachment", "timestamp": at(ms), "attachment": {
        "type": "queued_command", "prompt": notification(text), "commandMode": "task-notification"}}


def codex(kind, payload, ms=T0):
    return {"timestamp": at(ms), "ordinal": 7, "type": kind, "payload": payload}


def codex_item(item, ms=T0):
    return codex("event_msg", {"type": "item_completed", "thread_id": "t", "turn_id": "u", "item": item}, ms)


def developer(text, kinds=("hooks.additional_context",), ms=T0):
    payload = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
    if kinds is not None:
        payload["internal_chat_message_metadata_passthrough"] = {"content_item_kinds": list(kinds)}
    return codex("response_item", payload, ms)


def agy(kind, content, source="SYSTEM", ms=T0):
    return {"step_index": 3, "source": source, "type": kind, "status": "DONE", "created_at": at(ms)[:19] + "Z",
            "content": content}


class TranscriptCase(unittest.TestCase):
    def setUp(self):
        self.base = Path(tempfile.mkdtemp(prefix="xm"))
        self.addCleanup(shutil.rmtree, self.base, ignore_errors=True)
        self.path = self.base / "transcript.jsonl"

    def write(self, *records, end="\n"):
        self.path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
                                       for record in records) + end)

    def look(self, host, *rows, **options):
        return transcripts.evidence(host, str(self.path), list(rows), **dict({"seconds": 30}, **options))

    def found(self, host, *rows, **options):
        return {key: evidence.by for key, evidence in self.look(host, *rows, **options).found.items()}


def row(key=1, text=None, id=None, since=T0):
    return {"key": key, "text": text, "id": id, "since": since}


class IdTest(TranscriptCase):
    def test_claude_shows_our_id_where_a_message_began_a_turn_and_where_it_came_into_one(self):
        for record in (peer(ID), peer_in_turn(ID)):
            self.write(human("a"), record, human("b"))
            self.assertEqual(self.found("claude", row(id=ID), row(2, id=OTHER_ID)), {1: "id"})

    def test_an_id_is_proof_whatever_its_time(self):
        self.write(peer(ID, T0 - 5000))
        self.assertEqual(self.look("claude", row(id=ID)).found[1], transcripts.Evidence("id", T0 - 5000, "peer " + ID))

    def test_an_id_in_words_of_a_person_a_tool_or_the_queue_proves_nothing(self):
        self.write(human("is %s there?" % ID), {"type": "queue-operation", "operation": "enqueue", "content": ID},
                   {**human(ID), "origin": {"kind": "human", "msg_id": ID}}, {**peer(ID), "type": "assistant"},
                   {"type": "attachment", "attachment": {"type": "x", "origin": {"kind": "peer"}, "msg_id": ID}},
                   {"type": "user", "origin": ID}, {"type": "user", "origin": {"kind": "peer", "msg_id": [ID]}})
        self.assertEqual(self.found("claude", row(id=ID)), {})

    def test_codex_shows_it_as_client_id(self):
        self.write(codex_item({"type": "UserMessage", "client_id": ID, "content": []}),
                   codex_item({"type": "AgentMessage", "client_id": OTHER_ID}),
                   codex("response_item", {"client_id": OTHER_ID}))
        self.assertEqual(self.found("codex", row(id=ID), row(2, id=OTHER_ID)), {1: "id"})


class TextTest(TranscriptCase):
    def test_each_window_of_a_claude_hook_leaves_the_text_in_a_record_of_its_own(self):
        for record in (context(ITEM), context(ITEM, event="Stop"), blocked_stop(ITEM), wake(ITEM), wake_in_turn(ITEM),
                       wake(ITEM, label="SessionStart:startup")):
            self.write(human("a"), record)
            self.assertEqual(self.found("claude", row(text=ITEM)), {1: "text"}, record)

    def test_each_window_of_a_codex_hook_and_a_delegated_tool_output_do(self):
        delegated = ("<codex_delegation>\n  <source_thread_id>01a2</source_thread_id>\n  <input>a &lt;b&gt; &amp;lt;"
                     "</input>\n</codex_delegation>")
        tool = {"type": "FunctionCallOutput", "name": "send_message_to_thread", "namespace": "codex_tui"}
        for text, record in ((ITEM, developer(ITEM)), (ITEM, developer(ITEM, None)),
                             (ITEM, codex_item({"type": "HookPrompt", "fragments": [{"text": ITEM}]})),
                             ("a <b> &lt;", codex_item({**tool, "output": delegated})),
                             ("bare", codex_item({**tool, "output": "bare"}))):
            self.write(record)
            self.assertEqual(self.found("codex", row(text=text)), {1: "text"}, record)

    def test_agys_steps_do(self):
        framed = "<SYSTEM_MESSAGE>\n[text of a Stop hook, the user did not write this]\n%s\n</SYSTEM_MESSAGE>"
        for record in (agy("SYSTEM_MESSAGE", framed % ITEM),
                       agy("SYSTEM_MESSAGE", "<SYSTEM_MESSAGE>\n%s\n</SYSTEM_MESSAGE>" % ITEM),
                       agy("SYSTEM_MESSAGE", ITEM + "\n\n" + NEXT, source="SYSTEM_SDK")):
            self.write(record)
            self.assertEqual(self.found("agy", row(text=ITEM)), {1: "text"}, record)

    def test_an_ephemeral_step_of_agy_does_once_its_own_model_call_was_answered(self):
        step, answer = agy("EPHEMERAL_MESSAGE", ITEM), agy("PLANNER_RESPONSE", "ok", "MODEL")
        failure, turn = agy("ERROR_MESSAGE", "overloaded"), agy("USER_INPUT", "again", "USER_EXPLICIT")
        for records, found in (((step, answer), {1: "text"}), ((step, agy("CHECKPOINT", ""), answer, failure), {1: "text"}),
                               ((step,), {}), ((step, failure, answer), {}), ((step, turn, answer), {}),
                               ((answer, step), {})):
            self.write(*records)
            self.assertEqual(found, self.found("agy", row(text=ITEM)), records)

    def test_nothing_else_counts(self):
        hook = {"type": "hook_success", "hookEvent": "Stop", "stdout": ITEM, "content": ITEM}
        self.write(human(ITEM), {"type": "assistant", "message": {"content": ITEM}, "timestamp": at(T0)},
                   {"type": "attachment", "timestamp": at(T0), "attachment": hook},
                   {"type": "system", "subtype": "stop_hook_summary", "hookAdditionalContext": [ITEM],
                    "timestamp": at(T0)},
                   {"type": "queue-operation", "operation": "enqueue", "timestamp": at(T0),
                    "content": notification(ITEM)},
                   {**wake(ITEM), "origin": {"kind": "human"}}, human("hook_additional_context " + ITEM),
                   {"type": "attachment", "timestamp": at(T0), "attachment": {
                       "type": "queued_command", "prompt": notification(ITEM), "commandMode": "prompt"}})
        self.assertEqual(self.found("claude", row(text=ITEM)), {})
        self.write(codex("response_item", {"type": "message", "role": "user", "content": [{"text": ITEM}]}),
                   developer(ITEM, ["other"]), codex_item({"type": "FunctionCallOutput", "output": ITEM}),
                   codex_item({"type": "UserMessage", "content": [{"text": ITEM}]}),
                   codex("response_item", {"type": "function_call_output", "call_id": "c", "output": ITEM}))
        self.assertEqual(self.found("codex", row(text=ITEM)), {})
        self.write(agy("USER_INPUT", ITEM, "USER_EXPLICIT"), agy("SYSTEM_MESSAGE", ITEM, "MODEL"),
                   agy("PLANNER_RESPONSE", ITEM, "MODEL"))
        self.assertEqual(self.found("agy", row(text=ITEM)), {})

    def test_a_text_counts_as_a_whole_item_of_a_batch_only(self):
        self.write(context(NEXT + "\n\n" + ITEM + "\n"))
        self.assertEqual(self.found("claude", row(1, ITEM), row(2, NEXT)), {1: "text", 2: "text"})
        for part in ("another", ITEM[:-1], ITEM.partition("\n")[2], "please look"):
            self.assertEqual(self.found("claude", row(1, part)), {}, part)
        self.write(context(ITEM))
        self.assertEqual(self.found("claude", row(1, ITEM.partition("\n")[2])), {})

    def test_a_text_is_not_found_inside_a_longer_one_that_is_looked_for(self):
        longer = NEXT + "\n\nmore"
        self.write(context(longer))
        self.assertEqual(self.found("claude", row(1, NEXT), row(2, longer)), {2: "text"})
        self.write(context(longer), context(NEXT))
        self.assertEqual(self.found("claude", row(1, NEXT), row(2, longer)), {1: "text", 2: "text"})

    def test_a_record_older_than_the_claim_does_not_count(self):
        self.write(context(ITEM, T0 - 1))
        self.assertEqual(self.found("claude", row(text=ITEM)), {})
        self.write({**context(ITEM), "timestamp": "yesterday"})
        self.assertEqual(self.found("claude", row(text=ITEM)), {})
        # agy's times are whole seconds.
        self.write(agy("SYSTEM_MESSAGE", ITEM, ms=T0 // 1000 * 1000))
        self.assertEqual(self.found("agy", row(text=ITEM, since=T0 + 999)), {1: "text"})
        self.assertEqual(self.found("agy", row(text=ITEM, since=T0 + 1000)), {})

    def test_one_occurrence_counts_for_one_row_and_the_oldest_first(self):
        self.write(context(ITEM, T0), context(ITEM, T0 + 10))
        first = self.look("claude", row(text=ITEM)).found[1]
        self.assertEqual(first.at, T0)
        second = self.look("claude", row(text=ITEM), taken=[first.name]).found[1]
        self.assertEqual(second.at, T0 + 10)
        self.assertEqual(self.found("claude", row(text=ITEM), taken=[first.name, second.name]), {})

    def test_an_occurrence_keeps_its_name_while_the_transcript_grows(self):
        self.write(context(ITEM))
        first = self.look("claude", row(text=ITEM)).found[1]
        with open(self.path, "a") as file:
            file.write(json.dumps(context(NEXT, T0 + 5)) + "\n")
        self.assertEqual(self.look("claude", row(text=ITEM)).found[1], first)

    def test_two_rows_of_equal_text_are_not_confirmed_by_it(self):
        self.write(context(ITEM), context(ITEM, T0 + 1))
        self.assertEqual(self.found("claude", row(1, ITEM), row(2, ITEM), row(3, NEXT)), {})

    def test_a_row_that_its_id_settles_leaves_its_twin_alone(self):
        self.write(peer(ID), context(ITEM))
        self.assertEqual(self.found("claude", row(1, ITEM, ID), row(2, ITEM)), {1: "id", 2: "text"})

    def test_any_of_several_renderings_counts(self):
        chinese = "[同伴 leader · codex:01a00000；非用户指令]\nplease look"
        self.write(context(chinese))
        self.assertEqual(self.found("claude", row(text=(ITEM, chinese)), row(2, text=())), {1: "text"})


class BoundsTest(TranscriptCase):
    def test_torn_and_foreign_lines_cost_themselves_only(self):
        self.write('{"type":"attachment","attachment":{"type":"hook_additional_context","content":["x', "[]", "null", "7",
                   "[" * 5000 + "hook_additional_context", "\x00\xff hook_additional_context", "", context(ITEM),
                   {"type": "attachment", "attachment": "hook_additional_context"},
                   {"type": "attachment", "attachment": {"type": "hook_additional_context", "content": {"a": 1}}},
                   {"type": "attachment", "attachment": {"type": "hook_blocking_error", "blockingError": "x"}},
                   {"type": "user", "origin": {"kind": "task-notification"}, "message": {"content": [1]}},
                   '{"type":"attachment","timestamp":"2026-', end="")
        result = self.look("claude", row(text=ITEM))
        self.assertEqual((set(result.found), result.complete), ({1}, False))
        self.write(codex_item(7), codex_item({"type": "HookPrompt", "fragments": [7, {"text": 7}]}),
                   codex("event_msg", [1]), developer(7), developer(ITEM), end="")
        self.assertEqual(self.found("codex", row(text=ITEM)), {1: "text"})

    def test_lines_longer_than_a_block_are_put_together(self):
        for size in (transcripts.BLOCK - 1, transcripts.BLOCK, transcripts.BLOCK + 1, 3 * transcripts.BLOCK):
            with self.subTest(size=size):
                self.write(context(ITEM), human("x" * size), context(NEXT, T0 + 1), human("y" * size), peer(ID))
                self.assertEqual(self.found("claude", row(1, ITEM), row(2, NEXT), row(3, id=ID)),
                                 {1: "text", 2: "text", 3: "id"})

    def test_every_way_to_cut_a_file_into_blocks_reads_the_same_lines(self):
        self.write("a", "bb", "", "ccc", "dddd", end="")
        whole = self.path.read_bytes()
        expected = [(offset, line) for offset, line in
                    [(0, b"a"), (2, b"bb"), (6, b"ccc"), (10, b"dddd")]][::-1] + [(None, True)]
        self.addCleanup(setattr, transcripts, "BLOCK", transcripts.BLOCK)
        for end in (b"", b"\n"):
            self.path.write_bytes(whole + end)
            for size in range(1, len(whole) + 3):
                transcripts.BLOCK = size
                lines = transcripts._lines_backwards(str(self.path), 1 << 20, time.monotonic() + 9)
                self.assertEqual(list(lines), expected)

    def test_a_line_beyond_every_limit_is_passed_over(self):
        self.addCleanup(setattr, transcripts, "LINE_LIMIT", transcripts.LINE_LIMIT)
        transcripts.LINE_LIMIT = 2 * transcripts.BLOCK
        self.write(context(ITEM), human("hook_additional_context" * (transcripts.BLOCK // 4)), context(NEXT, T0 + 1))
        self.assertEqual(self.found("claude", row(1, ITEM), row(2, NEXT)), {1: "text", 2: "text"})
        lines = transcripts._lines_backwards(str(self.path), 1 << 30, time.monotonic() + 9)
        self.assertEqual([len(line) for offset, line in lines if offset is not None and len(line) > 1000], [])

    def test_no_more_bytes_are_read_than_allowed(self):
        self.write(context(ITEM), human("x" * 5000), context(NEXT, T0 + 1))
        result = self.look("claude", row(1, ITEM), row(2, NEXT), max_bytes=4000)
        self.assertEqual((set(result.found), result.complete), ({2}, False))
        self.assertEqual(self.look("claude", row(1, ITEM), row(2, NEXT)).complete, True)

    def test_no_more_time_is_spent_than_allowed(self):
        self.write(context(ITEM))
        self.assertEqual(self.look("claude", row(text=ITEM), seconds=-1), transcripts.Result({}, False))

    def test_what_is_long_before_the_claim_is_not_read(self):
        old = T0 - transcripts.DISORDER_MS - 1
        self.write(context(ITEM), human("x", old), human("y", T0), context(NEXT))
        result = self.look("claude", row(1, ITEM), row(2, NEXT))
        self.assertEqual((set(result.found), result.complete), ({2}, True))

    def test_a_queued_message_or_a_tools_arguments_do_not_end_the_search(self):
        old = T0 - transcripts.DISORDER_MS - 1
        content = [{"input": {"timestamp": at(old)}}]
        tool = {"type": "assistant", "timestamp": at(T0), "message": {"content": content}}
        self.write(context(ITEM), {**peer_in_turn(OTHER_ID), "timestamp": at(old)}, tool,
                   {"type": "user", "timestamp": 7})
        self.assertEqual(self.found("claude", row(text=ITEM)), {1: "text"})

    def test_a_missing_file_a_directory_a_fifo_and_a_symlink_are_no_evidence(self):
        self.assertEqual(self.look("claude", row(text=ITEM)), transcripts.Result({}, False))
        os.mkfifo(self.path)
        self.assertEqual(self.look("claude", row(text=ITEM)), transcripts.Result({}, False))
        self.path.unlink()
        self.path.mkdir()
        self.assertEqual(self.look("claude", row(text=ITEM)), transcripts.Result({}, False))
        self.path.rmdir()
        self.write(context(ITEM))
        (self.base / "link").symlink_to(self.path)
        self.assertEqual(transcripts.evidence("claude", str(self.base / "link"), [row(text=ITEM)]).found, {})

    def test_a_file_that_is_cut_while_it_is_read_is_no_error(self):
        self.write(*[human("x" * transcripts.BLOCK)] * 3, context(ITEM))
        lines = transcripts._lines_backwards(str(self.path), 1 << 30, time.monotonic() + 9)
        next(lines)
        os.truncate(self.path, 10)
        with self.assertRaises(OSError):
            list(lines)

    def test_without_anything_to_look_for_nothing_is_read(self):
        self.write(context(ITEM))
        self.assertEqual(self.look("claude"), transcripts.Result({}, False))
        self.assertEqual(self.look("claude", row()), transcripts.Result({}, False))


class PathTest(TranscriptCase):
    SESSION = "01a22f1d-7abd-7230-af81-82fd8fff1553"  # of 2026-12-01, by its first 48 bits

    def make(self, name, age=0):
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (T0 / 1000 - age, T0 / 1000 - age))
        return str(path)

    def test_claudes_lies_below_any_configuration_directory(self):
        path = self.make("one/projects/-w-a-b/s-1.jsonl")
        roots = [str(self.base / "none"), str(self.base / "one")]
        self.assertEqual(transcripts.transcript_path("claude", "s-1", roots), path)
        self.assertEqual(transcripts.transcript_path("claude", "s-1", roots, cwd="/w/a.b"), path)
        self.assertEqual(transcripts.transcript_path("claude", "s-1", roots, cwd="/elsewhere"), path)
        self.assertIsNone(transcripts.transcript_path("claude", "s-2", roots))

    def test_of_several_the_newest_is_taken(self):
        self.make("one/projects/-a/s-1.jsonl", age=9)
        path = self.make("two/projects/-b/s-1.jsonl")
        self.make("one/projects/-c/s-1.jsonl", age=5)
        roots = [str(self.base / "one"), str(self.base / "two")]
        self.assertEqual(transcripts.transcript_path("claude", "s-1", roots), path)

    def test_codexs_is_found_by_the_day_in_its_id_in_the_archive_and_anywhere(self):
        for name in ("sessions/2026/12/01", "sessions/2026/11/30", "sessions/2026/12/02", "archived_sessions",
                     "sessions/2024/01/02"):
            path = self.make("codex/%s/rollout-2026-12-01T00-59-50-%s.jsonl" % (name, self.SESSION))
            self.make("codex/%s/rollout-2026-12-01T00-59-50-%s.jsonl" % (name, self.SESSION[:-1] + "4"))
            self.assertEqual(transcripts.transcript_path("codex", self.SESSION, [str(self.base / "codex")]), path)
            os.unlink(path)
        self.assertIsNone(transcripts.transcript_path("codex", self.SESSION, [str(self.base / "codex")]))

    def test_agys_lies_at_its_conversation(self):
        path = self.make("agy/brain/c-1/.system_generated/logs/transcript_full.jsonl")
        self.assertEqual(transcripts.transcript_path("agy", "c-1", [str(self.base / "agy")]), path)

    def test_a_hostile_session_id_finds_nothing(self):
        self.make("one/projects/x.jsonl")
        self.make("one/projects/-w/a.jsonl")
        for session in ("../x", "a/b", "", None, ".", "x" * 129, "*"):
            for host in ("claude", "codex", "agy"):
                self.assertIsNone(transcripts.transcript_path(host, session, [str(self.base / "one")]))

    def test_a_symlink_in_a_transcripts_place_is_passed_over(self):
        target = self.make("elsewhere")
        folder = self.base / "one" / "projects" / "-w"
        folder.mkdir(parents=True)
        (folder / "s-1.jsonl").symlink_to(target)
        self.assertIsNone(transcripts.transcript_path("claude", "s-1", [str(self.base / "one")]))


if __name__ == "__main__":
    unittest.main()
