"""What a TARGET means: full id, exact name, unique prefix; one host's sessions; groups; what is refused and how."""
import json
import os
import random
import unittest

from support import ADA, BOB, EVE, HomeCase, HostProcess, dead_process, peer, wait_until
from side_by_side import load_tests  # noqa: F401
import contract
import xmsg
from contract import Ambiguous, NoSuchTarget, RemoteError, UsageError, now_ms


class Case(HomeCase):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.dead = dead_process()

    def peer(self, session, host="codex", live=True, **columns):
        if not live:
            columns.update(pid=self.dead[0], pid_start=self.dead[1])
        return peer(self.store, session, host, **columns)

    def resolve(self, spec, own="", force=False):
        return [found["session"] for found in xmsg.resolve(self.store, spec, {"self": own}, force)]

    def assertMeans(self, session, spec, **options):
        self.assertEqual([session], self.resolve(spec, **options), spec)


class ATarget(Case):
    def test_is_a_full_id_then_an_exact_name_then_a_unique_prefix(self):
        self.peer("abcd1234-full")
        self.peer("abcd5678-x", name="abcd1234-full")  # a name that is another session's id loses to it
        self.peer("efgh1234-y", name="abcd")           # a name that is the start of other ids wins over them
        self.assertMeans("abcd1234-full", "abcd1234-full")
        self.assertMeans("efgh1234-y", "abcd")
        self.assertMeans("abcd5678-x", "abcd5")
        self.assertMeans("efgh1234-y", "efgh1234")

    def test_is_a_name_in_any_case_and_a_full_id_only_as_it_is(self):
        self.peer(BOB, name="Leader")
        for spec in ("leader", "LEADER", " leader ", "lead\u200ber"):
            self.assertMeans(BOB, spec)
        with self.assertRaises(NoSuchTarget):
            self.resolve(BOB.upper())
        with self.assertRaises(NoSuchTarget):
            self.resolve("lead")

    def test_is_a_name_that_was_given_before_a_hosts_title_and_both_lead_there(self):
        self.peer(BOB, title="deploy")
        self.peer(EVE, name="deploy", title="other")
        self.assertMeans(EVE, "deploy")
        self.assertMeans(EVE, "other")
        self.store.set_name(EVE, "")
        self.assertMeans(BOB, "deploy")

    def test_is_the_live_one_of_several_with_a_name(self):
        self.peer(BOB, name="leader", live=False)
        self.peer(EVE, title="leader")
        self.assertMeans(EVE, "leader")
        self.assertMeans(BOB, BOB)

    def test_that_has_ended_is_still_reached_when_it_is_the_only_one(self):
        self.peer(BOB, name="leader", live=False)
        self.assertMeans(BOB, "leader")
        self.assertMeans(BOB, BOB[:8])

    def test_by_prefix_needs_four_characters_of_which_only_one_id_has(self):
        self.peer("abcd1234")
        self.peer("abce1234")
        self.assertMeans("abcd1234", "abcd")
        for spec in ("abc", "a", "ab"):
            with self.assertRaises(NoSuchTarget):
                self.resolve(spec)
        self.peer("abcd1235")
        with self.assertRaises(Ambiguous):
            self.resolve("abcd")

    def test_by_prefix_never_takes_a_letter_for_a_pattern(self):
        self.peer("abcd1234")
        for spec in ("%bcd", "abc_", "____", "ab*d", "abc[d]", "abcd%"):
            with self.assertRaises(NoSuchTarget):
                self.resolve(spec)

    def test_within_one_host_is_looked_for_among_its_sessions_only(self):
        self.peer(ADA, "claude", name="leader")
        self.peer(BOB, "codex", name="Leader")
        with self.assertRaises(Ambiguous):
            self.resolve("leader")
        self.assertMeans(ADA, "claude:leader")
        self.assertMeans(BOB, "codex:leader")
        self.assertMeans(BOB, "codex:" + BOB[:8])
        self.assertMeans(BOB, "codex:" + BOB)
        for spec in ("agy:leader", "claude:" + BOB, "claude:" + BOB[:8], "codex:" + ADA):
            with self.assertRaises(NoSuchTarget):
                self.resolve(spec)

    def test_with_a_colon_is_of_a_host_or_of_another_machine_and_never_a_name(self):
        self.peer(BOB, title="team:leader")
        with self.assertRaisesRegex(NoSuchTarget, "team is no host, and no machine"):
            self.resolve("team:leader")
        self.assertMeans(BOB, "codex:team:leader")

    def test_that_is_ambiguous_lists_every_candidate_with_its_full_id(self):
        self.peer(BOB, name="leader")
        self.peer(EVE, title="leader")
        self.peer(ADA, "claude", title="leader")
        for spec, sessions in (("codex:01a0", (BOB, EVE)), ("01a04cd2", (BOB, EVE))):
            with self.assertRaisesRegex(Ambiguous, "means 2 sessions") as caught:
                self.resolve(spec)
            self.assertEqual(set(sessions), {line.split()[0] for line in caught.exception.candidates})
        self.store.set_name(BOB, "")
        with self.assertRaises(Ambiguous) as caught:
            self.resolve("leader")
        self.assertEqual({EVE, ADA}, {line.split()[0] for line in caught.exception.candidates})

    def test_that_several_dead_sessions_share_is_ambiguous(self):
        self.peer(BOB, title="leader", live=False)
        self.peer(EVE, title="leader", live=False)
        with self.assertRaises(Ambiguous):
            self.resolve("leader")

    def test_that_is_empty_is_refused_with_a_way_on(self):
        for spec in ("", " ", "\t\n"):
            with self.assertRaisesRegex(UsageError, "xmsg list"):
                self.resolve(spec)

    def test_that_nobody_is_called_says_how_to_find_one(self):
        with self.assertRaisesRegex(NoSuchTarget, "xmsg list --all"):
            self.resolve("nobody")
        with self.assertRaisesRegex(NoSuchTarget, "--force"):
            self.resolve(BOB)

    def test_by_force_is_a_full_id_that_nobody_knows(self):
        self.assertMeans("unknown-id", "unknown-id", force=True)
        self.assertMeans("unknown-id", "codex:unknown-id", force=True)
        for spec in ("-p", "a b", "../x", "\x1b"):
            with self.assertRaises(NoSuchTarget):
                self.resolve(spec, force=True)

    def test_is_never_oneself(self):
        self.peer(BOB, name="leader")
        for spec in (BOB, "leader", BOB[:8], "codex:leader"):
            with self.assertRaisesRegex(UsageError, "itself"):
                self.resolve(spec, own=BOB)
            self.assertMeans(BOB, spec, own=EVE)

    def test_on_another_machine_is_never_looked_for_on_this_one(self):
        self.peer(BOB, name="peer")
        for spec in ("peer", "peer:leader", "peer:"):
            with self.assertRaises(RemoteError):
                self.resolve(spec)

    def test_leads_from_a_cleared_session_to_the_one_in_its_place(self):
        self.peer(ADA, "claude", name="leader")
        self.peer(EVE, "claude")
        self.store.register({"session": EVE, "host": "claude"}, now_ms(), self.store.peer(ADA))
        for spec in (ADA, ADA[:8], "leader", "claude:" + ADA):
            self.assertMeans(EVE, spec)
        with self.assertRaisesRegex(UsageError, "itself"):
            self.resolve(ADA, own=EVE)

    def test_full_of_control_characters_never_reaches_the_terminal_raw(self):
        for spec in ("\x1b[31mred", "a\u202eb", "x\ny", "\x9b0m"):
            with self.assertRaises(NoSuchTarget) as caught:
                self.resolve(spec)
            self.assertFalse(any(contract.is_invisible(char) for char in str(caught.exception)), ascii(str(caught.exception)))

    def test_of_random_registries_follows_the_order_of_the_rules(self):
        """The rules said again in the plainest way, over small ids and names that collide often."""
        pick = random.Random(13)
        for trial in range(150):
            sessions = {}
            self.store._execute("delete from peers")
            for _ in range(pick.randrange(1, 6)):
                session = "".join(pick.choice("ab") for _ in range(pick.choice((4, 5, 6))))
                if session in sessions:
                    continue
                name = pick.choice(["", "", "abab", "aaaa", "x", "ABAB", session[:4]])
                sessions[session] = (name, pick.random() < 0.6)
                self.peer(session, live=sessions[session][1], name=name)
            for spec in ("abab", "aaaa", "x", "baba", "abb", *sessions):
                named = [session for session, (name, _) in sessions.items() if name.casefold() == spec.casefold()]
                live = [session for session in named if sessions[session][1]]
                begun = [session for session in sessions if session.startswith(spec)] if len(spec) > 3 else []
                expected = [spec] if spec in sessions else live or named or begun
                try:
                    found = self.resolve(spec)
                except Ambiguous as error:
                    found = [line.split()[0] for line in error.candidates]
                    self.assertGreater(len(expected), 1, (sessions, spec))
                except NoSuchTarget:
                    found = []
                self.assertEqual(sorted(expected), sorted(found), (sessions, spec))


class AGroup(Case):
    def setUp(self):
        super().setUp()
        self.work = os.path.join(self.home.folder, "work")
        os.makedirs(os.path.join(self.work, ".git"))
        self.peer(ADA, "claude", cwd=self.work, project=self.work)
        self.peer(BOB, "codex", cwd=self.work, project=self.work)
        self.peer(EVE, "codex", cwd="/elsewhere", project="/elsewhere")
        self.peer("dead-claude", "claude", cwd=self.work, project=self.work, live=False)

    def test_is_everybody_live_but_oneself(self):
        self.assertEqual({BOB, EVE}, set(self.resolve("all", own=ADA)))
        self.assertEqual({ADA, BOB, EVE}, set(self.resolve("all")))

    def test_is_the_live_sessions_of_the_project(self):
        self.assertEqual([BOB], self.resolve("project", own=ADA))
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.makedirs(os.path.join(self.work, "deep"))
        os.chdir(os.path.join(self.work, "deep"))
        self.assertEqual({ADA, BOB}, set(self.resolve("project")))

    def test_is_all_live_sessions_of_a_host(self):
        self.assertEqual({BOB, EVE}, set(self.resolve("codex:", own=ADA)))
        self.assertEqual([EVE], self.resolve("codex:", own=BOB))

    def test_of_nobody_is_refused(self):
        for spec, own in (("claude:", ADA), ("agy:", ""), ("project", EVE)):
            with self.assertRaisesRegex(NoSuchTarget, "nobody else is live"):
                self.resolve(spec, own=own)

    def test_has_a_name_that_no_session_can_take(self):
        self.store.set_name(BOB, "all")
        self.store.set_name(EVE, "project")
        self.assertEqual({ADA, BOB, EVE}, set(self.resolve("all")))
        self.home.hook("codex", BOB, "SessionStart")
        for word in contract.RESERVED_NAMES + ("ALL", "Codex"):
            out = self.home.xmsg("name", BOB, word, status=2)
            self.assertIn("word of xmsg's own", out)


class ANameThatIsGiven(HomeCase):
    def setUp(self):
        super().setUp()
        self.home.hook("claude", ADA, "SessionStart")
        self.home.hook("codex", BOB, "SessionStart")

    def test_can_be_typed_back_as_it_is(self):
        for word in ("two words", "a:b", "[x]", "-x", "x" * 81, "a\x1bb", "a\u202eb", "tab\tbed"):
            self.home.xmsg("name", "--", BOB, word, status=2)
        for word in ("leader", "队长", "v1.2_x", "naïve"):
            self.home.xmsg("name", BOB, word)
            self.assertEqual(BOB, self.home.json("find", "--exact", word)["sessions"][0]["session"])

    def test_belongs_to_one_live_session(self):
        self.home.xmsg("name", BOB, "leader")
        self.assertIn(BOB, self.home.xmsg("name", ADA, "Leader", status=2))
        self.home.xmsg("name", BOB, "Leader")
        self.home.xmsg("name", BOB, "")
        self.home.xmsg("name", ADA, "leader")

    def test_is_never_the_start_of_another_sessions_id(self):
        self.assertIn("id begins", self.home.xmsg("name", ADA, BOB[:8], status=2))
        self.home.xmsg("name", ADA, ADA[:8])

    def test_may_be_given_by_the_session_to_itself(self):
        self.home.xmsg("name", ".", "me", session=ADA)
        self.assertEqual("me", self.home.json("find", ADA)["sessions"][0]["name"])
        self.assertIn("not a session", self.home.xmsg("name", ".", "me", status=2))


class AnOpenSession(HomeCase):
    """One that its host tells of, before any hook of it has run."""

    def test_is_a_target_by_id_title_and_prefix_before_its_first_hook(self):
        import host_process
        host = HostProcess(self.home)
        self.addCleanup(host.end)
        config = os.path.join(self.home.folder, ".claude")
        os.makedirs(os.path.join(config, "sessions"), 0o700)
        with open(os.path.join(config, "sessions", "%d.json" % host.pid), "w") as file:
            json.dump({"pid": host.pid, "sessionId": ADA, "cwd": self.home.folder, "procStart": host.start,
                       "version": "2.1.332", "name": "alpha", "nameSource": "user", "status": "idle",
                       "updatedAt": now_ms()}, file)
        wait_until(lambda: host_process.alive(host.pid, host.start), "the stand-in runs")
        for spec in (ADA, "ALPHA", ADA[:6], "claude:alpha"):
            self.assertEqual(ADA, self.home.json("find", "--exact", spec)["sessions"][0]["session"])
        self.assertIn("--force", self.home.xmsg("send", "alpha", "x", status=3))


if __name__ == "__main__":
    unittest.main()
