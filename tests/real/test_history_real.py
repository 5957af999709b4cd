"""`codex-history` beside the real Codex: what it lists, whether its resume goes on, whether its export is whole."""
import json
import subprocess
import sys
from pathlib import Path

from codex_rpc import CodexRpc
from hosts import CodexDaemon, CodexHost, codex_exec, wait_until
from mock_openai import parts_text
from model_server import directive, say, shell
from realcase import PROJECT, RealCase, per_version, xmsg

sys.path.append(str(PROJECT / "tests"))
from export_reader import read_markdown

SECOND = """
[model_providers.second]
name = "second"
base_url = "%s/v1"
wire_api = "responses"
http_headers = { "x-provider" = "second" }
"""
AT_SECOND = ["-c", 'model_provider="second"', "-m", "other-model"]
ALL_KINDS = ["cli", "vscode", "exec", "appServer", "subAgent", "unknown"]


class History(RealCase):
    """Nine sessions: of `codex exec`, of a TUI and an app-server, at two providers; one is renamed, one archived, in one
    the user goes back, and four are forks."""

    kinds = ("codex",)

    @classmethod
    def set_up_hosts(cls):
        version = cls.versions["codex"]
        with open(cls.home.codex_home / "config.toml", "a") as file:
            file.write(SECOND % cls.home.openai.url)
        fences = say("see ```\n# not a heading\n~~~ and \u00e9\u6f22\U0001f600 <b>")
        codex_exec(cls.home, version, "first " + directive(shell("echo a-$((1+1)); printf '````\\n'"), fences))
        codex_exec(cls.home, version, "second " + directive(say("done")), AT_SECOND)
        with cls.tui() as host:
            host.prompt("third " + directive(shell("seq 1 3000"), say("counted")))
            host.wait_idle()
            cls.third = host.session_id
            host.press("-l", "/rename the plan")
            wait_until(lambda: "/rename the plan" in host.screen(), "the command on the screen")
            host.press("Enter")
            index = cls.home.codex_home / "session_index.jsonl"
            wait_until(lambda: index.exists() and '"the plan"' in index.read_text(), "the name", context=host.screen)
        with cls.tui(args=AT_SECOND) as host:
            for number in range(3):
                host.prompt("fourth-%d " % number + directive(say("reply-%d" % number)))
                host.wait_idle()
            cls.fourth = host.session_id
        with CodexDaemon(cls.home, version) as daemon, CodexRpc(daemon.socket) as rpc:
            def turn(thread, word):
                """A turn of the thread, whole; its id."""
                began = rpc.call("turn/start", {"threadId": thread, "input": [
                    {"type": "text", "text": word + " " + directive(say("after " + word))}]})["turn"]["id"]
                wait_until(lambda: '"last_agent_message":"after %s"' % word in cls.rollout(thread), "the end of a turn")
                return began
            cls.fork = rpc.call("thread/fork", {"threadId": cls.fourth})["thread"]["id"]
            turn(cls.fork, "fork")
            # A session whose user goes back twice; it was forked before, between and after.
            cls.back = rpc.call("thread/start", {"cwd": str(cls.home.projects["work"])})["thread"]["id"]
            turns, cls.forks_of_back = [turn(cls.back, word) for word in ("a", "b", "c")], []
            for word, before in (("f", turns[0]), ("g", None), ("h", None)):
                fork = rpc.call("thread/fork", {"threadId": cls.back})["thread"]["id"]
                turn(fork, word)
                cls.forks_of_back.append(fork)
                rpc.call("thread/revert", {"threadId": cls.back, "beforeTurnId": before or turns[-1]})
                turns += [turn(cls.back, word + "1"), turn(cls.back, word + "2")]
        cls.sessions = list(dict.fromkeys(record["session"] for record in cls.home.openai.log.requests()
                                          if record["session"]))
        with CodexDaemon(cls.home, version) as daemon:
            daemon.call("thread/archive", threadId=cls.sessions[0])

    @classmethod
    def rollout(cls, session):
        return "".join(path.read_text() for path in cls.home.codex_home.glob("sessions/*/*/*/*%s*.jsonl" % session))

    @classmethod
    def tui(cls, **options):
        return CodexHost(cls.home, cls.versions["codex"], trust="declined", **options)

    def history(self, *arguments, **options):
        return xmsg(self.home, "history", *arguments, **options)

    def test_lists_what_the_app_server_says_and_both_backends_agree(self):
        with CodexDaemon(self.home, self.versions["codex"]) as daemon, CodexRpc(daemon.socket) as rpc:
            for options, kinds, passes in (((), [], [False]), (("--include-archived",), [], [False, True]), (
                    ("--include-archived", "--include-non-interactive"), ALL_KINDS, [False, True])):
                expected = []
                for archived in passes:
                    answer = rpc.call("thread/list", {
                        "modelProviders": [], "sourceKinds": kinds, "sortKey": "updated_at", "limit": 100,
                        "useStateDbOnly": True, "archived": archived})
                    expected += [(thread["id"], thread["name"] or "", thread["modelProvider"], thread["model"],
                                  thread["cwd"], thread["updatedAt"], archived) for thread in answer["data"]]
                for backend in ("app-server", "sqlite", "auto"):
                    report = json.loads(self.history("list", "--json", "--backend", backend, *options))
                    self.assertEqual("sqlite" if backend == "sqlite" else "app-server", report["backend"])
                    listed = [(one["session"], one["name"], one["provider"], one["model"], one["cwd"],
                               self.seconds(one["updated_at"]), one["archived"]) for one in report["sessions"]]
                    self.assertEqual(sorted(expected, key=lambda row: (row[5], row[0]), reverse=True), listed)
        self.assertEqual({("the plan", "scripted")}, {row[1:3] for row in listed if row[0] == self.third})
        self.assertEqual(9, len(listed))
        self.assertEqual([self.sessions[0]], [row[0] for row in listed if row[6]])
        self.assertIn("database", self.stderr("list"))

    def seconds(self, text):
        import calendar
        import time
        return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))

    def stderr(self, *arguments):
        return subprocess.run([PROJECT / "bin" / "codex-history", *arguments], env=self.home.env, capture_output=True,
                              text=True).stderr

    def test_exports_each_message_of_the_models_log_once_in_order_and_nothing_else(self):
        for session in self.sessions:
            self.assert_export_is_whole(session)
        self.assertIn("fork ", self.history("export", self.fork))
        self.assertTrue({self.back, *self.forks_of_back} < set(self.sessions))
        self.assertIn("after g1", self.history("export", self.back))
        self.assertNotIn("after a", self.history("export", self.back))

    def assert_export_is_whole(self, session):
        requests = self.home.openai.log.of_session(session)
        expected = list(filter(None, map(self.as_exported, requests[-1]["body"]["input"])))
        expected.append(("Assistant", requests[-1]["step"]["say"]))
        exported = [item[:2] for item in read_markdown(self.history("export", session, "--full"))]
        self.assertEqual([(heading, text.rstrip("\n")) for heading, text in expected],
                         [(heading, text.rstrip("\n")) for heading, text in exported])
        for heading, text, _ in read_markdown(self.history("export", session)):
            self.assertLessEqual(len(text), 8000)

    def as_exported(self, item):
        """(heading, text) of what the model was told or has said, None for what the host itself put there."""
        kind = item.get("type", "message")
        if kind == "message":
            text = parts_text(item["content"])
            if item["role"] == "developer" or text.startswith("<environment_context>"):
                return None
            return {"user": "User", "assistant": "Assistant"}[item["role"]], text
        if kind.endswith("_output"):
            return "Tool result", parts_text(item["output"])
        return "Tool call: `%s`" % item["name"], item.get("arguments") or item["input"]

    def test_resumes_by_name_in_the_same_session_and_refuses_a_second_time_while_that_is_open(self):
        host = self.tui()
        host.env["PATH"] = "%s:%s" % (Path(host.binary).parent, host.env["PATH"])
        host.binary = PROJECT / "bin" / "codex-history"
        self.addCleanup(host.stop)
        host.start("resume", "the plan")
        self.goes_on(host, self.third, "counted")
        refused = self.history("resume", "the plan", "--dry-run", "--json", status=7)
        self.assertIn("process %d holds its writer lock" % host.pid, refused)
        host.stop()
        self.assert_export_is_whole(self.third)

    def test_prints_a_command_that_codex_takes_and_that_goes_on_at_the_same_provider(self):
        plan = json.loads(self.history("resume", self.fourth, "--dry-run", "--json"))
        self.assertEqual({"CODEX_HOME": str(self.home.codex_home)}, plan["env"])
        host = self.tui()
        self.addCleanup(host.stop)
        host.start(*plan["argv"][1:])
        request = self.goes_on(host, self.fourth, "reply-2")
        self.assertEqual(("other-model", "second"), (request["body"]["model"], request["headers"].get("x-provider")))

    def test_goes_on_at_another_provider_where_this_codex_can(self):
        host = self.tui()
        self.addCleanup(host.stop)
        path = "%s:%s" % (Path(host.binary).parent, self.home.env["PATH"])
        switch = ["resume", self.back, "--switch-provider", "second", "--model", "other-model", "--dry-run", "--json"]
        if self.versions["codex"] == "0.171.0":
            self.assertIn("only at its own provider", self.history(*switch, env={"PATH": path}, status=7))
            return
        host.start(*json.loads(self.history(*switch, env={"PATH": path}))["argv"][1:])
        request = self.goes_on(host, self.back, "after g1")
        self.assertEqual(("other-model", "second"), (request["body"]["model"], request["headers"].get("x-provider")))

    def goes_on(self, host, session, known):
        """Prompts a resumed session; the request, which holds what the session knew before."""
        word = self.word()
        host.prompt("go on " + directive(say(word)))
        host.wait_idle()
        self.assertEqual(session, host.session_id, host.screen())
        request = self.home.openai.log.of_session(session)[-1]
        self.assertIn(known, json.dumps(request["body"]["input"]))
        self.assertEqual({"say": word, "slow": 0}, request["step"])
        return request

    def test_refuses_what_is_archived(self):
        self.assertIn("is archived", self.history("resume", self.sessions[0], "--dry-run", "--json", status=7))


load_tests = per_version(History)
