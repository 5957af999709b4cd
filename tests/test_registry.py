"""Who is there and who speaks: registration by hooks, /clear, projects, host processes, sender identity, labels, liveness."""
import os
import subprocess
import sys
import unittest

import support
from support import (ADA, AGY, BOB, EVE, FakeProc, Home, HomeCase, HostProcess, dead_process, environ, message, payload, peer,
                     wait_until)
from side_by_side import load_tests  # noqa: F401
import contract
import host_process
import xmsg
from contract import UsageError, now_ms

NEW = "7c1f0a52-0000-4000-8000-0000000000cc"
NEWER = "7c1f0a52-0000-4000-8000-0000000000dd"


def call(host, event, session, **fields):
    argument = event if host == "agy" else ""
    return xmsg.parse_call(host, argument, payload(host, event, session, **fields))


class ARegistration(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        tree = FakeProc()
        self.addCleanup(tree.remove)
        block = environ(XMSG_PROC_ROOT=tree.folder)
        block.__enter__()
        self.addCleanup(block.__exit__, None, None, None)
        self.tree = tree

    def register(self, host, event, session, now=None, **fields):
        return xmsg.register_session(self.store, call(host, event, session, **fields), now or now_ms())

    def changes(self):
        return self.store._db.total_changes

    def test_writes_down_what_each_host_says_of_its_session(self):
        self.register("claude", "SessionStart", ADA, cwd=self.home.folder, session_title="delta")
        self.register("claude", "PreToolUse", ADA, cwd=self.home.folder, permission_mode="plan")
        self.register("codex", "SessionStart", BOB, cwd=self.home.folder, permission_mode="bypassPermissions")
        self.register("agy", "SessionStart", AGY, cwd=self.home.folder)
        self.assertEqual([
            (ADA, "claude", "delta", "claude-opus-5-5", "plan"), (BOB, "codex", "", "gpt-5.1-codex", "bypassPermissions"),
            (AGY, "agy", "", "gemini-3-pro", "")],
            [tuple(self.store.peer(session)[key] for key in ("session", "host", "title", "model", "permission_mode"))
             for session in (ADA, BOB, AGY)])
        for session in (ADA, BOB, AGY):
            row = self.store.peer(session)
            self.assertEqual((self.home.folder, self.home.folder), (row["cwd"], row["project"]))
            self.assertTrue(row["hook_seen"] and row["first_seen"] and row["transcript"].startswith("/"))

    def test_is_written_only_when_it_is_news(self):
        now = now_ms()
        self.register("claude", "PreToolUse", ADA, now, cwd=self.home.folder)
        before = self.changes()
        for later in (1, 1000, 29000):
            self.register("claude", "PostToolUse", ADA, now + later, cwd=self.home.folder)
        self.assertEqual(before, self.changes())
        self.register("claude", "PostToolUse", ADA, now + 31000, cwd=self.home.folder)
        self.assertGreater(self.changes(), before)
        self.assertEqual(now + 31000, self.store.peer(ADA)["last_seen"])
        for news in ({"cwd": "/"}, {"permission_mode": "acceptEdits", "cwd": "/"}):
            before = self.changes()
            self.register("claude", "PostToolUse", ADA, now + 31001, **news)
            self.assertGreater(self.changes(), before, news)

    def test_that_says_less_erases_nothing(self):
        self.register("claude", "SessionStart", ADA, cwd=self.home.folder, session_title="delta", model="m")
        self.register("claude", "UserPromptSubmit", ADA, cwd=self.home.folder, permission_mode="plan")
        self.register("claude", "CwdChanged", ADA, cwd=None)
        row = self.store.peer(ADA)
        self.assertEqual(("delta", "m", "plan", self.home.folder),
                         (row["title"], row["model"], row["permission_mode"], row["cwd"]))

    def test_never_touches_a_name_that_was_given(self):
        self.register("claude", "SessionStart", ADA, session_title="title one")
        self.store.set_name(ADA, "leader")
        for title in ("title two", None, "leader2"):
            self.register("claude", "SessionStart", ADA, session_title=title)
            self.register("claude", "UserPromptSubmit", ADA, session_title=title)
        row = self.store.peer(ADA)
        self.assertEqual(("leader", "leader2", "leader"), (row["name"], row["title"], xmsg.display_name(row)))
        self.store.set_name(ADA, "")
        self.assertEqual("leader2", xmsg.display_name(self.store.peer(ADA)))

    def test_of_a_hostile_payload_is_cleaned_and_bounded(self):
        self.register("claude", "SessionStart", ADA, session_title="\x1b[31mred\u202e\n" + "x" * 500, model="\x00m\ud800" * 900,
                      transcript_path="relative", cwd="/" + "x" * 5000)
        row = self.store.peer(ADA)
        self.assertEqual(contract.LONGEST_NAME, len(row["title"]))
        self.assertFalse(any(contract.is_invisible(char) for char in row["title"]))
        self.assertEqual(("", "", 1000), (row["transcript"], row["cwd"], len(row["model"])))

    def test_with_sql_in_it_is_only_text(self):
        nasty = "'; drop table peers; --%_[]\""
        self.register("claude", "SessionStart", ADA, session_title=nasty, cwd="/" + nasty, model=nasty)
        row = self.store.peer(ADA)
        self.assertEqual((nasty, "/" + nasty, nasty), (row["title"], row["cwd"], row["model"]))
        self.assertEqual([ADA], [found["session"] for found in self.store.peers_named(nasty)])
        self.assertEqual([], self.store.peers_beginning("%"))
        self.assertEqual([], self.store.peers_beginning("_c1f"))

    def test_finds_its_process_at_the_start_of_a_session_or_turn(self):
        self.tree.add(os.getpid(), ["python3"], 40, "500")
        self.tree.add(40, ["claude"], 1, "600")
        for event in ("SessionStart", "UserPromptSubmit"):
            self.tree.add(40, ["claude"], 1, "600" + str(len(event)))
            self.register("claude", event, ADA)
            self.assertEqual((40, "600" + str(len(event))), tuple(self.store.peer(ADA)[key] for key in ("pid", "pid_start")))


class AClear(HomeCase):
    """Claude's /clear: SessionStart with source clear, in the same process."""

    def setUp(self):
        super().setUp()
        self.host = HostProcess(self.home)
        self.addCleanup(self.host.end)
        self.home.hook("codex", BOB, "SessionStart")
        self.host.hook("claude", ADA, "SessionStart")

    def clear(self, new, host=None):
        return (host or self.host).hook("claude", new, "SessionStart", source="clear")

    def send(self, target, text, **options):
        return self.home.json("send", target, text, "--no-direct", session=BOB, host="codex", **options)["messages"][0]

    def test_moves_the_waiting_mail_and_the_given_name_to_the_new_session(self):
        self.home.xmsg("name", ADA, "leader")
        sent = self.send(ADA, "waiting")
        self.assertIn("waiting", self.clear(NEW)["hookSpecificOutput"].get("additionalContext", "") or
                      self.host.hook("claude", NEW, "UserPromptSubmit")["hookSpecificOutput"]["additionalContext"])
        story = self.home.json("show", sent["uid"])
        self.assertEqual(NEW, story["to"]["session"])
        self.assertTrue(any("moved to %s by /clear" % NEW in (event["detail"] or "") for event in story["events"]))
        self.assertEqual(NEW, self.home.json("find", "--exact", "leader")["sessions"][0]["session"])
        self.assertEqual([("", NEW), ("leader", None)], self.home.sql(
            "select name, successor from peers where host = 'claude' order by name"))

    def test_leaves_the_new_sessions_hint_up_and_the_old_ones_down(self):
        store = self.open_store()
        message(store, ADA, target_host="claude")
        peer(store, NEW, "claude")
        store.register({"session": NEW, "host": "codex"}, now_ms(), store.peer(ADA))
        self.assertEqual((False, True), (os.path.exists(self.home.hint(ADA)), os.path.exists(self.home.hint(NEW))))

    def test_sends_later_mail_for_the_old_id_to_the_newest_in_the_chain(self):
        self.clear(NEW)
        self.assertEqual(NEW, self.send(ADA, "one")["to"]["session"])
        self.assertEqual(NEW, self.send("claude:" + ADA, "two")["to"]["session"])
        self.assertEqual(["one", "two"], self.clear(NEWER)["hookSpecificOutput"]["additionalContext"].split("\n")[1::3])
        for target in (ADA, NEW, NEWER):
            self.assertEqual(NEWER, self.send(target, "three")["to"]["session"])

    def test_of_a_session_that_is_resumed_later_has_no_hold_on_it_any_more(self):
        self.home.xmsg("name", ADA, "leader")
        self.clear(NEW)
        self.host.hook("claude", ADA, "SessionStart", source="resume")
        self.assertEqual(ADA, self.send(ADA, "for the old one")["to"]["session"])
        self.assertEqual(NEW, self.home.json("find", "--exact", "leader")["sessions"][0]["session"])
        self.assertEqual([ADA], [record["session"] for record in self.home.json("list")["sessions"]
                                 if record["host"] == "claude" and record["live"]])

    def test_is_none_in_another_process_or_with_another_source(self):
        self.send(ADA, "stays")
        other = HostProcess(self.home)
        self.addCleanup(other.end)
        self.clear(NEW, other)
        for source in ("resume", "startup", "compact"):
            self.host.hook("claude", NEWER, "SessionStart", source=source)
        self.assertEqual([(ADA,)], self.home.sql("select target from messages"))
        self.assertEqual([], self.home.sql("select 1 from peers where successor is not null"))

    def test_is_none_for_codex_whose_processes_hold_many_threads(self):
        codex = HostProcess(self.home, "codex")
        self.addCleanup(codex.end)
        codex.hook("codex", BOB, "SessionStart")
        codex.hook("codex", EVE, "SessionStart", source="clear")
        self.assertEqual([], self.home.sql("select 1 from peers where successor is not null"))

    def test_lets_the_name_that_the_new_session_already_has_stand(self):
        self.home.xmsg("name", ADA, "leader")
        store = self.open_store()
        peer(store, NEW, "claude", name="other")
        store.register({"session": NEW, "host": "codex"}, now_ms(), store.peer(ADA))
        self.assertEqual(("other", ""), (store.peer(NEW)["name"], store.peer(ADA)["name"]))


class AProject(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.home = Home()
        cls.folder = cls.home.folder
        cls.git("init", "-q", "main")
        cls.git("-C", "main", "-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x")
        cls.git("-C", "main", "worktree", "add", "-q", "../tree")
        cls.git("init", "-q", "--bare", "bare.git")
        cls.git("-c", "protocol.file.allow=always", "-C", "main", "submodule", "--quiet", "add", "../main", "part")
        cls.git("clone", "-q", "main", "copy")
        for name in ("main/sub/deep", "tree/sub", "outside", "main/part/sub"):
            os.makedirs(os.path.join(cls.folder, name), exist_ok=True)

    @classmethod
    def tearDownClass(cls):
        cls.home.remove()

    @classmethod
    def git(cls, *arguments):
        subprocess.run(["git", *arguments], cwd=cls.folder, env=dict(cls.home.env, GIT_CONFIG_NOSYSTEM="1"), check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def root(self, name):
        return os.path.relpath(xmsg.project_root(os.path.join(self.folder, name)), self.folder)

    def test_is_the_repository_from_any_depth(self):
        self.assertEqual({"main"}, {self.root(name) for name in ("main", "main/sub", "main/sub/deep", "main/.git/..")})

    def test_is_the_same_for_every_worktree(self):
        self.assertEqual({"main"}, {self.root("tree"), self.root("tree/sub")})

    def test_is_another_one_for_a_clone_and_a_submodule(self):
        self.assertEqual(["copy", "main/part", "main/part"], [self.root(name) for name in ("copy", "main/part", "main/part/sub")])

    def test_is_the_folder_itself_outside_of_any(self):
        self.assertEqual("outside", self.root("outside"))
        self.assertEqual("gone/away", self.root("gone/away"))

    def test_is_found_through_links_and_survives_nonsense(self):
        os.symlink(os.path.join(self.folder, "main", "sub"), os.path.join(self.folder, "link"))
        self.assertEqual("main", self.root("link"))
        for number, content in enumerate((b"", b"gitdir: /nowhere\n", b"gitdir:", b"\xff\xfe\x00" * 100, b"gitdir: " + b"x" * 9000)):
            folder = os.path.join(self.folder, "odd%d" % number)
            os.mkdir(folder)
            with open(os.path.join(folder, ".git"), "wb") as file:
                file.write(content)
            self.assertEqual("odd%d" % number, self.root("odd%d" % number))


class AHostProcess(unittest.TestCase):
    """In a tree that stands in for /proc."""

    def setUp(self):
        self.tree = FakeProc()
        self.addCleanup(self.tree.remove)
        block = environ(XMSG_PROC_ROOT=self.tree.folder)
        block.__enter__()
        self.addCleanup(block.__exit__, None, None, None)

    def identify(self, words, executable=None):
        self.tree.add(50, words, 1, "777", executable)
        host = host_process.identify(50)
        return host and (host.kind, host.role)

    def test_is_known_by_its_program(self):
        for words, executable, expected in (
                (["claude"], "/opt/claude-code/bin/claude.exe", ("claude", "tui")),
                (["claude", "--resume", "x"], "/home/u/.local/bin/claude", ("claude", "tui")),
                (["claude", "-p", "hello"], "/opt/claude", ("claude", "exec")),
                (["claude", "--print"], "/opt/claude", ("claude", "exec")),
                (["node", "/usr/lib/node_modules/@anthropic-ai/claude-code/cli.js"], "/usr/bin/node", ("claude", "tui")),
                (["node", "/usr/bin/claude", "-p"], "/usr/bin/node", ("claude", "exec")),
                (["bun", "/x/claude"], "/usr/bin/bun", ("claude", "tui")),
                (["codex"], "/x/bin/codex", ("codex", "tui")),
                (["codex", "-c", "model=exec", "resume"], "/x/bin/codex", ("codex", "tui")),
                (["codex", "exec", "do it"], "/x/bin/codex", ("codex", "exec")),
                (["codex", "--profile", "p", "e", "do it"], "/x/bin/codex", ("codex", "exec")),
                (["codex", "app-server", "--listen", "unix://"], "/x/bin/codex", ("codex", "server")),
                (["codex", "a prompt that says exec"], "/x/bin/codex", ("codex", "tui")),
                (["codex", "queue", "--name", "x"], "/x/bin/codex", ("codex", "other")),
                (["codex-linux-sandbox", "--", "ls"], "/x/bin/codex", ("codex", "other")),
                (["agy"], "/opt/agy/agy", ("agy", "tui")), (["python3.11", "/x/agy"], "/usr/bin/python3.11", ("agy", "tui")),
                (["codex"], "/x/bin/codex (deleted)", ("codex", "tui"))):
            with self.subTest(words):
                self.assertEqual(expected, self.identify(words, executable))

    def test_is_no_shell_wrapper_editor_or_namesake(self):
        for words, executable in ((["/bin/sh", "-c", "xmsg-hook.sh claude"], "/usr/bin/dash"),
                                  (["bash", "/home/u/claude"], "/usr/bin/bash"), (["vim", "claude"], "/usr/bin/vim"),
                                  (["node", "/x/node_modules/.bin/codex", "exec"], "/usr/bin/node"),
                                  (["tmux", "new", "claude"], "/usr/bin/tmux"), (["python3", "claude.py"], "/usr/bin/python3"),
                                  (["claude-proxy"], "/opt/claude-proxy"), (["node"], "/usr/bin/node"),
                                  (["node", "server.js", "claude"], "/usr/bin/node")):
            with self.subTest(words):
                self.assertIsNone(self.identify(words, executable))

    def test_without_an_executable_to_be_seen_is_known_by_its_first_word(self):
        self.assertEqual(("claude", "tui"), self.identify(["claude"], ""))
        self.assertIsNone(self.identify(["bash"], ""))

    def test_began_with_an_environment_of_any_length(self):
        long = "x" * 100000
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={"A": long, "B": long, "CODEX_HOME": "/there"})
        self.addCleanup(support.end, child)
        with support.environ(XMSG_PROC_ROOT=None):
            # For a moment after it was started, a program has none.
            found = wait_until(lambda: host_process.environment(child.pid), "its environment")
            self.assertEqual({"A": long, "B": long, "CODEX_HOME": "/there"}, found)

    def test_is_the_nearest_one_above_and_not_what_stands_between(self):
        self.tree.add(10, ["claude"], 1)
        self.tree.add(11, ["/bin/sh", "-c", "codex exec x"], 10)
        self.tree.add(12, ["node", "/x/.bin/codex", "exec"], 11, executable="/usr/bin/node")
        self.tree.add(13, ["codex", "exec"], 12)
        self.tree.add(14, ["timeout", "5", "xmsg-hook.sh"], 13)
        self.tree.add(15, ["python3"], 14)
        found = host_process.nearest_host(15)
        self.assertEqual(("codex", "exec", 13, "1000", 14), (found.kind, found.role, found.pid, found.start, found.child))
        self.assertEqual([14, 13, 12, 11, 10, 1], host_process.ancestors(15))
        self.assertEqual(10, host_process.nearest_host(12).pid)
        self.assertIsNone(host_process.nearest_host(10))

    def test_of_a_session_is_never_another_hosts_and_never_a_daemon(self):
        self.tree.add(os.getpid(), ["python3"], 20)
        for words, host, expected in ((["codex"], "codex", (20, "1000")), (["codex", "app-server"], "codex", (None, None)),
                                      (["codex"], "claude", (None, None)), (["claude"], "claude", (20, "1000")),
                                      (["claude"], "agy", (None, None)), (["bash"], "claude", (None, None))):
            self.tree.add(20, words, 1)
            self.assertEqual(expected, xmsg.process_of_session(host), words)

    def test_is_alive_only_as_the_same_process(self):
        self.tree.add(60, ["claude"], 1, "900")
        self.assertTrue(host_process.alive(60, "900"))
        self.assertTrue(host_process.alive(60, 900))
        for pid, start in ((60, "901"), (61, "900"), (60, None), (60, ""), (None, "900"), (0, "0")):
            self.assertFalse(host_process.alive(pid, start), (pid, start))
        self.tree.add(60, ["claude"], 1, "900", state="Z")
        self.assertFalse(host_process.alive(60, "900"))

    def test_whose_name_is_made_to_confuse_is_read_right(self):
        for name in ("a) S 1 (b", "x y", ")))", "(claude)", "\n", ") Z 99"):
            self.tree.add(70, ["x"], 7, "4321", name=name)
            self.assertEqual((7, "4321"), (host_process.parent(70), host_process.start_time(70)), ascii(name))

    def test_in_a_ring_or_a_very_long_line_ends_the_search(self):
        self.tree.add(80, ["sh"], 81)
        self.tree.add(81, ["sh"], 80)
        self.assertIsNone(host_process.nearest_host(80))
        for pid in range(1000, 1200):
            self.tree.add(pid, ["sh"], pid + 1)
        self.assertLess(len(host_process.ancestors(1000)), 100)


class ARealProcess(HomeCase):
    def test_has_the_start_that_the_system_tells_and_keeps_it(self):
        start = host_process.start_time(os.getpid())
        self.assertTrue(start and start == host_process.start_time(os.getpid()))
        self.assertEqual(os.getppid(), host_process.parent(os.getpid()))
        self.assertEqual(os.getuid(), host_process.owner(os.getpid()))
        self.assertEqual(os.path.realpath(sys.executable), host_process.executable(os.getpid()))
        self.assertTrue(host_process.arguments(os.getpid()))
        self.assertIn(os.getpid(), host_process.processes())
        pid, start = dead_process()
        self.assertFalse(host_process.alive(pid, start))
        self.assertIsNone(host_process.start_time(pid))

    def test_is_found_as_the_host_through_shells_and_wrappers(self):
        for between in ((), ("/bin/sh", "-c", '"$@"; exit $?', "sh"),
                        ("/usr/bin/timeout", "20"), ("/bin/bash", "-c", 'sh -c \'"$@"; exit $?\' sh "$@"; exit $?', "x")):
            host = HostProcess(self.home, between=between)
            self.addCleanup(host.end)
            host.hook("claude", ADA, "SessionStart")
            self.assertEqual([(host.pid, host.start)], self.home.sql("select pid, pid_start from peers"), between)

    def test_below_a_daemon_gives_a_thread_no_process(self):
        server = HostProcess(self.home, "codex", "app-server")
        self.addCleanup(server.end)
        server.hook("codex", BOB, "SessionStart")
        self.assertEqual([(None, None)], self.home.sql("select pid, pid_start from peers"))
        self.assertTrue(self.home.json("list")["sessions"][0]["live"])

    @unittest.skipUnless(support.shutil.which("ps"), "there is no ps here")
    def test_is_read_by_ps_where_there_is_no_proc(self):
        real = host_process._proc
        host_process._proc = lambda: "/nonexistent"
        self.addCleanup(setattr, host_process, "_proc", real)
        process = subprocess.Popen(["/bin/cat", "-"], stdin=subprocess.PIPE)
        self.addCleanup(support.end, process)
        start = host_process.start_time(process.pid)
        self.assertTrue(start and host_process.alive(process.pid, start))
        self.assertEqual(os.getpid(), host_process.parent(process.pid))
        self.assertEqual(os.getuid(), host_process.owner(process.pid))
        self.assertIn("cat", host_process.executable(process.pid))
        self.assertEqual("-", host_process.arguments(process.pid)[-1])
        self.assertIn(process.pid, host_process.processes())
        process.kill()
        wait_until(lambda: host_process.start_time(process.pid) is None, "a zombie is gone")
        process.wait()
        self.assertFalse(host_process.alive(process.pid, start))


class TheSender(HomeCase):
    """Identity from variables and ancestors, as a table."""

    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.tree = FakeProc()
        self.addCleanup(self.tree.remove)
        block = environ(XMSG_PROC_ROOT=self.tree.folder)
        block.__enter__()
        self.addCleanup(block.__exit__, None, None, None)
        for session, host in ((ADA, "claude"), (BOB, "codex"), (AGY, "agy")):
            peer(self.store, session, host)

    def below(self, *hosts):
        """This process stands below these hosts, the nearest first; each is a kind or an argument list."""
        pid = os.getpid()
        for number, words in enumerate(hosts):
            words = [words] if isinstance(words, str) else words
            self.tree.add(pid, ["x"] if pid == os.getpid() else self.last, 100 + number, "50")
            self.last, pid = words, 100 + number
        self.tree.add(pid, ["x"] if pid == os.getpid() else self.last, 1, "50")

    def identity(self, variables=(), label="", notification=False):
        settings = {name: value for name, value in dict(variables).items() if name.startswith("XMSG_")}
        self.store.settings = self.home.settings(**settings)
        return xmsg.sender_identity(self.store, dict(variables), label, notification)

    def who(self, variables=(), **options):
        found = self.identity(variables, **options)
        return found["kind"], found["host"], found["session"]

    def test_is_the_session_that_its_hosts_own_variable_names(self):
        for host, variables, session in (("claude", {"CLAUDE_CODE_SESSION_ID": ADA}, ADA),
                                         ("codex", {"CODEX_THREAD_ID": BOB}, BOB),
                                         ("codex", {"CODEX_THREAD_ID": BOB, "CODEX_SESSION_ID": BOB}, BOB),
                                         ("agy", {"ANTIGRAVITY_CONVERSATION_ID": AGY}, AGY)):
            for above in ((), (host,)):
                with self.subTest(variables, above=above):
                    self.below(*above)
                    self.assertEqual(("agent", host, session), self.who(variables))
                    self.assertEqual(session, self.identity(variables)["self"])

    def test_of_several_inherited_variables_is_the_nearest_hosts(self):
        every = {"CLAUDE_CODE_SESSION_ID": ADA, "CODEX_THREAD_ID": BOB, "ANTIGRAVITY_CONVERSATION_ID": AGY}
        for above, expected in ((("claude", "codex"), ("claude", ADA)), (("codex", "claude"), ("codex", BOB)),
                                (("agy", "codex", "claude"), ("agy", AGY)),
                                ((["codex", "exec"], "claude"), ("codex", BOB)), ((["claude", "-p"],), ("claude", ADA))):
            with self.subTest(above):
                self.below(*above)
                self.assertEqual(("agent",) + expected, self.who(every))

    def test_below_a_host_whose_variable_is_missing_is_never_the_outer_host(self):
        self.below(["codex", "exec"], "claude")
        self.assertEqual(("unknown", "codex", ""), self.who({"CLAUDE_CODE_SESSION_ID": ADA}))

    def test_inside_a_sandbox_that_hides_the_ancestors_is_the_codex_thread(self):
        self.below()
        self.assertEqual(("agent", "codex", BOB), self.who({"CLAUDE_CODE_SESSION_ID": ADA, "CODEX_THREAD_ID": BOB}))

    def test_in_a_codex_subagent_is_the_thread_whose_hooks_run(self):
        self.below("codex")
        sub = "01a04cd2-9999-7000-8000-000000000099"
        self.assertEqual(("agent", "codex", BOB), self.who({"CODEX_THREAD_ID": sub, "CODEX_SESSION_ID": BOB}))
        self.assertEqual(("agent", "codex", sub), self.who({"CODEX_THREAD_ID": sub}))
        peer(self.store, EVE)
        self.assertEqual(("agent", "codex", EVE), self.who({"CODEX_THREAD_ID": EVE, "CODEX_SESSION_ID": BOB}))

    def test_is_proven_to_codex_by_what_it_gave_its_own_child_alone(self):
        """What somebody in between says may be another thread of the same app-server."""
        variables = {"CODEX_THREAD_ID": BOB}
        for given, told_by in ((b"CODEX_THREAD_ID=" + BOB.encode(), 101), (b"CODEX_SESSION_ID=" + BOB.encode(), 101),
                               (b"CODEX_THREAD_ID=" + EVE.encode(), None), (b"", None)):
            self.below("bash", ["codex", "app-server"])
            with open(os.path.join(self.tree.folder, "100", "environ"), "wb") as file:
                file.write(b"A=b\0" + given + b"\0")
            self.assertEqual(told_by, self.identity(variables)["told_by"], given)
            self.assertEqual(("agent", "codex", BOB), self.who(variables))

    def test_named_explicitly_beats_everything_found(self):
        self.below("codex")
        found = {"CODEX_THREAD_ID": BOB}
        self.assertEqual(("agent", "claude", ADA), self.who(dict(found, XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=ADA)))
        self.assertEqual(("agent", "claude", ADA), self.who(dict(found, XMSG_FROM_SESSION=ADA)))
        self.assertEqual(("agent", "codex", BOB), self.who(dict(found, XMSG_FROM_TOOL="codex")))
        self.assertEqual(("unknown", "robot", ""), self.who(dict(found, XMSG_FROM_TOOL="robot")))
        with self.assertRaisesRegex(UsageError, "XMSG_FROM_SESSION"):
            self.who({"XMSG_FROM_SESSION": "-p; rm"})

    def test_without_variables_is_what_its_host_process_was_registered_with(self):
        self.below("claude")
        self.assertEqual(("unknown", "claude", ""), self.who())
        peer(self.store, ADA, "claude", pid=100, pid_start="50")
        self.assertEqual(("agent", "claude", ADA), self.who())
        self.below(["codex", "app-server"])
        peer(self.store, BOB, "codex", pid=100, pid_start="50")
        self.assertEqual("unknown", self.who()[0])

    def test_that_is_a_notification_has_no_session_at_all(self):
        self.below("claude")
        found = self.identity({"CLAUDE_CODE_SESSION_ID": ADA}, label="patrol", notification=True)
        self.assertEqual(("notification", "", "", "", "patrol"),
                         tuple(found[key] for key in ("kind", "host", "session", "self", "label")))

    def test_with_hostile_variables_is_nobody_in_particular(self):
        self.below()
        for text in ("../../etc", "-p", "a b", "\n", "x" * 200, "$(id)", "\x1b[31m"):
            self.assertEqual(("unknown", "", ""), self.who({"CLAUDE_CODE_SESSION_ID": text, "CODEX_THREAD_ID": text}), text)

    def test_at_a_terminal_is_the_operator_and_elsewhere_unknown(self):
        self.home.hook("codex", BOB, "SessionStart")
        self.home.xmsg("send", BOB, "from a pipe", "--no-direct")
        status, out = support.on_a_terminal(self.home, [support.ROOT + "/bin/xmsg", "send", BOB, "by hand", "--no-direct"])
        self.assertEqual(0, status, out)
        self.assertEqual([("unknown",), ("operator",)], self.home.sql("select sender_kind from messages order by id"))

    def test_signs_with_the_label_that_comes_first_in_order(self):
        self.below("claude")
        variables = {"CLAUDE_CODE_SESSION_ID": ADA}
        self.assertEqual(ADA[:8], self.identity(variables)["label"])
        self.store.register({"session": ADA, "host": "claude", "title": "the title"}, now_ms(), fresh_ms=0)
        self.assertEqual("the title", self.identity(variables)["label"])
        self.store.set_name(ADA, "given")
        self.assertEqual("given", self.identity(variables)["label"])
        self.assertEqual("variable", self.identity(dict(variables, XMSG_FROM="variable"))["label"])
        self.assertEqual("option", self.identity(dict(variables, XMSG_FROM="variable"), label="option")["label"])

    def test_can_take_no_label_that_leads_elsewhere_or_cannot_be_read_back(self):
        self.below("claude")
        self.store.set_name(BOB, "leader")
        for label in ("leader", "LEADER", "a\nb", "[x]", "-x", " ", "x" * 81, "a\u202eb"):
            with self.subTest(label), self.assertRaises(UsageError):
                self.identity({"CLAUDE_CODE_SESSION_ID": ADA}, label=label)


class ALabel(HomeCase):
    """What the receiver reads back resolves to exactly the sender."""

    def setUp(self):
        super().setUp()
        self.store = self.open_store()

    def label(self, session):
        label = xmsg.session_label(self.store, session)
        self.assertEqual([session], [found["session"] for found in xmsg.resolve(self.store, label, {"self": ""})])
        return label

    def test_is_the_name_while_no_other_live_session_has_it(self):
        peer(self.store, ADA, "claude", name="leader")
        self.assertEqual("leader", self.label(ADA))
        peer(self.store, BOB, title="Leader")
        self.assertEqual(ADA[:8], self.label(ADA))
        self.assertEqual(BOB[:8], self.label(BOB))

    def test_is_the_name_again_once_the_other_session_has_ended(self):
        peer(self.store, ADA, "claude", name="leader")
        pid, start = dead_process()
        peer(self.store, BOB, title="leader", pid=pid, pid_start=start)
        self.assertEqual("leader", self.label(ADA))

    def test_is_otherwise_the_shortest_start_of_its_id_that_only_it_has(self):
        sessions = ["01a04cd2-1111", "01a04cd2-1122", "01a04cd2-1122-x", "01a04cd3-0000", "7c1f"]
        for session in sessions:
            peer(self.store, session)
        self.assertEqual(["01a04cd2-111", "01a04cd2-1122", "01a04cd2-1122-", "01a04cd3", "7c1f"],
                         [self.label(session) for session in sessions])

    def test_is_no_name_that_would_mean_something_else(self):
        for name in ("all", "peer", "Project", "claude", "codex", "AGY", "codex:x", "a]b", EVE):
            with self.subTest(name):
                peer(self.store, EVE)
                peer(self.store, ADA, "claude", title=name)
                self.assertEqual(ADA[:8], self.label(ADA))

    def test_that_looks_like_the_start_of_another_id_leads_to_its_bearer(self):
        peer(self.store, BOB)
        peer(self.store, ADA, "claude", title=BOB[:8])
        self.label(ADA)
        self.label(BOB)

    def test_of_a_session_that_was_never_registered_is_the_start_of_its_id(self):
        self.assertEqual(ADA[:8], xmsg.session_label(self.store, ADA))

    def test_given_by_the_sender_itself_leads_back_to_it(self):
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")
        self.home.xmsg("send", BOB, "x", "--no-direct", "--from", "my-own", session=ADA)
        self.assertIn("[peer my-own · claude:7c1f0a52;", self.home.context("codex", BOB, "PreToolUse"))
        sent = self.home.json("send", "my-own", "back", "--no-direct", session=BOB, host="codex")
        self.assertEqual(ADA, sent["messages"][0]["to"]["session"])


class ASession(HomeCase):
    """Live is a fact and not an age."""

    def setUp(self):
        super().setUp()
        self.store = self.open_store()

    def live(self, session, now=None):
        return xmsg.is_live(self.store, self.store.peer(session), now or now_ms())

    def test_is_live_while_its_process_runs_however_old_its_last_sign_is(self):
        host = HostProcess(self.home)
        self.addCleanup(host.end)
        peer(self.store, ADA, "claude", now=now_ms() - 20 * 86400000, pid=host.pid, pid_start=host.start)
        self.assertTrue(self.live(ADA))
        host.end()
        self.assertFalse(self.live(ADA))

    def test_is_not_live_in_a_process_that_merely_has_its_old_pid(self):
        peer(self.store, ADA, "claude", pid=os.getpid(), pid_start="1")
        self.assertFalse(self.live(ADA))

    def test_is_live_in_its_process_until_another_one_is_opened_there(self):
        host = HostProcess(self.home)
        self.addCleanup(host.end)
        host.hook("claude", ADA, "SessionStart")
        host.hook("claude", NEW, "SessionStart", source="resume")
        self.assertEqual((False, True), (self.live(ADA), self.live(NEW)))
        host.hook("claude", ADA, "SessionStart", source="resume")
        self.assertEqual((True, False), (self.live(ADA), self.live(NEW)))

    def test_without_a_fact_is_live_for_a_while_after_its_last_sign(self):
        now = now_ms()
        peer(self.store, AGY, "agy", now=now)
        stale = self.store.settings.peer_stale_seconds * 1000
        self.assertTrue(self.live(AGY, now + stale - 1))
        self.assertFalse(self.live(AGY, now + stale + 1000))
        self.store.heartbeat(AGY)
        os.utime(os.path.join(self.home.hints, "live", AGY), (now / 1000 + 600,) * 2)
        self.assertTrue(self.live(AGY, now + stale + 1000))

    def test_of_codex_is_live_while_somebody_holds_its_writer_lock(self):
        home = os.path.join(self.home.folder, ".codex")
        locks = os.path.join(home, "thread-writer-locks")
        os.makedirs(locks)
        rollout = home + "/sessions/2026/11/30/rollout-2026-11-30T22-23-02-%s.jsonl" % BOB
        peer(self.store, BOB, transcript=rollout, now=now_ms() - 86400000)
        path = os.path.join(locks, BOB + ".lock")
        open(path, "w").close()
        self.assertFalse(self.live(BOB))
        import fcntl
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.exists("/proc/locks"):
                self.skipTest("this system does not tell who holds a lock")
            self.assertTrue(self.live(BOB))
        self.assertFalse(self.live(BOB))

    def test_that_was_cleared_away_is_not_live(self):
        host = HostProcess(self.home)
        self.addCleanup(host.end)
        host.hook("claude", ADA, "SessionStart")
        host.hook("claude", NEW, "SessionStart", source="clear")
        self.assertEqual((False, True), (self.live(ADA), self.live(NEW)))


if __name__ == "__main__":
    unittest.main()
