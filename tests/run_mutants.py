#!/usr/bin/env python3
"""Proves that the guards are tested: breaks each on purpose in a copy, and its test must go red.

usage: run_mutants.py [-j N] [WORD ...]     only the mutants whose line holds one of the words

mutants.txt holds one mutant a line: guard | file | old text | new text | test. The texts are Python string literals
without their quotes (\\n is a line end); the old one stands exactly once in the file. The test is a name below tests/, as
`python3 -m unittest` takes it. Each test is first run on an unbroken copy, where it must pass.
"""
import argparse
import concurrent.futures
import os
import shutil
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


def fails(test, edit=None):
    """Whether a test fails in a copy of everything; edit: (file, old, new). None if the old text does not stand once."""
    folder = tempfile.mkdtemp(prefix="xmsg-mutant-")
    try:
        copy = os.path.join(folder, "xmsg")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
        if edit:
            path = os.path.join(copy, edit[0])
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
            if text.count(edit[1]) != 1:
                return None
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text.replace(edit[1], edit[2]))
        try:
            done = subprocess.run([sys.executable, "-m", "unittest", "-q", test], cwd=os.path.join(copy, "tests"),
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return True
        # A test that is skipped or not there proves nothing.
        return done.returncode != 0 if b"Ran 0 tests" not in done.stdout and b"skipped=" not in done.stdout else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="so many at once")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_mutants(os.path.join(TESTS, "mutants.txt"))
               if not options.words or any(word in " | ".join(map(str, mutant)) for word in options.words)]
    with concurrent.futures.ThreadPoolExecutor(options.j) as pool:
        tests = sorted({mutant[5] for mutant in mutants})
        unbroken = dict(zip(tests, pool.map(fails, tests)))
        for test in tests:
            if unbroken[test] is not False:
                print("%s %s" % ("FAILS WITHOUT A MUTANT" if unbroken[test] else "DOES NOT RUN", test), flush=True)
        killed = survived = 0
        results = pool.map(lambda mutant: unbroken[mutant[5]] is False and fails(mutant[5], mutant[2:5]), mutants)
        for (number, guard, name, _, _, test), result in zip(mutants, results):
            killed, survived = killed + (result is True), survived + (result is not True)
            print("%s %d: %s (%s, %s)" % ("killed" if result else "OLD TEXT NOT FOUND ONCE" if result is None else "SURVIVED",
                                          number, guard, name, test), flush=True)
    print("%d killed, %d survived" % (killed, survived))
    return 0 if survived == 0 and killed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
