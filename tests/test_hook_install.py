"""The installer: other people's files keep their bytes, whatever they look like and whatever happens meanwhile."""
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from side_by_side import load_tests  # noqa: E402, F401
import hook_install  # noqa: E402

WRAPPER = "/path/to/xmsg/xmsg-hook.sh"
EARLIER = "/opt/earlier/xmsg-hook.sh"
FOREIGN = {"type": "command", "command": "notify 'ünï 漢' --now", "timeout": 7}
BOTH = ("claude", "codex")


def group(*handlers, **fields):
    return dict(fields, hooks=list(handlers))


def command(words, wrapper=WRAPPER, **fields):
    return dict({"type": "command", "command": "%s %s" % (wrapper, words), "timeout": 5}, **fields)


def with_hooks(host, event="Stop"):
    """A file with another tool's hook, at an event that is also ours."""
    return {"other": {event: [FOREIGN]}} if host == "agy" else {"hooks": {event: [group(FOREIGN, matcher="Bash")]}}


def pretty(value, indent=2, end="\n"):
    return json.dumps(value, indent=indent, ensure_ascii=False) + end


# name: the bytes of a file by host. Install adds to each of them, and uninstall gives the same bytes back.
STARTING_POINTS = {
    "an empty object": lambda host: b"{}",
    "an empty object with room": lambda host: b" {\n\n}\n\n",
    "an empty file": lambda host: b"",
    "a blank file": lambda host: b"\n \r\n",
    "hooks that are empty": lambda host: pretty({hook_install.HOLDER[host]: {}}).encode(),
    "an event that is empty": lambda host: pretty({hook_install.HOLDER[host]: {"Stop": []}}).encode(),
    "other hooks at other events": lambda host: pretty(with_hooks(host, "PreCompact")).encode(),
    "other hooks at our events": lambda host: pretty(with_hooks(host)).encode(),
    "four spaces": lambda host: pretty(with_hooks(host), 4).encode(),
    "no indentation": lambda host: pretty(with_hooks(host), 0).encode(),
    "tabs": lambda host: pretty(with_hooks(host), "\t").encode(),
    "one line": lambda host: json.dumps(with_hooks(host)).encode(),
    "one line without spaces": lambda host: json.dumps(with_hooks(host), separators=(",", ":")).encode(),
    "lists on one line in a file of many": lambda host: (
        '{\n  "hooks": {\n    "Stop": [ %s ],\n    "SessionStart": []\n  }\n}' % json.dumps(group(FOREIGN))).encode()
    if host != "agy" else b'{\n  "other": {"Stop": [ {"type": "command", "command": "a"} ]}\n}',
    "line ends of Windows": lambda host: pretty(with_hooks(host)).replace("\n", "\r\n").encode(),
    "no final newline": lambda host: pretty(with_hooks(host), end="").encode(),
    "several final newlines": lambda host: pretty(with_hooks(host), end="\n\n\n").encode(),
    "odd spacing": lambda host: pretty(with_hooks(host)).replace(": ", "  :\t").replace(",\n", " ,\n\n").encode(),
    "unicode in the raw and escaped": lambda host: (
        '{"description": "\u2028 \\u6f22 \\ud83d\\ude00 漢 😀 \\/"}' if host == "codex" else
        '{"other": {"k\\u00e9y": "\u2028 \\u6f22 \\ud83d\\ude00 漢 😀 \\/"}}').encode(),
    "numbers as they were written": lambda host: b'{"description": "", "hooks": {"Stop": [{"x": 1.50e+1, "y": -0}]}}'
    if host != "agy" else b'{"other": {"n": 1.50e+1, "Stop": [{"timeout": 1, "y": -0}]}}',
    "a large file": lambda host: pretty(
        {"hooks": {"PreCompact": [group(dict(FOREIGN, command="tool %d" % number)) for number in range(1000)]}}
        if host != "agy" else {"tool-%d" % number: {"PreCompact": [FOREIGN]} for number in range(1000)}).encode(),
    "groups of a kind unknown to us": lambda host: pretty(
        {"hooks": {"Stop": [{}, {"hooks": []}, {"matcher": "x"}, 5, "y", group({"type": "prompt"})]}}
        if host != "agy" else {"other": {"Stop": [None, 7, {}]}, "third": {"Stop": {}}}).encode(),
}
# name: (hosts, bytes, what the record says). The file stays as it is.
REFUSED = {
    "a line comment": (hook_install.HOSTS, b'{\n  // note\n  "hooks": {}\n}', "2:3: a comment"),
    "a block comment": (hook_install.HOSTS, b'{"a": /* note */ {}}', "1:7: a comment"),
    "a trailing comma in an object": (hook_install.HOSTS, b'{"a": {},\n}', "2:1: a comma before the closing }"),
    "a trailing comma in a list": (hook_install.HOSTS, b'{"a": {"b": [1, ]}}', "1:17: a comma before the closing ]"),
    "half a file": (hook_install.HOSTS, b'{"hooks": {"Stop": [', "1:21: the text ends where a value should be"),
    "a list": (hook_install.HOSTS, b"[]\n", "1:1: the file should hold an object"),
    "two texts": (hook_install.HOSTS, b"{}\n{}", "2:1: the end of the text should be here"),
    "an open string": (hook_install.HOSTS, b'{"a": "' + b"x" * 50000, "1:7: a string that is not closed"),
    "a tab in a string": (hook_install.HOSTS, b'{"a": "x\ty"}', "1:7: a string"),
    "an escape that JSON does not know": (hook_install.HOSTS, b'{"a": "\\q"}', "1:7: a string"),
    "a bare word": (hook_install.HOSTS, b'{"a": NaN}', "1:7: a value should be here"),
    "a leading zero": (hook_install.HOSTS, b'{"a": 01}', "1:7: a value should be here"),
    "another encoding": (hook_install.HOSTS, '{"a": {}}'.encode("utf-16"), "1:1: not UTF-8"),
    "a torn character": (hook_install.HOSTS, '{\n"ü": "'.encode() + b"\xc3", "2:7: not UTF-8"),
    "a byte order mark in Codex's file": (("codex",), hook_install.BOM + b"{}", "1:1: a byte order mark"),
    "hooks that are a list": (BOTH, b'{\n"hooks": []}', '2:10: "hooks" should be an object'),
    "hooks that are null": (BOTH, b'{"hooks": null}', '1:11: "hooks" should be an object'),
    "an event that is an object": (BOTH, b'{"hooks": {"Stop": {}}}', "1:20: hooks.Stop should be a list"),
    "hooks that stand twice": (BOTH, b'{"hooks": {}, "hooks": {}}', '1:15: "hooks" stands twice'),
    "our name for something else": (("agy",), b'{"xmsg": 1}', '1:10: "xmsg" should be an object'),
    "no end of brackets": (hook_install.HOSTS, b'{"a": ' + b"[" * 100000, "nested deeper than"),
}


class Case(unittest.TestCase):
    def setUp(self):
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="xmsg-test-"))
        self.addCleanup(shutil.rmtree, self.home)
        self.environ = {"HOME": self.home, "PATH": ""}

    def path(self, host):
        return hook_install.config_path(host, self.environ)

    def put(self, host, content):
        """Writes a host's file: bytes, text, or a value for JSON."""
        path = self.path(host)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else pretty(content)).encode()
        with open(path, "wb") as file:
            file.write(content)
        return path

    def bytes_of(self, host):
        with open(self.path(host), "rb") as file:
            return file.read()

    def value_of(self, host):
        return json.loads(self.bytes_of(host).decode("utf-8-sig"))

    def install(self, host, wrapper=WRAPPER, **options):
        record, = hook_install.install([host], wrapper, self.environ, **options)
        return record

    def uninstall(self, host, wrapper=WRAPPER, **options):
        record, = hook_install.uninstall([host], wrapper, self.environ, **options)
        return record

    def check(self, host, wrapper=WRAPPER):
        return hook_install.check(host, wrapper, self.environ)

    def tree(self):
        """Every path below the home with its kind, mode and content."""
        found = {}
        for folder, folders, files in os.walk(self.home):
            for name in folders + files:
                path = os.path.join(folder, name)
                mode = os.lstat(path).st_mode
                if stat.S_ISLNK(mode):
                    content = os.readlink(path)
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        content = file.read()
                else:
                    content = None
                found[path] = (mode, content)
        return found

    def assert_comes_and_goes(self, host, action="added"):
        """Install, install, uninstall, uninstall: there once, nothing twice, and then everything as before."""
        before = self.tree()
        self.assertEqual(action, self.install(host)["action"])
        self.assertEqual(("installed", []), (self.check(host)["state"], self.check(host)["missing"]))
        installed = self.tree()
        self.assertEqual("unchanged", self.install(host)["action"])
        self.assertEqual(installed, self.tree())
        self.assertEqual("removed", self.uninstall(host)["action"])
        self.assertEqual(before, self.tree())
        self.assertEqual("unchanged", self.uninstall(host)["action"])
        self.assertEqual(before, self.tree())


class EveryStartingPoint(Case):
    def test_gets_its_bytes_back(self):
        for name, content in STARTING_POINTS.items():
            for host in hook_install.HOSTS:
                with self.subTest(name, host=host):
                    self.put(host, content(host))
                    self.assert_comes_and_goes(host)

    def test_keeps_what_other_tools_wrote_after_install(self):
        for name, content in STARTING_POINTS.items():
            for host in hook_install.HOSTS:
                with self.subTest(name, host=host):
                    self.put(host, content(host))
                    self.install(host)
                    edited = self.value_of(host)
                    edited["later"] = {"ours": False}
                    self.put(host, edited)
                    self.uninstall(host)
                    expected = json.loads(content(host).decode("utf-8-sig").strip() or "{}")
                    self.assertEqual(dict(expected, later={"ours": False}), self.value_of(host))
                    self.assertEqual([os.path.basename(self.path(host))], os.listdir(os.path.dirname(self.path(host))))

    def test_keeps_a_byte_order_mark_where_the_host_reads_one(self):
        for host in ("claude", "agy"):
            self.put(host, hook_install.BOM + pretty(with_hooks(host)).encode())
            self.assert_comes_and_goes(host)
            self.install(host)
            self.assertTrue(self.bytes_of(host).startswith(hook_install.BOM + b"{"))

    def test_may_be_no_file_and_no_folder(self):
        for host in hook_install.HOSTS:
            self.assert_comes_and_goes(host)
            os.makedirs(os.path.dirname(self.path(host)), 0o755)
            self.assert_comes_and_goes(host)

    def test_makes_files_and_folders_that_only_their_owner_reads(self):
        for host in hook_install.HOSTS:
            self.install(host)
            self.assertEqual({0o600, 0o700}, {stat.S_IMODE(mode) for mode, _ in self.tree().values()})

    def test_keeps_the_mode(self):
        for mode in (0o600, 0o644, 0o660):
            os.chmod(self.put("claude", {"model": "m"}), mode)
            self.assert_comes_and_goes("claude")
            self.install("claude")
            for name in (self.path("claude"), self.path("claude") + hook_install.BACKUP_SUFFIX):
                self.assertEqual(mode, stat.S_IMODE(os.stat(name).st_mode))
            self.uninstall("claude")

    @unittest.skipUnless(os.geteuid() == 0, "only root can give files away")
    def test_keeps_the_owner(self):
        os.chown(self.put("claude", {"model": "m"}), 12345, 54321)
        self.install("claude")
        status = os.stat(self.path("claude"))
        self.assertEqual((12345, 54321), (status.st_uid, status.st_gid))

    def test_is_written_through_a_symlink(self):
        for host in hook_install.HOSTS:
            target = os.path.join(self.home, "dotfiles-" + host)
            os.makedirs(os.path.dirname(self.path(host)))
            os.symlink(os.path.relpath(target, os.path.dirname(self.path(host))), self.path(host))
            with open(target, "w") as file:
                file.write(pretty(with_hooks(host)))
            self.assert_comes_and_goes(host)
            os.unlink(target)
            self.assert_comes_and_goes(host)
            self.install(host)
            self.assertTrue(os.path.islink(self.path(host)) and os.path.isfile(target))

    def test_with_an_unreadable_text_stays_as_it_is_and_the_record_tells_the_place(self):
        for name, (hosts, content, reason) in REFUSED.items():
            for host in hosts:
                with self.subTest(name, host=host):
                    self.put(host, content)
                    before = self.tree()
                    for change in (self.install, self.uninstall):
                        record = change(host)
                        self.assertEqual("refused", record["action"])
                        self.assertIn(reason, record["detail"])
                    self.assertEqual("unreadable", self.check(host)["state"])
                    self.assertIn(reason, self.check(host)["detail"])
                    self.assertEqual(before, self.tree())

    def test_that_is_read_only_stays_as_it_is(self):
        os.chmod(self.put("claude", with_hooks("claude")), 0o444)
        self.assertEqual("refused", self.install("claude")["action"])
        self.assertIn("read-only (mode 0444)", self.install("claude", dry_run=True)["detail"])
        self.assertEqual({"settings.json"}, set(os.listdir(os.path.dirname(self.path("claude")))))
        os.chmod(self.path("claude"), 0o644)
        self.install("claude")
        os.chmod(self.path("claude"), 0o444)
        installed = self.tree()
        self.assertIn("read-only (mode 0444)", self.uninstall("claude")["detail"])
        self.assertEqual(installed, self.tree())

    def test_that_is_no_regular_file_stays_as_it_is(self):
        path = self.path("codex")
        os.makedirs(path)
        self.assertEqual("refused", self.install("codex")["action"])
        os.rmdir(path)
        os.mkfifo(path)
        self.assertIn("not a regular file", self.install("codex")["detail"])
        os.unlink(path)
        os.symlink(path, path)
        self.assertEqual("refused", self.install("codex")["action"])
        os.unlink(path)
        os.symlink("/nowhere/at/all", path)
        self.assertIn("a folder that does not exist", self.install("codex")["detail"])

    def test_of_one_host_that_fails_does_not_stop_the_others(self):
        self.put("codex", "{")
        records = hook_install.install(hook_install.HOSTS, WRAPPER, self.environ)
        self.assertEqual(["added", "refused", "added"], [record["action"] for record in records])
        records = hook_install.uninstall(hook_install.HOSTS, WRAPPER, self.environ)
        self.assertEqual(["removed", "refused", "removed"], [record["action"] for record in records])


class AnInstallation(Case):
    def test_only_appends(self):
        for host in BOTH:
            self.put(host, with_hooks(host))
            self.install(host)
            self.assertEqual([group(FOREIGN, matcher="Bash"), group(command(host))],
                             self.value_of(host)["hooks"]["Stop"])

    def test_writes_in_the_style_of_the_file(self):
        self.put("codex", '{\r\n\t"hooks": {\r\n\t\t"Stop": []\r\n\t}\r\n}')
        self.install("codex")
        text = self.bytes_of("codex").decode()
        self.assertEqual(text.count("\n"), text.count("\r\n"))
        self.assertIn('\r\n\t\t"Stop": [\r\n\t\t\t{\r\n\t\t\t\t"hooks": [\r\n\t\t\t\t\t{\r\n\t\t\t\t\t\t"type"', text)
        self.put("codex", '{"hooks":{"Stop":[{"hooks":[]}]}}')
        self.install("codex")
        self.assertIn(b'{"hooks":[]},{"hooks":[{"type":"command",', self.bytes_of("codex"))
        self.assertNotIn(b"\n", self.bytes_of("codex"))

    def test_of_a_dry_run_writes_nothing_and_shows_the_same(self):
        for host in hook_install.HOSTS:
            self.put(host, with_hooks(host))
            for change in (self.install, self.uninstall):
                before = self.tree()
                dry = change(host, dry_run=True)
                self.assertEqual(before, self.tree())
                self.assertEqual(dry, change(host))
                self.assertNotEqual("", dry["diff"])
        shutil.rmtree(os.path.dirname(self.path("claude")))
        self.assertEqual("added", self.install("claude", dry_run=True)["action"])
        self.assertFalse(os.path.exists(os.path.dirname(self.path("claude"))))

    def test_shows_a_diff_that_patch_applies(self):
        contents = [content for name, content in STARTING_POINTS.items() if name != "a blank file"]
        for content in contents + [lambda host: pretty({"env": {str(n): n for n in range(30)}, "hooks": {"Stop": []},
                                                        "z": list(range(30))}).encode()]:
            path = self.put("claude", content("claude"))
            before = self.bytes_of("claude")
            record = self.install("claude")
            after = self.bytes_of("claude")
            self.put("claude", before)
            if not shutil.which("patch"):
                self.skipTest("patch(1) is not here")
            done = subprocess.run(["patch", "--binary", "-s", path], input=record["diff"].encode(), capture_output=True)
            self.assertEqual((0, b""), (done.returncode, done.stdout + done.stderr))
            self.assertEqual(after, self.bytes_of("claude"))

    def test_leaves_a_handler_that_serves_to_the_byte(self):
        """In Codex another command, timeout or matcher would have to be confirmed again."""
        real = os.path.join(self.home, "xmsg", "xmsg-hook.sh")
        os.mkdir(os.path.dirname(real))
        open(real, "w").close()
        os.symlink(os.path.dirname(real), os.path.join(self.home, "link"))
        linked = os.path.join(self.home, "link", "xmsg-hook.sh")
        for handler in (command("codex", real, timeout=30), command("codex", real, statusMessage="mail"),
                        command("codex", linked), command("codex", "'%s'" % real)):
            self.put("codex", {"hooks": {event: [group(handler)] for event in hook_install._by_event("codex")}})
            before = self.bytes_of("codex")
            self.assertEqual("unchanged", self.install("codex", real)["action"])
            self.assertEqual(before, self.bytes_of("codex"))
            self.assertEqual("installed", self.check("codex", real)["state"])

    def test_mends_a_handler_of_ours_that_does_not_serve_in_its_place(self):
        broken = [command("claude", timeout=1), command("claude", **{"async": True}), command("claude", once=True),
                  command("claude", EARLIER), command("claude", asyncRewake=True), command("claude", timeout=6.5)]
        for handler in broken:
            with self.subTest(handler):
                self.put("claude", {"hooks": {"Stop": [group(FOREIGN, handler, FOREIGN), group(FOREIGN)]}})
                self.assertEqual("Stop", self.check("claude")["missing"][5])
                self.assertEqual("replaced", self.install("claude")["action"])
                self.assertEqual([group(FOREIGN, command("claude"), FOREIGN), group(FOREIGN)],
                                 self.value_of("claude")["hooks"]["Stop"])

    def test_replaces_a_handler_that_runs_for_some_tools_only(self):
        for host in BOTH:
            self.put(host, {"hooks": {"PreToolUse": [group(command(host), matcher="Bash"), group(FOREIGN)]}})
            self.assertEqual("replaced", self.install(host)["action"])
            self.assertEqual([group(command(host), matcher="*"), group(FOREIGN)],
                             self.value_of(host)["hooks"]["PreToolUse"])
            self.assertEqual("installed", self.check(host)["state"])

    def test_leaves_one_of_each(self):
        for host in BOTH:
            self.put(host, {"hooks": {"Stop": [group(command(host)), group(command(host), command(host))],
                                      "PreCompact": [group(command(host))]}})
            self.install(host)
            self.assertEqual([group(command(host))], self.value_of(host)["hooks"]["Stop"])
            self.assertNotIn("PreCompact", self.value_of(host)["hooks"])

    def test_leaves_forms_that_it_does_not_know_and_says_so(self):
        for form in ("nice %s codex", "%s codex; true", "%s other", "'%s codex"):
            line = form % WRAPPER
            self.put("codex", {"hooks": {"Stop": [group(dict(FOREIGN, command=line))]}})
            for change in (self.install, self.install, self.uninstall):
                self.assertIn(line, change("codex")["detail"])
            self.assertEqual({"hooks": {"Stop": [group(dict(FOREIGN, command=line))]}}, self.value_of("codex"))
            self.assertIn(line, self.check("codex")["variants"][0])

    def test_quotes_the_path(self):
        wrapper = "/a dir/it's \"x\" $HOME/漢/xmsg-hook.sh"
        self.install("claude", wrapper)
        line = self.value_of("claude")["hooks"]["Stop"][0]["hooks"][0]["command"]
        shown = subprocess.run(["/bin/sh", "-c", "printf '%%s\\n' %s" % line], capture_output=True, text=True)
        self.assertEqual([wrapper, "claude"], shown.stdout.splitlines())
        self.assertEqual("installed", self.check("claude", wrapper)["state"])
        self.uninstall("claude", wrapper)
        self.assertEqual({}, self.tree())
        self.put("claude", {"model": "m"})
        self.install("claude", wrapper)
        self.assertIn("漢".encode(), self.bytes_of("claude"))

    def test_leaves_a_file_beyond_all_measure_alone(self):
        path = self.put("claude", "{}")
        os.truncate(path, hook_install.LARGEST_FILE + 1)
        for change in (self.install, self.uninstall):
            self.assertIn("larger than 16 MiB", change("claude")["detail"])
        self.assertEqual(hook_install.LARGEST_FILE + 1, os.path.getsize(path))

    def test_takes_no_wrapper_that_hosts_could_not_find(self):
        for wrapper in ("xmsg-hook.sh", "~/xmsg-hook.sh", "/x/hook.sh", ""):
            with self.assertRaises(ValueError):
                self.install("claude", wrapper)
        self.assertIn("not UTF-8", self.install("claude", "/\udcff/xmsg-hook.sh")["detail"])

    def test_does_not_write_over_an_edit_made_meanwhile(self):
        self.put("claude", {"model": "m"})
        at_lock, locked = [], hook_install._locked

        @contextlib.contextmanager
        def edit_first(folders):
            at_lock.append(self.put("claude", {"model": "other"}))
            with locked(folders):
                yield
        hook_install._locked = edit_first
        try:
            self.assertIn("it changed while", self.install("claude")["detail"])
            self.assertEqual({"model": "other"}, self.value_of("claude"))
            hook_install._locked = locked
            self.install("claude")
            hook_install._locked = edit_first
            self.assertIn("it changed while", self.uninstall("claude")["detail"])
            self.assertEqual({"model": "other"}, self.value_of("claude"))
        finally:
            hook_install._locked = locked
        self.assertEqual(2, len(at_lock))

    def test_that_fails_leaves_nothing_behind(self):
        """A full disk at any of its files; the sync of a folder after the fact is no failure."""
        replace = os.replace
        for prepare in (lambda: None, lambda: self.put("agy", with_hooks("agy"))):
            for failing in (1, 2):
                prepare()
                before, calls = self.tree(), []

                def fail(*names):
                    calls.append(names)
                    if len(calls) == failing:
                        raise OSError(28, "No space left on device", names[0])
                    replace(*names)
                os.replace = fail
                try:
                    self.assertIn("No space left on device", self.install("agy")["detail"])
                finally:
                    os.replace = replace
                self.assertEqual(before, self.tree())
        sync = os.fsync

        def fail_for_folders(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(5, "Input/output error")
            sync(descriptor)
        os.fsync = fail_for_folders
        try:
            self.assert_comes_and_goes("agy")
        finally:
            os.fsync = sync

    def test_refuses_a_plan_that_would_touch_others(self):
        """Whatever the planner does, its result is read again before it is written."""
        self.put("codex", with_hooks("codex"))
        before = self.tree()
        rewrite = hook_install._rewrite
        try:
            for fault in (lambda text, style, container, drop, add: [(container.start, container.end, "{}")],
                          lambda text, style, container, drop, add: [(container.end - 1, container.end, "")],
                          lambda text, style, container, drop, add: []):
                hook_install._rewrite = fault
                self.assertIn("nothing was changed", self.install("codex")["detail"])
                self.assertEqual(before, self.tree())
        finally:
            hook_install._rewrite = rewrite
        ours = hook_install.entries("codex", WRAPPER)["hooks"]
        moved = {"hooks": dict(ours, Stop=ours["Stop"] + [group(FOREIGN, matcher="Bash")])}
        apply_edits = hook_install._apply_edits
        try:
            for change, planned in ((self.install, {"hooks": ours}), (self.install, moved), (self.uninstall, {}),
                                    (self.uninstall, with_hooks("codex"))):
                if change == self.uninstall:
                    self.put("codex", moved)
                before = self.tree()
                hook_install._apply_edits = lambda text, edits: pretty(planned)
                self.assertIn("would have touched other entries", change("codex")["detail"])
                self.assertEqual(before, self.tree())
        finally:
            hook_install._apply_edits = apply_edits

    def test_keeps_one_backup_of_the_file_before_xmsg(self):
        first = pretty({"model": "m"}).encode()
        backup = self.put("claude", first) + hook_install.BACKUP_SUFFIX

        def kept():
            with open(backup, "rb") as file:
                return file.read()
        self.install("claude")
        self.assertEqual(first, kept())
        self.install("claude", EARLIER)
        self.assertEqual(first, kept())
        self.assertEqual("removed", self.uninstall("claude", EARLIER)["action"])
        self.put("claude", {"model": "second"})
        self.install("claude")
        self.assertEqual({"model": "second"}, json.loads(kept()))
        self.assertEqual(["settings.json", "settings.json.before-xmsg"],
                         sorted(os.listdir(os.path.dirname(self.path("claude")))))

    def test_is_undone_as_well_without_its_backup_or_with_a_wrong_one(self):
        for wrong in (None, b"", b"{", b'{"evil": 1}', "/etc/passwd"):
            self.put("claude", with_hooks("claude"))
            before = self.bytes_of("claude")
            self.install("claude")
            backup = self.path("claude") + hook_install.BACKUP_SUFFIX
            os.unlink(backup)
            if isinstance(wrong, str):
                os.symlink(wrong, backup)
            elif wrong is not None:
                with open(backup, "wb") as file:
                    file.write(wrong)
            self.assertEqual("removed", self.uninstall("claude")["action"])
            self.assertEqual(before, self.bytes_of("claude"))
            self.assertEqual(isinstance(wrong, str), os.path.lexists(backup))


class TheEarlierXmsg(Case):
    def earlier(self, host, wrapper=EARLIER):
        if host == "agy":
            return {"xmsg": {event: [command("agy " + event, wrapper)] for event in ("PreInvocation", "Stop")}}
        return {"hooks": {event: [group(FOREIGN), group(command(host, wrapper)), group(FOREIGN)]
                          for event in ("PreToolUse", "Stop")}}

    def test_is_replaced_where_it_stands(self):
        for host in hook_install.HOSTS:
            self.put(host, self.earlier(host))
            self.assertEqual("partial", self.check(host)["state"])
            self.assertEqual("replaced", self.install(host)["action"])
            self.assertNotIn(EARLIER.encode(), self.bytes_of(host))
            self.assertEqual("installed", self.check(host)["state"])
            self.assertEqual("unchanged", self.install(host)["action"])
            if host != "agy":
                self.assertEqual([group(FOREIGN), group(command(host)), group(FOREIGN)],
                                 self.value_of(host)["hooks"]["PreToolUse"])

    def test_keeps_its_bytes_in_codex_when_it_is_this_very_copy(self):
        self.put("codex", self.earlier("codex", WRAPPER))
        groups = self.value_of("codex")["hooks"]["Stop"]
        record = self.install("codex")
        self.assertEqual(groups, self.value_of("codex")["hooks"]["Stop"])
        self.assertIn("added SessionStart, UserPromptSubmit, PostToolUse;", record["detail"])

    def test_does_not_come_back_with_uninstall(self):
        for host in hook_install.HOSTS:
            for edited in (False, True):
                self.put(host, self.earlier(host))
                self.install(host)
                if edited:
                    self.put(host, dict(self.value_of(host), later={}))
                self.uninstall(host)
                left = self.value_of(host)
                later = {"later": {}} if edited else {}
                stand_in = [hook_install.EMPTY_GROUP] if host == "codex" else []
                groups = [group(FOREIGN)] + stand_in + [group(FOREIGN)]
                self.assertEqual(later if host == "agy" else
                                 dict({"hooks": {"PreToolUse": groups, "Stop": groups}}, **later), left)

    def test_goes_with_uninstall_alone(self):
        self.put("claude", self.earlier("claude"))
        self.assertEqual("removed", self.uninstall("claude")["action"])
        self.assertEqual({"hooks": {event: [group(FOREIGN)] * 2 for event in ("PreToolUse", "Stop")}},
                         self.value_of("claude"))


class CodexPositions(Case):
    """Codex binds a user's consent to <file>:<event>:<group>:<handler>."""

    OTHER = b'      {\n        "hooks": [\n          {"type": "command", "command": "theirs"}\n        ]\n      }'

    def places(self):
        return {(event, place, index): handler["command"]
                for event, groups in self.value_of("codex")["hooks"].items()
                for place, each in enumerate(groups) for index, handler in enumerate(each["hooks"])}

    def append_to_stop(self):
        """Another tool appends its group behind ours, as text."""
        text = self.bytes_of("codex")
        cut = text.rindex(b"\n    ]")
        self.put("codex", text[:cut] + b",\n" + self.OTHER + text[cut:])

    def test_of_others_stay_when_we_go(self):
        self.install("codex")
        self.append_to_stop()
        self.assertEqual("theirs", self.places()["Stop", 1, 0])
        record = self.uninstall("codex")
        self.assertEqual("removed", record["action"])
        self.assertIn("1 empty place stays", record["detail"])
        self.assertEqual({("Stop", 1, 0): "theirs"}, self.places())
        self.assertEqual(b'{\n  "hooks": {\n    "Stop": [\n      {\n        "matcher": "xmsg-placeholder",\n'
                         b'        "hooks": []\n      },\n' + self.OTHER + b"\n    ]\n  }\n}\n", self.bytes_of("codex"))
        before = self.tree()
        self.assertEqual("unchanged", self.uninstall("codex")["action"])
        self.assertIn("1 empty place stays", self.uninstall("codex")["detail"])
        self.assertEqual(before, self.tree())

    def test_that_we_kept_are_ours_again_at_the_next_install(self):
        self.install("codex")
        self.append_to_stop()
        installed = self.bytes_of("codex")
        self.uninstall("codex")
        self.assertEqual("added", self.install("codex")["action"])
        self.assertEqual([group(command("codex")), group({"type": "command", "command": "theirs"})],
                         self.value_of("codex")["hooks"]["Stop"])
        self.assertEqual(json.loads(installed), self.value_of("codex"))
        self.assertEqual("installed", self.check("codex")["state"])

    def test_that_nobody_needs_any_more_go_with_the_next_uninstall(self):
        self.put("codex", {"hooks": {"Stop": [group(FOREIGN), hook_install.EMPTY_GROUP, hook_install.EMPTY_GROUP],
                                     "PreToolUse": [hook_install.EMPTY_GROUP]}})
        self.assertEqual("removed", self.uninstall("codex")["action"])
        self.assertEqual({"hooks": {"Stop": [group(FOREIGN)]}}, self.value_of("codex"))

    def test_inside_a_group_stay_too(self):
        for before, after in (
                ([group(command("codex"), FOREIGN)], [group(hook_install.EMPTY_HANDLER, FOREIGN)]),
                ([group(FOREIGN, command("codex"))], [group(FOREIGN)]),
                ([group(FOREIGN, command("codex"), FOREIGN, command("codex"))],
                 [group(FOREIGN, hook_install.EMPTY_HANDLER, FOREIGN)]),
                ([group(command("codex"), command("codex")), group(FOREIGN)],
                 [hook_install.EMPTY_GROUP, group(FOREIGN)])):
            self.put("codex", {"hooks": {"Stop": before}})
            self.uninstall("codex")
            self.assertEqual({"hooks": {"Stop": after}}, self.value_of("codex"))
            self.install("codex")
            foreign = [(place, index) for place, each in enumerate(after) for index, handler in enumerate(each["hooks"])
                       if handler == FOREIGN]
            stop = self.value_of("codex")["hooks"]["Stop"]
            self.assertEqual([FOREIGN] * len(foreign), [stop[place]["hooks"][index] for place, index in foreign])
            self.assertNotIn(b"placeholder", self.bytes_of("codex"))

    def test_matter_to_no_other_host(self):
        self.put("claude", {"hooks": {"Stop": [group(command("claude"), FOREIGN), group(command("claude")),
                                               group(FOREIGN)]}})
        self.uninstall("claude")
        self.assertEqual({"hooks": {"Stop": [group(FOREIGN), group(FOREIGN)]}}, self.value_of("claude"))


class AKilledInstaller(Case):
    """Dies before every step that changes a folder, and at every line of the function that writes."""
    STEPS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "fcntl.flock")
    TRACED = ("_write", "_forget")

    def run_and_kill(self, change, step):
        """Runs change() in a process that is killed at the given step; whether there was such a step."""
        child = os.fork()
        if child == 0:
            seen = 0

            def count():
                nonlocal seen
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            def trace(frame, event, _):
                if frame.f_code.co_name not in self.TRACED:
                    return None
                if event == "line":
                    count()
                return trace
            try:
                sys.addaudithook(lambda event, _: count() if event in self.STEPS else None)
                sys.settrace(trace)
                change()
            finally:
                os._exit(0)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def assert_is_never_torn(self, host, prepare):
        prepare()
        start = self.tree()
        before = self.bytes_of(host) if os.path.exists(self.path(host)) else None
        self.install(host)
        after = self.bytes_of(host)
        for change, end in ((self.install, after), (self.uninstall, before)):
            for step in range(1, 300):
                shutil.rmtree(self.home)
                os.mkdir(self.home)
                prepare()
                if change == self.uninstall:
                    self.install(host)
                killed = self.run_and_kill(lambda: change(host), step)
                left = self.bytes_of(host) if os.path.exists(self.path(host)) else None
                self.assertIn(left, (before, after) if killed else (end,))
                self.install(host)
                self.assertEqual(after, self.bytes_of(host))
                self.uninstall(host)
                if before is not None:
                    self.assertEqual(start, self.tree())
                self.assertFalse([path for path, (mode, _) in self.tree().items()
                                  if stat.S_ISREG(mode) and path not in start])
                if not killed:
                    break
            self.assertGreater(step, 15)

    def test_leaves_the_old_file_or_the_new_one(self):
        self.assert_is_never_torn("codex", lambda: self.put("codex", with_hooks("codex")))

    def test_leaves_no_file_or_a_whole_one(self):
        self.assert_is_never_torn("agy", lambda: None)

    def test_lets_go_of_its_lock(self):
        folder = os.path.dirname(self.put("codex", {}))
        ready, write = os.pipe()
        child = os.fork()
        if child == 0:
            with hook_install._locked({folder}):
                os.write(write, b"x")
                signal.pause()
        try:
            os.read(ready, 1)
            patience, hook_install.LOCK_PATIENCE = hook_install.LOCK_PATIENCE, 0.1
            try:
                self.assertIn("another installation is at work", self.install("codex")["detail"])
            finally:
                hook_install.LOCK_PATIENCE = patience
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ready)
            os.close(write)
        self.assertEqual("added", self.install("codex")["action"])


class ACheck(Case):
    def test_tells_how_much_is_there(self):
        for host in hook_install.HOSTS:
            labels = [hook_install.label(entry) for entry in hook_install.ENTRIES if entry.host == host]
            self.assertEqual(len(labels), len(set(labels)))
            self.assertEqual(("absent", labels), (self.check(host)["state"], self.check(host)["missing"]))
            self.put(host, "")
            self.assertEqual("missing", self.check(host)["state"])
            self.put(host, {})
            self.assertEqual(("missing", labels), (self.check(host)["state"], self.check(host)["missing"]))
            self.install(host)
            self.assertEqual(("installed", labels, []), tuple(
                self.check(host)[key] for key in ("state", "present", "missing")))
            value = self.value_of(host)
            del value[hook_install.HOLDER[host]]["Stop"]
            self.put(host, value)
            self.assertEqual(("partial", ["Stop"]), (self.check(host)["state"], self.check(host)["missing"]))

    def test_tells_when_the_entries_lead_to_another_copy(self):
        self.install("codex", EARLIER)
        self.assertEqual(("partial", []), (self.check("codex")["state"], self.check("codex")["present"]))
        self.assertEqual(5, len(self.check("codex")["variants"]))

    def test_tells_why_a_host_ignores_its_file_all_the_same(self):
        for host, content, fault in (
                ("codex", {"$schema": "x"}, '2:3: Codex loads no file with "$schema"'),
                ("codex", '{"hooks": {"Idle": [], "Idle": []}}', 'Codex loads no file in which "Idle" stands twice'),
                ("claude", {"disableAllHooks": True}, '"disableAllHooks" switches all hooks off'),
                ("agy", {"$schema": "x"}, 'agy loads no file in which "$schema" is not an object'),
                ("agy", {"other": {"Stop": [dict(FOREIGN, timeout=1.5)]}}, "a timeout that is not a whole number"),
                ("agy", {"other": {"Stop": [dict(FOREIGN, type="http")]}}, "a handler of the type \"http\""),
                ("agy", {"other": {"PreToolUse": [group({"type": "command"})]}}, "a handler that has no command"),
                ("agy", {"xmsg": {"enabled": False}}, "\"enabled\" switches xmsg's hooks off")):
            self.put(host, content)
            self.assertIn(fault, self.install(host)["detail"])
            self.assertIn(fault, self.check(host)["faults"][0])
            self.put(host, with_hooks(host))
            self.install(host)
            self.assertEqual([], self.check(host)["faults"])
        self.put("agy", {"other": {"PreToolUse": [group(FOREIGN, {"type": "prompt"}, matcher="*")]}})
        self.assertEqual([], self.check("agy")["faults"])


class CodexTrust(Case):
    def states(self):
        return {entry["event"]: entry["state"] for entry in hook_install.codex_trust(self.environ)}

    def config(self, text):
        with open(os.path.join(os.path.dirname(self.path("codex")), "config.toml"), "w") as file:
            file.write(text)

    def confirm(self, form='[hooks.state."%s"]\ntrusted_hash = "%s"\n'):
        return "".join(form % (entry["key"], self.hash_of(entry)) for entry in hook_install.codex_trust(self.environ))

    def hash_of(self, entry):
        event = entry["event"]
        value = self.value_of("codex")["hooks"][event][int(entry["key"].split(":")[-2])]
        return hook_install._hook_hash(event, value, value["hooks"][0])

    def test_hashes_as_codex_does(self):
        """Answers of hooks/list of 0.156.1 and 0.171.0."""
        line = "echo 'ü漢 \"x\"'"
        for event, fields, handler, known in (
                ("PreToolUse", {}, {"command": "echo PreToolUse", "timeout": 5},
                 "0febd3d77745bf03947f95050dbab5dc6f71e2abb77b78ea4bbf7e12accae920"),
                ("Stop", {"matcher": "*"}, {"command": line},
                 "512708b4975017a8a86845f3d2c3be5544138892d505db98f7f3bebb28aa5d03"),
                ("UserPromptSubmit", {"matcher": "x"}, {"command": line, "timeout": 0},
                 "33e64705882065a89da0f6940293fb79253d2171547172b831d9863113bd207c"),
                ("PreToolUse", {"matcher": ""}, {"command": line, "timeout": 5, "statusMessage": "né"},
                 "b7f4e4fe5df25a90c0b69c272e8480b84a7c99ac65f84bfc7852af231ad959bd"),
                ("SessionStart", {"matcher": "*"}, {"command": line, "timeout": 5, "async": True},
                 "464f1c09d392a5326466c131427a83ee77e1430656eaaed4f78ec0ef41db306f"),
                ("PostToolUse", {"matcher": "*"}, {"command": line, "timeout": 5, "asyncRewake": True},
                 "875beaef5f7019ff25614296e6ece9c7e4082e0484119e2eb702af7dbbc47a83")):
            handler["type"] = "command"
            self.assertEqual("sha256:" + known, hook_install._hook_hash(event, fields, handler))

    def test_is_untrusted_until_the_user_confirms(self):
        self.assertEqual([], hook_install.codex_trust(self.environ))
        self.install("codex")
        self.assertEqual({"untrusted"}, set(self.states().values()))
        self.config('model = "x"\n\n[hooks.state]\n\n' + self.confirm() + "\n[other]\nenabled = false\n")
        self.assertEqual({event: "trusted" for event in hook_install._by_event("codex")}, self.states())
        before = self.tree()
        self.assertIn("[hooks.state.\"%s:...\"]" % self.path("codex"), self.uninstall("codex")["detail"])
        self.assertEqual(before[os.path.join(os.path.dirname(self.path("codex")), "config.toml")], self.tree()[
            os.path.join(os.path.dirname(self.path("codex")), "config.toml")])

    def test_reads_the_ways_in_which_toml_can_say_it(self):
        self.install("codex")
        for form in ("[ hooks . state . '%s' ] # note\n trusted_hash = '%s' # note\n",
                     '[hooks.state."%s"]\r\nenabled = true\r\ntrusted_hash = "%s"\r\n'):
            self.config(self.confirm(form))
            self.assertEqual({"trusted"}, set(self.states().values()))

    def test_tells_what_is_changed_switched_off_or_confirmed_for_another_place(self):
        self.install("codex")
        confirmed = self.confirm()
        self.config(confirmed.replace('trusted_hash = "sha256:', 'trusted_hash = "sha256:00'))
        self.assertEqual({"changed"}, set(self.states().values()))
        self.config(confirmed.replace("trusted_hash", "enabled = false\ntrusted_hash"))
        self.assertEqual({"disabled"}, set(self.states().values()))
        self.config(confirmed.replace(self.home, "/another/home"))
        self.assertEqual({"untrusted"}, set(self.states().values()))
        self.assertIn("/another/home/.codex/hooks.json:session_start:0:0 does not count",
                      hook_install.codex_trust(self.environ)[0]["detail"])
        for torn in ("[hooks.state.", "[hooks.state.\"\\q\"]\ntrusted_hash = 1\n", "\0\n", "trusted_hash = \"x\"\n"):
            self.config(torn)
            self.assertEqual({"untrusted"}, set(self.states().values()))

    def test_survives_an_upgrade(self):
        self.install("codex")
        self.config(self.confirm())
        self.install("codex")
        self.assertEqual({"trusted"}, set(self.states().values()))

    def test_is_kept_for_the_way_codex_writes_the_path(self):
        """CODEX_HOME with its links resolved, ~/.codex as it is, hooks.json itself never followed."""
        real = os.path.join(self.home, "real")
        os.mkdir(real)
        os.symlink(real, os.path.join(self.home, ".codex"))
        os.symlink(real, os.path.join(self.home, "linked"))
        os.symlink(os.path.join(self.home, "dotfile"), os.path.join(real, "hooks.json"))
        self.install("codex")

        def first_key():
            return hook_install.codex_trust(self.environ)[0]["key"]
        self.assertEqual(self.home + "/.codex/hooks.json:session_start:0:0", first_key())
        self.environ["CODEX_HOME"] = os.path.join(self.home, "linked")
        self.assertEqual(self.home + "/real/hooks.json:session_start:0:0", first_key())
        self.assertEqual(self.home + "/real/config.toml", hook_install.codex_trust(self.environ)[0]["file"])

    def test_of_a_file_that_cannot_be_read_is_refused(self):
        self.put("codex", "{")
        with self.assertRaisesRegex(hook_install.Refused, "1:2"):
            hook_install.codex_trust(self.environ)
        self.install("codex")
        self.put("codex", {})
        self.install("codex")
        os.mkdir(os.path.join(os.path.dirname(self.path("codex")), "config.toml"))
        with self.assertRaises(hook_install.Refused):
            hook_install.codex_trust(self.environ)


class Hosts(Case):
    def test_are_found_by_their_folder_or_their_program(self):
        self.assertEqual([], hook_install.hosts_found(self.environ))
        os.makedirs(os.path.join(self.home, ".gemini"))  # other tools of the family use it too
        self.assertEqual([], hook_install.hosts_found(self.environ))
        for folder, host in ((".gemini/antigravity-cli", "agy"), (".codex", "codex"), (".claude", "claude")):
            os.makedirs(os.path.join(self.home, folder))
            self.assertIn(host, hook_install.hosts_found(self.environ))
            shutil.rmtree(os.path.join(self.home, folder))
            program = os.path.join(self.home, host)
            open(program, "w").close()
            os.chmod(program, 0o755)
            self.assertEqual([host], hook_install.hosts_found(dict(self.environ, PATH=self.home)))
            os.unlink(program)

    def test_keep_their_files_where_their_variables_say(self):
        environ = dict(self.environ, CLAUDE_CONFIG_DIR=self.home + "/c", CODEX_HOME=self.home + "/x/../y")
        self.assertEqual([self.home + "/c/settings.json", self.home + "/y/hooks.json",
                          self.home + "/.gemini/config/hooks.json"],
                         [hook_install.config_path(host, environ) for host in hook_install.HOSTS])
        environ = dict(self.environ, CLAUDE_CONFIG_DIR="", CODEX_HOME="")
        self.assertEqual([self.home + "/.claude/settings.json", self.home + "/.codex/hooks.json"],
                         [hook_install.config_path(host, environ) for host in BOTH])


class TheCommand(Case):
    def setUp(self):
        super().setUp()
        self.program = self.copy_of_xmsg("clone")
        self.path_of_link = os.path.join(self.home, ".local", "bin", "xmsg")

    def copy_of_xmsg(self, name):
        program = os.path.join(self.home, name, "bin", "xmsg")
        os.makedirs(os.path.dirname(program))
        for path in (program, os.path.join(self.home, name, "xmsg-hook.sh")):
            open(path, "w").close()
        return program

    def test_comes_and_goes(self):
        before = self.tree()
        self.assertEqual("added", hook_install.link(self.program, self.environ, dry_run=True)["action"])
        self.assertEqual(before, self.tree())
        record = hook_install.link(self.program, self.environ)
        self.assertEqual(("added", self.path_of_link), (record["action"], record["path"]))
        self.assertIn("not on your PATH", record["detail"])
        self.assertEqual(self.program, os.readlink(self.path_of_link))
        on_path = dict(self.environ, PATH="/bin:" + os.path.dirname(self.path_of_link))
        self.assertEqual(("unchanged", ""), tuple(
            hook_install.link(self.program, on_path)[key] for key in ("action", "detail")))
        self.assertEqual("removed", hook_install.unlink(self.program, self.environ, dry_run=True)["action"])
        self.assertTrue(os.path.islink(self.path_of_link))
        self.assertEqual("removed", hook_install.unlink(self.program, self.environ)["action"])
        self.assertEqual(before, self.tree())
        self.assertEqual("unchanged", hook_install.unlink(self.program, self.environ)["action"])

    def test_has_a_link_for_each_program(self):
        before = self.tree()
        for name in ("xmsg", "xmsg-find-session"):
            program = os.path.join(os.path.dirname(self.program), name)
            hook_install.link(program, self.environ)
            self.assertEqual(program, os.readlink(os.path.join(os.path.dirname(self.path_of_link), name)))
        for name in ("xmsg", "xmsg-find-session"):
            hook_install.unlink(os.path.join(os.path.dirname(self.program), name), self.environ)
        self.assertEqual(before, self.tree())

    def test_takes_the_place_of_another_copy_or_of_nothing(self):
        os.makedirs(os.path.dirname(self.path_of_link))
        for target in (self.copy_of_xmsg("other"), "/nowhere/xmsg"):
            os.symlink(target, self.path_of_link)
            self.assertEqual("unchanged", hook_install.unlink(self.program, self.environ)["action"])
            record = hook_install.link(self.program, self.environ)
            self.assertEqual("replaced", record["action"])
            self.assertIn(target, record["detail"])
            self.assertEqual(self.program, os.readlink(self.path_of_link))
            os.unlink(self.path_of_link)

    def test_never_takes_the_place_of_somebody_elses(self):
        os.makedirs(os.path.dirname(self.path_of_link))
        with open(self.path_of_link, "w") as file:
            file.write("theirs")
        before = self.tree()
        self.assertEqual("refused", hook_install.link(self.program, self.environ)["action"])
        self.assertEqual("unchanged", hook_install.unlink(self.program, self.environ)["action"])
        self.assertEqual(before, self.tree())
        os.unlink(self.path_of_link)
        os.symlink("/bin/sh", self.path_of_link)
        self.assertEqual("refused", hook_install.link(self.program, self.environ)["action"])
        self.assertEqual("/bin/sh", os.readlink(self.path_of_link))


class TheInterpreter(Case):
    def shim(self, line):
        path = os.path.join(self.home, "python3")
        with open(path, "w") as file:
            file.write("#!/bin/sh\n%s\n" % line)
        os.chmod(path, 0o755)
        return path

    def test_is_a_real_one(self):
        real = hook_install.real_interpreter(environ=self.environ)
        with open(real, "rb") as file:
            self.assertNotEqual(b"#!", file.read(2))
        self.assertEqual(real, hook_install._ask_interpreter(self.shim('exec %s "$@"' % real)))

    def test_stands_as_long_as_it_works(self):
        real = hook_install.real_interpreter(environ=self.environ)
        other = os.path.join(self.home, "linked")
        os.symlink(real, other)
        self.assertEqual(other, hook_install.real_interpreter(other, self.environ))
        for broken in (os.path.join(self.home, "gone"), "/bin/true", self.shim("exit 1")):
            self.assertEqual(real, hook_install.real_interpreter(broken, self.environ))
        self.assertEqual(real, hook_install.real_interpreter(self.shim('exec %s "$@"' % real), self.environ))

    def test_is_new_enough(self):
        for answer in ("/usr/bin/python3 3 8", "/usr/bin/python3 2 7", "nonsense", "", "python3 3 11"):
            self.assertIsNone(hook_install._ask_interpreter(self.shim("echo '%s'" % answer)))
        self.assertEqual("/a b/python3", hook_install._ask_interpreter(self.shim("echo '/a b/python3 3 9'")))


class TheTable(unittest.TestCase):
    def test_keeps_every_hook_within_its_host_s_patience(self):
        for entry in hook_install.ENTRIES:
            self.assertEqual(600 if entry.wakes else 5, entry.timeout)
            self.assertEqual(entry.wakes, entry.words == "claude FileChanged")

    def test_says_what_the_hosts_read(self):
        claude = hook_install.entries("claude", WRAPPER)["hooks"]
        self.assertEqual([group(command("claude"), command("claude FileChanged", timeout=600, asyncRewake=True))],
                         claude["SessionStart"])
        self.assertEqual([group(command("claude"), matcher="*")], claude["PreToolUse"])
        self.assertEqual([group(command("codex"))], hook_install.entries("codex", WRAPPER)["hooks"]["Stop"])
        self.assertEqual({"xmsg": {event: [command("agy " + event)] for event in ("SessionStart", "PreInvocation",
                                                                                  "Stop")}},
                         hook_install.entries("agy", WRAPPER))


if __name__ == "__main__":
    unittest.main()
