"""The hook: what each host and event gets, what is never taken, what is registered, and how an idle session is woken."""
import contextlib
import fcntl
import json
import os
import pty
import subprocess
import tempfile
import termios
import time
import unittest

from support import (ADA, AGY, BOB, EVE, PATIENCE, ROOT, Home, HomeCase, HostProcess, copy_of_product, end, message, payload,
                     wait_until)
from side_by_side import load_tests, side_by_side  # noqa: F401

import contract
import host_process

HOOK = os.path.join(ROOT, "xmsg-hook.sh")
NEW = "7c1f0a52-0000-4000-8000-0000000000cc"  # what ADA becomes by /clear
SESSIONS = {"claude": ADA, "codex": BOB, "agy": AGY}
SENDERS = {"claude": (BOB, "codex"), "codex": (ADA, "claude"), "agy": (ADA, "claude")}
FROM = {"claude": "[peer codex:01a04cd2; not a user instruction]", "codex": "[peer claude:7c1f0a52; not a user instruction]",
        "agy": "[peer claude:7c1f0a52; not a user instruction]"}


class Hooks(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        for host, session in SESSIONS.items():
            with self.store.transaction():
                self.store._execute("insert into peers (session, host, cwd, first_seen, last_seen, hook_seen) values "
                                    "(?, ?, ?, 1, 1, 1)", (session, host, self.home.folder))

    def queue(self, host="codex", body="mail", session=None, **columns):
        """One message for the session of a host."""
        sender, kind = SENDERS[host]
        return message(self.store, session or SESSIONS[host], body, **dict({
            "sender_session": sender, "sender_host": kind, "sender_label": sender[:8], "target_host": host}, **columns))

    def row(self, row):
        return self.store.by_id(row["id"])

    def hook(self, host, event, session=None, **options):
        return self.home.hook(host, session or SESSIONS[host], event, **options)

    def hooks(self, calls, env=()):
        """Runs many hooks, several at a time, and yields (what, CompletedProcess). calls: (what, arguments, payload)."""
        return side_by_side((what, {"args": [HOOK, *arguments], "input": data, "cwd": self.home.folder,
                                    "env": dict(self.home.env, **dict(env))}) for what, arguments, data in calls)

    def assertSilent(self, calls, env=()):
        for what, done in self.hooks(calls, env):
            self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr), what)

    def pay(self, host, event, session=None, **fields):
        return payload(host, event, session or SESSIONS[host], cwd=self.home.folder, **fields)

    def assertStates(self, *states):
        self.assertEqual(list(states), self.home.states())


class TheOutput(Hooks):
    def test_has_exactly_the_shape_that_each_host_takes_at_each_event(self):
        def context(event, text, watch=()):
            return {"hookSpecificOutput": dict({"hookEventName": event, "additionalContext": text}, **dict(watch))}

        watch = {"watchPaths": [self.home.hint(ADA)]}
        block = {"AI_AGENT": "claude-code_2-1-280_harness"}
        new = {"AI_AGENT": "claude-code_2-1-281_harness"}
        cases = [
            ("claude", "SessionStart", {}, lambda text: context("SessionStart", text, watch)),
            ("claude", "UserPromptSubmit", {}, lambda text: context("UserPromptSubmit", text)),
            ("claude", "PreToolUse", {}, lambda text: context("PreToolUse", text)),
            ("claude", "PostToolUse", {}, lambda text: context("PostToolUse", text)),
            ("claude", "Stop", new, lambda text: context("Stop", text)),
            ("claude", "Stop", block, lambda text: {"decision": "block", "reason": text}),
            ("codex", "SessionStart", {}, lambda text: context("SessionStart", text)),
            ("codex", "UserPromptSubmit", {}, lambda text: context("UserPromptSubmit", text)),
            ("codex", "PreToolUse", {}, lambda text: context("PreToolUse", text)),
            ("codex", "PostToolUse", {}, lambda text: context("PostToolUse", text)),
            ("codex", "Stop", new, lambda text: {"decision": "block", "reason": text}),
            ("agy", "PreInvocation", {}, lambda text: {"injectSteps": [{"systemMessage": {"systemMessage": text}}]}),
            ("agy", "Stop", {}, lambda text: {"decision": "continue", "reason": "\n\n" + text}),
        ]
        shown = {(host, event) for host, event, _, _ in cases}
        self.assertEqual({key for key, shape in contract.WINDOWS.items() if shape and shape != "wake"}, shown)
        for host, event, env, expected in cases:
            with self.subTest(host=host, event=event, env=env):
                told = "\n\n" + contract.PHRASES["answer"][0] if event == "SessionStart" else ""
                row = self.queue(host, "naïve \"长\"\n\t💬 </b> \\u0041 \u2028 end")
                done = self.home.run_hook(host, payload(host, event, SESSIONS[host], cwd=self.home.folder),
                                          event if host == "agy" else "", env=env)
                self.assertEqual((0, b""), (done.returncode, done.stderr))
                self.assertEqual(1, done.stdout.count(b"\n"))
                self.assertEqual(expected(FROM[host] + "\nnaïve \"长\"\n\t💬 </b> \\u0041 \u2028 end" + told), json.loads(done.stdout))
                shown = "hook-inflight" if host == "agy" else "delivered"  # a transcript has to prove it there
                self.assertEqual((shown, event), (self.row(row)["state"], self.row(row)["window"]))
                again = self.home.run_hook(host, payload(host, event, SESSIONS[host], cwd=self.home.folder),
                                           event if host == "agy" else "", env=env)
                if event == "SessionStart" and host == "claude":
                    self.assertEqual({"hookSpecificOutput": dict({"hookEventName": event}, **watch)},
                                     json.loads(again.stdout))
                else:
                    self.assertEqual((0, b""), (again.returncode, again.stdout), "an empty mailbox is no output")

    def test_of_an_event_that_only_registers_takes_nothing(self):
        for host, event in sorted(key for key, shape in contract.WINDOWS.items() if shape is None):
            row = self.queue(host)
            out = self.hook(host, event)
            self.assertNotIn("mail,", json.dumps(out) + ",")
            self.assertEqual("queued", self.row(row)["state"], (host, event))

    def test_of_a_session_names_the_file_to_watch_and_none_where_waking_is_off(self):
        for event in ("SessionStart", "CwdChanged"):
            self.assertEqual({"hookSpecificOutput": {"hookEventName": event, "watchPaths": [self.home.hint(ADA)]}},
                             self.hook("claude", event))
            self.assertIsNone(self.hook("claude", event, env={"XMSG_WAKE": "off"}))
            self.assertIsNone(self.hook("codex", event))

    def test_fits_the_budget_of_its_host_and_what_does_not_fit_waits_in_order(self):
        for host, event, budget in (("claude", "PreToolUse", 9500), ("codex", "Stop", 9500), ("agy", "PreInvocation", 40000)):
            with self.subTest(host):
                body = "<长&>" * (1900 if host != "agy" else 1999)
                rows = [self.queue(host, body), self.queue(host, "x" * 7000)] + [self.queue(host, "s%d" % n) for n in range(12)]
                texts = []
                for number in range(8):
                    out = self.hook(host, event, **({"turn_id": "t%d" % number} if host == "codex" else {}))
                    if out is None:
                        break
                    text = (out.get("reason") or (out["injectSteps"][0]["systemMessage"]["systemMessage"]
                                                  if "injectSteps" in out else out["hookSpecificOutput"]["additionalContext"]))
                    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
                    size = {"claude": len(text.encode("utf-16-le")) // 2, "codex": len(escaped.encode()),
                            "agy": len(text.encode())}[host]
                    self.assertLessEqual(size, budget)
                    self.assertLessEqual(text.count(FROM[host]), 10)
                    texts.append(text)
                whole = "\n\n".join(texts)
                self.assertEqual(["s%d" % n for n in range(12)], [line for line in whole.split("\n") if line[:1] == "s"])
                if host == "codex":
                    self.assertIn("`xmsg inbox %d`" % rows[0]["id"], texts[0])
                else:
                    self.assertIn(body, texts[0])
                self.assertEqual({"hook-inflight" if host == "agy" else "delivered"}, {self.row(row)["state"] for row in rows})

    def test_at_a_stop_is_chosen_by_what_this_version_is_known_to_take(self):
        for agent, key in (("claude-code_2-1-281_harness", "hookSpecificOutput"), ("claude-code_2-1-332_agent",
                           "hookSpecificOutput"), ("claude-code_2-1-280_harness", "decision"), ("claude-code_1-9-999_x",
                           "decision"), ("claude-code_3-0-0_x", "hookSpecificOutput"), ("", "decision"), ("x", "decision"),
                           ("claude-code__", "decision"), ("claude-code_2-1-x_h", "decision")):
            self.queue("claude")
            self.assertIn(key, self.hook("claude", "Stop", env={"AI_AGENT": agent}), agent)


class WhatIsNeverTaken(Hooks):
    def test_is_mail_at_a_call_of_a_subagent(self):
        """It carries its parent's session id, and what it is shown the parent never sees."""
        before = self.home.sql("select * from peers order by session")
        cases = [("claude", event, {"agent_id": "a1b2", "agent_type": "general-purpose"}) for event in (
            "PreToolUse", "PostToolUse", "Stop", "UserPromptSubmit", "FileChanged", "SubagentStart", "SubagentStop")]
        cases += [("codex", event, {"agent_id": "01a04cd2-9999-7000-8000-000000000001", "agent_type": "default",
                                    "turn_id": "of-the-subagent", "transcript_path": "/its/own.jsonl",
                                    "permission_mode": "plan"}) for event in (
            "UserPromptSubmit", "PreToolUse", "PostToolUse", "SubagentStart", "SubagentStop")]
        rows = [self.queue(host) for host in ("claude", "codex")]
        self.assertSilent(((host, event, kind), [host] + ["FileChanged"] * (event == "FileChanged"),
                           self.pay(host, event, **dict(fields, agent_type=kind)))
                          for host, event, fields in cases for kind in (fields["agent_type"], None))
        self.assertStates("queued", "queued")
        self.assertEqual(before, self.home.sql("select * from peers order by session"), "it registered itself")
        for host, row in zip(("claude", "codex"), rows):
            self.assertIn("mail", json.dumps(self.hook(host, "PostToolUse")))
            self.assertEqual("delivered", self.row(row)["state"])

    def test_is_mail_at_an_active_stop_of_claude(self):
        self.queue("claude")
        self.assertIsNone(self.hook("claude", "Stop", stop_hook_active=True))
        self.assertStates("queued")
        self.assertIsNotNone(self.hook("claude", "Stop", stop_hook_active=False))

    def test_is_a_fourth_stop_of_one_codex_turn(self):
        """Codex itself never ends a loop of blocked stops."""
        for number in range(5):
            row = self.queue("codex", "n%d" % number, priority=9)
            out = self.hook("codex", "Stop", turn_id="t1", stop_hook_active=number > 0)
            self.assertEqual(number < 3, out is not None, number)
            self.assertEqual("delivered" if number < 3 else "queued", self.row(row)["state"])
        self.assertIsNone(self.hook("codex", "Stop", turn_id="t1", stop_hook_active=True))
        self.assertEqual("block", self.hook("codex", "Stop", turn_id="t2", stop_hook_active=False)["decision"])
        self.assertIsNone(self.hook("codex", "Stop", turn_id="t2", stop_hook_active=True), "no mail, and it blocked")
        for number in range(2):
            self.queue("codex")
            self.assertIsNotNone(self.hook("codex", "Stop", turn_id="t2", stop_hook_active=True))
        self.queue("codex")
        self.assertIsNone(self.hook("codex", "Stop", turn_id="t2", stop_hook_active=True))
        self.assertIn("mail", json.dumps(self.hook("codex", "PreToolUse", turn_id="t2")))

    def test_is_mail_of_agy_without_the_event_as_an_argument(self):
        self.queue("agy")
        data = payload("agy", "PreInvocation", AGY, cwd=self.home.folder)
        for arguments in (["agy"], ["agy", ""], ["agy", "PreToolUse"], ["agy", "PostInvocation"], ["agy", "preinvocation"],
                          ["agy", "FileChanged"], ["agy", "SessionStart"]):
            self.assertIsNone(self.home.raw_hook(arguments, data), arguments)
        named = json.dumps(dict(json.loads(data), hook_event_name="PreInvocation", session_id=AGY)).encode()
        self.assertIsNone(self.home.raw_hook(["agy"], named))
        self.assertStates("queued")
        self.assertIsNotNone(self.home.raw_hook(["agy", "PreInvocation"], data))

    def test_is_mail_at_a_stop_of_agy_that_would_not_go_on(self):
        self.queue("agy")
        self.assertSilent((fields, ["agy", "Stop"], self.pay("agy", "Stop", **fields)) for fields in [
            {"terminationReason": reason} for reason in (
                "ERROR", "USER_CANCELED", "MAX_INVOCATIONS", "MAX_FORCED_INVOCATIONS", "MAX_TOKEN_BUDGET_EXCEEDED",
                "TERMINAL_STEP_TYPE", "unheard of", 7, {})] + [
            {"fullyIdle": False}, {"executionNum": 3}, {"executionNum": 99}])
        self.assertStates("queued")
        # protojson leaves zero and empty fields out.
        for fields in ({"terminationReason": None, "executionNum": None, "error": None}, {"terminationReason": ""},
                       {"executionNum": 0}, {"executionNum": 2}, {"executionNum": "many"}):
            self.assertEqual("continue", self.hook("agy", "Stop", **fields)["decision"], fields)
            self.queue("agy")

    def test_is_anything_at_an_event_that_is_none_of_ours(self):
        home = Home()
        self.addCleanup(home.remove)
        for host, events in (("claude", ("PreCompact", "SessionEnd", "Notification", "SubagentStop", "Interrupt", "",
                                         "PostToolBatch", "MessageDisplay", "PreModelRequest")),
                             ("codex", ("SessionEnd", "Interrupt", "CwdChanged", "FileChanged", "PreCompact")),
                             ("agy", ("PreToolUse", "PostToolUse", "PostInvocation"))):
            self.queue(host)
            calls = [((host, event), [host] + [event] * (host == "agy"), self.pay(host, event)) for event in events]
            self.assertSilent(calls)
            self.assertSilent(calls, home.env)
        self.assertStates("queued", "queued", "queued")
        self.assertEqual(["python"], os.listdir(os.path.dirname(home.db)), "a store was made for nothing")
        self.assertEqual("", self.home.faults())

    def test_is_another_sessions_mail(self):
        self.queue("codex", session=EVE)
        for what, done in self.hooks(((host, event), [host] + [event] * (host == "agy" or event == "FileChanged"),
                                      self.pay(host, event)) for host, event in contract.WINDOWS):
            self.assertEqual(0, done.returncode, what)
        self.assertStates("queued")

    def test_is_mail_that_cannot_be_shown_whatever_arrives(self):
        mail = [self.queue("codex"), self.queue("codex", session=EVE)]
        base = json.loads(payload("codex", "PreToolUse", BOB, cwd=self.home.folder))
        good = json.dumps(base).encode()

        def changed(**fields):
            return json.dumps(dict(base, **fields)).encode()

        bodies = {
            "nothing": b"", "a brace": b"{", "torn": good[:-1], "torn in a string": good[:40], "a list": b"[" + good + b"]",
            "null": b"null", "a number": b"7", "a string": b'"x"', "two objects": good + good, "garbage after": good + b"x",
            "no utf-8": good.replace(b"echo", b"\xff\xfe"), "a bom": b"\xef\xbb\xbf\xef\xbb\xbf" + good,
            "utf-16": good.decode().encode("utf-16"), "nul": b"\0" + good, "a nul inside": good[:50] + b"\0" + good[50:],
            "NaN": good[:-1] + b',"x":NaN}', "Infinity": good[:-1] + b',"x":{"y":[-Infinity]}}',
            "a double key": b'{"session_id":"%s",' % EVE.encode() + good[1:],
            "a double key, escaped": b'{"\\u0073ession_id":"%s",' % EVE.encode() + good[1:],
            "a double event": good[:-1] + b',"hook_event_name":"Stop"}',
            "a double key of no use": good[:-1] + b',"x":1,"x":1}',
            "deep": b"[" * 100000, "deep and closed": b'{"x":' + b"[" * 100000 + b"]" * 100000 + b"}",
            "deep objects": b'{"x":' * 100000 + b"1" + b"}" * 100000, "a huge number": b'{"x":' + b"9" * 100000 + b"}",
            "no session": changed(session_id=None), "an empty session": changed(session_id=""),
            "a number for a session": changed(session_id=7), "a list for a session": changed(session_id=[BOB]),
            "a path for a session": changed(session_id="../../../etc/passwd"), "an option": changed(session_id="--help"),
            "a dot": changed(session_id="."), "a line end": changed(session_id=BOB + "\n"), "a NUL": changed(session_id=BOB + "\0"),
            "a long session": changed(session_id="a" * 129), "a surrogate": changed(session_id="\ud800"),
            "sql": changed(session_id="' or 1=1 --"), "a number for an event": changed(hook_event_name=7),
            "another host's": payload("agy", "Stop", AGY), "no event": changed(hook_event_name=None),
        }
        self.assertSilent((what, ["codex"], body) for what, body in bodies.items())
        self.assertSilent((host, [host], good) for host in ("", "Codex", "cursor", "codex ", "../x"))
        self.assertStates("queued", "queued")
        known = {session for session, in self.home.sql("select session from peers")}
        self.assertEqual(set(), {session for session in known if not contract.is_session_id(session)})
        strange = changed(cwd=["x"], model={"a": 1}, permission_mode=7, transcript_path="relative", turn_id=[], agent_id="",
                          source=None, stop_hook_active="no", tool_input={"b": {"c": [None] * 99}})
        out = self.home.raw_hook(["codex"], strange)
        self.assertIn("mail", out["hookSpecificOutput"]["additionalContext"], "odd fields of no importance keep mail back")
        self.assertEqual(["delivered", "queued"], [self.row(row)["state"] for row in mail])
        self.assertEqual([], os.listdir(self.home.hints + "/wake"))

    def test_is_more_than_the_queue_holds_when_double_keys_stand_deeper(self):
        for event, place in (("PreToolUse", b'"tool_input":{'), ("PostToolUse", b'"tool_response":{')):
            self.queue("codex")
            data = payload("codex", event, BOB, cwd=self.home.folder, tool_response={"a": 1}).replace(
                place, place + b'"session_id":"x","session_id":"y",')
            self.assertIn(b'"x"', data)
            self.assertIn("mail", json.dumps(self.home.raw_hook(["codex"], data)), event)


class TheRegistry(Hooks):
    def peer(self, session):
        return self.store.peer(session)

    def test_holds_what_each_host_says_of_its_session(self):
        self.hook("claude", "SessionStart", EVE[:-1] + "1", session_title="ada the first")
        row = self.peer(EVE[:-1] + "1")
        self.assertEqual(("claude", "ada the first", self.home.folder, self.home.folder, "claude-opus-5-5", ""),
                         tuple(row[key] for key in ("host", "title", "cwd", "project", "model", "permission_mode")))
        self.hook("claude", "UserPromptSubmit", EVE[:-1] + "1", session_title="renamed", permission_mode="plan")
        row = self.peer(EVE[:-1] + "1")
        self.assertEqual(("renamed", "claude-opus-5-5", "plan"), (row["title"], row["model"], row["permission_mode"]))
        self.hook("codex", "SessionStart", EVE)
        row = self.peer(EVE)
        self.assertEqual(("codex", "gpt-5.1-codex", "default", "%s/transcripts/%s.jsonl" % (self.home.folder, EVE)),
                         (row["host"], row["model"], row["permission_mode"], row["transcript"]))
        self.hook("agy", "SessionStart", "a" * 8)
        row = self.peer("a" * 8)
        self.assertEqual(("agy", self.home.folder, "gemini-3-pro"), (row["host"], row["cwd"], row["model"]))
        self.hook("agy", "PreInvocation", "b" * 8, workspacePaths=[], modelName=None)
        self.assertEqual(("agy", "", ""), tuple(self.peer("b" * 8)[key] for key in ("host", "cwd", "model")))

    def test_keeps_what_a_later_payload_leaves_out(self):
        self.hook("claude", "SessionStart")
        self.hook("claude", "UserPromptSubmit", permission_mode="plan", session_title="ada")
        self.store.set_name(ADA, "leader")
        before = self.peer(ADA)
        self.hook("claude", "CwdChanged", transcript_path=None)
        self.hook("claude", "Stop", permission_mode=None)
        self.hook("claude", "UserPromptSubmit", session_title="", prompt_id="p2", permission_mode=None)
        after = self.peer(ADA)
        for key in ("name", "title", "permission_mode", "model", "cwd", "transcript", "first_seen"):
            self.assertEqual(before[key], after[key], key)

    def test_takes_worktrees_of_a_repository_for_one_project(self):
        main, tree = self.home.folder + "/main", self.home.folder + "/tree"
        git = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
               "GIT_COMMITTER_EMAIL": "a@b"}
        for command in (["init", "-q", main], ["-C", main, "commit", "-q", "--allow-empty", "-m", "x"],
                        ["-C", main, "worktree", "add", "-q", tree]):
            self.assertEqual(0, self.home.run(["git", *command], env=git).returncode)
        os.makedirs(main + "/sub/deep")
        for session, cwd in ((ADA, main + "/sub/deep"), (BOB, tree)):
            self.hook("claude" if session == ADA else "codex", "PreToolUse", cwd=cwd)
            self.assertEqual((cwd, main), (self.peer(session)["cwd"], self.peer(session)["project"]))

    def test_names_the_host_process_and_not_what_stands_in_between(self):
        for kind, session in (("claude", ADA), ("codex", BOB), ("agy", AGY)):
            with self.subTest(kind):
                host = HostProcess(self.home, kind, between=["/bin/sh", "-c", 'exec "$@"', "sh", "/bin/bash", "-c",
                                                             '"$@"; exit $?', "bash"])
                try:
                    host.hook(kind, session, "SessionStart")
                    row = self.peer(session)
                    self.assertEqual((host.pid, host.start), (row["pid"], row["pid_start"]))
                finally:
                    host.end()

    def test_names_no_daemon_and_no_other_host_as_the_process(self):
        for kind, word, host, session in (("codex", "app-server", "codex", BOB), ("claude", "", "codex", BOB),
                                          ("codex", "exec", "claude", ADA)):
            process = HostProcess(self.home, kind, word)
            try:
                process.hook(host, session, "SessionStart")
                self.assertEqual((None, None), (self.peer(session)["pid"], self.peer(session)["pid_start"]), kind)
            finally:
                process.end()

    def test_moves_mail_and_name_to_what_a_clear_begins(self):
        process = HostProcess(self.home, "claude")
        self.addCleanup(process.end)
        process.hook("claude", ADA, "SessionStart")
        self.store.set_name(ADA, "leader")
        rows = [self.queue("claude", "n%d" % number) for number in range(3)]
        out = process.hook("claude", NEW, "SessionStart", source="clear", model=None)
        self.assertEqual([self.home.hint(NEW)], out["hookSpecificOutput"]["watchPaths"])
        self.assertEqual(FROM["claude"] + "\nn0", out["hookSpecificOutput"]["additionalContext"].split("\n\n")[0])
        self.assertEqual([("delivered", NEW)] * 3, [(self.row(row)["state"], self.row(row)["target"]) for row in rows])
        self.assertIn("moved to %s by /clear" % NEW, [event["detail"] for event in self.store.events(rows[0]["id"])])
        self.assertEqual(("leader", "", NEW), (self.peer(NEW)["name"], self.peer(ADA)["name"], self.peer(ADA)["successor"]))
        self.assertFalse(os.path.exists(self.home.hint(ADA)))
        late = self.queue("claude", "late")
        self.assertEqual(NEW, late["target"])
        self.assertTrue(os.path.exists(self.home.hint(NEW)))

    def test_moves_nothing_for_resume_or_another_process_or_codex(self):
        for host, event, source, other in (("claude", "SessionStart", "resume", False), ("claude", "SessionStart", "startup", False),
                                           ("claude", "SessionStart", "clear", True), ("codex", "SessionStart", "clear", False),
                                           ("claude", "UserPromptSubmit", "compact", False)):
            old, new = (ADA, NEW) if host == "claude" else (BOB, EVE)
            with self.subTest(host=host, source=source, other=other):
                row = self.queue(host, "stays")
                processes = [HostProcess(self.home, host) for _ in range(2 if other else 1)]
                self.store.register({"session": old, "host": host, "pid": processes[0].pid,
                                     "pid_start": processes[0].start}, contract.now_ms(), 0)
                try:
                    processes[-1].hook(host, new, event, source=source)
                finally:
                    for process in processes:
                        process.end()
                self.assertEqual(("queued", old), (self.row(row)["state"], self.row(row)["target"]))
                self.assertIsNone(self.peer(old)["successor"])
                self.store._execute("delete from messages")

    def test_says_a_session_has_no_successor_once_it_is_opened_again(self):
        self.store._execute("update peers set successor = ? where session = ?", (NEW, ADA))
        self.hook("claude", "PreToolUse")
        self.assertEqual(NEW, self.peer(ADA)["successor"])
        self.hook("claude", "SessionStart", source="resume")
        self.assertIsNone(self.peer(ADA)["successor"])


class ABrokenWorld(Hooks):
    def test_without_a_reader_queues_again_and_the_next_hook_shows_it(self):
        row = self.queue()
        data = payload("codex", "PreToolUse", BOB, cwd=self.home.folder)
        full, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 65536)
        reader, gone = os.pipe()
        os.close(reader)
        for what, options in (("closed", {"before": lambda: os.close(1)}), ("no reader", {"stdout": gone}),
                              ("a full disk", {"stdout": open("/dev/full", "wb")} if os.path.exists("/dev/full") else {}),
                              ("a full pipe that does not wait", {"stdout": writer})):
            with self.subTest(what):
                done = self.home.run_hook("codex", data, **options)
                self.assertEqual((0, b""), (done.returncode, done.stderr))
                self.assertEqual("queued", self.row(row)["state"])
                self.assertTrue(os.path.exists(self.home.hint(BOB)))
                self.assertEqual("", self.store.integrity())
                if hasattr(options.get("stdout"), "close"):
                    options["stdout"].close()
        os.close(full), os.close(writer), os.close(gone)
        self.assertIn("the hook could not write", self.store.events(row["id"])[2]["detail"])
        self.assertIn("mail", self.home.context("codex", BOB, "PreToolUse"))

    def test_that_takes_a_part_leaves_the_row_unknown_and_shows_it_to_nobody_else(self):
        if not hasattr(fcntl, "F_SETPIPE_SZ") and not os.path.exists("/proc/sys/fs/pipe-max-size"):
            self.skipTest("a pipe's size cannot be set here")
        row = self.queue(body="x" * 7900)
        reader, writer = os.pipe()
        fcntl.fcntl(writer, getattr(fcntl, "F_SETPIPE_SZ", 1031), 4096)
        os.set_blocking(writer, False)
        done = self.home.run_hook("codex", payload("codex", "PreToolUse", BOB), stdout=writer)
        os.close(writer)
        part = os.read(reader, 65536)
        os.close(reader)
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        self.assertEqual(4096, len(part))
        self.unknown_until_resolved(row)

    def test_that_does_not_read_is_left_in_time_with_the_row_unknown(self):
        row = self.queue()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 65536)
        os.set_blocking(writer, True)
        begun = time.monotonic()
        done = self.home.run_hook("codex", payload("codex", "PreToolUse", BOB), stdout=writer, env={"XMSG_HOOK_TIMEOUT": "0.4"})
        self.assertLess(time.monotonic() - begun, 3 * PATIENCE)
        os.close(reader), os.close(writer)
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        self.unknown_until_resolved(row)

    def unknown_until_resolved(self, row):
        self.assertEqual("hook-inflight", self.row(row)["state"])
        self.assertIsNone(self.home.context("codex", BOB, "PreToolUse"))
        self.assertTrue(self.home.json("show", row["uid"])["unknown"])
        self.assertIn("UNKNOWN", self.home.xmsg("outbox", session=ADA))
        self.home.xmsg("resolve", row["uid"], "--requeue")
        self.assertIn(FROM["codex"], self.home.context("codex", BOB, "PreToolUse"))
        self.assertEqual("delivered", self.row(row)["state"])

    def test_of_the_store_is_silent_and_changes_nothing(self):
        self.store.close()
        data = payload("codex", "PreToolUse", BOB, cwd=self.home.folder)

        def prepared(change):
            home = Home()
            self.addCleanup(home.remove)
            home.hook("codex", BOB, "PreToolUse")
            store = home.store()
            message(store, BOB, "mail")
            store.close()
            change(home)
            return home

        def cut(home):
            os.truncate(home.db, 5000)

        def text(home):
            with open(home.db, "w") as file:
                file.write("not a database, but a letter " * 400)
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(home.db + suffix)

        def newer(home):
            home.sql("pragma user_version = 99")

        def foreign(home):
            home.sql("drop table peers")

        def link(home):
            os.rename(home.db, home.db + ".real")
            os.symlink(home.db + ".real", home.db)

        def loose(home):
            os.chmod(home.db, 0o666)

        for change in (cut, text, newer, foreign, link, loose):
            with self.subTest(change.__name__):
                home = prepared(change)
                with open(home.db, "rb") as file:
                    before = file.read()
                done = home.run_hook("codex", data)
                self.assertEqual((0, b"", b""), (done.returncode, done.stdout, done.stderr))
                with open(home.db, "rb") as file:
                    self.assertTrue(before == file.read(), "the file was written")
                self.assertIn("Store", home.faults())
                bare = home.run_hook("codex", data, env={"XMSG_NO_FAILOPEN": "1"})
                self.assertEqual(1, bare.returncode, "the net hides nothing")


class TheLogOfFaults(Hooks):
    def test_is_bounded_and_private(self):
        log = self.home.db + ".faults"
        self.home.raw_hook(["codex"], b"{")
        self.assertEqual(0o600, os.stat(log).st_mode & 0o777)
        self.assertEqual({"at", "where", "fault"}, set(json.loads(self.home.faults())))
        with open(log, "ab") as file:
            file.write(b"x" * (contract.LOG_BYTES - 100))
        for _ in range(3):
            self.home.raw_hook(["x" * 9000, "y" * 9000], b"{")
        for _ in range(2):
            self.home.raw_hook(["codex"], b'{"session_id":"' + b"z" * 9000 + b'","hook_event_name":"Stop"}')
        sizes = [os.stat(path).st_size for path in (log, log + ".old")]
        self.assertLess(max(sizes), contract.LOG_BYTES + 2100)
        self.assertLess(0, min(sizes))
        self.assertEqual([0o600] * 2, [os.stat(path).st_mode & 0o777 for path in (log, log + ".old")])
        with open(log) as file:
            self.assertLess(max(len(line) for line in file), 2002)

    def test_is_never_somebody_elses_file(self):
        victim = os.path.join(self.home.folder, "victim")
        with open(victim, "w") as file:
            file.write("precious")
        os.symlink(victim, self.home.db + ".faults")
        self.assertIsNone(self.home.raw_hook(["codex"], b"{"))
        with open(victim) as file:
            self.assertEqual("precious", file.read())

    def test_holds_a_bad_setting_which_falls_back_to_its_default(self):
        self.queue()
        env = {"XMSG_MAX_PER_INJECT": "-5", "XMSG_TTL_SECONDS": "soon", "XMSG_LANG": "tlh", "XMSG_HOOK_SWEEP_INTERVAL": "nan"}
        self.assertIn("mail", self.home.context("codex", BOB, "PreToolUse", env=env))
        for name in env:
            self.assertIn(name, self.home.faults())


class TheBudget(unittest.TestCase):
    def test_of_a_hook_ends_below_the_hosts_and_that_of_a_waiter_below_its_entrys(self):
        names = {name: (default, limits) for name, _, default, limits, _ in contract.SETTINGS}
        default, limits = names["XMSG_HOOK_TIMEOUT"]
        import hook_install
        with open(HOOK) as file:
            script = file.read()
        self.assertLess(default, 5)
        self.assertLess(limits[1], 5)
        self.assertIn("limit=${XMSG_HOOK_TIMEOUT:-%s}" % default, script)
        self.assertIn("limit=580", script)
        self.assertLess(contract.WATCH_DELAY + contract.WAITER_SECONDS, 580)
        with open(hook_install.__file__) as file:
            installer = file.read()
        self.assertIn("600", installer)


class TheWaiter(Hooks):
    """Claude Code's FileChanged entry, with the registration of a running session that the test itself writes."""

    def setUp(self):
        super().setUp()
        self.status("idle")

    def status(self, status, session=ADA):
        folder = os.path.join(self.home.folder, ".claude", "sessions")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "%d.json" % os.getpid())
        with open(path + ".new", "w") as file:
            json.dump({"pid": os.getpid(), "sessionId": session, "procStart": host_process.start_time(os.getpid()),
                       "kind": "interactive", "entrypoint": "cli", "version": "2.1.332", "status": status}, file)
        os.rename(path + ".new", path)

    def wake(self, status=2, event="FileChanged", env=(), **fields):
        out = self.home.hook("claude", ADA, event, "FileChanged", status=status, env=dict(
            {"CLAUDE_PID": str(os.getpid())}, **dict(env)), **fields)
        self.assertIsNone(out, "text on stdout")
        return self.home.stderr

    def start(self, event="FileChanged", root=ROOT):
        """A waiter that runs, once it has taken its lock; .result() is (status, text)."""
        errors = tempfile.TemporaryFile()
        self.addCleanup(errors.close)
        waiter = subprocess.Popen([root + "/xmsg-hook.sh", "claude", "FileChanged"], stdin=subprocess.PIPE, stderr=errors,
                                  stdout=subprocess.DEVNULL, cwd=self.home.folder,
                                  env=dict(self.home.env, CLAUDE_PID=str(os.getpid())))
        self.addCleanup(end, waiter)
        waiter.stdin.write(payload("claude", event, ADA, cwd=self.home.folder))
        waiter.stdin.close()

        def result():
            status = waiter.wait(20 * PATIENCE)
            errors.seek(0)
            return status, errors.read().decode()
        waiter.result = result
        return waiter

    def is_held(self):
        """Whether a waiter holds its lock, without taking it."""
        try:
            number = os.stat(self.home.hints + "/wake/" + ADA).st_ino
        except FileNotFoundError:
            return False
        if not os.path.exists("/proc/locks"):
            return True
        with open("/proc/locks") as file:
            return any(line.split()[5].endswith(":%d" % number) and "FLOCK" in line for line in file if "->" not in line)

    def still(self, condition, seconds=0.5):
        """Holds through more than two looks of a waiter, which looks every 0.2 s."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.assertTrue(condition())
            time.sleep(0.02)

    def test_wakes_an_idle_session_with_2_and_the_text_on_stderr(self):
        row = self.queue("claude", "wake up 长")
        self.assertEqual(FROM["claude"] + "\nwake up 长\n", self.wake())
        self.assertEqual(("delivered", "FileChanged"), (self.row(row)["state"], self.row(row)["window"]))
        self.assertEqual("", self.wake(0))
        self.assertFalse(os.path.exists(self.home.hint(ADA)))

    def test_may_say_more_at_once_than_another_hook(self):
        for number in range(2):
            self.queue("claude", "x" * 7000)
        self.assertEqual(2, self.wake().count(FROM["claude"]))

    def test_stays_while_the_session_is_busy_and_wakes_it_when_it_is_idle(self):
        for status in ("busy", "waiting"):
            with self.subTest(status):
                self.store._execute("update messages set state_at = 0")
                os.path.exists(self.home.hints + "/wake/" + ADA) and os.truncate(self.home.hints + "/wake/" + ADA, 0)
                self.status(status)
                row = self.queue("claude")
                waiter = self.start()
                wait_until(self.is_held, "the waiter waits")
                self.still(lambda: waiter.poll() is None and self.row(row)["state"] == "queued")
                self.status("idle")
                self.assertEqual((2, FROM["claude"] + "\nmail\n"), waiter.result())

    def test_leaves_in_silence_once_another_hook_has_taken_the_mail(self):
        self.status("busy")
        self.queue("claude")
        waiter = self.start()
        wait_until(self.is_held, "the waiter waits")
        self.assertIn("mail", self.home.context("claude", ADA, "PostToolUse"))
        self.assertEqual((0, ""), waiter.result())
        self.assertStates("delivered")

    def test_is_one_however_many_events_come(self):
        self.status("busy")
        self.queue("claude")
        first = self.start()
        wait_until(self.is_held, "the waiter waits")
        others = [self.start() for _ in range(4)]
        for other in others:
            self.assertEqual((0, ""), other.result())
        self.assertIsNone(first.poll())
        self.status("idle")
        self.assertEqual(2, first.result()[0])
        self.assertStates("delivered")

    def test_that_was_killed_is_in_nobodys_way(self):
        self.status("busy")
        self.queue("claude")
        waiter = self.start()
        wait_until(self.is_held, "the waiter waits")
        for pid in self.below(waiter) + [waiter.pid]:
            os.kill(pid, 9)
        waiter.wait(5 * PATIENCE)
        wait_until(lambda: not self.is_held(), "the lock is gone with its holder")
        self.status("idle")
        self.assertIn("mail", self.wake())

    def test_whose_wrapper_was_killed_is_not_taken_for_one_that_woke(self):
        """Without the wrapper's status of 2 the host does not use what it has read: nobody can say that it was seen."""
        self.status("busy")
        row = self.queue("claude")
        waiter = self.start()
        wait_until(self.is_held, "the waiter waits")
        python = self.below(waiter)[-1]
        start = host_process.start_time(python)
        os.kill(waiter.pid, 9)
        waiter.wait(5 * PATIENCE)
        self.status("idle")
        wait_until(lambda: not host_process.alive(python, start), "nobody is left to wait")
        self.assertTrue(self.home.json("show", row["uid"])["unknown"])
        self.assertEqual("", self.wake(0), "shown once more")

    def test_without_the_hosts_ear_takes_nothing(self):
        self.queue("claude")
        for redirection in ("2>&-", "2>/dev/full" if os.path.exists("/dev/full") else "2>&-"):
            done = self.home.run(["/bin/sh", "-c", 'exec "$0" claude FileChanged ' + redirection, HOOK], env={
                "CLAUDE_PID": str(os.getpid())}, input=payload("claude", "FileChanged", ADA))
            self.assertEqual((0, b""), (done.returncode, done.stdout), redirection)
            self.assertStates("queued")
        self.assertIn("mail", self.wake())

    def test_touches_the_hint_at_its_limit_and_takes_nothing(self):
        root = copy_of_product(self, ("contract.py", "WAITER_SECONDS = 540", "WAITER_SECONDS = 0.5"))
        self.status("busy")
        self.queue("claude")
        os.utime(self.home.hint(ADA), (1, 1))
        self.assertEqual((0, ""), self.start(root=root).result())
        self.assertLess(time.time() - 60, os.stat(self.home.hint(ADA)).st_mtime)
        self.assertStates("queued")

    def test_wakes_at_most_once_a_second(self):
        self.queue("claude", "first")
        self.wake()
        self.queue("claude", "second")
        self.assertIn("second", self.wake())
        first, second = [self.store.events(row["id"])[1]["at"] for row in self.store.messages()]
        self.assertLessEqual(1000, second - first)

    def test_takes_nothing_where_waking_is_off_or_the_host_ends_when_idle(self):
        self.queue("claude")
        for env in ({"XMSG_WAKE": "off"}, {"CLAUDE_CODE_ENTRYPOINT": "sdk-cli"}):
            self.assertEqual("", self.wake(0, env=env))
        self.assertStates("queued")

    def test_of_the_session_start_looks_once_more_when_the_watch_is_live(self):
        """The host watches only some 0.2 to 0.5 s after SessionStart's output; mail of that time raised no event."""
        self.assertLess(0.5, contract.WATCH_DELAY)
        root = copy_of_product(self, ("contract.py", "WATCH_DELAY = 2.0", "WATCH_DELAY = 0.6"))
        for event in ("SessionStart", "CwdChanged"):
            begun = contract.now_ms()
            waiter = self.start(event, root)
            row = self.queue("claude", "in between")
            self.assertEqual((2, FROM["claude"] + "\nin between\n"), waiter.result())
            self.assertLess(begun + 600, self.store.events(row["id"])[1]["at"])
            self.assertEqual((0, ""), self.start(event, root).result())
            os.truncate(self.home.hints + "/wake/" + ADA, 0)

    def test_decides_under_the_lock_since_a_hint_comes_before_its_row(self):
        with self.store.transaction():
            self.store.raise_hint(ADA)
            waiter = self.start()
            wait_until(lambda: self.is_open_below(waiter), "the waiter has opened the store")
            self.still(lambda: waiter.poll() is None, 0.1)
            self.store._execute("insert into messages (uid, created_at, expires_at, state, state_at, sender_kind, sender_label, "
                                "sender_host, sender_session, target, target_host, body, priority) values ('u', 1, ?, "
                                "'queued', 1, 'agent', 'x', 'codex', ?, ?, 'claude', 'late row', 0)",
                                (contract.now_ms() + 60000, BOB, ADA))
        self.assertEqual(2, waiter.result()[0])

    def below(self, process):
        """The pids of all that a process has started, the deepest last."""
        found = [(len(host_process.ancestors(pid)), pid) for pid in host_process.processes()
                 if process.pid in host_process.ancestors(pid)]
        return [pid for _, pid in sorted(found)]

    def is_open_below(self, process):
        for pid in self.below(process):
            with contextlib.suppress(OSError):
                folder = "/proc/%d/fd" % pid
                if any(os.readlink("%s/%s" % (folder, name)) == self.home.db for name in os.listdir(folder)):
                    return True
        return False

    def test_is_called_once_more_by_a_stop_that_leaves_mail(self):
        hint = self.home.hint(ADA)

        def touched(**fields):
            os.utime(hint, (1, 1))
            self.hook("claude", "Stop", **fields)
            return os.path.exists(hint) and os.stat(hint).st_mtime > 1
        self.queue("claude")
        self.assertTrue(touched(stop_hook_active=True))
        self.assertStates("queued")
        for _ in range(11):
            self.queue("claude")
        self.assertTrue(touched())
        self.assertEqual(2, self.home.states().count("queued"))
        self.assertFalse(touched())
        self.assertFalse(os.path.exists(hint), "nothing waits any more")
        self.hook("claude", "Stop")
        self.assertFalse(os.path.exists(hint))

    def test_is_not_hidden_from_by_the_event_of_another_session(self):
        self.status("busy", NEW)
        self.queue("claude")
        self.assertIn("mail", self.wake(), "a registration that is another session's says nothing of this one")


class TheBanner(Hooks):
    def terminal(self, env=(("XMSG_TTY_BANNER", "1"),), stopped=False):
        """(status, bytes) that a hook writes to the terminal of its session; its own streams are pipes."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\0\x50\0\0\0\0\0")

        def own_terminal():
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            if stopped:
                termios.tcflow(slave, termios.TCOOFF)
        try:
            done = self.home.run_hook("codex", payload("codex", "PreToolUse", BOB), before=own_terminal, pass_fds=(slave,),
                                      env=env)
            os.set_blocking(master, False)
            try:
                return done, os.read(master, 65536)
            except OSError:
                return done, b""
        finally:
            os.close(master), os.close(slave)

    def test_is_one_line_with_the_senders_name_and_never_the_text(self):
        self.queue(body="\x1b]0;pwned\x07 rm -rf / \x1b[2J", sender_label="ada\x1b[31m\nx", sender_session="", sender_kind="unknown")
        done, written = self.terminal()
        self.assertIn(b"rm -rf", done.stdout)
        self.assertEqual("\r\r\n\U0001f4e8 xmsg: 1 from ada[31m x\r\r\n", written.decode())

    def test_is_absent_without_mail_or_the_setting(self):
        self.assertEqual(b"", self.terminal()[1])
        for env in ((), {"XMSG_TTY_BANNER": "0"}):
            self.queue()
            self.assertEqual(b"", self.terminal(env)[1])
        self.assertStates("delivered", "delivered")

    def test_is_no_reason_to_wait_for_a_stopped_terminal(self):
        self.queue()
        begun = time.monotonic()
        done, _ = self.terminal(stopped=True)
        self.assertIn(b"mail", done.stdout)
        self.assertLess(time.monotonic() - begun, 2 * PATIENCE)
        self.assertStates("delivered")
        self.assertEqual("", self.home.faults())


if __name__ == "__main__":
    unittest.main()
