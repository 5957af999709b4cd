"""The command line: reports as records, their form on a terminal, and the only place that prints and exits."""
import contextlib
import json
import os
import sys
import time

from contract import (ENDED, HOSTS, IN_FLIGHT, LONGEST_NAME, NoSuchTarget, NotPossible, REFUSED_STATUS, RESERVED_NAMES,
                      RemoteError, SETTINGS, STATES, STORED, Settings, StoreError, StoreReadOnly, UNKNOWN_STATUS,
                      UsageError, VERSION, WAIT_SECONDS, XmsgError, age, clean_text, clip, display_width, is_invisible,
                      is_label, name_key, now_ms, one_line)
from store import Store, is_unknown, myself, note_fault, record_interpreter, shown_state
from xmsg import (NothingWritten, activity, all_peers, begins_other_ids, describe_peer, direct_facts,
                  display_name, found, hook_main, host_queue, host_queue_counts, is_live, project_root, render, resolve,
                  resolve_one, route, sender_identity, show, take_spooled)
from sending import (deliver_spooled, find_message, follow_host_queue, look_for_evidence, record_receipt,
                     send_from_sandbox, waiting_word, wake)
from forwarding import (ask_far, cancel, catch_up, check, list_everywhere, send, settle, split_target,
                        wait_for_proof)


# ---------------------------------------------------------------------------------------------------- reports

def iso(ms):
    """A time of the store as ISO 8601 in UTC, None for none."""
    if ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + ".%03dZ" % (ms % 1000)


def message_record(store, row):
    """A message as JSON reports it."""
    try:
        peer = store.peer(row["target"])
    except StoreError:  # the receipt of what is in the store is owed all the same
        peer = None
    # A sender on another machine is MACHINE:SESSION, a target there ALIAS:NAME.
    machine, _, session = row["sender_session"].rpartition(":")
    record = {"id": row["id"], "uid": row["uid"], "state": row["state"], "unknown": is_unknown(row),
              "window": row["window"], "detail": row["detail"],
              "from": {"label": row["sender_label"], "host": row["sender_host"], "session": session,
                       "kind": row["sender_kind"]},
              "to": {"session": row["target"], "host": row["target_host"], "name": display_name(peer) if peer else ""},
              "body": row["body"], "priority": row["priority"], "reply_to": row["reply_to"],
              "created_at": iso(row["created_at"]), "expires_at": iso(row["expires_at"]),
              "state_at": iso(row["state_at"]), "confirmed_at": iso(row["confirmed_at"]), "evidence": row["evidence"]}
    if machine:
        record["from"]["machine"] = machine
    if row.get("remote"):  # what has left a sandbox has no such column yet
        record["to"].update(session=row["far_session"] or "", name=row["target"].partition(":")[2])
        record["remote"] = {"alias": row["remote"], "id": row["far_id"], "state": row["far_state"],
                            "at": iso(row["far_at"])}
    return record


def shown_target(row):
    """Where a message goes, for people: the full id, with its machine in front if that is another one."""
    if row["remote"] and row["far_session"]:
        return "%s:%s" % (row["remote"], row["far_session"])
    return one_line(row["target"])


def waiting_counts(store):
    """({session: how many messages wait here}, {session: how many inputs wait in its host's own queue})."""
    return store.queued_counts(), host_queue_counts(store)


def session_record(store, peer, waiting, now):
    """A session as JSON reports it. waiting: of waiting_counts().

    window: the first to be tried; reason: why it is not a direct one.
    """
    queued, host_queued = (counts.get(peer["session"], 0) for counts in waiting)
    live = is_live(store, peer, now)
    facts = direct_facts(store, peer, live)
    windows, reason = route(facts)
    return {"session": peer["session"], "host": peer["host"],
            "name": display_name(peer), "cwd": peer["cwd"],
            "project": peer["project"], "model": peer["model"], "permission_mode": peer["permission_mode"],
            "pid": peer["pid"], "live": live, "activity": activity(peer, facts) if live else "unknown",
            "seen_at": iso(store.seen_at(peer)),
            "queued": queued, "host_queued": host_queued, "direct": bool(windows),
            "window": windows[0] if windows else "hook",
            "reason": reason if live else "not open", "hooks": iso(peer["hook_seen"]),
            "successor": peer["successor"]}


def session_records(store, everything=False, project=None, query=None):
    """The sessions that are registered or open, live ones first: by default the live ones and those with mail."""
    now, waiting = now_ms(), waiting_counts(store)
    peers = [peer for peer in all_peers(store)
             if (project is None or peer["project"] == project) and (query is None or _mentions(peer, query))
             and (everything or peer["session"] in waiting[0] or is_live(store, peer, now))]
    records = [session_record(store, peer, waiting, now) for peer in peers]
    return sorted(records, key=lambda record: not record["live"])


def sessions_json(store, records):
    """Sessions as JSON reports them, with the shortest id that is an address for each."""
    return {"sessions": [dict(record, short_id=store.short_id(record["session"])) for record in records]}


def _mentions(peer, query):
    wanted = name_key(query)
    return any(wanted in name_key(peer[column]) for column in ("session", "name", "title", "cwd", "host"))


def own_messages(store, sender, target=None, everything=False, limit=20):
    """What this session has sent, or everybody if no session asks: by default what has not ended yet."""
    states = None if everything else [state for state in STORED if state not in ENDED]
    return store.messages(target=target, sender=sender["session"] or None, states=states, limit=limit, newest=True)


# ---------------------------------------------------------------------------------------------------- terminal

def terminal_width():
    """The columns of the terminal, 0 where the output is no terminal and nothing needs to be cut."""
    try:
        return os.get_terminal_size(1).columns if os.isatty(1) else 0
    except OSError:
        return 80


def paint(text, color):
    """The text in a colour, on a terminal that wants any."""
    codes = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}
    if not os.isatty(1) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or color not in codes:
        return text
    return "\x1b[%sm%s\x1b[0m" % (codes[color], text)


def fold(text, room):
    """The text in pieces of at most so many columns, broken between words, or inside one that is longer than a line."""
    pieces, line = [], ""
    for word in text.split(" "):
        if line and display_width(line + " " + word) > room:
            pieces.append(line)
            line = ""
        line = line + " " + word if line else word
        while display_width(line) > room:
            pieces.append(clip(line, room + 1)[:-1])
            line = line[len(pieces[-1]):]
    return pieces + [line]


def hanging(head, text, width=None):
    """Lines with the text to the right of its head, or below it where a narrow terminal leaves too little room."""
    width, text, indent = terminal_width() if width is None else width, one_line(text), display_width(head)
    if not width or indent + display_width(text) <= width:
        return [head + text]
    if width - indent < 30:
        return [clip(head.rstrip(), width)] + ["    " + piece for piece in fold(text, max(10, width - 4))]
    pieces = fold(text, width - indent)
    return [head + pieces[0]] + [" " * indent + piece for piece in pieces[1:]]


STATE_COLORS = {"delivered": "green", "queued": "yellow", "held": "yellow", "UNKNOWN": "red", "refused": "red",
                "expired": "red"}


def table(heads, rows, flexible, width=None):
    """Lines of columns under their heads. The flexible columns shrink, last first, until all fits the terminal."""
    width = terminal_width() if width is None else width
    cells = [[one_line(str(cell)) for cell in row] for row in [heads] + rows]
    sizes = [[display_width(cell) for cell in row] for row in cells]
    widths = [max(column) for column in zip(*sizes)]
    excess = sum(widths) + 2 * (len(heads) - 1) - width if width else 0
    if excess > 0:
        for column in reversed(flexible):
            cut = min(excess, max(0, widths[column] - 6))
            widths[column] -= cut
            excess -= cut
        cells = [[clip(cell, room) for cell, room in zip(row, widths)] for row in cells]
        sizes = [[display_width(cell) for cell in row] for row in cells]
    lines = ["  ".join(cell + " " * (room - size) for cell, size, room in zip(row, own, widths)).rstrip()
             for row, own in zip(cells, sizes)]
    if excess > 0:
        lines = [clip(line, width) for line in lines]
    return [paint(lines[0], "bold")] + lines[1:]


def session_lines(store, records, now):
    if not records:
        return ["no session is open here that xmsg knows; a session appears with its first hook (`xmsg install` adds "
                "them, `xmsg doctor` checks them); `xmsg list --all` shows ended ones"]
    # A cut id is no address; its unique beginning is one.
    narrow = 0 < terminal_width() < 100
    return table(["NAME", "SESSION", "HOST", "OPEN", "SEEN", "MAIL", "BY", "FOLDER"], [
        [record["name"] or "-", store.short_id(record["session"]) if narrow else record["session"], record["host"],
         ("yes" if record["activity"] == "unknown" else record["activity"]) if record["live"] else "no",
         age(now - _seen_at(store, record["session"])), _mail(record),
         record["window"] if record["live"] else "-", record["cwd"]] for record in records], [7, 0, 6])


def _mail(record):
    """What waits for a session: messages, and what stands in its host's own queue."""
    own = "+%d in %s" % (record["host_queued"], record["host"].capitalize()) if record["host_queued"] else ""
    return "%d%s" % (record["queued"], own) if own else record["queued"] or "-"


def _seen_at(store, session):
    """When a session gave its last sign, ms. Reading that back from its record would import `datetime`, for 3 ms."""
    return store.seen_at(found(store).sessions.get(session) or store.peer(session))


def describe_state(row, now):
    """What a sender wants to know of a message, in one phrase."""
    state, where = shown_state(row), " on %s" % row["remote"] if row["remote"] else ""
    if state in ("expired", "cancelled") and not row["far_state"]:
        where = ""  # it never left
    if state == "UNKNOWN" and where and not row["far_state"]:
        return ("UNKNOWN: the link to %s was lost; `xmsg outbox --refresh` sends it again, which makes no second one"
                % row["remote"])
    if state == "UNKNOWN" and where:
        return "UNKNOWN%s, %s ago; `xmsg outbox --refresh` asks again, `xmsg resolve %d` settles it" % (
            where, age(now - row["far_at"]), row["id"])
    if state == "queued" and row["far_state"]:
        return "queued%s, as of %s ago (`xmsg outbox --refresh` asks)" % (where, age(now - row["far_at"]))
    if state == "UNKNOWN":
        return ("UNKNOWN, and xmsg will not send it again; look there, then "
                "`xmsg resolve %d --delivered|--requeue|--drop`" % row["id"])
    if state == "queued":
        left = row["expires_at"] - now
        return "queued%s, %s%s" % (", waits here for the way to %s" % row["remote"] if where else "",
                                   "%s left" % age(left) if left > 0 else "its time ran out",
                                   ": " + one_line(row["detail"]) if row["detail"] else "")
    if state == "delivered":
        confirmed = ", confirmed" if row["confirmed_at"] else ""
        return "delivered%s %s ago by %s%s%s" % (where, age(now - row["state_at"]), row["window"] or "hand", confirmed,
                                                 "; " + one_line(row["detail"]) if row["detail"] else "")
    return "%s%s %s ago%s" % (state, where, age(now - row["state_at"]),
                              ": " + one_line(row["detail"]) if row["detail"] else "")


def message_lines(rows, now, incoming=False):
    lines = []
    for row in rows:
        other = "from %s" % row["sender_label"] if incoming else "-> %s" % shown_target(row)
        state, head = describe_state(row, now), "#%d  %s  " % (row["id"], one_line(other))
        color = STATE_COLORS.get(shown_state(row))
        if terminal_width() and display_width(head + state) > terminal_width():
            lines.append(head.rstrip())
            lines += [paint(line, color) for line in hanging("      ", state)]
        else:
            lines.append(head + paint(state, color))
        first = "      " + one_line(row["body"].strip().split("\n")[0])
        lines.append(clip(first, terminal_width() or 100))
    return lines


def receipt(row, note):
    """The one line that `send` prints for a target."""
    state = shown_state(row)
    word = {"UNKNOWN": "unknown", "direct-uncertain": "unknown"}.get(state, state)
    confirmed = ", confirmed" if row["confirmed_at"] else ""
    more = "; " + row["detail"] if row["detail"] else ""
    waits = "direct" if not row["remote"] else "there #%d; direct" % row["far_id"] if row["far_state"] else "waits here"
    detail = {"delivered": (row["window"] or "") + confirmed + more, "queued": "ttl %ds; %s: %s" % (
        (row["expires_at"] - row["created_at"]) // 1000, waits, note)}.get(state) or note or row["detail"] or ""
    return "%s #%d -> %s  (from %s, %s)" % (word, row["id"], shown_target(row), one_line(row["sender_label"]),
                                            one_line(detail))


def story_lines(row, events, now, far_events=()):
    """One message, whole: who, what, and every move."""
    lines = ["#%d  %s  %s" % (row["id"], row["uid"], describe_state(row, now)),
             "from  %s%s" % (one_line(row["sender_label"]), "  %s:%s" % (row["sender_host"], row["sender_session"])
                             if row["sender_session"] else "  (%s)" % row["sender_kind"]),
             "to    %s%s" % (row["target_host"] + ":" if row["target_host"] and not row["remote"] else "",
                             shown_target(row))]
    if row["reply_to"]:
        lines.append("reply to  %s" % row["reply_to"])
    lines += [event_line(event) for event in events]
    lines += ["%s  %s" % (row["remote"], event_line(event)) for event in far_events]
    return lines + ["", printable(row["body"])]


def event_line(event):
    return "  ".join(filter(None, (iso(event["at"]), event["state"], event["window"],
                                   event["detail"] and one_line(event["detail"]))))


def printable(text):
    """A body for a terminal: its lines stay lines, control and bidi characters go."""
    return "\n".join(one_line(line.replace("\t", "    ")) for line in text.replace("\r\n", "\n").split("\n"))


def states_markdown():
    """The README's table of states."""
    lines = ["| state | what is true | what moves it on | after a crash here |", "|---|---|---|---|"]
    for state, (true, moves, crash) in STATES.items():
        moves = "; ".join("%s -> `%s`" % (how, to) for to, how in moves.items()) or "it is kept for XMSG_RETAIN_SECONDS"
        lines.append("| `%s` | %s | %s | %s |" % (state, true, moves, crash))
    return lines


def settings_markdown():
    """The README's table of settings."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, _, default, _, text in SETTINGS:
        lines.append("| `%s` | %s | %s |" % (name, "`%s`" % default if default != "" else "", text.replace("|", "\\|")))
    return lines


# ---------------------------------------------------------------------------------------------------- main

EPILOG = """\
The first message: `xmsg list` shows who is there, `xmsg send NAME "text"` sends, and the text shows up in that session
by itself. Nobody has to poll. `xmsg outbox` says what became of what you sent. `xmsg COMMAND --help` explains each.

exit status: 0 delivered, held or queued; 1 unexpected; 2 usage; 3 no such target; 4 ambiguous; 5 store; 6 UNKNOWN;
7 refused, or no longer possible; 8 another machine"""


def main(arguments):
    """The command line. Returns the exit status; the only place that prints and catches errors."""
    umask = os.umask(0o077)
    if not os.environ.get("HOME"):  # set but empty, ~ would be the root of the file system
        os.environ.pop("HOME", None)
        if os.path.isabs(os.path.expanduser("~")):
            os.environ["HOME"] = os.path.expanduser("~")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller; no file of ours may get its descriptor
            setattr(sys, name, open(os.devnull, mode))
    try:
        status = _dispatch([clean_text(argument) for argument in arguments])
        sys.stdout.flush()
        return status if isinstance(status, int) else _become(status, umask)
    except OSError as error:  # most likely the output cannot be written
        try:
            if not isinstance(error, BrokenPipeError):
                sys.stderr.write("xmsg: cannot go on: %s\n" % (error.strerror or error))
        except OSError:
            pass  # nor can that be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130


def _become(argv, umask):
    """This process goes on as another program, as if it had been started in our place. Returns only if it cannot."""
    import signal
    os.umask(umask)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
    sys.stderr.flush()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        return _report_error(XmsgError("cannot run %s: %s" % (argv[0], error.strerror)), False)


def _dispatch(arguments):
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "hook":
        return _hook_command(rest)
    if name == "receipt":
        return _receipt_command(rest)
    if name == "deliver":
        return _deliver_command(rest)
    if name == "wake":
        return _wake_command(rest)
    if name == "receive":
        return _receive_command()
    json_wanted = "--json" in rest
    try:
        if name in ("-h", "--help", "help"):
            print(help_text())
            return 0
        if name in ("--version", "version"):
            print("xmsg %s" % VERSION)
            return 0
        if name not in COMMANDS:
            sys.stderr.write(help_text() + "\n")
            raise UsageError("there is no command %r" % name if name else "give a command")
        add_arguments, run, about = COMMANDS[name]
        parser = _parser(name, about)
        add_arguments(parser)
        options = _parse(parser, rest, name == "history")
        # These two help to mend a bad setting.
        return run(options, Settings(os.environ, [] if name in ("doctor", "settings") else None), print)
    except XmsgError as error:
        return _report_error(_as_seen_inside(error, name), json_wanted)
    except OSError:
        raise
    except Exception as error:
        if os.environ.get("XMSG_NO_FAILOPEN") == "1":
            raise
        return _report_error(XmsgError("unexpected %s: %s (XMSG_NO_FAILOPEN=1 shows where)"
                                       % (type(error).__name__, error)), json_wanted)


def _parse(parser, words, has_actions):
    """The options of a command line: options may stand between positionals, and behind -- nothing is one.

    argparse can do the first or the second, and the first not for a command with actions of its own.
    """
    if has_actions:
        return parser.parse_args(words)
    at = words.index("--") if "--" in words else len(words)
    literal = {"\0%d" % place: word for place, word in enumerate(words[at + 1:])}
    options = parser.parse_intermixed_args(words[:at] + list(literal))
    for name, value in vars(options).items():
        if isinstance(value, list):
            setattr(options, name, [literal.get(word, word) for word in value])
        elif isinstance(value, str):
            setattr(options, name, literal.get(value, value))
    return options


def _as_seen_inside(error, name):
    """The error, where no change of modes would help; `send` has its own words."""
    if isinstance(error, StoreReadOnly) and name != "send":
        import spool
        if spool.sandboxed(os.environ):
            return StoreReadOnly("Codex's sandbox lets nothing write the store; run `xmsg %s` outside of it" % name)
    return error


def _report_error(error, json_wanted):
    if json_wanted:
        report = {"code": error.code, "message": str(error)}
        if error.candidates is not None:
            report["candidates"] = error.candidates
        print_json({"error": report}, print)
    else:
        sys.stderr.write("xmsg: %s\n" % one_line(str(error)))
        for candidate in error.candidates or ():
            sys.stderr.write("  %s\n" % one_line(candidate))
    return error.status


def _hook_command(arguments):
    """`xmsg hook --host H [--event E]`, for those who wire hooks without xmsg-hook.sh."""
    words = dict(zip(arguments[::2], arguments[1::2]))
    return hook_main([words.get("--host", words.get("--tool", "")), words.get("--event", "")])


def _receipt_command(arguments):
    """`xmsg receipt UID WORD TEXT`, which a courier runs for each later word of the host; 0 once it is written down."""
    uid, word, text = arguments
    return 0 if record_receipt(Store(Settings(os.environ)), uid, (word, text)) else 1


def _deliver_command(arguments):
    """`xmsg deliver PID UID...`, which a hook starts for what it has taken from a sandbox."""
    deliver_spooled(Store(Settings(os.environ)), int(arguments[0]), arguments[1:])
    return 0


def _receive_command():
    """`xmsg receive`, which another machine runs here to send and to ask; the conversation is on stdin and stdout."""
    from receiving import receive
    try:
        store = Store(Settings(os.environ))
        record_interpreter(store.settings)
        receive(store, lambda: session_records(store))
    except XmsgError as error:
        return _report_error(error, False)
    return 0


def _wake_command(arguments):
    """`xmsg wake SESSION`, the courier that `send` leaves behind for an offline session of agy."""
    settings = Settings(os.environ)
    try:
        wake(Store(settings), arguments[0])
    except Exception as error:
        note_fault(settings, "agy-wake", error)
        return 1
    return 0


def help_text():
    lines = ["usage: xmsg COMMAND ...", "",
             "One AI coding agent session sends a message to another: Claude Code, Codex, Antigravity.", ""]
    lines += ["  %-9s %s" % (name, COMMANDS[name][2]) for name in COMMANDS]
    lines.append("  %-9s what xmsg-hook.sh runs: --host H [--event E], the payload on stdin" % "hook")
    return "\n".join(lines + ["", EPILOG])


def _parser(name, about):
    import argparse
    # It would look for translations of its own words, which takes as long as all the rest of it: 4 ms.
    argparse._ = str

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError("%s; `xmsg %s --help` explains it%s" % (
                message, name, " (a text that begins with - comes after --, or by stdin)" if name == "send" else ""))

    def formatter(prog):  # argparse makes one for each argument, and without a width imports shutil, which takes 8 ms
        return argparse.RawDescriptionHelpFormatter(prog, width=terminal_width() or 100)

    parser = Parser(prog="xmsg " + name, description=about[0].upper() + about[1:] + ".", allow_abbrev=False,
                    formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print JSON, errors too")
    return parser


def print_json(value, out):
    """Prints JSON in UTF-8; what could steer a terminal stands there as an escape, which parses to the same text."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    out(text if text.isascii() and "\x7f" not in text else "".join(
        json.dumps(char)[1:-1] if char != "\n" and (is_invisible(char) or char == "\x7f") else char for char in text))


def _send_arguments(parser):
    parser.add_argument("target", metavar="TARGET",
                        help="a name, a full session id or a unique start of one (4 characters or more); HOST:X within "
                             "one host; all, project, or HOST: for everybody there but oneself; ALIAS:X on another "
                             "machine (`xmsg remote list`)")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="the message; - or none: from stdin")
    parser.add_argument("--file", metavar="F", help="the message is this file's text")
    parser.add_argument("--from", dest="label", metavar="LABEL", default="", help="sign with this label")
    parser.add_argument("--ttl", type=float, metavar="S", help="expire after this many seconds")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--urgent", action="store_const", dest="priority", const=100, help="before all that waits")
    which.add_argument("--priority", type=int, metavar="N", help="higher goes first; 0 is usual, --urgent is 100")
    parser.add_argument("--no-direct", dest="direct", action="store_false", help="queue only, and wake nobody")
    parser.add_argument("--force", action="store_true", help="queue for a session that nothing is known of")
    parser.add_argument("--notification", action="store_true",
                        help="a local reminder, as from cron: no session's identity, and it says so")
    parser.add_argument("--reply-to", metavar="ID", help="the message that this answers; last: the newest that came")
    parser.add_argument("--key", metavar="KEY", help="while a message with this key waits, no second one is made")
    parser.add_argument("--replace", action="store_true", help="with --key: withdraw the one that waits first")
    parser.add_argument("--uid", metavar="UID", help="the message's own 16 hex digits: a resend makes no second one")
    parser.add_argument("--spool", action="store_true",
                        help="for another machine: wait here while it cannot be reached, for `xmsg flush` or the next "
                             "send there")
    parser.add_argument("--wait", nargs="?", type=float, const=WAIT_SECONDS, metavar="S",
                        help="wait until the receiver's transcript proves that it has the message; status 6 if that "
                             "does not come within S seconds (30)")
    parser.add_argument("--dry-run", action="store_true", help="say where it would go and why; send nothing")


def run_send(options, settings, out):
    if options.file and options.text not in (None,):
        raise UsageError("give the text or --file, not both")
    if options.replace and not options.key:
        raise UsageError("--replace needs --key: it replaces the message with that key")
    if options.uid and not (len(options.uid) == 16 and set(options.uid) <= set("0123456789abcdef")):
        raise UsageError("--uid is 16 lower-case hex digits")
    if options.ttl is not None and not 1 <= options.ttl <= 365 * 86400:
        raise UsageError("--ttl is from 1 to 31536000 seconds")
    if options.wait is not None and not 0 <= options.wait <= 86400:
        raise UsageError("--wait is from 0 to 86400 seconds")
    if options.priority is not None and abs(options.priority) > 1000000:
        raise UsageError("--priority is from -1000000 to 1000000")
    request = {"target": options.target, "label": options.label, "priority": options.priority or 0,
               "ttl": options.ttl or settings.ttl_seconds, "key": options.key, "uid": options.uid,
               "replace": options.replace, "reply_to": options.reply_to, "force": options.force,
               "direct": options.direct, "notification": options.notification, "spool": options.spool}
    if options.dry_run:
        return _dry_run(request, settings, options, out)
    request["body"] = read_body(options, settings)
    try:
        store = Store(settings)
        record_interpreter(settings)
        results = send(store, request, os.environ)
    except StoreReadOnly:
        import spool
        if not spool.sandboxed(os.environ):
            raise
        return _send_from_sandbox(request, settings, options, out)
    interrupted = False
    if options.wait is not None:
        try:
            wait_for_proof(store, [row for row, _ in results], options.wait)
        except KeyboardInterrupt:  # the messages are on their way, and their receipts are owed
            interrupted = True
        results = [(store.by_id(row["id"]), note) for row, note in results]
    if options.json:
        print_json({"messages": [message_record(store, row) for row, _ in results]}, out)
    else:
        for row, note in results:
            out(receipt(row, note))
    if results[0][0]["sender_kind"] == "unknown":
        sys.stderr.write("xmsg: no session's identity was found, so the message is shown as from an unknown source; "
                         "set XMSG_FROM_TOOL and XMSG_FROM_SESSION\n")
    unproven = options.wait is not None and not all(row["confirmed_at"] for row, _ in results)
    if unproven and not options.json:
        sys.stderr.write("xmsg: not confirmed in %g s, and it stays as it is; `xmsg outbox --all` looks again\n"
                         % options.wait)
    return 130 if interrupted else group_status([row for row, _ in results]) or (UNKNOWN_STATUS if unproven else 0)


def _send_from_sandbox(request, settings, options, out):
    import stat
    remote, _ = split_target(settings, request["target"])
    if remote:
        raise StoreReadOnly("nothing was sent: from inside Codex's sandbox no other machine is reached; run this "
                            "command outside the sandbox")
    store = Store(settings, write=False)
    rows, line = send_from_sandbox(store, request, os.environ)
    if line:
        # Only what the tool call prints reaches the hook, and JSON on stdout must stay JSON.
        mode = os.fstat(2).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(2)):
            raise StoreReadOnly("nothing was sent: in this sandbox a message leaves by what this command prints on "
                                "stderr, which goes elsewhere; run it without a redirection of stderr")
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    if options.json:
        print_json({"messages": [message_record(store, row) for row in rows]}, out)
    else:
        for row in rows:
            out("spooled %s -> %s  (from %s, ttl %ds; not yet in the store: this session's next hook takes it there)"
                % (row["uid"], row["target"], one_line(row["sender_label"]),
                   (row["expires_at"] - row["created_at"]) // 1000))
    return UNKNOWN_STATUS if options.wait is not None else 0


def group_status(rows):
    """The exit status for what became of several messages: the first of 6, 7 that occurs, else 0."""
    states = {shown_state(row) for row in rows}
    return UNKNOWN_STATUS if "UNKNOWN" in states else REFUSED_STATUS if "refused" in states else 0


def read_body(options, settings):
    """The text from the argument, the file or stdin. One final newline of a file or pipe is not part of it."""
    if options.text not in (None, "-"):
        return options.text
    if options.text is None and not options.file and sys.stdin.isatty():
        raise UsageError("the message is missing: `xmsg send TARGET \"text\"`, or pipe it in")
    most = 4 * settings.max_body_chars + 4
    try:
        if options.file:
            with open(options.file, "rb") as file:
                content = file.read(most)
        else:
            content = sys.stdin.buffer.read(most)
    except OSError as error:
        raise UsageError("cannot read the message from %s: %s" % (options.file or "stdin", error.strerror))
    text = content.decode("utf-8", "replace")
    return text[:-1] if text.endswith("\n") else text


def _dry_run(request, settings, options, out):
    store = Store(settings, write=False)
    sender = sender_identity(store, os.environ, request["label"], request["notification"])
    remote, spec = split_target(settings, request["target"])
    if remote:
        if options.json:
            print_json({"plan": [{"machine": remote["alias"], "target": spec, "command": remote["words"],
                                  "from": sender["label"]}]}, out)
        else:
            out("would be sent to %s, which decides what %s means there  (from %s; by `%s`)" % (
                remote["alias"], one_line(spec), sender["label"], " ".join(remote["words"])))
        return 0
    now, plans = now_ms(), []
    for peer in resolve(store, request["target"], sender, request["force"]):
        windows, reason = route(direct_facts(store, peer, request["direct"], sender))
        live = not peer.get("forced") and is_live(store, peer, now)
        plans.append({"session": peer["session"], "host": peer["host"], "name": display_name(peer), "live": live,
                      "windows": windows + ["hook"], "reason": reason, "from": sender["label"]})
    if options.json:
        print_json({"plan": plans}, out)
    else:
        for plan in plans:
            if plan["windows"][0].startswith(("uds", "codex")):
                out("would go -> %s  (from %s; %s)" % (plan["session"], plan["from"], ", else ".join(plan["windows"])))
                continue
            out("would queue -> %s  (from %s; direct: %s; %s)" % (
                plan["session"], plan["from"], plan["reason"] or plan["windows"][0],
                "its next hook shows it" if plan["live"] else "it is woken, and its hook shows it"
                if "agy-wake" in plan["windows"] else "the session is not open now: it waits until it is"))
    return 0


def _list_arguments(parser):
    parser.add_argument("--all", action="store_true", help="ended sessions too")
    parser.add_argument("--project", nargs="?", const=".", metavar="DIR", help="only this folder's project")
    parser.add_argument("--peer", nargs="?", const="peer", metavar="ALIAS", help="the sessions of another machine")
    parser.add_argument("--everywhere", action="store_true", help="the sessions of this machine and of all others")


def run_list(options, settings, out):
    if options.peer or options.everywhere:
        return _list_elsewhere(options, settings, out)
    store = Store(settings, write=False)
    project = project_root(options.project) if options.project else None
    records = session_records(store, options.all, project)
    if options.json:
        print_json(sessions_json(store, records), out)
    else:
        for line in session_lines(store, records, now_ms()):
            out(line)
    return 0


def _list_elsewhere(options, settings, out):
    """The sessions of other machines, those of this one first if all are wanted; a dead machine is one line."""
    import remote as machines
    store = Store(settings)
    remotes = [machines.find_remote(settings, options.peer)] if options.peer else list(
        machines.read_remotes(settings).values())
    here = [dict(session, machine="") for session in session_records(store, options.all)] if options.everywhere else []
    found = list_everywhere(store, remotes)
    if options.json:
        print_json({"sessions": here + [session for machine in found for session in machine["sessions"]],
                    "machines": [{key: machine[key] for key in ("alias", "reason", "seconds")} for machine in found]},
                   out)
    else:
        session_column = "short_id" if 0 < terminal_width() < 100 else "session"
        rows = [[session["machine"] or "(here)", session["name"] or "-", session[session_column], session["host"],
                 ("yes" if session["activity"] == "unknown" else session["activity"]) if session["live"] else "no",
                 session["cwd"]] for session in here + [one for machine in found for one in machine["sessions"]]]
        for line in table(["MACHINE", "NAME", "SESSION", "HOST", "OPEN", "FOLDER"], rows, [5, 1]) if rows else ():
            out(line)
        for machine in found:
            if machine["reason"]:
                out(paint("%s: %s" % (machine["alias"], one_line(machine["reason"])), "red"))
            elif not machine["sessions"]:
                out("%s: no session is open there" % machine["alias"])
    return RemoteError.status if options.peer and found[0]["reason"] else 0


def _queue_arguments(parser):
    parser.add_argument("--name", metavar="SPEC", help="only what waits for this session")
    parser.add_argument("--limit", type=int, default=50, metavar="N")


HOST_QUEUE_NOTE = ("In Codex's own queue, for the turn after the running one. It has no priorities, and --urgent does "
                   "not touch it. In Codex, Enter steers the running turn and Tab queues the next.")


def run_queue(options, settings, out):
    store = Store(settings, write=False)
    target = resolve_one(store, options.name)["session"] if options.name else None
    rows = store.queued(target, options.limit)
    others = [item for item in host_queue(store) if target in (None, item["session"])][:options.limit]
    if options.json:
        print_json({"messages": [message_record(store, row) for row in rows],
                    "host_queue": [dict(item, created_at=iso(item["created_at"])) for item in others]}, out)
        return 0
    now = now_ms()
    if rows:
        for line in table(["ID", "TO", "FROM", "WAITS", "PRIO", "TEXT"], [
                [row["id"], row["target"], row["sender_label"], age(now - row["created_at"]), row["priority"],
                 row["body"][:200]] for row in rows], [5, 2]):
            out(line)
    else:
        out("nothing waits" if not others else "nothing waits for a hook")
    if others:
        out("\n" + HOST_QUEUE_NOTE)
        for line in table(["TO", "NAME", "WAITS", "TEXT"], [
                [item["session"], item["name"] or "-", age(now - item["created_at"]), item["text"][:200] or "(no text)"]
                for item in others], [3, 1]):
            out(line)
    return 0


def _outbox_arguments(parser):
    parser.add_argument("--all", action="store_true", help="also what has ended")
    parser.add_argument("--to", metavar="SPEC", help="only to this session")
    parser.add_argument("--refresh", action="store_true",
                        help="ask other machines first; what was lost on the way is sent again, which makes no second "
                             "one")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="the newest N")


def store_with_evidence(settings):
    """The store for a report that looks for evidence first, and (store, False) where it can only be read."""
    import spool
    if os.path.exists(settings.db) and not spool.sandboxed(os.environ):
        try:
            return Store(settings), True
        except StoreReadOnly:
            pass
    return Store(settings, write=False), False


def run_outbox(options, settings, out):
    store, may_write = store_with_evidence(settings)
    unasked = [report for report in (catch_up(store) if options.refresh and may_write else ()) if report["reason"]]
    for report in unasked:
        sys.stderr.write("xmsg: %s cannot be asked: %s\n" % (report["alias"], one_line(report["reason"])))
    sender = sender_identity(store, os.environ)
    target = options.to
    if target and not store.messages(target=target, limit=1):
        target = resolve_one(store, target)["session"]
    if may_write:
        take_spooled(store, os.environ)
        rows = own_messages(store, sender, target, True, options.limit)
        look_for_evidence(store, sorted({row["target"] for row in rows if not row["confirmed_at"]}))
    rows = own_messages(store, sender, target, True, options.limit)
    waiting = follow_host_queue(store, rows)
    if not options.all:
        rows = sorted(own_messages(store, sender, target, False, options.limit) + waiting, key=lambda row: row["id"])
    for row in rows:
        if row["state"] == "queued":
            row["detail"] = waiting_word(store, row)
    if options.json:
        print_json({"messages": [message_record(store, row) for row in rows]}, out)
    elif not rows:
        out("nothing was sent from here yet" if options.all else "nothing waits and nothing is in doubt; "
            "`xmsg outbox --all` shows what has arrived")
    else:
        for line in message_lines(rows, now_ms()):
            out(line)
    return RemoteError.status if unasked else 0


def _inbox_arguments(parser):
    parser.add_argument("which", nargs="?", metavar="SESSION|ID", help="another session, or one message, whole")
    parser.add_argument("--take", action="store_true",
                        help="take what waits for this session now, for a host without hooks")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="the newest N")


def run_inbox(options, settings, out):
    store = Store(settings, write=options.take)
    which = options.which or ""
    if which and not options.take:
        try:
            row = find_message(store, which)
        except NoSuchTarget:
            row = None
        if row:
            if options.json:
                print_json({"messages": [message_record(store, row)]}, out)
            else:
                out(item_text(store, row))
            return 0
    session = own_session(store, which)
    if options.take:
        return _take(store, session, options, out)
    rows = store.messages(target=session, states=[state for state in STORED if state in ("delivered",) + IN_FLIGHT],
                          limit=options.limit, newest=True)
    if options.json:
        print_json({"messages": [message_record(store, row) for row in rows]}, out)
    else:
        for row in rows:
            out("#%d  %s ago\n%s\n" % (row["id"], age(now_ms() - row["state_at"]), item_text(store, row)))
        waiting = store.queued_counts().get(session, 0)
        out("%d shown, %d waiting%s" % (len(rows), waiting, "; `xmsg inbox --take` takes them now" if waiting else ""))
    return 0


def _take(store, session, options, out):
    rows = store.claim(session, now_ms(), options.limit, len, "inbox", myself())

    def write():
        if options.json:
            print_json({"messages": [message_record(store, row) for row in rows]}, out)
        else:
            out("\n\n".join(item_text(store, row) for row in rows) or "nothing waits")
        try:
            sys.stdout.flush()
        except OSError as error:
            raise NothingWritten(error.strerror) from error
    show(store, rows, "inbox", write)
    store.lower_hint(session)
    return 0


def item_text(store, row):
    """A message as an agent reads it again: framed like in a hook, and fit for a terminal."""
    head, body = render(store, row)
    return "%s\n%s" % (head, printable(body))


def own_session(store, which=""):
    """The session that a command is about: the one named, or the one that runs it (also `.`)."""
    if which and which != ".":
        return resolve_one(store, which)["session"]
    session = sender_identity(store, os.environ)["self"]
    if not session:
        raise UsageError("this is not a session of Claude Code, Codex or agy; name one, as `xmsg list` shows it")
    return session


def _message_argument(parser):
    parser.add_argument("id", metavar="ID", help="the message's number or uid")


def run_show(options, settings, out):
    store, may_write = store_with_evidence(settings)
    row = find_message(store, options.id)
    if may_write and not row["confirmed_at"] and look_for_evidence(store, [row["target"]]):
        row = store.by_id(row["id"])
    follow_host_queue(store, [row])
    told = None
    if may_write and row["remote"] and row["far_state"]:
        told, reason = ask_far(store, row)
        if reason:
            sys.stderr.write("xmsg: %s cannot be asked: %s\n" % (row["remote"], one_line(reason)))
    events, far_events = store.events(row["id"]), told["events"] if told else []
    if options.json:
        record = dict(message_record(store, row), events=[dict(event, at=iso(event["at"])) for event in events])
        if row["remote"]:
            record["remote"]["events"] = [dict(event, at=iso(event["at"])) for event in far_events]
        print_json(record, out)
    else:
        for line in story_lines(row, events, now_ms(), far_events):
            out(line)
    return 0


def run_cancel(options, settings, out):
    store = Store(settings)
    row = cancel(store, find_message(store, options.id), sender_identity(store, os.environ))
    if options.json:
        print_json({"messages": [message_record(store, row)]}, out)
    else:
        out("cancelled #%d" % row["id"])
    return 0


def _resolve_arguments(parser):
    _message_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--delivered", dest="resolution", action="store_const", const="delivered", help="it did arrive")
    which.add_argument("--requeue", dest="resolution", action="store_const", const="requeue",
                       help="it did not arrive: send it once more")
    which.add_argument("--drop", dest="resolution", action="store_const", const="drop", help="forget about it")


def run_resolve(options, settings, out):
    store = Store(settings)
    row = settle(store, find_message(store, options.id), options.resolution)
    if options.json:
        print_json({"messages": [message_record(store, row)]}, out)
    else:
        out("#%d is now %s" % (row["id"], row["state"]))
    return 0


def _name_arguments(parser):
    parser.add_argument("session", metavar="SESSION", help="as for send; . is this session itself")
    parser.add_argument("label", metavar="LABEL", help="the name; \"\" takes it away")


def run_name(options, settings, out):
    store = Store(settings)
    session = own_session(store, options.session)
    label = options.label.strip()
    peer = store.peer(session)
    if not peer:
        raise NoSuchTarget("%s is not registered yet; it is after its first hook" % session)
    if label:
        _check_name(store, label, session)
    store.set_name(session, label)
    if options.json:
        record = session_record(store, store.peer(session), waiting_counts(store), now_ms())
        print_json(sessions_json(store, [record]), out)
    else:
        out("%s is now called %s: `xmsg send %s ...`" % (session, label, label) if label
            else "%s has no given name any more" % session)
    return 0


def _check_name(store, label, session):
    if not is_label(label) or label == "." or any(char.isspace() or char == ":" for char in label):
        raise UsageError("a name is one word of up to %d characters without brackets, colons or a leading dash"
                         % LONGEST_NAME)
    if name_key(label) in RESERVED_NAMES:
        raise UsageError("%s is a word of xmsg's own; take another name" % label)
    now = now_ms()
    for other in store.peers_named(label):
        if other["session"] != session and is_live(store, other, now):
            raise UsageError("%s is already the name of %s; take another, or clear that one first"
                             % (label, describe_peer(store, other, now)))
    if begins_other_ids(store, label, session):
        raise UsageError("%s is how another session's id begins; take another name" % label)


def _find_arguments(parser):
    parser.add_argument("query", nargs="?", metavar="QUERY", help="part of a name, id, folder or host")
    parser.add_argument("--ids-only", action="store_true", help="print nothing but full ids")
    parser.add_argument("--exact", action="store_true", help="the one session that QUERY means to `xmsg send`; its id")


def run_find(options, settings, out):
    store = Store(settings, write=False)
    if options.exact:
        peer = resolve_one(store, options.query or "")
        records = [session_record(store, peer, waiting_counts(store), now_ms())]
    else:
        records = session_records(store, everything=True, query=options.query)
    if not records:
        raise NoSuchTarget("%s; `xmsg list --all` shows every session that is known"
                           % ("nothing matches %r" % options.query if options.query else "no session is known yet"))
    if options.json:
        print_json(sessions_json(store, records), out)
    elif options.exact or options.ids_only:
        for record in records:
            out(record["session"])
    else:
        for line in session_lines(store, records, now_ms()):
            out(line)
    return 0


def _remote_arguments(parser):
    parser.add_argument("action", choices=("list", "add", "remove", "check"), help="what to do")
    parser.add_argument("alias", metavar="ALIAS", nargs="?", help="the machine's name here, as in `send ALIAS:X`")
    parser.add_argument("command", metavar="COMMAND", nargs="*",
                        help="for add: what runs a command there, as `ssh otherhost`; behind --, or as one word, if it "
                             "holds options")
    parser.add_argument("--spool", action="store_true",
                        help="for add: messages wait here whenever the machine cannot be reached")


def run_remote(options, settings, out):
    import shlex
    import remote as machines
    if (options.action != "list" and not options.alias) or (options.command and options.action != "add"):
        raise UsageError("it is `xmsg remote list`, `add ALIAS COMMAND...`, `remove ALIAS` or `check ALIAS`")
    if options.action == "check":
        return _check_remote(options, settings, out)
    if options.action == "add":
        command = shlex.split(options.command[0]) if len(options.command) == 1 else options.command
        if not command:
            raise UsageError("the command is missing, as in `xmsg remote add box ssh otherhost`")
        machines.add_remote(settings, options.alias, command, options.spool)
    elif options.action == "remove":
        machines.remove_remote(settings, options.alias)
    remotes = list(machines.read_remotes(settings).values())
    faults = machines.bad_lines(settings)
    for fault in faults:
        sys.stderr.write("xmsg: %s\n" % one_line(fault))
    if options.json:
        print_json({"remotes": [{"alias": remote["alias"], "command": remote["words"], "spool": remote["spool"]}
                                for remote in remotes], "faults": faults}, out)
    elif options.action == "list" and remotes:
        for line in table(["ALIAS", "SPOOL", "COMMAND"], [
                [remote["alias"], "yes" if remote["spool"] else "-", shlex.join(remote["words"])]
                for remote in remotes], [2]):
            out(line)
    else:
        out({"list": "no other machine is set up; `xmsg remote add ALIAS COMMAND...` adds one",
             "add": "added; `xmsg remote check %s` proves it" % options.alias,
             "remove": "removed"}[options.action])
    return RemoteError.status if faults else 0


def _check_remote(options, settings, out):
    found = check(Store(settings), options.alias)
    alias = found["alias"]
    if options.json:
        print_json(found, out)
    elif not found["there"]:
        out("%s: cannot be reached: %s" % (alias, found["reason"]))
    else:
        out("%s: reached in %.1f s (%s, xmsg %s)" % (alias, found["seconds"], found["name"], found["version"]))
        out("back: %s" % ("it calls this machine %s, and that works" % found["back"] if found["back"] else
                          "%s; a receiver there sees no address to reply to. There: `xmsg remote add NAME COMMAND...`"
                          % found["reason"]))
    return 0 if found["there"] and found["back"] else RemoteError.status


def run_flush(options, settings, out):
    store = Store(settings)
    reports = catch_up(store)
    if options.json:
        print_json({"messages": [message_record(store, row) for report in reports for row in report["rows"]],
                    "machines": [{"alias": report["alias"], "reason": report["reason"]} for report in reports]}, out)
    else:
        for report in reports:
            if report["reason"]:
                waiting = sum(not row["far_state"] for row in report["rows"])  # the others are there already
                out("%s cannot be reached, %d wait: %s" % (report["alias"], waiting, one_line(report["reason"])))
            else:
                for line in message_lines(report["rows"], now_ms()):
                    out(line)
    return RemoteError.status if any(report["reason"] for report in reports) else 0


def _settings_arguments(parser):
    parser.add_argument("--markdown", action="store_true", help="the README's table")


def run_settings(options, settings, out):
    if options.markdown:
        lines = settings_markdown()
    elif options.json:
        return print_json({name: os.environ.get(name) or default for name, _, default, _, _ in SETTINGS}, out) or 0
    else:
        rows = [[name, str(os.environ.get(name) or default), text] for name, _, default, _, text in SETTINGS]
        if 0 < terminal_width() < 120:
            lines = [line for name, value, text in rows
                     for line in hanging("%-26s" % name, value or "-") + hanging("    ", text)]
        else:
            lines = table(["VARIABLE", "VALUE", "MEANING"], rows, [2])
    for line in lines:
        out(line)
    return 0


def _install_arguments(parser):
    parser.add_argument("--host", action="append", choices=HOSTS, help="only this host; default: every host found")
    parser.add_argument("--dry-run", action="store_true", help="print what would change; change nothing")


PROGRAMS = ("bin/xmsg", "bin/xmsg-find-session", "bin/codex-history")
# Measured: Claude Code 2.1.281 and 2.1.332 take hooks into a running session, Codex 0.156.1 and 0.171.0 do not.
WHAT_IS_NEXT = {
    "claude": "Claude Code: open sessions have the hooks from their next prompt on; messages wake them while they are "
              "idle by their inbox, and by the hooks as well after a restart or /clear",
    "codex": "Codex: start it once and confirm the hooks (\"Trust all and continue\"); open sessions need a restart",
    "agy": "Antigravity: the next turn has the hooks"}


def run_install(options, settings, out):
    import hook_install
    hosts = options.host or hook_install.hosts_found(os.environ)
    records = hook_install.install(hosts, _beside("xmsg-hook.sh"), os.environ, options.dry_run)
    records += [hook_install.link(_beside(program), os.environ, options.dry_run) for program in PROGRAMS]
    if not options.dry_run:
        store = Store(settings)
        record_interpreter(settings, hook_install.real_interpreter)
        store.close()
    status = _report_changes(records, options, out)
    if options.json or options.dry_run:
        return status
    if not hosts:
        out("no host was found; install Claude Code, Codex or agy, or name one with --host")
    missing = [host for host in hook_install.HOSTS if host not in hosts]
    if hosts and missing and not options.host:
        out("not found here: %s; `xmsg install --host NAME` adds a host's entries all the same" % ", ".join(missing))
    for record in records:
        if record["host"] and record["action"] in ("added", "replaced"):
            _print_lines(hanging("", WHAT_IS_NEXT[record["host"]]), out)
    if hosts and not status:
        out("`xmsg list` shows who can be reached; `xmsg doctor` looks whether all is well")
    return status


def run_uninstall(options, settings, out):
    import hook_install
    hosts = options.host or hook_install.HOSTS
    records = hook_install.uninstall(hosts, _beside("xmsg-hook.sh"), os.environ, options.dry_run)
    if not options.host:
        records += [hook_install.unlink(_beside(program), os.environ, options.dry_run) for program in PROGRAMS]
    status = _report_changes(records, options, out)
    if not options.json:
        out("the store stays: `rm -r %s` removes it" % os.path.dirname(settings.db))
    return status


def _print_lines(lines, out):
    for line in lines:
        out(line)


def _beside(name):
    return os.path.join(os.path.dirname(os.path.realpath(__file__)), *name.split("/"))


def _report_changes(records, options, out):
    if options.json:
        print_json({"changes": records}, out)
    else:
        said = ""
        for record in records:
            _print_lines(hanging("%-7s %-9s " % (record["host"] or "command", record["action"]), record["path"]), out)
            if record["detail"] and (record["host"] or record["detail"] != said):
                _print_lines(hanging("        ", record["detail"]), out)
            said = record["detail"]
            if options.dry_run and record["diff"]:
                out(record["diff"])
    return 1 if any(record["action"] == "refused" for record in records) else 0


def _doctor_arguments(parser):
    parser.add_argument("--probe", metavar="SESSION",
                        help="send a marked message to this session and say which window carried it, and how fast")


def run_doctor(options, settings, out):
    if options.probe:
        return _probe(options, settings, out)
    import doctor
    checks = doctor.examine(settings, os.environ)
    well = all(check["ok"] is not False for check in checks)
    if options.json:
        print_json({"well": well, "checks": checks}, out)
    else:
        for check in checks:
            word = {True: "ok", False: "WRONG", None: "note"}[check["ok"]]
            color = {True: "green", False: "red", None: "yellow"}[check["ok"]]
            first, *rest = hanging("%-5s  %-18s " % (word, check["check"]), check["detail"])
            _print_lines([paint(first[:5], color) + first[5:]] + rest, out)
            _print_lines(hanging("       -> ", check["advice"]) if check["advice"] else (), out)
    return 0 if well else 1


def _probe(options, settings, out):
    """Sends a marked message and waits; what nobody has taken by then is withdrawn."""
    store = Store(settings)
    session = resolve_one(store, options.probe)["session"]
    # Claude Code drops a text that it has just had from the same sender.
    body = "probe %s of `xmsg doctor`; nothing is to be done" % os.urandom(4).hex()
    request = {"target": session, "label": "", "priority": 0, "ttl": WAIT_SECONDS + 5, "key": None, "uid": None,
               "replace": False, "reply_to": None, "force": False, "direct": True, "notification": True, "spool": False,
               "body": body}
    (row, note), = send(store, request, os.environ)
    if row["state"] == "queued" and not options.json:
        out("queued (direct: %s); it waits up to %d s for a hook there: a prompt, a tool call or the end of a turn"
            % (note, WAIT_SECONDS))
    try:
        row, = wait_for_proof(store, [row], WAIT_SECONDS)
    finally:
        row = withdraw_probe(store, row)
    taken, proven = [None if at is None else (at - row["created_at"]) / 1000 for at in
                     (row["state_at"] if row["state"] == "delivered" else None, row["confirmed_at"])]
    if options.json:
        print_json({"messages": [message_record(store, row)], "seconds": taken, "confirmed_seconds": proven}, out)
    elif row["state"] == "cancelled":
        out("no window took it in %d s, so it is withdrawn: the session was quiet; say a word in it and probe again"
            % WAIT_SECONDS)
    elif taken is None:
        out("%s%s" % (shown_state(row), ": " + one_line(row["detail"]) if row["detail"] else ""))
    else:
        out("delivered by %s after %.1f s, %s" % (row["window"], taken, "not confirmed by its transcript"
            if proven is None else "confirmed by its transcript after %.1f s" % proven))
    if row["state"] in ("cancelled", "expired"):
        return 1
    return group_status([row]) or (0 if row["confirmed_at"] else UNKNOWN_STATUS)


def withdraw_probe(store, row):
    """The row as it stands, cancelled if it still waited."""
    row = store.by_id(row["id"])
    if row["state"] == "queued":
        with contextlib.suppress(NotPossible):  # a hook has taken it just now
            cancel(store, row, {"session": ""})
        row = store.by_id(row["id"])
    return row


def _history_arguments(parser):
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, about in (("list", "the newest sessions, of all providers"),
                          ("resume", "go on with a session, in its folder, with its provider and model"),
                          ("export", "a session as Markdown, for a person or another model to read")):
        one = actions.add_parser(action, help=about, description=about[0].upper() + about[1:] + ".", allow_abbrev=False)
        _history_options(one, action)


def _history_options(parser, action):
    import argparse
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, errors too")
    if action != "list":
        parser.add_argument("target", nargs="?", metavar="TARGET", default="",
                            help="a full id, an exact name, or a unique start of an id; none: choose on the terminal")
    parser.add_argument("--provider", metavar="P", default="", help="only this provider's")
    parser.add_argument("--query", metavar="TEXT", default="", help="only with this in name, text, id, model or folder")
    parser.add_argument("--cwd", metavar="D", default="", help="only those of this folder or below")
    parser.add_argument("--include-archived", action="store_true", help="archived ones too")
    parser.add_argument("--include-non-interactive", action="store_true",
                        help="those of `codex exec` and of subagents too")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="the newest N (50)")
    parser.add_argument("--backend", choices=("auto", "app-server", "sqlite"), default="auto",
                        help="whom to ask: the running app-server, else Codex's own database (read-only)")
    parser.add_argument("--home", metavar="H", default="", help="another CODEX_HOME")
    if action == "resume":
        parser.add_argument("--switch-provider", metavar="P", default="",
                            help="with --model: go on at another provider, which gets the whole history")
        parser.add_argument("--model", metavar="M", default="", help="another model")
        parser.add_argument("--dry-run", action="store_true", help="print the command; run nothing")
    elif action == "export":
        parser.add_argument("--full", action="store_true", help="long tool calls and results whole, and the reasoning "
                                                                "that Codex shows")
        parser.add_argument("--redact", action="store_true", help="mask well-known shapes of secrets")
        parser.add_argument("--output", metavar="FILE", help="write it there, whole or not at all; default: print it")


def run_history(options, settings, out):
    """Returns the argument list of the program to become, for a `resume` that may go ahead."""
    import codex_delivery
    home = os.path.abspath(os.path.expanduser(options.home) if options.home else codex_delivery.codex_home(os.environ))
    if options.limit < 1:
        raise UsageError("--limit is 1 or more")
    if options.action == "list":
        return _history_list(home, options, out)
    if options.action == "resume":
        return _history_resume(home, options, settings, out)
    return _history_export(home, options, out)


def _ask_history(home, options, question):
    """(answer, backend); a backend that could not be asked is named aloud."""
    import codex_history
    answer, backend, fault = codex_history.ask(home, options.backend, question)
    if fault:
        sys.stderr.write("xmsg: the app-server was not asked (%s); this is from Codex's own database\n"
                         % one_line(fault))
    return answer, backend


def _newest_history(home, options, index):
    import codex_history
    return codex_history.newest(index, home, options.limit, options.include_archived, options.include_non_interactive,
                                options.provider, options.query, options.cwd)


def _history_list(home, options, out):
    (records, more), backend = _ask_history(home, options, lambda index: _newest_history(home, options, index))
    if options.json:
        print_json({"backend": backend, "more": more, "sessions": [
            dict(record, updated_at=iso(record["updated_at"] * 1000)) for record in records]}, out)
        return 0
    for line in history_lines(records, now_ms()):
        out(line)
    if more:
        sys.stderr.write("xmsg: there are older ones; --limit N shows more, --query TEXT searches\n")
    return 0


def history_lines(records, now):
    if not records:
        return ["no session fits; --include-archived and --include-non-interactive show more"]
    return table(["SEEN", "SESSION", "NAME", "PROVIDER/MODEL", "STATE", "FOLDER"], [
        [age(now - record["updated_at"] * 1000), record["session"], _history_name(record),
         "%s/%s" % (record["provider"] or "-", record["model"] or "-"),
         "archived" if record["archived"] else record["status"], record["cwd"]] for record in records], [2, 3, 5])


def _history_name(record):
    """What a person knows a session by: its name, else how it began."""
    return clip(record["name"] or record["preview"].strip() or "-", 40)


def _history_target(home, options):
    """The session that was named, or is chosen on the terminal."""
    import codex_history
    if options.target:
        return _ask_history(home, options, lambda index: codex_history.find(
            index, home, options.target, options.provider, options.query, options.cwd))[0]
    if not (os.isatty(0) and os.isatty(2)):
        raise UsageError("name a session; nothing is chosen without a terminal")
    (records, _), _ = _ask_history(home, options, lambda index: _newest_history(home, options, index))
    if not records:
        raise NoSuchTarget("no session fits")
    return _choose(records)


def _choose(records):
    """One of the sessions, by fzf where there is one, else by number. KeyboardInterrupt if none is."""
    import shutil
    import subprocess
    lines = history_lines(records, now_ms())
    fzf = shutil.which("fzf")
    if fzf:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FZF_")}
        entries = "".join("%d\t%s\n" % entry for entry in enumerate(lines[1:]))
        done = subprocess.run([fzf, "--delimiter=\t", "--with-nth=2..", "--no-multi", "--tiebreak=index"], env=clean,
                              input=entries.encode(), stdout=subprocess.PIPE)
        answer = done.stdout.decode("utf-8", "replace").partition("\t")[0]
    else:
        for number, line in enumerate(lines):
            sys.stderr.write("%3s  %s\n" % (number or "", line))
        sys.stderr.write("number: ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip()
        answer = str(int(answer) - 1) if answer.isascii() and answer.isdigit() and len(answer) < 9 else answer
    if not answer:
        raise KeyboardInterrupt
    if not (answer.isdigit() and int(answer) < len(records)):
        raise UsageError("no number of the list: %s" % answer)
    return records[int(answer)]


def _history_resume(home, options, settings, out):
    import codex_delivery
    import codex_history
    import shlex
    if options.switch_provider and not options.model:
        raise UsageError("--switch-provider needs --model: another provider has other models")
    record = _history_target(home, options)
    _refuse_registered(settings, record["session"])
    argv, warnings = codex_history.resume_plan(home, record, os.environ, options.switch_provider, options.model)
    same_home = home == os.path.abspath(codex_delivery.codex_home(os.environ))
    if options.json:
        return print_json({"argv": argv, "env": {"CODEX_HOME": home}, "warnings": warnings}, out) or 0
    for warning in warnings:
        sys.stderr.write("xmsg: %s\n" % one_line(warning))
    if options.dry_run:
        out(shlex.join(argv if same_home else ["env", "CODEX_HOME=" + home] + argv))
        return 0
    if not (os.isatty(0) and os.isatty(1)):
        raise UsageError("Codex needs a terminal; --dry-run prints the command")
    if options.switch_provider and options.switch_provider != record["provider"]:
        sys.stderr.write("go on? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise KeyboardInterrupt
    if not same_home:
        os.environ["CODEX_HOME"] = home
    return argv


def _refuse_registered(settings, session):
    store = Store(settings, write=False)
    peer = store.peer(session)
    # Without a process a session counts as live by its age, which proves nothing here.
    if peer and peer["pid"] and is_live(store, peer, now_ms()):
        raise NotPossible("%s is open: `xmsg list` shows it, process %d" % (session, peer["pid"]))


def _history_export(home, options, out):
    import codex_history
    record = _history_target(home, options)
    if options.json and options.output is None:
        raise UsageError("the export is Markdown; with --json, --output FILE says where to write it")
    parts = codex_history.open_history(home, record)
    pieces = codex_history.markdown(parts, options.full, options.redact)
    if options.output is None:
        sys.stdout.writelines(pieces)
        return 0
    path = write_whole(os.path.expanduser(options.output), pieces)
    if options.json:
        print_json({"session": record["session"], "output": path}, out)
    else:
        out("written to %s" % path)
    return 0


def write_whole(path, pieces):
    """Writes a file of this user's alone, which has its name only once it is whole. Returns the full path.

    From here on a polite end of this process is an interrupt, so that no part of the file stays behind.
    """
    import signal
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    path = os.path.abspath(path)
    if os.path.lexists(path) and not os.path.islink(path) and not os.path.isfile(path):
        raise UsageError("%s is no plain file" % path)
    folder, name = os.path.split(path)
    partial = os.path.join(folder, ".%s.%d.partial" % (name[:100], os.getpid()))
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8", newline="") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise XmsgError("cannot write %s: %s" % (path, error.strerror)) from None
    return path


def run_demo(options, settings, out):
    """Two pretend sessions in a store of their own, through the real hook and the real command line."""
    import shutil
    import subprocess
    import tempfile
    folder = tempfile.mkdtemp(prefix="xmsg-demo-")
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("XMSG_", "CLAUDE", "CODEX_", "ANTIGRAVITY_"))}
    clean["XMSG_DB"] = os.path.join(folder, "messages.sqlite3")
    ada, bob, steps = "7c1f0a52-demo", "01a04cd2-demo", []

    def run(command, environ=(), payload=None):
        done = subprocess.run(command, env=dict(clean, **dict(environ)), cwd=folder, stdout=subprocess.PIPE,
                              input=json.dumps(payload, separators=(",", ":")).encode() if payload else b"")
        if done.returncode:
            raise XmsgError("the demo's %s left with %d" % (" ".join(command), done.returncode))
        return done.stdout.decode().rstrip()

    def hook(host, session, event):
        return run([_beside("xmsg-hook.sh"), host], payload={
            "session_id": session, "cwd": folder, "hook_event_name": event, "permission_mode": "default"})

    def xmsg(*arguments, **environ):
        return run([_beside("bin/xmsg"), *arguments], environ)

    def step(what, output):
        steps.append({"step": what, "output": output})
        if not options.json:
            out("%s:\n\n%s\n" % (what, output))
    try:
        hook("claude", ada, "SessionStart")
        hook("codex", bob, "SessionStart")
        xmsg("name", ada, "ada")
        xmsg("name", bob, "bob")
        step("Two sessions have registered through their hooks", xmsg("list"))
        step("ada runs `xmsg send bob \"the API is ready\"`",
             xmsg("send", "bob", "the API is ready", XMSG_FROM_TOOL="claude", XMSG_FROM_SESSION=ada))
        step("bob's next tool call runs the hook, whose answer puts this before bob's model",
             hook("codex", bob, "PreToolUse"))
        step("The whole story, `xmsg show 1`", xmsg("show", "1"))
        step("The hook after that has nothing to say", hook("codex", bob, "PreToolUse") or "(nothing)")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print_json({"steps": steps}, out)
    return 0


def _no_arguments(parser):
    pass


# command -> (its arguments, what runs it, its line of help)
COMMANDS = {
    "send": (_send_arguments, run_send, "send a message to a session, or to everybody in a group"),
    "list": (_list_arguments, run_list, "the sessions that can be reached"),
    "outbox": (_outbox_arguments, run_outbox, "what became of what this session sent"),
    "inbox": (_inbox_arguments, run_inbox, "what came to this session, again; or one message, whole"),
    "show": (_message_argument, run_show, "the whole story of one message"),
    "queue": (_queue_arguments, run_queue, "what waits, in the order in which it goes, also in Codex's own queue"),
    "cancel": (_message_argument, run_cancel, "withdraw a message that nobody has seen"),
    "resolve": (_resolve_arguments, run_resolve, "settle a message whose fate is UNKNOWN"),
    "name": (_name_arguments, run_name, "give a session a name to be reached by"),
    "find": (_find_arguments, run_find, "search the sessions, ended ones too"),
    "remote": (_remote_arguments, run_remote, "other machines: list, add, remove, check"),
    "flush": (_no_arguments, run_flush, "carry what waits for other machines, and ask what became of the rest"),
    "install": (_install_arguments, run_install, "add the hook entries to the hosts' configuration"),
    "uninstall": (_install_arguments, run_uninstall, "take exactly these entries away again"),
    "history": (_history_arguments, run_history, "past Codex sessions: list, resume, export"),
    "doctor": (_doctor_arguments, run_doctor, "what works, what does not, and what to do about it"),
    "settings": (_settings_arguments, run_settings, "the environment variables, their values and meaning"),
    "demo": (_no_arguments, run_demo, "the whole way of a message, with two pretend sessions"),
}
