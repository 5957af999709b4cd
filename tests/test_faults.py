"""A small sample of tests/faults/: faults at chosen calls of send and hook, and the books afterwards."""
import os
import shutil
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults"))

from side_by_side import load_tests  # noqa: F401,E402
import run  # noqa: E402
from cases import CASES, name_of  # noqa: E402
from injectors import INJECTORS  # noqa: E402


class Sample(unittest.TestCase):
    def fail_at(self, name, injector, jobs):
        """Runs the program called name with faults; jobs(calls): [(kind, call)]."""
        [number] = [number for number, case in enumerate(CASES) if name_of(case) == name]
        calls = run.measure(number, injector)[0]
        self.assertGreater(len(calls), 20)
        results = run.work(number, injector, jobs(calls))
        self.assertEqual([], [(kind, call, fault) for kind, call, _, fault in results if fault])
        self.assertGreater(sum(reached for _, _, reached, _ in results), len(results) // 2)

    def spread(self, injector, least=1, **most):
        """So many calls of each kind of fault, over the whole run, and of each name at least so many."""
        return lambda calls: [(kind, call) for kind, number in most.items()
                              for call in run.chosen(calls, kind, INJECTORS[injector], False, number, least)[0]]


@unittest.skipUnless(shutil.which("strace"), "TheFallback runs these cases where there is no strace")
class AFault(Sample):
    def test_in_send_leaves_no_receipt_without_a_row(self):
        self.fail_at("send", "strace", self.spread("strace", KILL=8, ENOSPC=5))

    def test_in_a_hook_shows_nothing_twice_and_loses_nothing(self):
        self.fail_at("hook-codex-PreToolUse", "strace", self.spread("strace", 2, KILL=16, EIO=6))

    def test_on_the_way_into_an_inbox_is_told_by_the_receipt(self):
        def writes(calls):
            """From the first courier's start on: what is written before the message leaves, and after it."""
            at = min(at for at, call in enumerate(calls) if call.name.startswith("clone"))
            return [("ENOSPC", call) for call in calls[at:] if call.name == "pwrite64"][::3]
        self.fail_at("send-claude", "strace", writes)

    def test_of_a_hook_that_takes_a_spooled_message_keeps_no_folder(self):
        self.fail_at("hook-codex-spool", "strace",
                     lambda calls: [("KILL", call) for call in calls if call.name in ("rmdir", "unlink")])

    def test_in_an_installation_leaves_the_old_file_or_the_new_one(self):
        self.fail_at("install-codex", "strace", self.spread("strace", KILL=6))
        self.fail_at("uninstall-codex", "strace", self.spread("strace", KILL=6))


class TheFallback(Sample):
    def test_kills_a_hook_at_each_step_and_nothing_is_shown_twice_or_lost(self):
        self.fail_at("hook-codex-PreToolUse", "wrapper", self.spread("wrapper", KILL=10))

    def test_has_a_receipt_for_what_is_in_the_store_also_if_that_cannot_be_read_any_more(self):
        self.fail_at("send", "wrapper", lambda calls: [
            ("EIO", call) for call in calls if call.name == "execute"][-14::2])


if __name__ == "__main__":
    unittest.main()
