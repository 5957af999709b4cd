#!/usr/bin/env python3
"""Gives the parsers of test_hostile.py what it makes up, and stops at the first fault.

usage: fuzz.py [--seconds N] [PARSER ...]      so many seconds for each; default: 10 for every parser

With atheris (development only, `pip install atheris`) the search is guided by coverage; without it documents are
changed blindly, and the first line says so. A finding is printed as bytes: keep it, as short as it can be, in FOUND.
"""
import argparse
import os
import random
import subprocess
import sys
import time

import test_hostile
from test_hostile import DOCUMENTS, PARSERS, World, in_time, mutants, odd_ones, refused

try:
    import atheris
except ImportError:
    atheris = None
LONGEST = 4096  # bytes of a document


def try_one(world, name, data):
    """Prints a document that is a fault, and raises."""
    try:
        with in_time():
            refused(world, name, data)
    except BaseException:
        print("FOUND by %s: %r" % (name, data), flush=True)
        raise


def seeds(name):
    yield from PARSERS[name].samples
    for sample in PARSERS[name].samples:
        yield from (document for document in odd_ones(sample) if len(document) <= LONGEST)
    yield from (document for document in DOCUMENTS.values() if len(document) <= LONGEST)
    yield from test_hostile.FOUND.get(name, ())


def blindly(world, name, seconds, seed):
    """How many documents were tried: samples with values replaced, cut and damaged, and those again."""
    pick, deadline, count = random.Random(seed), time.monotonic() + seconds, 0
    pool = list(seeds(name))
    while time.monotonic() < deadline:
        for data in mutants(pick.choice(pool), 20, pick.random()):
            try_one(world, name, data)
            count += 1
            if len(pool) < 20000 and pick.random() < 0.05:
                pool.append(data)
    return count


def guided(world, name, seconds, folder):
    """One parser under libFuzzer, which ends this process."""
    for number, document in enumerate(seeds(name)):
        with open(os.path.join(folder, str(number)), "wb") as file:
            file.write(document)
    modules = [module for module in list(sys.modules.values()) if os.path.dirname(getattr(module, "__file__", None)
               or "") == test_hostile.contract.__file__.rpartition("/")[0]]
    for module in modules:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
                setattr(module, value.__name__, atheris.instrument_func(value))
    atheris.Setup([sys.argv[0], "-max_total_time=%d" % seconds, "-max_len=%d" % LONGEST, "-rss_limit_mb=0",
                   "-verbosity=0", "-print_final_stats=1", "-artifact_prefix=%s/" % folder, folder],
                  lambda data: try_one(world, name, data))
    atheris.Fuzz()


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--guided", help=argparse.SUPPRESS)
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help="a word of a parser's name")
    options = parser.parse_args(arguments)
    names = [name for name in PARSERS if not options.parsers or any(word in name for word in options.parsers)]
    world = World()
    os.environ.update(HOME=world.folder, XMSG_DB=world.home.db)
    try:
        if options.guided:
            return guided(world, names[0], options.seconds, options.guided)
        print("guided by coverage (atheris)" if atheris else "blindly: atheris is not installed here", flush=True)
        failed = 0
        for number, name in enumerate(names):
            folder = world.path("corpus-%d" % number)
            os.mkdir(folder)
            if atheris:
                done = subprocess.run(
                    [sys.executable, __file__, "--seconds", str(options.seconds), "--guided", folder, name],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
                count = [line.split()[-1] for line in done.stdout.splitlines() if "number_of_executed_units" in line]
                bad, more = done.returncode, "\n" + done.stdout[-3000:] if done.returncode else ""
                print("%s: %s documents%s" % (name, (count + ["?"])[0], more), flush=True)
            else:
                bad = 0
                try:
                    print("%s: %d documents" % (name, blindly(world, name, options.seconds, options.seed)), flush=True)
                except Exception as error:
                    print("%s: %s: %s" % (name, type(error).__name__, str(error)[:500]), flush=True)
                    bad = 1
            failed += bool(bad)
    finally:
        world.close()
    print("%d parsers, %d with a fault" % (len(names), failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
