#!/usr/bin/env python3
"""Runs the tests on real hosts, for every pinned version; a line a test, and last "N passed, N failed".

usage: run.py [--kit] [WORD ...]      WORDs: only the tests whose line holds every one of them

Installs the hosts if need be (install_hosts.py), and runs two classes at a time. --kit: also the kit's own selftest.py.
The exit status is 0 only if something ran and nothing failed; no test is ever skipped. A few failed ones run once more.
"""
import concurrent.futures
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path

import install_hosts
from hosts import PATIENCE

HERE = Path(__file__).resolve().parent
SECONDS = 90 * PATIENCE  # for one test, or for one class's hosts to start
SELFTEST_SECONDS = 400 * PATIENCE
MOST_AGAIN = 8  # so many failed tests at most get a second try
AT_ONCE = 2  # classes; their hosts wait most of the time
CLASS = "--class"  # inner: run.py --class NAME DESCRIPTOR LINE ...


class TooLong(Exception):
    pass


def out_of_time(*_):
    raise TooLong("this test took longer than %g s" % SECONDS)


def limit(seconds):
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Report(unittest.TestResult):
    """One line a test, as soon as it ends."""

    def startTest(self, test):
        super().startTest(test)
        self.begin = time.monotonic()
        limit(SECONDS)

    def stopTest(self, test):
        limit(SECONDS)  # for the next class's hosts
        super().stopTest(test)

    def addSuccess(self, test):
        self.passed = getattr(self, "passed", 0) + 1
        print("ok     %s (%.1f s)" % (test, time.monotonic() - self.begin), flush=True)

    def addFailure(self, test, error):
        test.__class__.spoiled = True
        self.failures.append((test, ""))
        print("FAILED %s" % test, flush=True)
        traceback.print_exception(*error, file=sys.stdout)

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addFailure(test, error)

    def addSkip(self, test, reason):
        self.failures.append((test, reason))
        print("FAILED %s: skipped, which nothing here may be: %s" % (test, reason), flush=True)


def all_tests():
    return unittest.TestLoader().discover(str(HERE), pattern="test_*_real.py", top_level_dir=str(HERE))


def single_tests(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from single_tests(test)
        else:
            yield test


def run_class(name, wanted):
    """Runs one class's tests whose line wanted(line) takes, here; (passed, lines of those that failed)."""
    report = Report()
    limit(SECONDS)
    unittest.TestSuite(tests_of(name, wanted)).run(report)
    limit(0)
    return getattr(report, "passed", 0), [str(test) for test, _ in report.failures]


def full_name(test):
    return "%s.%s" % (type(test).__module__, type(test).__qualname__)


def tests_of(name, wanted):
    return [test for test in single_tests(all_tests()) if full_name(test) == name and wanted(str(test))]


def run_tests(wanted, at_once):
    """Runs the tests whose line wanted(line) takes, each class in a process of its own; (passed, lines that failed)."""
    names = list(dict.fromkeys(full_name(test) for test in single_tests(all_tests()) if wanted(str(test))))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda name: run_class_apart(name, wanted), names))
    return sum(passed for passed, _ in answers), [line for _, lines in answers for line in lines]


def run_class_apart(name, wanted):
    lines = [str(test) for test in tests_of(name, wanted)]
    with tempfile.TemporaryFile("w+") as result:
        command = [sys.executable, str(HERE / "run.py"), CLASS, name, str(result.fileno()), *lines]
        done = subprocess.run(command, pass_fds=[result.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        sys.stdout.write(done.stdout)
        sys.stdout.flush()
        result.seek(0)
        try:
            return json.load(result)
        except ValueError:
            print("FAILED %s: its process left with %d" % (name, done.returncode), flush=True)
            return 0, lines


def run_selftest(script, words):
    """Runs a self-test as it is; (passed, failed) by its last line, one failure at least if that is bad."""
    if words and not all(word in script for word in words):
        return 0, 0
    begin, last = time.monotonic(), ""
    process = subprocess.Popen([sys.executable, HERE / script], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    limit(SELFTEST_SECONDS)
    try:
        for last in process.stdout:
            print("       %s: %s" % (script, last.rstrip()), flush=True)
        status = process.wait()
    except TooLong:
        status, last = 1, "longer than %g s" % SELFTEST_SECONDS
    finally:
        limit(0)
        if process.poll() is None:
            process.terminate()
            process.wait()
    numbers = [int(word) for word in last.split() if word.isdigit()]
    passed, failed = numbers if len(numbers) == 2 else (0, 1)
    if status and not failed:
        failed = 1
    print("%s %s (%.1f s)" % ("FAILED" if failed else "ok    ", script, time.monotonic() - begin), flush=True)
    return passed, failed


def main():
    if sys.argv[1:2] == [CLASS]:
        signal.signal(signal.SIGALRM, out_of_time)
        name, descriptor, *lines = sys.argv[2:]
        answer = run_class(name, lambda line: line in lines)
        with open(int(descriptor), "w") as result:
            json.dump(answer, result)
        return
    words = sys.argv[1:]
    kit = "--kit" in words
    words = [word for word in words if word != "--kit"]
    signal.signal(signal.SIGALRM, out_of_time)
    for name in install_hosts.DEFAULTS + install_hosts.more():
        install_hosts.install(*name.split("@"))
    begin = time.monotonic()
    passed, lines = run_tests(lambda line: all(word in line for word in words), AT_ONCE)
    failed = len(lines)
    if 0 < failed <= MOST_AGAIN:
        # The hosts are other people's programs on a clock of their own; a fault of ours does not go away.
        print("%d failed; once more, and that counts:" % failed, flush=True)
        again, _ = run_tests(lambda line: line in lines, 1)
        passed, failed = passed + again, failed - again
    for script in ["selftest_agy.py"] + (["selftest.py"] if kit else []):
        more_passed, more_failed = run_selftest(script, words)
        passed, failed = passed + more_passed, failed + more_failed
    if not passed and not failed:
        print("no test has %s in its line" % " and ".join(words))
        failed = 1
    print("in %.0f s" % (time.monotonic() - begin))
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
