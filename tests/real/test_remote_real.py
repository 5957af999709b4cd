"""Another machine over a real sshd on loopback, and reminders from cron's environment, up to the real hosts' models.

Two users' homes stand for two machines; each has an sshd of its own, whose logins have that home.
"""
import getpass
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hosts import PATIENCE, wait_until
from realcase import PROJECT, XMSG, RealCase, per_version

ADA, BOB, EVE = ("7c1f0a52-0000-4000-8000-00000000000a", "01a04cd2-1111-7000-8000-00000000000b",
                 "01a04cd2-2222-7000-8000-0000000000ee")
BODIES = ["$HOME `id` $(id) \\ \\\\ \"x\" 'y' ; & | > < * ? [a] {b} ~ ! # % \t ^ @ = , ( )", "-rf --help", "''", "a\nb\n\n c ",
          "\U0001f600 é 漢字 \u200d \x7f \x1b[31m", "漢" * 8000]
CUTS = 50
CONFIG = """\
ListenAddress 127.0.0.1
Port %d
HostKey %s/host_key
PidFile none
AuthorizedKeysFile %s/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv HOME=%s PATH=%s XMSG_LANG=en
"""


class Sshd:
    """An sshd on a free high port of loopback, whose logins have this home. command: the words that reach it."""

    def __init__(self, folder, home):
        self.folder = Path(folder)
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        path = ":".join([str(PROJECT / "bin"), os.path.dirname(sys.executable), "/usr/bin:/bin"])
        (self.folder / "config").write_text(CONFIG % (self.port, folder, folder, home, path))
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", 0o755, exist_ok=True)  # it insists on this empty folder
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen([shutil.which("sshd", path="/usr/sbin:/usr/bin"), "-D", "-e", "-f", self.folder / "config"],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.command = ["ssh", "-F", "/dev/null", "-p", str(self.port), "-i", str(self.folder / "key"), "-o", "BatchMode=yes",
                        "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR",
                        getpass.getuser() + "@127.0.0.1"]
        wait_until(self._listens, "sshd to listen", context=lambda: (self.folder / "log").read_text())

    def _listens(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        self.process.terminate()
        self.process.wait(10 * PATIENCE)


class Machine:
    """A home with a store, reached by its own sshd. home: a kit's Home in whose place it stands, else a new one."""

    def __init__(self, case, home=None):
        self.folder = Path(tempfile.mkdtemp(prefix="rm")).resolve()
        case.addCleanup(shutil.rmtree, self.folder, True)
        self.home = home.home if home else self.folder / "home"
        self.home.mkdir(exist_ok=True)
        self.env = {"PATH": os.path.dirname(sys.executable) + ":/usr/bin:/bin", "HOME": str(self.home), "XMSG_LANG": "en"}
        self.sshd = Sshd(self.folder, self.home)
        case.addCleanup(self.sshd.stop)

    def run(self, *arguments, text="", session=None, **env):
        if session:
            env.update(XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=session)
        return subprocess.run([XMSG, *arguments], input=text, env=dict(self.env, **env), cwd=self.folder, capture_output=True,
                              text=True, timeout=60 * PATIENCE)

    def json(self, *arguments, status=0, **options):
        done = self.run(arguments[0], "--json", *arguments[1:], **options)
        if done.returncode != status:
            raise AssertionError("xmsg %s: status %d\n%s%s" % (arguments, done.returncode, done.stdout, done.stderr))
        return json.loads(done.stdout)

    def knows(self, alias, other):
        self.json("remote", "add", alias, "--", *other.sshd.command)

    def session(self, host, session, name):
        """Registers a session through the real hook, and names it."""
        payload = {"session_id": session, "cwd": "/", "hook_event_name": "SessionStart", "permission_mode": "default"}
        subprocess.run([PROJECT / "xmsg-hook.sh", host], input=json.dumps(payload), env=self.env, text=True, check=True,
                       stdout=subprocess.DEVNULL)
        self.json("name", session, name)

    def has(self, body):
        """Whether the store holds a message of this text."""
        database = sqlite3.connect("file:%s?mode=ro" % (self.home / ".local/share/agent-msg/messages.sqlite3"), uri=True)
        try:
            return database.execute("select 1 from messages where body = ?", (body,)).fetchone()
        finally:
            database.close()

    def messages(self):
        return self.json("outbox", "--all", "--limit", "1000")["messages"]


class TwoMachines(RealCase):
    """Without hosts: what crosses, byte for byte, and what a cut leaves."""

    versions = {"sshd": "of this machine"}

    @classmethod
    def set_up_hosts(cls):
        """There are none."""

    def setUp(self):
        self.here, self.there = Machine(self), Machine(self)
        self.here.session("claude", ADA, "ada")
        self.there.session("codex", BOB, "bob")
        self.there.session("codex", EVE, "eve")
        self.here.knows("box", self.there)

    def test_text_of_every_kind_arrives_byte_for_byte_and_answers_are_as_at_home(self):
        for body in BODIES:
            self.here.json("send", "box:bob", "-", text=body + "\n", session=ADA)
        self.assertEqual(BODIES, [found["body"] for found in self.there.messages()])
        for target, text, status in (("nobody", "x", 3), ("01a04cd2", "x", 4), ("bob", "", 2), ("bob", "x" * 8001, 2), ("claude:", "x", 3)):
            far = self.here.json("send", "box:" + target, text, session=ADA, status=status)["error"]
            near = self.there.json("send", target, text, session=EVE if target != "01a04cd2" else None, status=status)["error"]
            self.assertEqual(near["code"], far["code"])
            self.assertEqual([line[:40] for line in near.get("candidates", ())], [line[:40] for line in far.get("candidates", ())])
        self.assertEqual({BOB, EVE}, {found["to"]["session"] for found in self.here.json("send", "box:all", "x", session=ADA)["messages"]})
        self.assertEqual(BOB, self.here.json("send", "box:01a04cd2-1", "x", session=ADA)["messages"][0]["to"]["session"])

    def test_both_directions_are_proven_and_an_answer_finds_its_way(self):
        self.assertIsNone(self.here.json("remote", "check", "box", status=8)["back"])
        self.there.knows("lap", self.here)
        self.assertEqual("lap", self.here.json("remote", "check", "box")["back"])
        self.here.json("send", "box:bob", "question", session=ADA)
        question, = self.there.messages()
        self.assertEqual("lap:ada", question["from"]["label"])
        self.there.json("send", question["from"]["label"], "answer", session=BOB)
        self.assertEqual(["question", "answer"], [found["body"] for found in self.here.messages()])

    def test_no_cut_at_any_of_fifty_points_doubles_or_invents_anything(self):
        begin = time.monotonic()
        self.here.json("send", "box:bob", "measured", session=ADA)
        whole, rng = time.monotonic() - begin, random.Random(50)
        rest = {}
        # On a quick machine most cuts come too late: more of them then, until some were in the middle.
        while len(rest) < CUTS or len(rest) < 4 * CUTS and self.unknown() < 3:
            number = len(rest)
            body = "text %02d" % number
            process = subprocess.Popen([XMSG, "send", "box:bob", body, "--json"], cwd=self.here.folder, text=True,
                                       env=dict(self.here.env, XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=ADA),
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            # A third at any time of all; the others once the far side has spoken, when the message is on its way.
            if number % 3:
                while process.poll() is None and not self.here.has(body):
                    time.sleep(0.001)
            try:
                process.wait(rng.uniform(0, 0.1 * whole if number % 3 else 1.1 * whole))
            except subprocess.TimeoutExpired:
                self.cut(process.pid, rng.choice(("ssh", "sshd", "receive", "send")))
            out, _ = process.communicate(timeout=30 * PATIENCE)
            self.assertIn(process.returncode, (0, 6, 8, -signal.SIGKILL))
            if process.returncode in (0, 6):
                sent, = json.loads(out)["messages"]
                self.assertEqual((process.returncode == 6, "direct-uncertain" if process.returncode == 6 else "queued"),
                                 (sent["unknown"], sent["state"]))
            rest[body] = process.returncode
        unknown = self.unknown()
        self.here.json("outbox", "--refresh", "--limit", "1000")
        after, there = self.here.messages(), [found["body"] for found in self.there.messages()]
        self.assertEqual(len(set(there)), len(there))
        self.assertEqual(set(), {found["state"] for found in after} - {"queued", "cancelled"})
        self.assertEqual({found["body"] for found in after if found["state"] == "queued"}, set(there))
        for body, status in rest.items():
            self.assertTrue(body in there if status in (0, 6) else body not in there or status != 8, (body, status))
        self.assertGreaterEqual(unknown, 3)
        print("       %d whole, %d refused, %d killed, %d were UNKNOWN before one refresh" % tuple(
            [sum(status == wanted for status in rest.values()) for wanted in (0, 8, -signal.SIGKILL)] + [unknown]), flush=True)

    def unknown(self):
        """How many of the messages here are UNKNOWN."""
        return sum(found["unknown"] for found in self.here.messages())

    def cut(self, sender, what):
        """Kills one process of the exchange: the sender, its ssh, the session's sshd, or the far xmsg."""
        pids = {"send": [sender]}
        if what != "send":
            pids = {"ssh": below(sender, lambda words: words[0] == "ssh"),
                    "sshd": below(self.there.sshd.process.pid, lambda words: words[0].startswith("sshd")),
                    "receive": below(self.there.sshd.process.pid, lambda words: "receive" in words)}
        for pid in pids[what]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def below(pid, wanted):
    """The processes below one whose arguments are wanted."""
    found = []
    try:
        children = Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        try:
            words = Path("/proc/%d/cmdline" % child).read_bytes().decode().split("\0")
        except OSError:
            continue
        found += ([child] if words[0] and wanted(words) else []) + below(child, wanted)
    return found


class ToRealHosts(RealCase):
    kinds = ("claude", "codex")

    @classmethod
    def set_up_hosts(cls):
        cls.claude = cls.open_host("claude")
        cls.codex = cls.open_host("codex")
        cls.codex.prompt("hello")  # it registers with its first prompt
        cls.codex.wait_idle()

    def test_a_message_of_another_machine_is_proven_to_arrive_and_names_the_way_back(self):
        here, there = Machine(self), Machine(self, self.home)
        here.session("claude", ADA, "ada")
        here.knows("box", there)
        there.knows("lap", here)
        here.json("remote", "check", "box")
        word = self.word()
        sent, = here.json("send", "box:" + self.claude.session_id, word, "--wait", "15", session=ADA)["messages"]
        self.assertEqual(("delivered", "uds-direct"), (sent["state"], sent["window"]))
        self.assertTrue(sent["confirmed_at"])
        self.claude.wait_seen(word)
        self.claude.wait_idle()
        self.assertEqual(1, self.claude.times_seen(word))
        self.assertIn('<cross-session-message from="lap:ada"', self.claude.seen())
        self.assertNotIn("from-mode", self.claude.seen())

    def test_a_reminder_from_cron_reaches_both_hosts(self):
        environments = ({"HOME": str(self.home.home), "LOGNAME": getpass.getuser(), "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"},
                        {"XMSG_DB": str(self.home.home / ".local/share/agent-msg/messages.sqlite3"), "HOME": str(self.home.home)})
        for host in (self.claude, self.codex):
            for environment in environments:
                word = self.word()
                done = subprocess.run(["/bin/sh", "-c", "%s send %s %s --notification --from patrol --json" % (XMSG, host.session_id, word)],
                                      env=environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                      start_new_session=True, timeout=30 * PATIENCE)
                self.assertEqual((0, ""), (done.returncode, done.stderr), done.stdout)
                if host is self.codex and json.loads(done.stdout)["messages"][0]["state"] == "queued":
                    host.prompt("go on")
                host.wait_seen(word)
                host.wait_idle()
                self.assertEqual(1, host.times_seen(word))
                if host is self.codex:
                    self.assertIn("[local notification patrol; not a user instruction]\n" + word, host.seen())
                else:
                    self.assertIn('from="patrol"', host.seen())
        self.assertNotIn("from-mode", self.claude.seen())


def load_tests(loader, tests, pattern):
    suite = per_version(ToRealHosts)(loader, tests, pattern)
    suite.addTest(loader.loadTestsFromTestCase(TwoMachines))
    return suite
