"""What the benchmarks share: a home of their own, interleaved runs, and ratios to floors of the same run.

Times of one machine say nothing on another, and a busy machine changes them by the minute; the ratio of two commands
that took turns says something. The ratio of the medians decides; those of the minima and of the CPU times stand beside
it, since load spoils the medians first.
"""
import os
import shutil
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON = os.path.realpath(sys.executable)


class Home:
    """A store of its own, run by this interpreter; gone at the end."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="xmsg-bench-")
        self.db = os.path.join(self.folder, "messages.sqlite3")
        self.env = {"PATH": "/usr/bin:/bin", "HOME": self.folder, "LANG": "C.UTF-8", "XMSG_LANG": "en",
                    "XMSG_DB": self.db}
        with open(os.path.join(self.folder, "python"), "w") as file:
            file.write(PYTHON + "\n")
        return self

    def __exit__(self, *exc):
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command, data=b""):
        """(seconds, CPU seconds, standard output) of a command, from its start until it has ended.

        The CPU time is that of the process and its children. Nothing of ours stands in between, as the buffers of
        `subprocess` do: what fits into the pipe lies there before the process begins.
        """
        stdin, feed = os.pipe()
        sink, stdout = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1),
                   (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        rest = data[os.write(feed, data[:32768]):]
        if not rest:
            os.close(feed)
        begin = time.perf_counter()
        pid = os.posix_spawnp(command[0], command, self.env, file_actions=actions)
        os.close(stdin)
        os.close(stdout)
        if rest:
            while rest:
                rest = rest[os.write(feed, rest):]
            os.close(feed)
        out = b"".join(iter(lambda: os.read(sink, 65536), b""))
        _, status, used = os.wait4(pid, 0)
        seconds = time.perf_counter() - begin
        os.close(sink)
        if status:
            raise SystemExit("%r left with %d" % (command, os.waitstatus_to_exitcode(status)))
        return seconds, used.ru_utime + used.ru_stime, out


def python(imports):
    """A floor: the interpreter with these imports and nothing else."""
    return [PYTHON, "-I", "-S", "-c", "import %s" % imports]


def measure(cases, rounds):
    """{name: [(seconds, CPU seconds)]} of cases {name: function that returns Home.run()'s answer}.

    The cases take turns, every second round backwards, so that none always follows the same one. The first round,
    which compiles and fills caches, does not count.
    """
    times = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name in list(cases)[::-1 if turn % 2 else 1]:
            seconds, cpu, _ = cases[name]()
            if turn:
                times[name].append((seconds, cpu))
    return times


# (case, what it is compared with): [median ratio, bar], of all that was reported; run.py compares it with results.md.
FIGURES = {}


def report(title, times, bars):
    """Prints the table; true if every bar holds.

    bars: [(name, floor, most times that floor[, host])]; host: the case that measures what is not ours but the host's own
    time, which is taken off first.
    """
    print("\n%s (%d rounds)" % (title, max(map(len, times.values()))))
    print("%-30s %8s %8s %8s   %s" % ("", "min ms", "p50 ms", "cpu ms", "p50, min, cpu: times the floor, and the bar"))
    held = True
    summary = {name: (statistics.median(seconds for seconds, _ in runs), min(seconds for seconds, _ in runs),
                      statistics.median(cpu for _, cpu in runs)) for name, runs in times.items()}
    compared = {name: (floor, most, *host) for name, floor, most, *host in bars}
    for name, (median, least, cpu) in summary.items():
        line = "%-30s %8.2f %8.2f %8.2f" % (name, 1000 * least, 1000 * median, 1000 * cpu)
        if name in compared:
            floor, most, *host = compared[name]
            own = [time - sum(summary[other][place] for other in host) for place, time in enumerate(summary[name])]
            ratios = [time / other for time, other in zip(own, summary[floor])]
            held = held and ratios[0] <= most
            FIGURES["%s / %s" % (name, floor)] = [round(ratios[0], 3), most]
            line += "   %.2f  %.2f  %.2f  <= %.2f x %s" % (*ratios, most, floor)
            line += "".join(" + " + other for other in host)
            line += "" if ratios[0] <= most else "  MISSED"
        print(line)
    if any(median > 1.3 * cpu for median, _, cpu in (summary[floor] for _, floor, *_ in bars)):
        print("The machine was busy: a floor took 1.3 times its CPU time or more. Compare cpu, or run it again.")
    sys.stdout.flush()
    return held
