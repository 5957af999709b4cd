"""What a hook costs, as ratios to floors of the same run: `python3 bench/hook.py [ROUNDS]`. Status 1 if a bar is missed."""
import json
import os
import sys

from measure import ROOT, Home, measure, python, report

SESSION = "01a04cd2-0000-7000-8000-000000000001"
HOOK = [os.path.join(ROOT, "xmsg-hook.sh"), "claude"]
FIELDS = {"session_id": SESSION, "transcript_path": "/nowhere/projects/x/%s.jsonl" % SESSION, "cwd": "/tmp",
          "prompt_id": "6a0c5a52-0000-4000-8000-000000000001", "permission_mode": "default",
          "hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "make " + "x" * 300}}


def payload(**more):
    return json.dumps(dict(FIELDS, **more), separators=(",", ":")).encode() + b"\n"


def main(rounds):
    small, large = payload(), payload(tool_response={"stdout": "x" * (1 << 20)})
    with Home() as home:
        send = [os.path.join(ROOT, "bin", "xmsg"), "send", SESSION, "the API is ready", "--no-direct"]
        home.run(HOOK, small)

        def silent(data):
            seconds, out = home.run(HOOK, data)
            if out:
                raise SystemExit("an empty inbox showed %r" % out)
            return seconds

        def with_mail(count):
            for _ in range(count):
                home.run(send)
            seconds, out = home.run(HOOK, small)
            if out.count(b"the API is ready") != count:
                raise SystemExit("%d messages were shown as %r" % (count, out))
            return seconds
        times = measure({
            "bash -c :": lambda: home.run(["bash", "-c", ":"])[0],
            "python json,sqlite3": lambda: home.run(python("json, sqlite3"))[0],
            "hook, empty": lambda: silent(small),
            "hook, empty, 1 MiB": lambda: silent(large),
            "hook, one message": lambda: with_mail(1),
        }, rounds)
        ten = measure({"hook, 1 message": lambda: with_mail(1), "hook, 10 messages": lambda: with_mail(10)},
                      max(3, rounds // 5))
    held = report("hook", times, [("hook, empty", "bash -c :", 2.0), ("hook, empty, 1 MiB", "bash -c :", 4.0),
                                  ("hook, one message", "python json,sqlite3", 1.35)])
    report("hook, by messages", ten, [("hook, 10 messages", "hook, 1 message", 1.1)])
    return held


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
