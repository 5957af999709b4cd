"""What runs beside what: short processes inside a test, and whole test modules, as many at a time as there are cores."""
import collections
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from support import PATIENCE, CommandServer, end

WIDTH = min(4, os.cpu_count() or 1)


def side_by_side(jobs, width=WIDTH, seconds=30):
    """jobs: an iterable of (key, options of Popen with `args` and `input`), taken one by one as places become free.

    Yields (key, CompletedProcess with bytes), in order.
    """
    running = collections.deque()

    def finish():
        key, process, out, err = running.popleft()
        with out, err:
            try:
                status = process.wait(seconds * PATIENCE)
            finally:
                end(process)
            out.seek(0), err.seek(0)
            return key, subprocess.CompletedProcess(process.args, status, out.read(), err.read())
    try:
        for key, job in jobs:
            data, out, err = job.pop("input", b""), tempfile.TemporaryFile(), tempfile.TemporaryFile()
            process = subprocess.Popen(stdin=subprocess.PIPE, stdout=out, stderr=err, **job)
            running.append((key, process, out, err))
            try:
                process.stdin.write(data)
                process.stdin.close()
            except BrokenPipeError:
                pass
            if len(running) >= width:
                yield finish()
        while running:
            yield finish()
    finally:
        for _, process, _, _ in running:
            end(process)


class Told(Exception):
    """A failure of another process, as the text of its traceback."""


class Beside(unittest.TestSuite):
    """A module's tests, run by a forked process beside those of the other modules; told in the usual order."""
    waiting, running, process = [], [], None

    def __init__(self, tests):
        super().__init__(tests)
        self.waiting.append(self)

    def run(self, result, debug=False):
        try:
            self.wait()
        except KeyboardInterrupt:
            for suite in self.running:
                os.kill(suite.process, signal.SIGINT)
            for suite in self.running:
                os.waitpid(suite.process, 0)
            raise
        tests = {test.id(): test for test in _single_tests(self)}
        with self.report:
            self.report.seek(0)
            try:
                events = pickle.load(self.report)
            except EOFError:
                events = [("addError", next(iter(tests), ""), "the process of this module's tests died")]
        for kind, name, detail in events:
            # A fixture of a class or module that fails is no test; it is told under its own name.
            test = tests.get(name) or unittest.FunctionTestCase(lambda: None, description=name)
            if kind in ("startTest", "addSuccess"):
                getattr(result, kind)(test)
            else:
                getattr(result, kind)(test, detail if kind == "addSkip" else (Told, Told(detail), None))
        return result

    def wait(self):
        """Until this module's tests have run; those of other modules are started beside them."""
        while self.process is None or self in self.running:
            for suite in self.running[:]:
                if os.waitpid(suite.process, os.WNOHANG)[0]:
                    self.running.remove(suite)
            while self.waiting and len(self.running) < 2 * WIDTH:  # tests wait about as much as they work
                self.waiting.pop().start()  # the last module is the longest
            time.sleep(0.01)

    def start(self):
        self.report = tempfile.TemporaryFile()
        self.running.append(self)
        sys.stdout.flush()
        self.process = os.fork()
        if self.process:
            return
        try:
            CommandServer.running = None  # the parent's
            faulthandler.dump_traceback_later(300 * PATIENCE, exit=True)  # a test that hangs is told, and does not stay
            record = Record()
            unittest.TestSuite(self).run(record)
            pickle.dump(record.events, self.report)
            self.report.flush()
            sys.stdout.flush()
        finally:
            os._exit(0)


class Record(unittest.TestResult):
    """What happens to each test, as (method of a result, the test's id, text)."""

    def __init__(self):
        super().__init__()
        self.events = []

    def startTest(self, test):
        super().startTest(test)
        self.events.append(("startTest", test.id(), None))

    def addSuccess(self, test):
        self.events.append(("addSuccess", test.id(), None))

    def addSkip(self, test, reason):
        self.events.append(("addSkip", test.id(), reason))

    def addError(self, test, err):
        self.events.append(("addError", test.id(), self._exc_info_to_string(err, test)))

    def addFailure(self, test, err):
        self.events.append(("addFailure", test.id(), self._exc_info_to_string(err, test)))

    def addSubTest(self, test, subtest, err):
        if err:
            kind = "addFailure" if issubclass(err[0], test.failureException) else "addError"
            self.events.append((kind, test.id(), "%s\n%s" % (subtest, self._exc_info_to_string(err, test))))


def _single_tests(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _single_tests(test)
        else:
            yield test


def load_tests(loader, tests, pattern):
    """Import this into a test module, and its tests run beside those of others. XMSG_TEST_BESIDE=0: one by one."""
    return tests if WIDTH == 1 or os.environ.get("XMSG_TEST_BESIDE") == "0" else Beside(tests)
