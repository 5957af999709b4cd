"""What a direct delivery costs: `send` to an idle session until its host has the message and has not refused it.

`python3 bench/direct.py [ROUNDS [VERSION]]`: ratios to floors of the same run; status 1 if a bar is missed. The host comes
from npm, and answers to a scripted model server on loopback. What the host itself takes to begin its turn, some 100 ms in
which it does nothing else, is measured beside it by a bare client: a line written, then the transcript watched.
"""
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

from measure import PYTHON, ROOT, Home, measure, python, report

TESTS = os.path.join(ROOT, "tests")
sys.path[:0] = [ROOT, os.path.join(TESTS, "real")]
import claude_delivery  # noqa: E402
from hosts import ClaudeHost, Home as HostHome  # noqa: E402
from install_hosts import DEFAULTS  # noqa: E402

FLOOR = "python json,sqlite3,argparse,socket"
HOST = "the host's own time"
XMSG = os.path.join(ROOT, "bin", "xmsg")
SESSION = "7c1f0a52-0000-4000-8000-00000000000a"


def send(bench, session, text, *options):
    run = bench.run([XMSG, "send", session, text, *options])
    if not run[2].startswith(b"delivered"):
        raise SystemExit("send said %r" % run[2])
    return run


def bare_write(config, session, text):
    """(seconds, 0, b"") from the write of a line until the host's transcript has the message."""
    import socket
    record, reason = claude_delivery.find_inbox(session, [config])
    if reason:
        raise SystemExit(reason)
    message = claude_delivery.msg_id(os.urandom(8).hex())
    begin = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as inbox:
        inbox.connect(record.socket)
        inbox.sendall(claude_delivery.line(text, message, session, "uds:/nobody.sock"))
    while True:
        for path in glob.glob(os.path.join(glob.escape(config), "projects", "*", session + ".jsonl")):
            with open(path) as file:
                if message in file.read():
                    return time.perf_counter() - begin, 0, b""
        if time.perf_counter() - begin > 10:
            raise SystemExit("the host has not taken a bare line")
        time.sleep(0.001)


def with_the_real_host(rounds, version):
    with Home() as bench, tempfile.TemporaryDirectory(prefix="rh") as base, HostHome(base) as home, \
            ClaudeHost(home, version) as host:
        bench.env, texts = home.env, []

        def to_host(act, *options):
            host.wait_idle()
            texts.append("direct message %d." % len(texts))
            return act(host.session_id, texts[-1], *options)
        times = measure({
            FLOOR: lambda: bench.run(python("json, sqlite3, argparse, socket")),
            HOST: lambda: to_host(lambda *words: bare_write(str(home.claude_config), *words)),
            "send": lambda: to_host(lambda *words: send(bench, *words)),
            "send --wait": lambda: to_host(lambda *words: send(bench, *words), "--wait", "9")}, rounds)
        host.wait_seen(texts[-1])
        lost = [text for text in texts if host.times_seen(text) != 1]
        if lost:
            raise SystemExit("not seen once: %r" % lost)
    return report("direct delivery to an idle Claude Code %s" % version, times, [("send", FLOOR, 2.5, HOST)])


def with_a_host_that_answers_at_once(rounds):
    with Home() as bench, tempfile.TemporaryDirectory(prefix="rh") as runtime:
        config = os.path.join(bench.folder, ".claude")
        os.makedirs(os.path.join(config, "sessions"))
        with subprocess.Popen([PYTHON, os.path.join(TESTS, "fake_claude.py"), config, runtime, SESSION],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
            json.loads(host.stdout.readline())
            try:
                times = measure({FLOOR: lambda: bench.run(python("json, sqlite3, argparse, socket")),
                                 "send": lambda: send(bench, SESSION, "a direct message")}, rounds)
            finally:
                host.kill()
    return report("direct delivery to a host that answers at once", times, [("send", FLOOR, 2.5)])


if __name__ == "__main__":
    newest = [name.partition("@")[2] for name in DEFAULTS if name.startswith("claude@")][-1]
    rounds, version = (sys.argv[1:] + ["20", newest][len(sys.argv) - 1:])[:2]
    held = [with_a_host_that_answers_at_once(int(rounds)), with_the_real_host(int(rounds), version)]
    sys.exit(not all(held))
