"""What the tests on real hosts share: xmsg's hooks in a home, its command line, what the model saw.

A module `test_*_real.py` says which classes run on which hosts: `load_tests = per_version(CLASS, ...)`.
"""
import atexit
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from pathlib import Path

from hosts import PATIENCE, ClaudeHost, CodexHost, Home, wait_until
from install_hosts import DEFAULTS

PROJECT = Path(__file__).resolve().parents[2]
XMSG = PROJECT / "bin" / "xmsg"
WRAPPER = PROJECT / "xmsg-hook.sh"
TUI = {"claude": ClaudeHost, "codex": CodexHost}
# Another tool's hook, which a test can make slow: `echo 4 > <Event>.sleep` beside it.
OTHER_TOOL = """\
event=$(sed 's/.*"hook_event_name":"\\([A-Za-z]*\\)".*/\\1/')
cd "$1" || exit 0
echo "$event" >> other-tool.log
[ ! -f "$event.sleep" ] || sleep "$(cat "$event.sleep")"
"""
_serial = iter(range(1, 1 << 30))


def hook_entries(home, kind):
    """xmsg's own entries and, after them, another tool's at SessionStart and Stop."""
    sys.path.insert(0, str(PROJECT))
    try:
        import hook_install
    finally:
        sys.path.remove(str(PROJECT))
    lists = hook_install.entries(kind, str(WRAPPER))["hooks"]
    script = home.root / "other-tool.sh"
    script.write_text(OTHER_TOOL)
    other = {"type": "command", "command": "/bin/sh '%s' '%s'" % (script, home.root), "timeout": 20}
    for event in ("SessionStart", "Stop"):
        lists[event] = lists[event] + [{"hooks": [other]}]
    return lists


def install_xmsg(host):
    """For a Host's `hooks`: writes the entries into its home's configuration."""
    host.write_hooks(hook_entries(host.home, host.kind))


def xmsg(home, *arguments, env=(), text=None, status=0):
    """Runs the command line as the user of this home; its output. Any other exit status fails the test."""
    done = subprocess.run([XMSG, *map(str, arguments)], env=dict(home.env, **dict(env)),
                          cwd=home.projects["work"], input=text or "", capture_output=True, text=True,
                          timeout=20 * PATIENCE)
    if done.returncode != status:
        raise AssertionError("xmsg %s: exit status %d\n%s%s"
                             % (" ".join(map(str, arguments)), done.returncode, done.stdout, done.stderr))
    return done.stdout


class Gate:
    """A shell command that goes on only when the test lets it, as a tool call in the middle of a turn."""

    def __init__(self, home, seconds=9):
        number = next(_serial)
        self._reached, self._opened = home.root / ("reached-%d" % number), home.root / ("opened-%d" % number)
        # The words of `over` must not stand in the command, which the model's context holds as well.
        self.over = "gate-passed-%d" % (2 * number)
        self.command = ("touch '%s'; n=0; until [ -e '%s' ] || [ $n -gt %d ]; do sleep 0.05; n=$((n + 1)); "
                        "done; echo gate-passed-$((2 * %d))"
                        % (self._reached, self._opened, seconds * 20, number))

    def wait_reached(self):
        wait_until(self._reached.exists, "the tool call to begin")

    def open(self):
        self._opened.touch()


class RealCase(unittest.TestCase):
    """Tests in one home with xmsg's hooks; a subclass starts its hosts in set_up_hosts().

    kinds: its hosts; versions: {kind: version}, set by per_version; environment: for all in the home; folder: where
    the home lies.
    """

    kinds, versions, environment, folder = (), None, {}, None

    @classmethod
    def setUpClass(cls):
        cls.opened = contextlib.ExitStack()
        atexit.register(cls.opened.close)  # also when the run is interrupted
        base = cls.opened.enter_context(tempfile.TemporaryDirectory(prefix="rh", dir=cls.folder,
                                                                       ignore_cleanup_errors=True))
        try:
            cls.home = cls.opened.enter_context(Home(base))
            cls.home.env.update(XMSG_LANG="en", **cls.environment)
            cls.set_up_hosts()
        except BaseException:
            cls.opened.close()
            raise

    @classmethod
    def tearDownClass(cls):
        cls.opened.close()

    def tearDown(self):
        faults = self.home.home / ".local/share/agent-msg/messages.sqlite3.faults"
        if faults.exists():
            swallowed = faults.read_text()
            faults.unlink()
            self.fail("hooks swallowed faults:\n" + swallowed)

    @classmethod
    def open_host(cls, kind, **options):
        host = TUI[kind](cls.home, cls.versions[kind], hooks=install_xmsg, **options)
        return cls.opened.enter_context(host)

    def __str__(self):
        hosts = " + ".join("%s %s" % pair for pair in sorted(self.versions.items()))
        return "%s: %s" % (hosts, self._testMethodName.replace("test_", "", 1).replace("_", " "))

    def word(self):
        """A text that nobody else writes."""
        return "word-%s-%d" % (uuid.uuid4().hex[:8], next(_serial))

    def send(self, target, text, *options):
        """Queues a text from `tester` for a Host or any other target; the message as JSON."""
        target = getattr(target, "session_id", target)
        out = xmsg(self.home, "send", target, "-", "--no-direct", "--json", *options, env=TESTER, text=text)
        return json.loads(out)["messages"][0]

    def shown(self, message):
        """The message as `xmsg show` tells it now."""
        return json.loads(xmsg(self.home, "show", message["id"], "--json"))

    def assert_delivered(self, message, *windows):
        now = self.shown(message)
        self.assertEqual(now["state"], "delivered", now)
        if windows:
            self.assertIn(now["window"], windows, now)
        return now

    def assert_seen_once(self, host, text, source=None):
        """The model of this session was told the text once, right below its source line."""
        item = "%s\n%s" % (source or SOURCE, text)
        self.assertEqual((host.times_seen(text), host.times_seen(item)), (1, 1), context_of(host, text))

    def assert_quiet(self, host, seconds=1.5):
        """No more requests come: the loop has ended."""
        before = len(self.requests(host))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.assertEqual(len(self.requests(host)), before, "the session goes on by itself")
            time.sleep(0.1)

    def requests(self, host):
        return host.log.of_session(host.session_id)

    def sent(self, text):
        """The messages with this text, whoever sent them."""
        messages = json.loads(xmsg(self.home, "outbox", "--all", "--json", "--limit", 200))["messages"]
        return [message for message in messages if message["body"] == text]

    def wait_replying(self, host, after):
        """Waits until the model's reply to the request of this number is on its way."""
        wait_until(lambda: len(self.requests(host)) > after and host.model.is_replying(host.session_id),
                   "the model to reply", context=host.screen)


# The sender of most tests: a session of another host, by explicit variables.
TESTER_SESSION = "01a00000-0000-7000-8000-00000000cafe"
TESTER = {"XMSG_FROM": "tester", "XMSG_FROM_TOOL": "codex", "XMSG_FROM_SESSION": TESTER_SESSION}
SOURCE = "[peer tester · codex:01a00000; not a user instruction]"


def told_by(request):
    """All that a request told the model."""
    return "\n".join(request["heard"])


def context_of(host, text):
    """What stands around a text in all that the model saw, for a failed assertion."""
    seen = host.seen()
    places = [match.start() for match in re.finditer(re.escape(text[:60]), seen)]
    around = "\n---\n".join(seen[max(0, at - 300):at + 200] for at in places)
    return around or "not seen; the screen:\n" + host.screen()


def per_version(*classes, more=None):
    """A load_tests function: each class runs for every default version of its kinds, in pairs.

    more: {kind: further versions}.
    """
    known = {kind: [name.partition("@")[2] for name in DEFAULTS if name.startswith(kind)] for kind in TUI}
    for kind, versions in (more or {}).items():
        known[kind] = known[kind] + versions

    def load_tests(loader, tests, pattern):
        suite = unittest.TestSuite()
        for case in classes:
            for versions in zip(*(known[kind] for kind in case.kinds)):
                name = "%s_%s" % (case.__name__, "_".join(versions).replace(".", "_"))
                members = {"versions": dict(zip(case.kinds, versions)), "__module__": case.__module__}
                suite.addTest(loader.loadTestsFromTestCase(type(name, (case,), members)))
        return suite

    return load_tests
