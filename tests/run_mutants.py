#!/usr/bin/env python3
"""Proves that the guards are tested: breaks each on purpose in a copy, and its test must go red.

usage: run_mutants.py [-j N] [WORD ...]     only the mutants whose line holds one of the words

mutants.txt holds one mutant a line: guard | file | old text | new text | test. In the texts \\n is a line end, \\t a tab,
\\\\ a backslash and \\p a vertical bar; the old one stands exactly once in the file. The test is a name below tests/, as
`python3 -m unittest` takes it. Each test is first run on an unbroken copy, where it must pass.
"""
import argparse
import concurrent.futures
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TESTS)
SECONDS = 300 * float(os.environ.get("XMSG_TEST_PATIENCE", "1"))
# No byte code: a file of the same size that was changed within its second would be taken for the old one.
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".git", "node_modules", "*.pyc")


def read_mutants(path):
    """[(line number, guard, file, old, new, test)]; ValueError for a line that is none."""
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            if not line.strip() or line.startswith("#"):
                continue
            fields = line.split(" | ")
            if len(fields) != 5:
                raise ValueError("%s:%d: not guard | file | old text | new text | test" % (path, number))
            guard, name, old, new, test = fields
            found.append((number, guard.strip(), name.strip(), unescaped(old), unescaped(new), test.strip()))
    return found


def unescaped(text):
    """The text with \\n, \\t, \\\\ and \\p (a vertical bar) as what they mean."""
    pieces, rest = [], iter(text)
    for letter in rest:
        if letter == "\\":
            letter = next(rest)
            letter = {"n": "\n", "t": "\t", "p": "|", "\\": "\\"}[letter]
        pieces.append(letter)
    return "".join(pieces)


class Bench:
    """A frozen copy of everything, which the tree's own changes do not reach; each run is made in a copy of that."""

    def __init__(self, folder):
        self.folder, self.frozen, self.count = folder, os.path.join(folder, "frozen"), itertools.count()
        shutil.copytree(ROOT, self.frozen, symlinks=True, ignore=LEFT_OUT)

    def run(self, test, edit=None):
        """(whether the test fails, what it printed). edit: (file, old, new). None instead of True or False if the old
        text does not stand once, or if the test does not run."""
        copy = os.path.join(self.folder, str(next(self.count)), "xmsg")
        shutil.copytree(self.frozen, copy, symlinks=True)
        try:
            if edit:
                path = os.path.join(copy, edit[0])
                with open(path, encoding="utf-8", newline="") as file:
                    text = file.read()
                if text.count(edit[1]) != 1:
                    return None, "the old text stands %d times in %s" % (text.count(edit[1]), edit[0])
                with open(path, "w", encoding="utf-8", newline="") as file:
                    file.write(text.replace(edit[1], edit[2]))
            process = subprocess.Popen([sys.executable, "-m", "unittest", "-q", test], cwd=os.path.join(copy, "tests"),
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                printed = process.communicate(timeout=SECONDS)[0].decode("utf-8", "replace")
            except subprocess.TimeoutExpired:
                return True, "not in time"
            finally:
                with contextlib.suppress(ProcessLookupError):  # a mutant may go on for ever, and outlive its test
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()
            # A test that is skipped or not there proves nothing.
            if "Ran 0 tests" in printed or "skipped=" in printed or "_FailedTest" in printed:
                return None, printed
            return process.returncode != 0, printed
        finally:
            shutil.rmtree(os.path.dirname(copy), ignore_errors=True)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="so many at once")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_mutants(os.path.join(TESTS, "mutants.txt"))
               if not options.words or any(word in " | ".join(map(str, mutant)) for word in options.words)]
    killed = survived = 0
    with tempfile.TemporaryDirectory(prefix="xmsg-mutants-") as folder, \
            concurrent.futures.ThreadPoolExecutor(options.j) as pool:
        bench = Bench(folder)
        tests = sorted({mutant[5] for mutant in mutants})
        sound = set()
        for test, (result, printed) in zip(tests, pool.map(bench.run, tests)):
            if result is False:
                sound.add(test)
            else:
                print("%s: %s\n%s" % ("FAILS WITHOUT A MUTANT" if result else "DOES NOT RUN", test, printed[-1500:]))
        results = pool.map(lambda mutant: bench.run(mutant[5], mutant[2:5]) if mutant[5] in sound else (None, ""), mutants)
        for (number, guard, name, _, _, test), (result, printed) in zip(mutants, results):
            killed, survived = killed + (result is True), survived + (result is not True)
            word = "killed" if result else "SURVIVED" if result is False else "PROVES NOTHING"
            print("%s %d: %s (%s, %s)%s" % (word, number, guard, name, test, "\n" + printed[-300:] if result is None else ""),
                  flush=True)
    print("%d killed, %d survived" % (killed, survived))
    return 0 if survived == 0 and killed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
