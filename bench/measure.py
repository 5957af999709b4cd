"""What the benchmarks share: a home of their own, interleaved runs, and ratios to floors of the same run.

Times of one machine say nothing on another; the ratio of two medians of interleaved runs does.
"""
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON = os.path.realpath(sys.executable)


class Home:
    """A store of its own, run by this interpreter; gone at the end."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="xmsg-bench-")
        self.env = {"PATH": "/usr/bin:/bin", "HOME": self.folder, "LANG": "C.UTF-8", "XMSG_LANG": "en",
                    "XMSG_DB": os.path.join(self.folder, "messages.sqlite3")}
        with open(os.path.join(self.folder, "python"), "w") as file:
            file.write(PYTHON + "\n")
        return self

    def __exit__(self, *exc):
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command, data=b""):
        """(seconds, standard output) of a command."""
        begin = time.perf_counter()
        done = subprocess.run(command, input=data, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              cwd=self.folder)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit("%r left with %d" % (command, done.returncode))
        return seconds, done.stdout


def python(imports):
    """A floor: the interpreter with these imports and nothing else."""
    return [PYTHON, "-I", "-S", "-c", "import %s" % imports]


def measure(cases, rounds):
    """{name: [seconds]} of cases {name: function that returns seconds}, interleaved."""
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(case())
    return times


def report(title, times, bars):
    """Prints the table; true if every bar holds. bars: [(name, floor, most times that floor)]."""
    print("\n%s\n%-34s %8s %8s   %s" % (title, "", "min ms", "p50 ms", "ratio of medians, bar"))
    held = True
    compared = {name: (floor, most) for name, floor, most in bars}
    for name, seconds in times.items():
        line = "%-34s %8.2f %8.2f" % (name, 1000 * min(seconds), 1000 * statistics.median(seconds))
        if name in compared:
            floor, most = compared[name]
            ratio = statistics.median(seconds) / statistics.median(times[floor])
            held = held and ratio <= most
            line += "   %.2f x %s, at most %.2f%s" % (ratio, floor, most, "" if ratio <= most else "  MISSED")
        print(line)
    return held
