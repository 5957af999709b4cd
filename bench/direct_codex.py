"""What a direct delivery to Codex costs: `send` to an idle thread until its app-server has taken the message.

`python3 bench/direct_codex.py [ROUNDS [VERSION]]`: a ratio to a floor of the same run; status 1 if the bar is missed. The
host comes from npm, and answers to a scripted model server on loopback. What the app-server itself takes to be asked and to
answer is measured beside it by a bare client, which stays connected to nothing in between either.
"""
import os
import sys
import tempfile
import time

from measure import ROOT, Home, measure, python, report

sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "real")]
from codex_rpc import CodexRpc  # noqa: E402
from hosts import CodexDaemon, CodexHost, Home as HostHome  # noqa: E402
from install_hosts import DEFAULTS  # noqa: E402

FLOOR = "python json,sqlite3,argparse,socket"
SERVER = "the server's own time"
XMSG = os.path.join(ROOT, "bin", "xmsg")


def send(bench, thread, text):
    run = bench.run([XMSG, "send", thread, text])
    if b"codex-turn-start" not in run[2]:
        raise SystemExit("send said %r" % run[2])
    return run


def bare_turn(socket, thread, text):
    """(seconds, 0, b"") of a connection, a look at the thread, and a turn in it."""
    begin = time.perf_counter()
    with CodexRpc(socket) as rpc:
        rpc.call("thread/read", {"threadId": thread})
        rpc.call("turn/start", {"threadId": thread, "input": [{"type": "text", "text": text}]})
        return time.perf_counter() - begin, 0, b""


def main(rounds, version):
    with Home() as bench, tempfile.TemporaryDirectory(prefix="rh") as base, HostHome(base) as home, \
            CodexDaemon(home, version) as daemon, CodexHost(home, version) as host:
        bench.env, texts = home.env, []
        host.prompt("hello")

        def to_host(act, first):
            host.wait_idle()
            texts.append("direct message %d." % len(texts))
            return act(first, host.session_id, texts[-1])
        times = measure({
            FLOOR: lambda: bench.run(python("json, sqlite3, argparse, socket")),
            SERVER: lambda: to_host(bare_turn, daemon.socket), "send": lambda: to_host(send, bench)}, rounds)
        host.wait_seen(texts[-1])
        lost = [text for text in texts if host.times_seen(text) != 1]
        if lost:
            raise SystemExit("not seen once: %r" % lost)
    return report("direct delivery to an idle thread of Codex %s" % version, times, [("send", FLOOR, 2.5, SERVER)])


if __name__ == "__main__":
    newest = [name.partition("@")[2] for name in DEFAULTS if name.startswith("codex@")][-1]
    rounds, version = (sys.argv[1:] + ["20", newest][len(sys.argv) - 1:])[:2]
    sys.exit(not main(int(rounds), version))
