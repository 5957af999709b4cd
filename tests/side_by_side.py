"""Runs many short processes, as many at a time as there are cores; what they are about stays in the test's one thread."""
import collections
import os
import subprocess
import tempfile

from support import PATIENCE, end

WIDTH = min(4, os.cpu_count() or 1)


def side_by_side(jobs, width=WIDTH, seconds=30):
    """jobs: an iterable of (key, options of Popen with `args` and `input`), taken one by one as places become free.

    Yields (key, CompletedProcess with bytes), in order.
    """
    running = collections.deque()

    def finish():
        key, process, out, err = running.popleft()
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
