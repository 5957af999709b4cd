"""Messages to other machines: the row of each here, and what the machine that has it says of it.

A message keeps its uid on both machines, so that to send it again is to ask what became of it: the far side makes no
second one. Its row here carries the far session, number and state, as they were last told.
"""
import json
import os
import time

from contract import (Ambiguous, ENDED, HOSTS, IN_FLIGHT, LONGEST_NAME, NoSuchTarget, NotPossible, RemoteError,
                      STORED, StoreError, UsageError, XmsgError, clean_body, clean_text, is_session_id, name_key,
                      now_ms, one_line)
from store import holder_lives, is_unknown, myself, note_fault
from xmsg import sender_identity
import sending

AT_ONCE = 20  # messages in one line of jobs
GROUPS = ("all",)
# What the far side says before it makes anything: the message is not there and will not be.
REFUSALS = {kind.code: kind for kind in (UsageError, NoSuchTarget, Ambiguous, NotPossible, RemoteError)}


# ---------------------------------------------------------------------------------------------------- machines

def machine_id(store):
    """What this store is called among machines: 16 hex digits, made at the first question."""
    if not store.meta("machine"):
        with store.transaction():
            if not store.meta("machine"):
                store.set_meta("machine", os.urandom(8).hex())
    return store.meta("machine")


def meet(store, remote, far):
    """Remembers which machine an alias leads to, for the way back. RemoteError if it leads to this very store."""
    if far["machine"] == machine_id(store):
        raise RemoteError("%s leads back to this store; a session here is reached without it" % remote["alias"])
    if store.meta(_met(remote)) != far["machine"]:
        with store.transaction():
            store.set_meta(_met(remote), far["machine"])


def _met(remote):
    """Under which key the machine that was met is kept: another command of the same alias has not met anybody."""
    return "machine:%s %s" % (remote["alias"], json.dumps(remote["words"]))


def way_back(store, machine):
    """The alias under which a machine is reached from here, as far as it was ever met; None if there is none."""
    import remote as machines
    try:
        remotes = machines.read_remotes(store.settings)
    except RemoteError:
        return None
    return next((remote["alias"] for remote in remotes.values()
                 if store.meta(_met(remote)) == machine), None)


def open_link(store, remote):
    """(Link, "") or (None, why there is none)."""
    import remote as machines
    link, reason = machines.open_link(remote, store.settings.remote_timeout)
    if link:
        try:
            meet(store, remote, link.far)
        except XmsgError:
            link.close()
            raise
    return link, reason


def reach(store, alias):
    """A Link to a machine; RemoteError if it cannot be reached."""
    import remote as machines
    remote = machines.find_remote(store.settings, alias)
    link, reason = open_link(store, remote)
    if not link:
        raise RemoteError("%s cannot be reached: %s" % (alias, reason))
    return link


def check(store, alias):
    """Both directions of one machine, as a record: there, back (the alias that leads here, None), reason, seconds."""
    import remote as machines
    remote, begin = machines.find_remote(store.settings, alias), time.monotonic()
    found = {"alias": remote["alias"], "there": False, "back": None, "reason": "", "machine": "", "name": "",
             "version": ""}
    link, found["reason"] = open_link(store, remote)
    if link:
        found.update(link.far, there=True, seconds=round(time.monotonic() - begin, 3))
        word, answer = link.ask([["check", {"machine": machine_id(store)}]])
        link.close()
        if word == "ACCEPTED" and "ok" in answer[0] and isinstance(answer[0]["ok"], dict):
            back = answer[0]["ok"].get("back")
            found["back"] = one_line(clean_text(back))[:LONGEST_NAME] if isinstance(back, str) else None
            found["reason"] = "" if back else "no remote there leads here"
        else:
            found["reason"] = answer if word != "ACCEPTED" else _error(answer[0])["message"]
    return found


def list_everywhere(store, remotes):
    """What each of these machines lists, all within XMSG_REMOTE_TIMEOUT: [{alias, reason, seconds, sessions}]."""
    import remote as machines
    seconds = 0.8 * store.settings.remote_timeout

    def ask(remote):
        begin = time.monotonic()
        word, answer, far = machines.ask_once(remote, [["list", {}]], seconds)
        sessions, reason = [], answer
        if word == "ACCEPTED":
            told = answer[0].get("ok")
            sessions = list(filter(None, map(_session, told))) if isinstance(told, list) else []
            reason = "" if "ok" in answer[0] else _error(answer[0])["message"]
        return {"alias": remote["alias"], "reason": reason, "seconds": round(time.monotonic() - begin, 3),
                "sessions": [dict(session, machine=remote["alias"]) for session in sessions], "far": far}
    found = machines.side_by_side(remotes, ask)
    for remote in remotes:
        far = found[remote["alias"]].pop("far")
        if far and far["machine"] != machine_id(store):
            meet(store, remote, far)
    return [found[remote["alias"]] for remote in remotes]


SESSION_FIELDS = {"session": str, "short_id": str, "host": str, "name": str, "cwd": str, "project": str, "model": str,
                  "permission_mode": str, "live": bool, "activity": str, "seen_at": str, "queued": int,
                  "host_queued": int, "direct": bool, "window": str}


def _session(told):
    """A session as another machine lists it, if it is one; what it says is anybody's text."""
    if not isinstance(told, dict) or not is_session_id(told.get("session")):
        return None
    session = {key: told[key] if isinstance(told.get(key), kind) else kind() for key, kind in SESSION_FIELDS.items()}
    return {key: clean_text(value)[:4096] if isinstance(value, str) else value for key, value in session.items()}


# ---------------------------------------------------------------------------------------------------- sending there

def split_target(settings, spec):
    """(remote, rest) for a TARGET on another machine, (None, spec) for one on this.

    What stands before the first colon is a host or a machine, never a part of a session's name, so no session can pass
    for one on another machine by calling itself so. RemoteError where no `peer` is set up, and never a local delivery.
    """
    word, colon, rest = spec.strip().partition(":")
    if word in HOSTS or (not colon and word != "peer"):
        return None, spec
    import remote as machines
    remote = machines.read_remotes(settings).get(name_key(word))
    if remote and not rest.strip():
        raise UsageError("%s: is a machine; name a session there, as %s:NAME, or %s:all" % (word, word, word))
    if word == "peer" and not remote:
        raise RemoteError("no other machine is set up as peer, and %s is never delivered on this one; set XMSG_REMOTE, "
                          "or `xmsg remote add ALIAS COMMAND...`" % one_line(spec)[:80])
    faults = not remote and machines.bad_lines(settings)
    if faults:  # one of them may be that machine's
        raise RemoteError("there is no machine %s as far as can be read: %s" % (one_line(word)[:40], faults[0]))
    return (remote, rest.strip()) if remote else (None, spec)


def send(store, request, environ):
    """sending.send() for a target on this machine; for one on another, the row here and the message there.

    Where the way is down before a byte has left, nothing is made (RemoteError), or with request["spool"] the message
    waits here for `xmsg flush` or the next send.
    """
    remote, spec = split_target(store.settings, request["target"])
    if not remote:
        return sending.send(store, request, environ)
    if request["notification"]:
        raise UsageError("a notification is from this machine and for this machine; %s is another" % remote["alias"])
    sender = sender_identity(store, environ, request["label"])
    request = dict(request, body=clean_body(request["body"], store.settings.max_body_chars),
                   reply_to=sending.reply_uid(store, request["reply_to"], sender) if request["reply_to"] else None)
    group = spec in GROUPS or (spec.endswith(":") and spec[:-1] in HOSTS)
    if spec == "project" or (group and request["uid"]):
        raise UsageError("a project is of one machine; name a session, or %s:all" % remote["alias"]
                         if spec == "project" else "--uid names one message, and %s is a group" % request["target"])
    spool = request["spool"] or remote["spool"]
    store.requeue_reserved(now_ms())
    link, reason = open_link(store, remote)
    if not link and (group or not spool):
        raise RemoteError("%s cannot be reached, and nothing was sent: %s" % (remote["alias"], reason))
    try:
        targets = _members(link, remote, spec) if group else [spec]
        if link:
            now = now_ms()
            older = [[row] for row in store.away(remote["alias"]) if _waits_here(row, now)]
            for at in range(0, len(older), AT_ONCE):
                _carry(store, link, older[at:at + AT_ONCE])
        rows = _add(store, link, request, sender, remote, targets)
        if link:
            notes, errors = _carry(store, link, [rows], request)
        else:
            notes, errors = {row["id"]: "%s cannot be reached: %s" % (remote["alias"], reason) for row in rows}, {}
    finally:
        if link:
            link.close()
    if not spool:
        for row in rows:
            if _waits_here(row, 0):
                with store.transaction():
                    store.move(row, "cancelled", now_ms(), detail="not sent: %s" % notes[row["id"]])
                raise RemoteError("%s: nothing was sent: %s" % (remote["alias"], notes[row["id"]]))
    if len(rows) == 1 and rows[0]["id"] in errors:
        error = errors[rows[0]["id"]]
        raise REFUSALS[error["code"]]("%s: %s" % (remote["alias"], error["message"]), error["candidates"])
    try:
        store.sweep(now_ms())
    except StoreError as error:
        note_fault(store.settings, "sweep after send", error)
    return [(row, notes.get(row["id"], sending.same_request(request))) for row in rows]


def _members(link, remote, spec):
    """The full ids of a group's sessions, as the other machine resolves it."""
    word, answer = link.ask([["group", {"target": spec}]])
    if word != "ACCEPTED":
        raise RemoteError("%s did not say who is in %s, and nothing was sent: %s" % (remote["alias"], spec, answer))
    if "ok" not in answer[0]:
        error = _error(answer[0])
        raise REFUSALS.get(error["code"], RemoteError)("%s: %s" % (remote["alias"], error["message"]),
                                                       error["candidates"])
    told = answer[0]["ok"] if isinstance(answer[0]["ok"], list) else []
    sessions = [session for session in told if is_session_id(session)]
    if not sessions:
        raise NoSuchTarget("nobody is live in %s:%s" % (remote["alias"], spec))
    return sessions


def _add(store, link, request, sender, remote, targets):
    """The rows of a message here; with a link already on their way, so that a crash leaves none that would go later
    though its sender was never told of it.

    With --replace the one that waits there is withdrawn first, if it still can be.
    """
    def columns(target, now):
        return dict(sending.new_message(request, sender, {"session": "%s:%s" % (remote["alias"], target), "host": ""},
                                        now), remote=remote["alias"])
    if request["replace"] and link:
        for target in targets:
            known = store.same_request(columns(target, now_ms()))
            if known and known["state"] == "queued" and known["far_state"]:
                _tell(store, link, known, "cancel")
    now = now_ms()
    with store.transaction():
        rows = [store.add(columns(target, now), now, request["replace"]) for target in targets]
        for row in rows if link else ():
            _take(store, row, link)
    return rows


def _take(store, row, link):
    """Moves a row that waits here on its way, durably once the transaction ends; false if another process has it."""
    if _waits_here(row, 0):
        store.leaves_for(row, link.far["machine"])
        store.move(row, "reserved", now_ms(), holder=myself())
        store.move(row, "direct-inflight", now_ms(), holder=myself())
    return row["state"] != "direct-inflight" or row["holder_pid"] == os.getpid()


def _elsewhere(link, row):
    """Why this link's machine is not the one that has or may have a message, None if it is.

    An alias can lead to another machine than before; sent there as well, the message would be seen twice.
    """
    if not _waits_here(row, 0) and row["far_machine"] not in (None, link.far["machine"]):
        return "%s leads to another machine now, and the message went to the one before" % row["remote"]
    return None


def _waits_here(row, now):
    """Whether no byte of a row has left this machine, and its time has not run out."""
    return row["state"] == "queued" and not row["far_state"] and row["expires_at"] > now


def _lost(row):
    """Whether the link was lost while the row was on its way, so that nobody here knows whether it arrived."""
    return row["state"] == "direct-uncertain" and not row["far_state"]


def _document(store, rows, request=None):
    """The message of these rows, which differ in uid and target only, for the far side."""
    row = rows[0]
    return {"machine": machine_id(store), "name": os.uname().nodename, "body": row["body"],
            "ttl": max(1, row["expires_at"] - now_ms()), "priority": row["priority"], "reply_to": row["reply_to"],
            "kind": row["sender_kind"], "label": row["sender_label"], "host": row["sender_host"],
            "session": row["sender_session"], "direct": request["direct"] if request else True,
            "force": request["force"] if request else False,
            "to": [[row["uid"], row["far_session"] or row["target"].partition(":")[2]] for row in rows]}


def _carry(store, link, batches, request=None):
    """Sends what waits here, sends again what was lost on the way, asks about the rest, and writes down the answers.

    batches: lists of rows of one text. ({row id: why it is where it is}, {row id: the far side's refusal}).
    """
    notes, errors, jobs, asked = {}, {}, [], []
    with store.transaction():
        for rows in batches:
            for row in rows:
                row.update(store.by_id(row["id"]))
                reason = _elsewhere(link, row)
                if reason or not _take(store, row, link):
                    notes[row["id"]] = reason or "another process has it"
    for rows in batches:
        rows = [row for row in rows if row["id"] not in notes and row["state"] not in ENDED]
        fresh = [row for row in rows if row["state"] == "direct-inflight" or (
            _lost(row) and row["expires_at"] > now_ms())]
        late = [row for row in rows if _lost(row) and row not in fresh]
        others = [row for row in rows if row["far_state"]]
        for verb, part in (("send", fresh), ("cancel", late), ("state", others)):
            if part:
                jobs.append([verb, _document(store, part, request)])
                asked.append(part)
    word, answers = link.ask(jobs) if jobs else ("ACCEPTED", [])
    for rows, answer in zip(asked, answers if word == "ACCEPTED" else [None] * len(asked)):
        for number, row in enumerate(rows):
            told = (_told(answer, number, row) if answer else None) or {"error": answers}
            if "error" not in told:
                follow(store, row, told)
                if told["note"]:
                    notes[row["id"]] = told["note"]
                continue
            error = told["error"]
            refused = isinstance(error, dict) and error["code"] in REFUSALS
            notes[row["id"]] = reason = error["message"] if isinstance(error, dict) else error
            if refused and not row["far_state"]:
                errors[row["id"]] = error
            _fall_back(store, row, "refused" if refused else "queued" if word == "NOT_SENT" else "direct-uncertain",
                       reason)
    return notes, errors


def _fall_back(store, row, state, reason):
    """Where a row goes that the far side has not answered for."""
    if row["state"] == "direct-inflight" or (_lost(row) and state == "refused"):
        with store.transaction():
            store.move(row, state, now_ms(), detail=one_line(reason)[:1000])


def _error(answer):
    """The error of an answer; its texts are anybody's."""
    error = answer.get("error") if isinstance(answer.get("error"), dict) else {}
    code, message, candidates = map(error.get, ("code", "message", "candidates"))

    def said(text, most):
        return one_line(clean_text(str(text)))[:most]
    return {"code": said(code, 80), "message": said(message, 2000),
            "candidates": [said(line, 400) for line in candidates[:100]] if isinstance(candidates, list) else None}


def _told(answer, number, row):
    """What an answer says of one row, checked: a record, {"error": ...}, or {"error": a text} for nonsense."""
    if "ok" not in answer:
        return {"error": _error(answer)}
    told = answer["ok"][number] if isinstance(answer["ok"], list) and number < len(answer["ok"]) else None
    if isinstance(told, dict) and "error" in told:
        return {"error": _error(told)}
    if not isinstance(told, dict) or told.get("uid") != row["uid"]:
        return {"error": "it gave an answer that cannot be read"}
    if told.get("state") is None:
        return {"error": "it does not know the message any more"}
    if (told["state"] not in STORED + ("UNKNOWN",) or not is_session_id(told.get("session"))
            or type(told.get("id")) is not int or not 0 < told["id"] < 1 << 63
            or told.get("host") not in HOSTS + ("",)):
        return {"error": "it gave an answer that cannot be read"}
    events = told.get("events")
    events = [dict(_lined(event, "window", "detail"), at=event["at"], state=event["state"])
              for event in (events[:100] if isinstance(events, list) else ()) if isinstance(event, dict)
              and type(event.get("at")) is int and 0 < event["at"] < 1 << 46 and event.get("state") in STORED]
    return dict({key: told[key] for key in ("uid", "state", "session", "id", "host")}, events=events,
                **_lined(told, "window", "detail", "evidence", "note"))


def _lined(told, *keys):
    """The texts of a record, each on one line, None for none."""
    return {key: one_line(clean_text(told[key]))[:1000] if isinstance(told.get(key), str) and told[key] else None
            for key in keys}


def follow(store, row, told):
    """Writes down what the machine that has a message says of it."""
    state = told["state"]
    if state == "UNKNOWN" or state in IN_FLIGHT:
        state = "direct-uncertain"
    elif state == "reserved":
        state = "queued"
    now = now_ms()
    with store.transaction():
        current = store.by_id(row["id"])
        if current is None or current["state"] in ENDED and current["state"] != state:
            return  # somebody has settled it meanwhile
        row.update(current)
        store.heard(row, now, told["session"], told["host"], told["id"], told["state"])
        if row["state"] != state:
            store.move(row, state, now, window=told["window"], far=True,
                       detail=told["detail"] or "%s, there #%d" % (told["state"], told["id"]))
        if told.get("evidence") and state == "delivered" and not row["confirmed_at"]:
            store.confirm(row, now, told["evidence"])
            row.update(confirmed_at=now, evidence=told["evidence"])


# ---------------------------------------------------------------------------------------------------- what comes later

def catch_up(store):
    """Carries what waits for other machines, settles what was lost on the way, and asks about what they have.

    [{alias, reason, rows}], the rows as they then stand; reason: why a machine could not be asked.
    """
    import remote as machines
    now = now_ms()
    store.requeue_reserved(now)
    store.sweep(now)
    rows = store.away()
    for row in rows:
        if row["state"] == "direct-inflight" and not holder_lives(row):
            with store.transaction():
                store.move(row, "direct-uncertain", now, detail="its sender ended without an answer")
    rows = [row for row in rows if row["state"] != "direct-inflight"]
    remotes = machines.read_remotes(store.settings)
    by_alias = {}
    for row in rows:
        remote = remotes.get(name_key(row["remote"]), {"alias": row["remote"]})
        by_alias.setdefault(remote["alias"], []).append(row)
    known = [remote for remote in remotes.values() if remote["alias"] in by_alias]
    links = machines.side_by_side(known, lambda remote: machines.open_link(remote, store.settings.remote_timeout))
    reports = []
    for alias, rows in by_alias.items():
        link, reason = links.get(alias, (None, "there is no machine of this name any more"))
        if link:
            try:
                meet(store, remotes[name_key(alias)], link.far)
                link.deadline = time.monotonic() + store.settings.remote_timeout  # the machines before it took theirs
                for at in range(0, len(rows), AT_ONCE):
                    _carry(store, link, [[row] for row in rows[at:at + AT_ONCE]])
            except RemoteError as error:
                reason = str(error)
            finally:
                link.close()
        reports.append({"alias": alias, "reason": reason, "rows": [store.by_id(row["id"]) for row in rows]})
    return reports


def _tell(store, link, row, verb, **more):
    """Tells the far side to do something about one row that it may have; its record, or an error as text or dict."""
    reason = _elsewhere(link, row)
    if reason:
        return {"error": reason}
    word, answers = link.ask([[verb, dict(_document(store, [row]), **more)]])
    told = _told(answers[0], 0, row) if word == "ACCEPTED" else {"error": answers}
    if "error" not in told:
        follow(store, row, told)
    return told


def ask_far(store, row):
    """Asks the machine that has a message about it: (its record, "") or (None, why not)."""
    try:
        link = reach(store, row["remote"])
    except RemoteError as error:
        return None, str(error)
    try:
        told = _tell(store, link, row, "state")
    finally:
        link.close()
    return (None, str(told["error"])) if "error" in told else (told, "")


def wait_for_proof(store, rows, seconds):
    """sending.wait_for_proof(), where the proof may be on another machine, which then does the waiting."""
    far = [row for row in rows if row["remote"] and row["far_state"]]
    if not far:
        return sending.wait_for_proof(store, rows, 0 if any(row["remote"] for row in rows) else seconds)
    try:
        link = reach(store, far[0]["remote"])
    except RemoteError:
        return rows  # they are there; only the proof is out of reach
    link.deadline += seconds
    far = [row for row in far if not _elsewhere(link, row)]
    try:
        word, answers = link.ask([["state", dict(_document(store, far), wait=seconds)]] if far else [])
    finally:
        link.close()
    for number, row in enumerate(far if far and word == "ACCEPTED" else ()):
        told = _told(answers[0], number, row)
        if "error" not in told:
            follow(store, row, told)
    return [store.by_id(row["id"]) for row in rows]


def cancel(store, row, sender):
    """sending.cancel(), also of a message that another machine has or may have. NotPossible if that is too late."""
    if not row["remote"] or _waits_here(row, 0) or row["state"] in ENDED:
        return sending.cancel(store, row, sender)
    sending.check_sender(row, sender)
    link = reach(store, row["remote"])
    try:
        if row["state"] == "direct-inflight" and not holder_lives(row):
            with store.transaction():
                store.move(row, "direct-uncertain", now_ms(), detail="its sender ended without an answer")
        told = _tell(store, link, row, "cancel")
    finally:
        link.close()
    if "error" in told:
        raise RemoteError("%s could not cancel it: %s" % (row["remote"], _reason(told)))
    if row["state"] != "cancelled":
        raise NotPossible("#%d cannot be cancelled any more: it is %s on %s" % (row["id"], told["state"],
                                                                               row["remote"]))
    return row


def _reason(told):
    return told["error"]["message"] if isinstance(told["error"], dict) else told["error"]


def settle(store, row, resolution):
    """sending.settle(), after asking the machine that may have the message, which settles its own doubt the same way.

    Where it cannot be asked, the person's word counts here.
    """
    if row["remote"] and row["state"] not in ENDED:
        try:
            link = reach(store, row["remote"])
        except RemoteError:
            if row["far_state"]:
                raise  # its doubt is over there
            return sending.settle(store, row, resolution)
        try:
            if row["state"] == "direct-inflight" and not holder_lives(row):
                with store.transaction():
                    store.move(row, "direct-uncertain", now_ms(), detail="its sender ended without an answer")
            told = _tell(store, link, row, "resolve", resolution=resolution)
        finally:
            link.close()
        row = store.by_id(row["id"])
        if "error" not in told and not is_unknown(row):
            return row
    return sending.settle(store, row, resolution)
