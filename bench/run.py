"""All figures in one run, and how they compare with the committed ones.

`python3 bench/run.py [--quick] [--write]`: every case as a ratio to a floor of the same run, then these ratios beside
those of results.md; status 1 if a bar is missed or a ratio is SLACK times the committed one. --quick: fewer rounds, and
growth to 50,000 rows. --write: puts this run's ratios into results.md. What needs a real host, or much disk, is run by
itself: direct.py, direct_codex.py, history.py, adoption.py.
"""
import importlib
import json
import os
import re
import sys
import time

import direct
import hook
import send
from measure import FIGURES, PYTHON, Home, python

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results.md")
FLOOR = "python json,sqlite3,argparse"
SENDERS, LEAST_RATE = 8, 0.55
SLACK = 1.25  # two noisy cores


def parallel(home, command, seconds):
    """How many of these commands end in a second, SENDERS of them at any time."""
    devnull = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, devnull, number) for number in (0, 1, 2)]
    running, count, begin = set(), 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        while len(running) < SENDERS:
            running.add(os.posix_spawnp(command[0], command, home.env, file_actions=actions))
        pid, status = os.wait()
        running.remove(pid)
        if status:
            raise SystemExit("%r left with %d" % (command, os.waitstatus_to_exitcode(status)))
        count += 1
    taken = time.perf_counter() - begin
    for pid in running:
        os.waitpid(pid, 0)
    os.close(devnull)
    return count / taken


def throughput(seconds):
    """Whether 8 senders at once come near the rate of 8 interpreters that only import what they need."""
    command, floor = [hook.XMSG, "send", hook.SESSION, hook.TEXT, "--no-direct"], python("json, sqlite3, argparse")
    rates = {"send": [], FLOOR: []}
    with Home() as home:
        hook.hook(home, hook.payload())
        for turn in range(4):
            for name, words in (("send", command), (FLOOR, floor))[::-1 if turn % 2 else 1]:
                rates[name].append(parallel(home, words, seconds / 4))
    sends, floors = (sum(rates[name]) / 4 for name in ("send", FLOOR))
    FIGURES["time of %d senders at once / %s" % (SENDERS, FLOOR)] = [round(floors / sends, 3), round(1 / LEAST_RATE, 3)]
    print("\n%d at once for %d s: %.1f sends/s, %.1f floors/s: %.2f of the floor's rate, >= %.2f%s" % (
        SENDERS, seconds, sends, floors, sends / floors, LEAST_RATE,
        "" if sends / floors >= LEAST_RATE else "  MISSED"))
    return sends / floors >= LEAST_RATE


# A process counts what its parent took before it became what it is, so a small one stands in between.
PEAK = ("import os, resource, sys\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "else:\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "    os.execvp(sys.argv[1], sys.argv[1:])\n")


def memory():
    """The most memory of each command, in MB and times the floor's. No bar: it is compared with the committed one."""
    with Home() as home:
        hook.hook(home, hook.payload())
        commands = {FLOOR: python("json, sqlite3, argparse"),
                    "send": [hook.XMSG, "send", hook.SESSION, hook.TEXT, "--no-direct"],
                    "hook, 1 message": [hook.HOOK, "claude"], "list": [hook.XMSG, "list"],
                    "outbox": [hook.XMSG, "outbox", "--all"], "hook, empty": [hook.HOOK, "claude"]}
        print("\nmemory (what takes less than %s stands as that)\n%-30s %8s" % ("a bare Python", "", "MB"))
        floor = None
        for name, command in commands.items():
            most = int(home.run([PYTHON, "-I", "-S", "-c", PEAK, *command], hook.payload())[2])
            size = most / (1024 if sys.platform == "linux" else 1 << 20)
            floor = floor or size
            FIGURES["memory of %s / %s" % (name, FLOOR)] = [round(size / floor, 3), None]
            print("%-30s %8.1f   %.2f x %s" % (name, size, size / floor, FLOOR))


def committed():
    """The ratios that results.md holds."""
    with open(RESULTS, encoding="utf-8") as file:
        found = re.search(r"```json\n(.*?)```", file.read(), re.S)
    return json.loads(found.group(1)) if found else {}


def compare(known):
    """Prints every ratio beside its bar and the committed one; false if one has grown by more than SLACK."""
    held = True
    print("\n%-62s %7s %7s %9s" % ("ratio", "now", "bar", "committed"))
    for name, (ratio, bar) in FIGURES.items():
        before = known.get(name)
        slower = before is not None and ratio > before * SLACK
        held = held and not slower
        print("%-62s %7.2f %7s %9s%s%s" % (name, ratio, "-" if bar is None else "%.2f" % bar,
                                          "-" if before is None else "%.2f" % before,
                                          "  MISSED" if bar is not None and ratio > bar else "",
                                          "  SLOWER" if slower else ""))
    return held


def write():
    with open(RESULTS, encoding="utf-8") as file:
        text = file.read()
    block = "```json\n%s\n```" % json.dumps({name: ratio for name, (ratio, _) in FIGURES.items()}, indent=1)
    with open(RESULTS, "w", encoding="utf-8") as file:
        file.write(re.sub(r"```json\n.*?```", lambda _: block, text, flags=re.S))


def main(quick):
    rounds = 8 if quick else 20
    print("Python %s, %d cores, load %.1f" % (sys.version.split()[0], os.cpu_count(), os.getloadavg()[0]))
    held = [hook.main(2 * rounds), send.main(rounds, 50000 if quick else 1000000),
            direct.with_a_host_that_answers_at_once(rounds), importlib.import_module("list").main(rounds),
            throughput(10)]
    memory()
    return all(held)


if __name__ == "__main__":
    known, held = committed(), main("--quick" in sys.argv)
    held = compare(known) and held
    if "--write" in sys.argv:
        write()
    sys.exit(not held)
