"""Each fault that `doctor` names is made on purpose, and its advice, followed, makes the line turn green."""
import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import unittest

from support import (ADA, AGY, BOB, PYTHON, ROOT, HomeCase, HostProcess, copy_of_product, dead_process, environ, message,
                     peer, permissions_count, small_disk)
from side_by_side import load_tests  # noqa: F401
import command_line
import contract
import doctor
import hook_install
import store as store_module


class Case(HomeCase):
    """A home with the three hosts' folders. Checks that start processes stay out, but for their own tests."""

    SLOW = ("_hook", "_login_shell", "_interpreter")

    def setUp(self):
        super().setUp()
        for name in self.SLOW:
            self.replace(doctor, name, lambda *_: None)
        for folder in (".claude", ".codex", ".gemini/antigravity-cli", ".gemini/config"):
            os.makedirs(os.path.join(self.home.folder, folder))

    def replace(self, owner, name, value):
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.addCleanup(setattr, owner, name, before)

    def lines(self, **env):
        variables = {name: value for name, value in dict(self.home.env, **env).items() if value is not None}
        found = doctor.examine(contract.Settings(variables, []), variables)
        return {line["check"]: line for line in found}

    def line(self, check, **env):
        return self.lines(**env)[check]

    def assert_right(self, check, detail="", **env):
        line = self.line(check, **env)
        self.assertEqual((True, ""), (line["ok"], line["advice"]), line)
        self.assertIn(detail, line["detail"])

    def assert_named(self, check, detail, ok=False, **env):
        """The line of a fault; its advice."""
        line = self.line(check, **env)
        self.assertIs(ok, line["ok"], line)
        self.assertIn(detail, line["detail"])
        self.assertNotEqual("", line["advice"])
        return line["advice"]

    def follow(self, advice, **words):
        """Runs the first command that the advice names in backticks. words: what stands for ID and the like."""
        command = re.search("`([^`]+)`", advice).group(1)
        for word, value in words.items():
            command = command.replace(word, str(value))
        if command.startswith("xmsg "):
            return self.home.xmsg(*shlex.split(command)[1:])
        subprocess.run(["/bin/sh", "-c", command], check=True, cwd=self.home.folder)

    def write(self, name, text, mode=0o600):
        path = os.path.join(self.home.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, mode)
        return path


class TheSettings(Case):
    def test_that_are_bad_are_named_until_they_are_unset(self):
        advice = self.assert_named("settings", "XMSG_TTL_SECONDS=soon is not a number", XMSG_TTL_SECONDS="soon")
        self.assertIn("unset", advice)
        self.assert_right("settings", XMSG_TTL_SECONDS=None)


class TheStore(Case):
    def move_away(self, advice):
        self.assertIn("move it away", advice)
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.home.db + ending, self.home.db + ending + ".kept")

    def test_that_is_sound_tells_its_facts(self):
        self.assert_right("store", "schema %d, " % contract.SCHEMA)
        self.assert_right("store", "every page is sound")

    def test_that_is_no_database_or_has_a_damaged_page_is_left_and_can_be_moved_away(self):
        self.write("store/messages.sqlite3", "no database" * 1000)
        self.move_away(self.assert_named("store", "not a database"))
        self.assert_right("store")
        store = self.home.store()
        for number in range(60):
            message(store, BOB, "text %d " % number * 100)
        store.close()
        with open(self.home.db, "r+b") as file:
            file.seek(-4096 * 3, os.SEEK_END)
            file.write(b"\xff" * 8192)
        before = os.path.getsize(self.home.db)
        lines = self.lines()
        self.assertIs(False, lines["store"]["ok"])
        self.assertIn("sessions", lines)
        self.assertEqual(before, os.path.getsize(self.home.db))
        self.move_away(lines["store"]["advice"])
        self.assert_right("store")

    def test_that_is_read_only_is_still_reported_on_until_it_can_be_written(self):
        store = self.home.store()
        peer(store, BOB)
        row = message(store, BOB, "waits")
        store.close()
        folder = os.path.dirname(self.home.db)
        os.chmod(self.home.db, 0o400)
        os.chmod(folder, 0o500)
        self.addCleanup(os.chmod, folder, 0o700)
        done = self.home.run_xmsg("doctor", "--json", before=permissions_count)
        self.assertEqual(1, done.returncode, done.stderr)
        lines = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
        self.assertIs(False, lines["store"]["ok"])
        self.assertIn("make the file and its folder writable", lines["store"]["advice"])
        self.assertLessEqual({"hosts", "hook", "login shell", "clock", "UNKNOWN", "sessions"}, set(lines))
        self.assertTrue(lines["clock"]["ok"] and lines["UNKNOWN"]["ok"])
        os.chmod(folder, 0o700)
        os.chmod(self.home.db, 0o600)
        self.assert_right("store")
        self.assertEqual("queued", self.home.json("show", row["uid"])["state"])

    def test_on_a_full_disk_is_still_reported_on_until_there_is_room(self):
        with small_disk("1m") as disk:
            if disk is None:
                self.skipTest("only root can mount a small disk")
            env = {"XMSG_DB": os.path.join(disk, "messages.sqlite3"), "TMPDIR": disk}
            self.assert_right("store", **env)
            store = store_module.Store(self.home.settings(**env))
            with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(b"x" * 4096)
            with contextlib.suppress(contract.StoreError):  # what room the log still has
                while True:
                    message(store, BOB, "x" * 4000)
            done = self.home.run_xmsg("doctor", "--json", env=env)
            self.assertEqual(1, done.returncode, done.stderr)
            lines = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
            self.assertIs(False, lines["store"]["ok"])
            # On a full tmpfs SQLite sometimes calls it an I/O error.
            self.assertRegex(lines["store"]["advice"], "free some space|look at the disk|writable")
            self.assertLessEqual({"hosts", "hook", "faults", "settings"}, set(lines))
            os.unlink(os.path.join(disk, "filler"))
            store.close()
            self.assert_right("store", **env)

    def test_of_a_newer_xmsg_is_named_until_xmsg_is_updated(self):
        self.home.store().close()
        self.home.sql("pragma user_version = %d" % (contract.SCHEMA + 1))
        self.assertIn("update xmsg", self.assert_named("store", "newer xmsg"))
        newer = copy_of_product(self, ("contract.py", "SCHEMA = %d" % contract.SCHEMA, "SCHEMA = %d" % (contract.SCHEMA + 1)))
        code = "import sys, os; sys.path.append(sys.argv[1]); import contract, doctor; print(doctor._store(" \
               "contract.Settings(os.environ), lambda check, ok, *_: print(check, ok)))"
        done = self.home.run([PYTHON, "-c", code, newer])
        self.assertIn(b"store True\n", done.stdout, done.stderr)

    def test_that_somebody_holds_is_named_until_it_is_free(self):
        self.replace(doctor, "Store", functools.partial(store_module.Store, busy_seconds=0.01))
        other = self.open_store()
        with other.transaction():
            self.assertIn("try again", self.assert_named("store", "locked"))
        self.assert_right("store")

    def test_that_others_can_write_is_named_until_they_cannot(self):
        self.home.store().close()
        folder = os.path.dirname(self.home.db)
        os.chmod(folder, 0o777)
        advice = self.assert_named("store", folder)
        self.assertIn("chmod go-w", advice)
        subprocess.run(["/bin/sh", "-c", "chmod go-w %s" % shlex.quote(folder)], check=True)
        self.assert_right("store")

    def test_with_files_that_others_can_read_is_named_until_they_cannot(self):
        self.home.store().close()
        python = os.path.join(os.path.dirname(self.home.db), "python")
        for path in (python, self.write("store/messages.sqlite3.faults", ""), self.home.hints + "/peer"):
            os.chmod(path, os.stat(path).st_mode | 0o044)
            advice = self.assert_named("modes", path)
            subprocess.run(["/bin/sh", "-c", advice], check=True)
            self.assert_right("modes")

    def test_tells_what_the_sweep_cleared(self):
        store = self.home.store()
        message(store, BOB, now=contract.now_ms() - 7200000)
        store.close()
        self.assert_right("sweep", "1 expired")
        self.assert_right("sweep", "0 expired")


class TheInterpreter(Case):
    SLOW = ("_hook", "_login_shell")

    def test_that_is_unknown_gone_or_a_shim_is_replaced_by_install(self):
        record = os.path.join(os.path.dirname(self.home.db), "python")
        shim = self.write("shim/python3", "#!/bin/sh\nexec %s \"$@\"\n" % PYTHON, 0o700)
        for text, detail in ((None, "none is recorded"), ("/nowhere/python3\n", "gone"), (shim + "\n", "shim")):
            os.unlink(record)
            if text:
                self.write("store/python", text)
            self.follow(self.assert_named("interpreter", detail), **{"xmsg install": "xmsg install --host agy"})
            self.assert_right("interpreter", PYTHON)


class TheHosts(Case):
    def test_are_told_with_their_versions(self):
        for name in (".claude", ".codex"):
            os.rmdir(os.path.join(self.home.folder, name))
        self.home.run(["rm", "-r", ".gemini"])
        none = {"PATH": self.home.folder + "/bin"}
        self.assertIn("install", self.assert_named("hosts", "none found", None, **none))
        self.write("bin/codex", "#!/bin/sh\necho 'WARNING: x' >&2; echo codex-cli 0.171.0\n", 0o700)
        self.write("bin/claude", "#!/bin/sh\necho '2.1.332 (Claude Code)'\n", 0o700)
        self.write("bin/agy", "#!/bin/sh\nexit 1\n", 0o700)
        self.assert_right("hosts", "claude 2.1.332, codex 0.171.0, agy (its program does not tell", **none)

    def test_that_hang_cost_a_bounded_time(self):
        self.replace(doctor, "VERSION_SECONDS", 0.05)
        self.write("bin/claude", "#!/bin/sh\nexec sleep 60\n", 0o700)
        begin = time.monotonic()
        self.assert_right("hosts", "claude (its program does not tell", PATH=self.home.folder + "/bin:/usr/bin:/bin")
        self.assertLess(time.monotonic() - begin, 10)


class TheHooks(Case):
    def config(self, host):
        return hook_install.config_path(host, self.home.env)

    def put(self, host, value):
        with open(self.config(host), "w") as file:
            file.write(value if isinstance(value, str) else json.dumps(value))

    def value(self, host):
        with open(self.config(host)) as file:
            return json.load(file)

    def test_that_are_missing_partial_or_another_copys_are_installed_as_the_advice_says(self):
        for host in hook_install.HOSTS:
            check = host + " hooks"
            self.follow(self.assert_named(check, "absent (%s)" % self.config(host)))
            self.assert_right(check, "installed")
            self.put(host, {})
            self.follow(self.assert_named(check, "missing ("))
            value = self.value(host)
            del value[hook_install.HOLDER[host]]["Stop"]
            self.put(host, value)
            self.follow(self.assert_named(check, "missing Stop"))
            self.assert_right(check)
            self.put(host, json.dumps(self.value(host)).replace(ROOT, "/opt/other"))
            self.follow(self.assert_named(check, "another form in Stop: /opt/other"))
            self.assert_right(check)

    def test_in_a_file_that_the_host_does_not_load_are_named_with_the_place(self):
        for host, text, place, mended in (
                ("claude", '{\n  "model": "x",\n}', "3:1: a comma", '{\n  "model": "x"\n}'),
                ("codex", "{\n// why\n}", "2:1: a comment", "{}"),
                ("agy", '{"other": {"Stop": [}}', "1:21: a value", '{"other": {"Stop": []}}')):
            self.put(host, text)
            advice = self.assert_named(host + " hooks", "unreadable (%s): %s" % (self.config(host), place))
            self.assertIn("correct %s by hand" % self.config(host), advice)
            self.put(host, mended)
            self.follow(advice)
            self.assert_right(host + " hooks")

    def test_that_the_host_ignores_all_the_same_are_named_with_the_reason(self):
        for host in hook_install.HOSTS:
            self.home.xmsg("install", "--host", host)
        for host, change, reason in (("claude", {"disableAllHooks": True}, "switches all hooks off"),
                                     ("codex", {"$schema": "x"}, "Codex loads no file"),
                                     ("agy", {"other": {"Stop": [{"command": "x", "timeout": 1.5}]}}, "agy loads no file")):
            value = self.value(host)
            self.put(host, dict(value, **change))
            self.assertIn("by hand", self.assert_named(host + " hooks", reason))
            self.put(host, value)
            self.assert_right(host + " hooks")
        self.assert_right("agy hooks", "strictly valid")

    def test_that_were_never_seen_running_are_named_until_one_runs(self):
        for host, session, event in (("claude", ADA, "PreToolUse"), ("codex", BOB, "UserPromptSubmit"),
                                     ("agy", AGY, "PreInvocation")):
            advice = self.assert_named(host + " hooks seen", "none has run", None)
            self.assertIn("say a word", advice)
            self.home.hook(host, session, event)
            self.assert_right(host + " hooks seen", event + ", 0s ago")


class CodexTrust(Case):
    def confirm(self, home=None):
        """What Codex writes when its user chooses "Trust all and continue"."""
        entries = hook_install.codex_trust(self.home.env)
        with open(hook_install.config_path("codex", self.home.env)) as file:
            hooks = json.load(file)["hooks"]
        text = ""
        for entry in entries:
            group = hooks[entry["event"]][int(entry["key"].split(":")[-2])]
            text += '[hooks.state."%s"]\ntrusted_hash = "%s"\n' % (
                entry["key"].replace(self.home.folder, home or self.home.folder),
                hook_install._hook_hash(entry["event"], group, group["hooks"][0]))
        self.write(".codex/config.toml", text)
        return text

    def test_that_is_missing_is_named_until_the_user_confirms(self):
        self.home.xmsg("install", "--host", "codex")
        advice = self.assert_named("codex trust", "untrusted: SessionStart, UserPromptSubmit, PreToolUse, PostToolUse, Stop")
        self.assertIn("Trust all and continue", advice)
        self.confirm()
        self.assert_right("codex trust", "by " + os.path.join(self.home.folder, ".codex", "config.toml"))

    def test_that_was_for_another_form_or_switched_off_is_named(self):
        self.home.xmsg("install", "--host", "codex")
        confirmed = self.confirm()
        self.write(".codex/config.toml", confirmed.replace('"sha256:', '"sha256:0', 1))
        self.assert_named("codex trust", "changed: SessionStart; trusted: UserPromptSubmit")
        self.write(".codex/config.toml", confirmed + "enabled = false\n")
        self.assertIn("/hooks", self.assert_named("codex trust", "disabled: Stop"))
        self.confirm()
        self.assert_right("codex trust")

    def test_of_a_copied_codex_home_is_none_and_the_line_says_so(self):
        self.home.xmsg("install", "--host", "codex")
        self.confirm("/home/original")
        advice = self.assert_named("codex trust", "the consent for /home/original/.codex/hooks.json:session_start:0:0 does "
                                                  "not count in this place")
        self.assertIn("copied CODEX_HOME", advice)
        self.confirm()
        self.assert_right("codex trust")

    def test_in_a_file_that_cannot_be_read_is_named(self):
        self.write(".codex/hooks.json", "{")
        self.assertIn("correct the file", self.assert_named("codex trust", "1:2"))
        self.write(".codex/hooks.json", "{}")
        self.home.xmsg("install", "--host", "codex")
        self.confirm()
        self.assert_right("codex trust")


class TheAppServer(Case):
    def test_that_does_not_listen_on_its_socket_is_named_until_it_does(self):
        self.assertNotIn("codex app-server", self.lines())
        folder = os.path.join(self.home.folder, ".codex", "app-server-control")
        path = os.path.join(folder, "app-server-control.sock")
        os.mkdir(folder, 0o700)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
        self.assertIn("restart it", self.assert_named("codex app-server", path, None))
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            self.assert_right("codex app-server", "listens on " + path)
            # With a session that would go by it, its silence is a fault of its own.
            session = HostProcess(self.home, "codex")
            self.addCleanup(session.end)
            self.assertIn("restart it", self.assert_named("codex app-server", "did not answer in time", None))


class AgysProgram(Case):
    def test_that_is_not_to_be_found_is_named_until_it_is(self):
        here = {"HOME": self.home.folder, "PATH": self.home.folder + "/bin"}
        with environ(**here):
            self.assertIn("put `agy` on PATH", self.assert_named("agy program", "is not woken", None, **here))
            path = self.write("bin/agy", "#!/bin/sh\necho 1.2.4\n", 0o700)
            self.assert_right("agy program", path, **here)


class TheSpool(Case):
    def test_with_files_of_an_open_session_is_named_until_its_own_hook_takes_them(self):
        self.home.hook("codex", BOB, "SessionStart")
        self.assert_right("spool")
        folder = contract.spool_folders(self.home.db, self.home.env)[0]
        self.addCleanup(shutil.rmtree, folder, True)
        for path in (folder, os.path.join(folder, BOB)):
            os.mkdir(path, 0o700)
        with open(os.path.join(folder, BOB, "0" * 16), "w") as file:
            file.write("no message\n")
        self.assertIn("next tool call", self.assert_named("spool", "wait for a hook of " + BOB, None))
        self.home.hook("codex", BOB, "PreToolUse")
        self.assert_right("spool")


class WhatAHookTakes(Case):
    SLOW = ()

    def setUp(self):
        super().setUp()
        for name in ("_interpreter", "_hosts", "_hooks", "_codex_trust"):
            self.replace(doctor, name, lambda *_: None)

    def test_in_a_slow_login_shell_is_named_until_its_files_are_faster(self):
        self.replace(doctor, "_hook", lambda *_: None)
        self.replace(doctor, "SLOW_LOGIN_SHELL", 0.8)
        shell = self.write("shell", "#!/bin/sh\nsleep 0.8\n", 0o700)
        self.assertIn("login files faster", self.assert_named("login shell", shell + " -lc takes ", None, SHELL=shell))
        self.write("shell", "#!/bin/sh\n", 0o700)
        self.assert_right("login shell", SHELL=shell)
        self.assert_named("login shell", "does not answer", None, SHELL="/nowhere/sh")

    def test_that_fails_or_is_slow_is_named_until_it_is_mended_and_install_records_a_real_interpreter(self):
        self.replace(doctor, "_login_shell", lambda *_: None)
        self.replace(doctor, "SLOW_HOOK", 0.8)
        here = doctor.HERE
        self.replace(doctor, "HERE", copy_of_product(self, ("xmsg.py", "def run_hook(", "def run_it(")))
        self.assertIn("look at the faults", self.assert_named("hook", "did not come through"))
        doctor.HERE = here
        shim = self.write("shim/python3", "#!/bin/sh\nsleep 0.8\nexec %s \"$@\"\n" % PYTHON, 0o700)
        self.write("store/python", shim + "\n")
        advice = self.assert_named("hook", "ms with mail")
        self.write("shim/python3", "#!/bin/sh\nexec %s \"$@\"\n" % PYTHON, 0o700)
        self.follow(advice, **{"xmsg install": "xmsg install --host agy"})
        self.assert_right("hook", "ms with mail")


class TheFaults(Case):
    def test_that_hooks_swallowed_are_counted_until_they_are_mended_and_removed(self):
        self.home.store().close()
        self.assert_right("faults", "no hook has failed")
        for _ in range(2):
            self.home.raw_hook(["codex"], b"{")
        advice = self.assert_named("faults", "2 swallowed, the newest 0s ago, codex : BadPayload: not JSON")
        self.follow(advice)
        self.assert_right("faults")


class TheClock(Case):
    def test_that_was_ahead_is_named_until_it_is_right(self):
        store = self.home.store()
        message(store, BOB, now=contract.now_ms() + 7200000)
        store.close()
        self.replace(store_module.Store, "sweep", lambda *_, **__: {})
        self.assertIn("set the clock", self.assert_named("clock", "times 1h ahead"))
        later = contract.now_ms() + 7200000
        self.replace(doctor, "now_ms", lambda: later)
        self.assert_right("clock")


class TheHints(Case):
    def test_that_disagree_with_the_rows_are_repaired_and_that_is_said(self):
        store = self.open_store()
        message(store, BOB)
        os.unlink(self.home.hint(BOB))
        store.raise_hint(ADA)
        self.assert_right("hints", "repaired: 1 missing, 1 of no mail")
        self.assertTrue(os.path.exists(self.home.hint(BOB)))
        self.assert_right("hints", "agree with the store")


class TheRows(Case):
    def setUp(self):
        super().setUp()
        self.store = self.open_store()
        self.row = message(self.store, BOB)

    def put(self, state, holder=(None, None)):
        self.home.sql("update messages set state = ?, holder_pid = ?, holder_start = ?", (state, *holder))

    def test_that_are_unknown_are_named_until_a_person_resolves_them(self):
        for state in ("hook-inflight", "direct-uncertain"):
            self.put(state, dead_process())
            advice = self.assert_named("UNKNOWN", "messages #1")
            self.follow(advice, **{"ID": 1, "--delivered|--requeue|--drop": "--drop"})
            self.assert_right("UNKNOWN", "none")

    def test_that_are_held_are_named_until_the_user_there_answers(self):
        self.put("held", (os.getpid(), "1"))
        self.home.sql("update messages set target_host = 'claude'")
        self.assertIn("answer there", self.assert_named("held", "messages #1", None))
        with self.store.transaction():
            self.store.move(self.store.by_id(1), "delivered", contract.now_ms(), window="uds-direct")
        self.assert_right("held", "none")

    def test_that_wait_for_a_closed_session_are_named_until_it_is_open_or_they_are_cancelled(self):
        self.follow(self.assert_named("waiting", "messages #1", None), ID=1)
        self.assert_right("waiting")
        message(self.store, BOB)
        self.assertIn("open them again", self.assert_named("waiting", "messages #2", None))
        self.home.hook("codex", BOB, "Stop", stop_hook_active=True)
        self.assert_right("waiting")


class TheSessions(Case):
    def test_are_counted_and_without_any_the_line_says_how_one_appears(self):
        self.assertIn("first hook", self.assert_named("sessions", "0 open", None))
        self.home.hook("codex", BOB, "SessionStart")
        self.assert_right("sessions", "1 open")


class AProbe(HomeCase):
    """`doctor --probe`, in this process, with little patience."""

    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, command_line, "WAIT_SECONDS", command_line.WAIT_SECONDS)
        command_line.WAIT_SECONDS = 0.2
        self.home.hook("codex", BOB, "SessionStart")

    def probe(self, hear=lambda line: None, json=False):
        """(status, the lines that it prints); hear(line) is called as each is printed."""
        lines = []

        def out(line):
            lines.append(line)
            hear(line)
        options = argparse.Namespace(probe=BOB, json=json)
        return command_line.run_doctor(options, self.home.settings(), out), lines

    def test_of_a_quiet_session_says_what_it_waits_for_and_is_withdrawn(self):
        status, lines = self.probe()
        self.assertEqual(1, status)
        self.assertRegex(lines[0], r"queued \(direct: .+\); it waits up to .* a prompt, a tool call")
        self.assertRegex(lines[1], "no window took it .* withdrawn")
        self.assertEqual(["cancelled"], self.home.states())
        self.assertIsNone(self.home.context("codex", BOB, "PreToolUse"))

    def test_tells_the_window_that_carried_it_and_how_long_that_took(self):
        shown = []

        def hear(line):
            if line.startswith("queued"):
                shown.append(self.home.context("codex", BOB, "PreToolUse"))
        status, lines = self.probe(hear)
        self.assertEqual(contract.UNKNOWN_STATUS, status)  # there is no transcript to prove it
        self.assertRegex(lines[1], r"delivered by PreToolUse after \d\.\d s, not confirmed")
        self.assertRegex(shown[0], r"\A\[local notification [^\n]+\]\nprobe [0-9a-f]{8} of `xmsg doctor`; nothing is to be done\Z")

    def test_that_is_interrupted_is_withdrawn_and_has_no_long_life_anyhow(self):
        def interrupt(*_):
            raise KeyboardInterrupt
        self.addCleanup(setattr, command_line, "wait_for_proof", command_line.wait_for_proof)
        command_line.wait_for_proof = interrupt
        with self.assertRaises(KeyboardInterrupt):
            self.probe()
        self.assertEqual([("cancelled", 5200)], self.home.sql("select state, expires_at - created_at from messages"))

    def test_in_json_is_one_message_and_two_times(self):
        status, lines = self.probe(json=True)
        report = json.loads("".join(lines))
        self.assertEqual(("cancelled", None, None), (
            report["messages"][0]["state"], report["seconds"], report["confirmed_seconds"]))


class TheWhole(Case):
    def test_is_well_only_when_nothing_is_wrong_and_the_exit_status_says_so(self):
        self.home.run(["rm", "-r", ".gemini", ".codex"])
        report = self.home.json("doctor", status=1)
        self.assertFalse(report["well"])
        slow = ["hook"]  # as it truly is on a machine that is busy with tests
        wrong = [line["check"] for line in report["checks"] if line["ok"] is False and line["check"] not in slow]
        self.assertEqual(["claude hooks"], wrong)
        self.home.xmsg("install")
        text = self.home.xmsg("doctor")
        self.assertNotRegex(text, r"(?m)^WRONG  (?!hook )")
        self.assertRegex(text, r"(?m)^ok     store              /")
        self.assertRegex(text, r"(?m)^note   claude hooks seen  none has run here yet\n       -> say a word")

    def test_goes_on_after_a_check_that_fails(self):
        def fails(*_):
            raise OSError(28, "No space left on device")
        fails.__name__ = "_hook"
        self.replace(doctor, "_hook", fails)
        self.assert_named("hook", "No space left on device")
        self.assert_right("clock")


if __name__ == "__main__":
    unittest.main()
