"""What a hook costs, as ratios to floors of the same run.

`python3 bench/hook.py [ROUNDS]`; status 1 if a bar is missed.
"""
import json
import os
import sys

from measure import ROOT, Home, measure, python, report

SESSION = "01a04cd2-0000-7000-8000-000000000001"
CODEX_SESSION = "01a04cd2-0000-7000-8000-000000000002"
HOOK = os.path.join(ROOT, "xmsg-hook.sh")
XMSG = os.path.join(ROOT, "bin", "xmsg")
TEXT = "the API is ready"
FIELDS = {"session_id": SESSION, "transcript_path": "/nowhere/projects/x/%s.jsonl" % SESSION, "cwd": "/tmp",
          "prompt_id": "6a0c5a52-0000-4000-8000-000000000001", "permission_mode": "default",
          "hook_event_name": "PreToolUse", "tool_name": "Bash",
          "tool_input": {"command": "make " + "x" * 300}}


def payload(**more):
    return json.dumps(dict(FIELDS, **more), separators=(",", ":")).encode() + b"\n"


# Codex names the event before the permission mode, and its fast path looks at more: see spool.py.
CODEX = json.dumps({"session_id": CODEX_SESSION, "turn_id": "01a04cd2-0000-7000-8000-000000000003", **{
    key: FIELDS[key] for key in ("transcript_path", "cwd")}, "hook_event_name": "PostToolUse", "model": "gpt-5.1-codex",
    "permission_mode": "default", "tool_name": "Bash", "tool_input": FIELDS["tool_input"], "tool_response": "x" * 300},
    separators=(",", ":")).encode()


def hook(home, data, shown=0, host="claude"):
    """One run of the hook that has to show so many messages."""
    run = home.run([HOOK, host], data)
    if run[2].count(TEXT.encode()) != shown or bool(run[2]) != bool(shown):
        raise SystemExit("with %d messages waiting the hook said %r" % (shown, run[2]))
    return run


def send(home):
    """One `send` to the session."""
    run = home.run([XMSG, "send", SESSION, TEXT, "--no-direct"])
    if not run[2].startswith(b"queued"):
        raise SystemExit("send said %r" % run[2])
    return run


def main(rounds):
    small, large = payload(), payload(tool_response={"stdout": "x" * (1 << 20)})
    with Home() as home:
        hook(home, small)
        hook(home, CODEX, host="codex")

        def empty(data, host="claude"):
            # The prefix is good for a minute; a full run that falls due is not what is measured here.
            for session in (SESSION, CODEX_SESSION):
                os.utime(os.path.join(home.db + ".hints", "peer", session), (2e9, 2e9))
            return hook(home, data, host=host)

        def with_mail(count):
            for _ in range(count):
                send(home)
            return hook(home, small, count)
        times = measure({
            "bash -c :": lambda: home.run(["bash", "-c", ":"]),
            "hook, empty": lambda: empty(small),
            "hook, empty, codex": lambda: empty(CODEX, "codex"),
            "hook, empty, 1 MiB": lambda: empty(large),
            "python json,sqlite3": lambda: home.run(python("json, sqlite3")),
            "hook, 1 message": lambda: with_mail(1),
        }, rounds)
        many = measure({"hook, 1 message": lambda: with_mail(1), "hook, 10 messages": lambda: with_mail(10)},
                       max(5, rounds * 3 // 4))
    held = report("hook", times, [("hook, empty", "bash -c :", 2.0), ("hook, empty, codex", "bash -c :", 2.0),
                                  ("hook, empty, 1 MiB", "bash -c :", 4.0),
                                  ("hook, 1 message", "python json,sqlite3", 1.35)])
    return report("hook, by messages", many, [("hook, 10 messages", "hook, 1 message", 1.1)]) and held


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
