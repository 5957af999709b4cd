"""`xmsg receive`: what another machine sends and asks, answered from the store of this one.

Everything that comes is checked before anything is made. Only messages that came from the machine that asks are told
or changed.
"""
import os
import time

from contract import (HOSTS, IN_FLIGHT, LONGEST_NAME, NoSuchTarget, SENDER_KINDS, UsageError, VERSION, XmsgError,
                      clean_body, clean_text, is_label, is_session_id, now_ms, one_line)
from store import holder_lives, is_unknown, note_fault, shown_state
from xmsg import resolve
import forwarding
import remote as machines
import sending

UID_DIGITS = set("0123456789abcdef")


def receive(store, list_sessions):
    """The far side of a conversation, on stdin and stdout. list_sessions() -> what `xmsg list --json` has."""
    def answer(jobs):
        return [_answer(store, verb, argument, list_sessions) for verb, argument in jobs]
    about = {"machine": forwarding.machine_id(store), "name": one_line(os.uname().nodename)[:200], "version": VERSION}
    machines.serve(about, answer, store.settings.remote_timeout)


def _answer(store, verb, argument, list_sessions):
    try:
        if not isinstance(argument, dict) or not isinstance(verb, str) or verb not in VERBS and verb != "list":
            raise UsageError("%s is nothing that xmsg %s is asked; update it" % (one_line(str(verb))[:40], VERSION))
        return {"ok": list_sessions() if verb == "list" else VERBS[verb](store, argument)}
    except XmsgError as error:
        return {"error": {"code": error.code, "message": str(error), "candidates": error.candidates}}
    except Exception as error:
        note_fault(store.settings, "receive", error)
        return {"error": {"code": "unexpected", "message": "unexpected %s: %s" % (type(error).__name__, error)}}


def _checked(argument):
    """The argument of a job about messages, or UsageError: it comes from outside."""
    def needs(true):
        if not true:
            raise UsageError("a request that this xmsg does not understand")

    def text(key, most):
        needs(isinstance(argument.get(key), str) and len(argument[key]) <= most)
        return clean_text(argument[key])

    def whole(key, least, most):
        needs(type(argument.get(key)) is int and least <= argument[key] <= most)
        return argument[key]
    to = argument.get("to")
    needs(isinstance(to, list) and 0 < len(to) <= 1000 and all(
        isinstance(pair, list) and len(pair) == 2 and is_uid(pair[0]) and isinstance(pair[1], str)
        and len(pair[1]) <= 1000 for pair in to))
    needs(is_uid(argument.get("machine")))
    job = {"machine": argument["machine"], "name": one_line(text("name", 256)), "body": text("body", 1 << 24),
           "ttl": whole("ttl", 1, 366 * 86400 * 1000) / 1000, "priority": whole("priority", -1000000, 1000000),
           "kind": text("kind", 20), "label": text("label", LONGEST_NAME), "host": text("host", LONGEST_NAME),
           "session": text("session", 256), "direct": argument.get("direct") is not False,
           "force": argument.get("force") is True, "reply_to": argument.get("reply_to"),
           "to": [(uid, clean_text(target)) for uid, target in to]}
    needs(job["kind"] in SENDER_KINDS and job["kind"] != "notification")
    needs(job["session"] == "" or is_session_id(job["session"]))
    needs(job["kind"] != "agent" or (job["session"] and job["host"] in HOSTS))
    needs(job["kind"] != "agent" or ":" not in job["label"])
    needs(is_label(job["label"]) and (job["host"] == "" or is_label(job["host"])))
    needs(job["reply_to"] is None or is_uid(job["reply_to"]))
    return job


def is_uid(text):
    return isinstance(text, str) and len(text) == 16 and UID_DIGITS.issuperset(text)


def _foreign(store, job):
    """The sender of a message from another machine. No process of here speaks for it, so no permission class does.

    Its session is MACHINE:SESSION, which is nobody's id here. Its label is the address that works from here, where a
    remote leads back to that machine, and else, or where nobody can be answered, says where it is from.
    """
    alias, label = forwarding.way_back(store, job["machine"]), job["label"]
    if alias and job["kind"] == "agent":
        label = next(filter(is_label, ("%s:%s" % (alias, word) for word in (label, job["session"]))), label)
    elif not label.endswith("@" + job["name"]):
        label = next(filter(is_label, ["%s@%s" % (label, job["name"])]), label)
    return {"kind": job["kind"], "label": label, "host": job["host"], "self": "", "process": None,
            "session": "%s:%s" % (job["machine"], job["session"])}


def _own_rows(store, job):
    """The rows of a job that are here, in its order, None for each that is not. UsageError for one of somebody else."""
    rows = [store.by_uid(uid) for uid, _ in job["to"]]
    for row in filter(None, rows):
        if not row["sender_session"].startswith(job["machine"] + ":"):
            raise UsageError("the uid %s is that of another message here" % row["uid"])
    return rows


def _far_send(store, argument):
    """Queues and delivers a message of another machine, unless it is here already; the record of each target."""
    job = _checked(argument)
    body = clean_body(job["body"], store.settings.max_body_chars)
    rows = _own_rows(store, job)
    if any(row and row["body"] != body for row in rows):
        raise UsageError("the uid is that of another message, with another text")
    sender, peers, notes = _foreign(store, job), [], {}
    for (uid, target), row in zip(job["to"], rows):
        if not row:
            found = resolve(store, target, sender, job["force"])
            if len(found) > 1:
                raise UsageError("%s is a group" % one_line(target))
            peers.append(dict(found[0], uid=uid))
    if peers:
        reply_to = job["reply_to"] if job["reply_to"] and store.by_uid(job["reply_to"]) else None
        request = {"body": body, "ttl": job["ttl"], "priority": job["priority"], "key": None, "uid": None,
                   "replace": False, "force": job["force"], "direct": job["direct"], "reply_to": reply_to}
        notes = {row["uid"]: note for row, note in sending.send_to(store, request, sender, peers)}
    gone = {"code": NoSuchTarget.code, "message": "nothing can reach that session any more"}
    return [told if told["state"] else {"uid": told["uid"], "error": gone}
            for told in _records(store, [uid for uid, _ in job["to"]], notes)]


def _records(store, uids, notes=()):
    """What this machine says of messages, once nothing is on its way any more; state None for one that is not here."""
    rows = [store.by_uid(uid) for uid in uids]
    deadline = time.monotonic() + 3
    while any(row and (row["state"] == "reserved" or row["state"] in IN_FLIGHT) and holder_lives(row)
              for row in rows) and time.monotonic() < deadline:
        time.sleep(0.02)
        rows = [store.by_uid(uid) for uid in uids]
    return [{"uid": uid, "state": None} if not row else {
        "uid": uid, "id": row["id"], "state": shown_state(row), "window": row["window"], "detail": row["detail"],
        "session": row["target"], "host": row["target_host"], "note": dict(notes).get(uid, row["detail"]),
        "evidence": row["evidence"] if row["confirmed_at"] else None,
        "events": store.events(row["id"])[-50:]} for uid, row in zip(uids, rows)]


def _far_state(store, argument):
    job, wait = _checked(argument), argument.get("wait")
    rows = [row for row in _own_rows(store, job) if row]
    if isinstance(wait, (int, float)) and 0 < wait <= 86400:
        sending.wait_for_proof(store, rows, wait)
    else:
        sending.look_for_evidence(store, sorted({row["target"] for row in rows}))
    return _records(store, [uid for uid, _ in job["to"]])


def _far_cancel(store, argument):
    """Withdraws messages, also those that may still be on their way here: their uids are taken, so they cannot come."""
    job = _checked(argument)
    for (uid, target), row in zip(job["to"], _own_rows(store, job)):
        now = now_ms()
        with store.transaction():
            if not row:
                peer = {"session": target if is_session_id(target) else "unknown", "host": "", "uid": uid}
                request = dict(job, key=None, uid=None, body=clean_body(job["body"], store.settings.max_body_chars))
                row = store.add(sending.new_message(request, _foreign(store, job), peer, now), now)
            if row["state"] == "queued":
                store.move(row, "cancelled", now, detail="withdrawn by its sender")
        store.lower_hint(row["target"])
    return _records(store, [uid for uid, _ in job["to"]])


def _far_resolve(store, argument):
    job = _checked(argument)
    if argument.get("resolution") not in list(sending.RESOLUTIONS):  # it may be of any kind
        raise UsageError("there is no resolution %r" % argument.get("resolution"))
    for row in _own_rows(store, job):
        if row and (is_unknown(row) or row["state"] == "held"):
            sending.settle(store, row, argument["resolution"])
    return _records(store, [uid for uid, _ in job["to"]])


def _far_group(store, argument):
    if not isinstance(argument.get("target"), str):
        raise UsageError("a group is a text")
    return [peer["session"] for peer in resolve(store, clean_text(argument["target"]), {"self": ""})]


def _far_check(store, argument):
    """Which of the machines that are set up here is the one that asks: each is called, and says who it is."""
    remotes = list(machines.read_remotes(store.settings).values())
    found = machines.side_by_side(
        remotes, lambda remote: machines.ask_once(remote, [], 0.4 * store.settings.remote_timeout)[2])
    for remote in remotes:
        far = found[remote["alias"]]
        if far and far["machine"] != forwarding.machine_id(store):
            forwarding.meet(store, remote, far)
    return {"back": next((remote["alias"] for remote in remotes if found[remote["alias"]]
                          and found[remote["alias"]]["machine"] == argument.get("machine")), None)}


VERBS = {"send": _far_send, "state": _far_state, "cancel": _far_cancel, "resolve": _far_resolve, "group": _far_group,
         "check": _far_check}
