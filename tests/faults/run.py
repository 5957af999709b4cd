#!/usr/bin/env python3
"""Fails the product at each of its calls and checks what it promises; last "N cases, N failed".

usage: run.py [--full] [--wrapper] [--kind KIND] [-j N] [--list] [WORD ...]

A case is one program in one world (cases.py) with one fault at one call (injectors.py): KILL, ENOSPC, EIO or EINTR.
By default KILL and ENOSPC at the calls that change something outside of the process, sampled where there are many of
them, which the line of each program says; --full takes every call and every kind. WORDs: only programs whose name holds
one. --wrapper: without strace, as where there is none. The exit status is 0 only if something ran and nothing failed.
"""
import argparse
import collections
import compileall
import concurrent.futures
import multiprocessing
import os
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

from support import ROOT, CommandServer  # noqa: E402
from cases import CASES, Wrong, keep_orphans, name_of  # noqa: E402
from injectors import INJECTORS, KINDS, Strace, Wrapper  # noqa: E402

# So many runs of a program at most by default, by kind; the first programs and the others.
MOST = {"KILL": (40, 10), "ENOSPC": (10, 3)}
FEWER = 3  # runs of a program that takes long (a direct window) are so many times fewer
SLICES = 4  # of a program's runs, which the workers share


def chosen(calls, kind, injector, full, most, least=1):
    """The calls to fail in this way: (those of a run, of how many). Of some most of them, over the whole run, but of
    each name least of them, the last one first: a run ends with the claim, the write and the commit."""
    able = [call for call in calls if kind == "KILL" or call.name in injector.FAILING[kind]]
    if full:
        return able, len(able)
    by_name, taken = collections.defaultdict(list), []
    for call in reversed(able):
        if call.changes:
            by_name[call.name].append(call)
    total = sum(map(len, by_name.values()))
    for same in by_name.values():
        number = min(len(same), max(least, most * len(same) // total))
        taken += [same[at * (len(same) - 1) // max(1, number - 1)] for at in range(number)]
    return [call for call in able if call in set(taken)], total


def measure(case_number, name):
    """The calls of one program, from a run without a fault, which has to hold too."""
    case, injector = CASES[case_number](), INJECTORS[name]()
    try:
        for _ in range(2):  # the first run may still write byte code
            case.restore()
            done, calls = injector.calls(case.home, case.program(), case.marks())
        done.killed = False
        begin = time.monotonic()
        case.check(done, None, None)
        return calls, done.returncode, time.monotonic() - begin
    finally:
        case.close()


def work(case_number, name, jobs):
    """Runs jobs, [(kind, call)], in one world: [(kind, call, reached, fault)]."""
    results = []
    case, injector = CASES[case_number](), INJECTORS[name]()
    try:
        case.restore()
        if isinstance(injector, Wrapper):
            injector.marks = case.marks()
        for kind, call in jobs:
            fault, reached = None, False
            try:
                case.restore()
                done = injector.run(case.home, case.program(), kind, call)
                reached = done.reached
                case.check(done, kind, call)
            except Wrong as error:
                fault = str(error)
            except Exception:
                fault = traceback.format_exc()
            results.append((kind, call, reached, fault))
    finally:
        case.close()
    return results


def begin():
    CommandServer.running = None  # the parent's
    keep_orphans()


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="every call and every kind of fault")
    parser.add_argument("--wrapper", action="store_true", help="without strace")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind of fault")
    parser.add_argument("--list", action="store_true", help="only the names of the programs")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="so many at once")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args(arguments)
    numbers = [number for number, case in enumerate(CASES)
               if not options.words or any(word in name_of(case) for word in options.words)]
    if options.list:
        print("\n".join(name_of(CASES[number]) for number in numbers))
        return 0
    injector = Wrapper if options.wrapper or not Strace.here() else Strace
    kinds = [kind for kind in options.kind or (KINDS if options.full else tuple(MOST))]
    compileall.compile_dir(ROOT, maxlevels=0, quiet=2)
    print("injected by %s: %s" % (injector.name, ", ".join(
        kind + ("" if kind == "KILL" or injector.FAILING[kind] else " (no such fault above Python, which tries again)")
        for kind in kinds)), flush=True)
    begin_at, cases, failed = time.monotonic(), 0, 0
    with concurrent.futures.ProcessPoolExecutor(options.j, multiprocessing.get_context("fork"), begin) as pool:
        measured = [(number, pool.submit(measure, number, injector.name)) for number in numbers]
        waiting = collections.deque()
        for number, future in measured:
            cases += 1
            try:
                calls, status, seconds = future.result()
            except Exception as error:
                failed += 1
                print("FAILED %s without a fault: %s" % (name_of(CASES[number]), error), flush=True)
                continue
            jobs, said = [], []
            for kind in kinds:
                most = MOST.get(kind, (12, 4))[number > 4]
                most = most // FEWER if seconds > 1 else most
                calls_of_kind, able = chosen(calls, kind, injector, options.full, most, 2 - (number > 4))
                jobs += [(kind, call) for call in calls_of_kind]
                said.append("%s %d of %d%s" % (kind, len(calls_of_kind), able, "" if options.full else " that change"))
            waiting.append((number, len(calls), said, [pool.submit(work, number, injector.name, jobs[at::SLICES])
                                                       for at in range(SLICES) if jobs[at::SLICES]]))
        for number, calls, said, futures in waiting:
            ran, reached, faults = 0, 0, []
            for future in futures:
                try:
                    for kind, call, came, fault in future.result():
                        ran, reached = ran + 1, reached + came
                        faults += [(kind, call, fault)] if fault else []
                except Exception as error:
                    ran += 1
                    faults.append(("world", None, repr(error)))
            if ran and reached < ran // 2:
                ran += 1
                faults.append(("world", None, "only %d of %d runs came to their fault" % (reached, ran)))
            cases, failed = cases + ran, failed + len(faults)
            print("%-6s %s: %d calls; %s; %d reached" % (
                "FAILED" if faults else "ok", name_of(CASES[number]), calls, ", ".join(said), reached), flush=True)
            for kind, call, fault in faults:
                print("       %s at %s: %s" % (kind, "%s %d" % call[:2] if call else "-", fault[:1500]), flush=True)
    print("%.0f s" % (time.monotonic() - begin_at))
    print("%d cases, %d failed" % (cases, failed))
    return 0 if cases and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
