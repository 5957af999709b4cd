"""Sending: one row for every target, the direct windows, the outcome of each, and the evidence that comes later."""
import os
import time

from contract import (ENDED, IN_FLIGHT, NoSuchTarget, NotPossible, OUTCOME_STATES, StoreError, StoreReadOnly,
                      UsageError, WINDOWS, clean_body, duration_seconds, now_ms, one_line, phrase)
from store import append_log, holder_lives, is_unknown, myself, note_fault, shown_state
from xmsg import (claude_dirs, codex_of, codex_sender, direct_facts, found, presence_folder, render, resolve, route,
                  sender_identity, settle_injections, source_lines, waiter_lock, waiter_path)

BURST_MS = 250  # messages to a session of agy that has left, so close together, wake it once
LONGEST_BURST = 2  # seconds
XMSG = os.path.join(os.path.dirname(os.path.realpath(__file__)), "bin", "xmsg")


def send(store, request, environ):
    """Queues one message for every target, durably, then tries the direct windows. Returns [(row, note)].

    request: target, body, label, ttl (seconds), priority, key, uid, replace, reply_to, force, direct, notification.
    note: why the row is where it is, for the receipt.
    """
    now = now_ms()
    sender = sender_identity(store, environ, request["label"], request["notification"])
    targets, messages = _prepare(store, request, sender, now)
    return _queue_and_deliver(store, request, sender, targets, messages, now)


def send_to(store, request, sender, targets):
    """send() for a body, sender and targets that are known: the peers' rows, each with its `uid` if that is decided."""
    if not request["force"]:
        targets = reachable(store, targets, request["direct"])
    now = now_ms()
    return _queue_and_deliver(store, request, sender, targets,
                              [new_message(request, sender, peer, now) for peer in targets], now)


def _queue_and_deliver(store, request, sender, targets, messages, now):
    store.requeue_reserved(now)
    with store.transaction():
        rows = [store.add(message, now, request["replace"]) for message in messages]
    new = [(peer, row) for peer, row in zip(targets, rows) if row["created_at"] == now and row["state"] == "queued"]
    notes = {}
    try:
        notes = deliver(store, new, sender, request["direct"])
        store.sweep(now_ms())
    except StoreError as error:  # the message is safe, and that is what the receipt says
        note_fault(store.settings, "after a message was queued", error)
        notes = {row["id"]: notes.get(row["id"], "the store failed: %s" % error) for _, row in new}
    # A hook may have taken what the direct window left.
    rows = [_as_left(store, row) for row in rows]
    return [(row, notes.get(row["id"], same_request(request))) for row in rows]


def _as_left(store, row):
    """A row as it stands once this process, which may hold it, has ended; as last known, if it cannot be read."""
    try:
        row = store.by_id(row["id"]) or row
    except StoreError:
        pass
    if (row["holder_pid"], row["holder_start"]) != myself():
        return row
    return dict(row, state="queued" if row["state"] == "reserved" else row["state"], holder_pid=None, holder_start=None)


def same_request(request):
    """Why nothing new was made of a request, for its receipt."""
    if request["key"]:
        return "one with the key %s waits already; --replace supersedes it" % one_line(request["key"])[:40]
    return "the same request as before"


def _prepare(store, request, sender, now):
    """The sessions that are meant, and what is to be queued for each; the store is only read."""
    body = clean_body(request["body"], store.settings.max_body_chars)
    targets = resolve(store, request["target"], sender, request["force"])
    if request["uid"] and len(targets) > 1:
        raise UsageError("--uid names one message, and %s is %d sessions" % (request["target"], len(targets)))
    reply_to = reply_uid(store, request["reply_to"], sender) if request["reply_to"] else None
    if not request["force"]:
        targets = reachable(store, targets, request["direct"])
    request = dict(request, body=body, reply_to=reply_to)
    return targets, [new_message(request, sender, peer, now) for peer in targets]


def send_from_sandbox(store, request, environ):
    """Lets one message for every target out of Codex's sandbox, from where the store can only be read.

    Returns (rows, line): they are as they will stand in the store, in the state `spooled`; line: what the caller must
    print, where no file could be left. StoreReadOnly with the way out if no hook would take them.
    """
    import spool
    now = now_ms()
    sender = sender_identity(store, environ, request["label"], request["notification"])
    thread, key = sender["session"], spool.read_key(store.path + ".key")
    peer = store.peer(thread) if thread else None
    if sender["host"] != "codex" or thread not in (environ.get("CODEX_THREAD_ID"), environ.get("CODEX_SESSION_ID")):
        raise StoreReadOnly("inside Codex's sandbox a message can only come from the Codex thread itself; leave out "
                            "--notification and XMSG_FROM_SESSION, or run this outside the sandbox")
    if not key or not peer or not peer["hook_seen"]:
        raise StoreReadOnly("nothing was sent: Codex's sandbox lets nothing write the store, and no hook of xmsg has "
                            "run in this session that would take the message from here; confirm the hooks with /hooks "
                            "in Codex (`xmsg install` adds them), or run this command outside the sandbox")
    messages = [dict(message, created_at=now, replace=request["replace"], direct=request["direct"])
                for message in _prepare(store, request, sender, now)[1]]
    line = None
    try:
        spool.leave(store.path, environ, thread, key, messages)
    except OSError as error:
        line = spool.seal(key, messages)
        if len(line) > spool.LONGEST_LINE:
            raise StoreReadOnly("nothing was sent: this sandbox lets nothing be written (%s), and the message is too "
                                "long to leave it as a line of output; send a shorter one, or run this command outside "
                                "the sandbox" % error.strerror)
    return [dict(message, id=None, state="spooled", state_at=now, window=None, detail="not yet in the store",
                 confirmed_at=None, evidence=None) for message in messages], line


def deliver_spooled(store, host, uids):
    """Tries the direct windows of messages that a hook has taken from a sandbox, each target's in order.

    host: the pid of the Codex that ran this hook for the very session that speaks, 0 if none did. That proves the
    sender as well as to be the host's child does.
    """
    while uids:
        batch, later = {}, []
        for uid in uids:
            row = store.by_uid(uid)
            if row and row["state"] == "queued":
                later.append(uid) if row["target"] in batch else batch.setdefault(row["target"], row)
        rows, uids = list(batch.values()), later
        peers = [(found(store).sessions.get(row["target"]) or store.peer(row["target"]), row) for row in rows]
        for session in {row["sender_session"] for row in rows}:
            sender = {"kind": "agent", "host": "codex", "session": session, "self": session, "process": None,
                      "told_by": host or None}
            deliver(store, [(peer, row) for peer, row in peers if peer and row["sender_session"] == session],
                    sender, True)


def reachable(store, targets, direct):
    """The targets that a hook or a direct window can reach. NoSuchTarget with the reason if there is none."""
    reasons, able = [], []
    for peer in targets:
        # agy reads its hooks anew at each turn, so they run in a session that none has told of yet.
        hooks = peer["hook_seen"] or peer["host"] == "agy" and store.hook_last_seen("agy")[0]
        reason = None if hooks else route(direct_facts(store, peer, direct))[1]
        if reason:
            reasons.append("%s (%s)" % (peer["session"], reason))
        else:
            able.append(peer)
    if not able:
        raise NoSuchTarget("nothing can reach %s, and no hook of xmsg has run there; `xmsg doctor` says why, --force "
                           "queues all the same" % ", ".join(reasons[:5]))
    return able


def new_message(request, sender, peer, now):
    """The columns of a message that its sender decides."""
    return {"uid": peer.get("uid") or request["uid"] or os.urandom(8).hex(),
            "expires_at": now + int(request["ttl"] * 1000),
            "sender_kind": sender["kind"], "sender_label": sender["label"], "sender_host": sender["host"],
            "sender_session": sender["session"], "target": peer["session"], "target_host": peer["host"],
            "body": request["body"], "priority": request["priority"], "request_key": request["key"] or None,
            "reply_to": request["reply_to"]}


def reply_uid(store, which, sender):
    """The uid of the message that a reply answers: an id, a uid, or `last`, the newest that came to this session."""
    if which == "last":
        if not sender["session"]:
            raise UsageError("--reply-to last needs a session of its own; give the message's id")
        row = store.last_received(sender["session"])
        if not row:
            raise UsageError("nothing has come to this session yet, so there is no last message to reply to")
        return row["uid"]
    return find_message(store, which)["uid"]


def find_message(store, which):
    """The row of a message by its number or uid. UsageError if it is neither; NoSuchTarget if there is none."""
    row = store.by_id(int(which)) if which.isdecimal() and which.isascii() and len(which) < 16 else None
    row = row or store.by_uid(which)
    if not row:
        raise NoSuchTarget("there is no message %s; `xmsg outbox --all` lists what was sent, `xmsg inbox` what came"
                           % one_line(which)[:40])
    return row


def deliver(store, new, sender, direct):
    """Tries the direct window of each (peer, row), the receivers side by side. Returns {row id: why it is where it is}.

    Older waiting rows of the same sender and target go first, so that a later success never overtakes; urgent rows are
    exempt. After one that was not taken the rest of its target waits for the hooks.
    """
    notes, batches = {}, []
    for peer, row in new:
        windows, notes[row["id"]] = route(direct_facts(store, peer, direct, sender))
        if windows == ["agy-wake"]:
            notes[row["id"]] = start_wake(store, peer["session"])
        elif windows == ["agy-message"]:
            notes.update(send_inside_agy(store, ([] if row["priority"] > 0 else store.waiting_before(row)) + [row]))
        elif windows:
            batches.append((peer, ([] if row["priority"] > 0 else store.waiting_before(row)) + [row]))
    while batches:
        outcomes = attempt(store, [(peer, rows[0]) for peer, rows in batches], sender)
        for (peer, rows), (word, text) in zip(batches, outcomes):
            notes[rows.pop(0)["id"]] = text
            if word in ("NOT_SENT", "UNKNOWN"):
                for row in rows:
                    notes[row["id"]] = "an earlier message to it was not taken: %s" % text
                rows.clear()
        batches = [(peer, rows) for peer, rows in batches if rows]
    return notes


def attempt(store, pairs, sender):
    """Writes one row to each of several sessions and settles what comes back; the outcomes, in order.

    A row is direct-inflight, durably, before its first byte can leave. If this process dies then, the row is shown as
    UNKNOWN; nobody sends it again.
    """
    holder = myself()
    with store.transaction():
        mine = [store.move(row, "reserved", now_ms(), holder=holder) for _, row in pairs]
    outcomes = [("UNKNOWN", "another process took it")] * len(pairs)
    # Claude Code first: its limit is the shorter one.
    for host, make_job, deliver_all in (("claude", _claude_job, _to_claude), ("codex", _codex_job, _to_codex)):
        places = [place for place, (peer, _) in enumerate(pairs) if peer["host"] == host and mine[place]]
        jobs = []
        for peer, row in map(pairs.__getitem__, places):
            jobs.append(dict(make_job(store, row, peer, sender), target_session=peer["session"], uid=row["uid"],
                             body=row["body"], leave=_leave(store, row, holder)))
        for place, (outcome, facts) in zip(places, deliver_all(store.settings, jobs) if jobs else ()):
            row, courier = pairs[place][1], facts.get("courier")
            outcomes[place] = outcome
            with store.transaction():
                settle_outcome(store, row, outcome, (courier, host_start(courier)) if courier else (None, None),
                               facts.get("detail"))
            store.lower_hint(row["target"])
    return outcomes


def _to_claude(settings, jobs):
    import claude_delivery
    return claude_delivery.deliver_all(jobs, settings.direct_timeout)


def _to_codex(settings, jobs):
    import codex_delivery
    return codex_delivery.deliver_all(jobs)


def _leave(store, row, holder):
    """What an adapter calls with the window before the first byte of a message can leave."""
    def leave(window=None):
        try:
            with store.transaction():
                if not store.move(row, "direct-inflight", now_ms(), window=window, holder=holder):
                    raise RuntimeError("the reservation was lost")
        except StoreError:
            row.update(store.by_id(row["id"]))  # what was not committed did not happen
            raise
    return leave


def host_start(pid):
    import host_process
    return host_process.start_time(pid)


def _claude_job(store, row, peer, sender):
    import claude_delivery
    mode, own = sender_mode(store, sender), store.peer(row["sender_session"]) if row["sender_session"] else None
    inbox = own and own["host"] == "claude" and claude_delivery.find_inbox(own["session"], claude_dirs(own))[0]
    return {"label": row["sender_label"],
            "reply_address": claude_delivery.address(inbox.socket) if inbox else row["sender_label"], "mode": mode,
            "config_dirs": claude_dirs(peer), "own_pids": [sender["process"][0]] if sender["process"] else [],
            "on_receipt": _on_receipt(store.settings, row["uid"]), "hold_for": (row["expires_at"] - now_ms()) / 1000}


def _codex_job(store, row, peer, sender):
    return {"codex": codex_of(store, peer), "text": "%s\n%s" % render(store, row), "sender": codex_sender(sender)}


def sender_mode(store, sender):
    """The permission class that a message may claim: only if the sending process really runs below the host process of
    the session that it speaks for, and then what that host itself reported last. None for no claim."""
    if sender["kind"] != "agent" or sender["host"] != "claude" or not sender["process"]:
        return None
    held = store.peers_of_process(*sender["process"])
    if not held or held[0]["session"] != sender["session"]:
        return None
    import claude_delivery
    return claude_delivery.from_mode(held[0]["permission_mode"])


def settle_outcome(store, row, outcome, holder=(None, None), detail=None):
    """Moves a row on by what an adapter answered. Call it in a transaction; False if the row was no longer there.

    detail: what is to be said of an accepted message beyond its window.
    """
    word, text = outcome
    accepted = word == "ACCEPTED"
    state = OUTCOME_STATES[word]
    if row["state"] == "reserved":
        state = "queued"
    elif row["state"] == "held" and word in ("NOT_SENT", "UNKNOWN"):
        state = "expired"
    elif row["state"] == state:
        return True
    return store.move(row, state, now_ms(), window=text if accepted else None, detail=detail if accepted else text,
                      holder=holder if word == "HELD" else (None, None))


def _on_receipt(settings, uid):
    """What a courier does with each later word of the host; true once it is written down.

    It starts a process: SQLite keeps state by file in a process, which the courier, a fork, must not use.
    """
    def record(outcome):
        import subprocess
        command = [XMSG, "receipt", uid, *outcome]
        return subprocess.run(command, env=dict(os.environ, XMSG_DB=settings.db), stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10).returncode == 0
    return record


def record_receipt(store, uid, outcome):
    """Writes down what a host said after its first answer; false while the sender has yet to write that one down."""
    with store.transaction():
        row = store.by_uid(uid)
        if row is None or row["state"] in ENDED:
            return True
        if row["state"] == "direct-inflight" and holder_lives(row):
            return False
        if row["state"] in ("held", "direct-inflight", "direct-uncertain"):
            settle_outcome(store, row, outcome, (row["holder_pid"], row["holder_start"]))
        return True


def look_for_evidence(store, targets, seconds=1.0):
    """Reads these sessions' transcripts for messages whose fate is open or not proven, and writes down what it finds.

    Bounded in time. Nothing is ever sent again by this. Returns the ids of the rows that it moved or confirmed.
    """
    import transcripts
    deadline, settled = time.monotonic() + seconds, []
    for target in targets:
        peer = store.peer(target) or found(store).sessions.get(target)  # one without hooks is not registered
        if peer and peer["host"] == "agy":
            settled += settle_injections(store, {"session": target, "transcript": _transcript(peer)}, now_ms())
        rows = [row for row in store.unproven(target) if row["state"] not in IN_FLIGHT or not holder_lives(row)]
        if not peer or not rows or time.monotonic() > deadline:
            continue
        path = _transcript(peer)
        if not path:
            continue
        result = transcripts.evidence(peer["host"], path, [_wanted(store, row) for row in rows],
                                      store.occurrences(target), seconds=max(0.05, deadline - time.monotonic()))
        with store.transaction():
            for row in rows:
                if row["id"] in result.found:
                    settled += [row["id"]] * _prove(store, row, result.found[row["id"]].name)
                elif row["state"] == "held" and result.complete and not _may_still_decide(peer, row):
                    settled += [row["id"]] * store.move(row, "expired", now_ms(), detail="the receiving session ended")
    return settled


def follow_host_queue(store, rows):
    """Says in the detail of each row that went into Codex's own queue whether it still waits there; those that do."""
    waiting = []
    for row in rows:
        peer = store.peer(row["target"]) if row["window"] == "codex-queue" and row["state"] == "delivered" else None
        if peer:
            import codex_delivery
            holds = codex_delivery.queue_holds(codex_of(store, peer).home, (row["detail"] or "").rpartition(" ")[2])
            if holds:
                waiting.append(row)
            if holds is not None:
                row["detail"] = ("waiting in Codex's own queue" if holds else
                                 None if row["confirmed_at"] else "taken from Codex's own queue")
    return waiting


def _transcript(peer):
    """The path of a session's transcript, "" if there is none."""
    import transcripts
    return peer["transcript"] or transcripts.transcript_path(
        peer["host"], peer["session"], _transcript_roots(peer), peer["cwd"]) or ""


def _transcript_roots(peer):
    if peer["host"] == "claude":
        return claude_dirs(peer)
    if peer["host"] == "codex":
        import codex_delivery
        return [codex_delivery.codex_home(os.environ)]
    import agy_delivery
    return [agy_delivery.data_dir(os.environ)]


def _wanted(store, row):
    """What to look for: the id that the host was given, and the text as a hook renders it in either language, or bare
    in Codex's own envelope, which carries no id."""
    import claude_delivery
    texts = [row["body"]] if row["window"] == "codex-delegated-tool-output" else None
    hooks = {event for _, event in WINDOWS}
    if row["state"] == "hook-inflight" or row["window"] in hooks or row["target_host"] == "agy":
        texts = ["%s\n%s" % (line, render(store, row)[1]) for line in source_lines(store, row)]
    identifiers = {"claude": claude_delivery.msg_id(row["uid"]), "codex": row["uid"]}
    return {"key": row["id"], "id": identifiers.get(row["target_host"]), "text": texts, "since": row["since"]}


def _may_still_decide(peer, row):
    """Whether a held message can still be released: its receiver runs, or its courier will have the last word."""
    import host_process
    return holder_lives(row) or host_process.alive(peer["pid"], peer["pid_start"])


def _prove(store, row, evidence):
    now = now_ms()
    if row["state"] == "delivered":
        store.confirm(row, now, evidence)
        return True
    if row["state"] == "direct-inflight":
        store.move(row, "direct-uncertain", now, detail="its sender ended without an answer")
    return store.move(row, "delivered", now, evidence=evidence, window=row["window"] or (
        "agy-message" if row["target_host"] == "agy" else "uds-direct"))


def wait_for_proof(store, rows, seconds):
    """Waits until every one of these rows is proven or has ended otherwise; the rows as they then stand."""
    deadline = time.monotonic() + seconds
    while True:
        rows = [store.by_id(row["id"]) for row in rows]
        open_rows = [row for row in rows if not row["confirmed_at"] and (row["state"] == "delivered"
                                                                        or row["state"] not in ENDED)]
        if not open_rows or time.monotonic() > deadline:
            return rows
        look_for_evidence(store, sorted({row["target"] for row in open_rows}))
        time.sleep(0.1)


# ---- agy: from inside it, into an open conversation

def send_inside_agy(store, rows):
    """Sends waiting rows to a conversation through the sender's own agy, the oldest first; {row id: what came of it}.

    The sender's environment holds agy's address and secret, which only agy's own program reads.
    """
    import agy_delivery
    holder, notes = myself(), {}
    for row in rows:
        with store.transaction():
            if not store.move(row, "reserved", now_ms(), holder=holder):
                notes[row["id"]] = "another process took it"
                continue

        def leave(row=row):
            with store.transaction():
                if not store.move(row, "direct-inflight", now_ms(), holder=holder):
                    raise RuntimeError("the reservation was lost")
        # agy puts words of its own before a text; after an empty line it begins for the model, and for the evidence.
        outcome = agy_delivery.send_message(agy_delivery.api_program(os.environ), row["target"],
                                            "\n\n%s\n%s" % render(store, row), leave)
        with store.transaction():
            settle_outcome(store, row, outcome)
        store.lower_hint(row["target"])
        notes[row["id"]] = outcome[1]
        if outcome[0] != "ACCEPTED":
            notes.update((later["id"], "an earlier message to it was not taken: %s" % outcome[1])
                         for later in rows if later["id"] not in notes)
            break
    return notes


# ---- agy: a session that has left is resumed without a terminal, and its own hook takes the mail

def start_wake(store, session):
    """Starts the courier that wakes an offline session of agy; why the message waits, for the receipt."""
    import host_process
    import subprocess
    failed = _failed_wake(waiter_path(store, session))
    rest = _rest(failed, _wake_command(store, session)[0], store.settings.agy_wake_cooldown)
    after = ", in %d s, since the last one failed" % (rest + 1) if rest else ""
    if host_process.flock_holder(waiter_path(store, session)) and (rest or not failed):
        return "agy-wake is under way%s; its PreInvocation takes it" % after
    process = subprocess.Popen([XMSG, "wake", session], env=dict(os.environ, XMSG_DB=store.settings.db), cwd="/",
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    return "agy-wake by process %d%s; its PreInvocation takes it" % (process.pid, after)


def _failed_wake(path):
    """What a session's waiter file holds: when a wake brought nothing, ms, and by which command; b"" while one runs."""
    try:
        with open(path, "rb") as file:
            return file.read(64)
    except OSError:
        return b""


def _mark(command):
    import zlib
    return b"%08x" % zlib.crc32("\0".join(command).encode("utf-8", "replace"))


def _rest(failed, command, pause):
    """Seconds that a session still rests after a wake that brought nothing. Another command need not wait."""
    at, _, mark = failed.partition(b" ")
    if not at.isdigit() or mark != _mark(command):
        return 0
    return max(0, min(pause, pause - (now_ms() - int(at)) / 1000))


def wake(store, session):
    """The courier: wakes a session of agy until none of its mail waits. One at a time for a session.

    Mail that two wakes have left gets no third one until more comes. It looks once more after it let the lock go: a
    sender that found the lock taken relies on that.
    """
    tries, left = 2, set()
    while True:
        waiting = _waiting_ids(store, session)
        if not waiting or not tries and waiting <= left:
            return
        command, workspace = _wake_command(store, session)
        lock = waiter_lock(store, session) or _relieve(store, session, command)
        if lock is None:
            return
        try:
            if not _may_wake(store, session, lock, command):
                return
            left = _wake_once(store, session, lock, command, workspace)
        finally:
            os.close(lock)
        tries = 2 if waiting - left else max(0, tries - 1)


def _waiting_ids(store, session):
    return {row["id"] for row in _waiting_rows(store, session)}


def _waiting_rows(store, session):
    now = now_ms()
    return [row for row in store.queued(session) if row["expires_at"] > now]


def _relieve(store, session, command):
    """The lock of a courier that rests after a wake by another command: what made that one fail may be mended now."""
    path = waiter_path(store, session)
    failed = _failed_wake(path)
    if not failed or failed.endswith(_mark(command)):
        return None
    os.truncate(path, 0)
    for _ in range(40):
        lock = waiter_lock(store, session)
        if lock is not None:
            return lock
        time.sleep(0.05)
    return None


def _may_wake(store, session, lock, command):
    """Waits out the time after a fruitless wake, which the lock file holds; false if no wake is needed, or possible, or
    if another courier asks for the lock."""
    import agy_delivery
    failed = os.pread(lock, 64, 0)
    deadline = time.monotonic() + _rest(failed, command, store.settings.agy_wake_cooldown)
    while True:
        waiting, left = _waiting_rows(store, session), deadline - time.monotonic()
        if not waiting or os.pread(lock, 64, 0) != failed:
            return False
        # A burst of messages costs one wake, not one each.
        in_a_burst = now_ms() - max(row["created_at"] for row in waiting) < BURST_MS and left > -LONGEST_BURST
        if left <= 0 and not in_a_burst:
            return agy_delivery.attached(presence_folder(store), session) == 0
        time.sleep(min(0.5, max(0.05, left)))


def _wake_command(store, session):
    """The arguments that wake a session of agy, and the folder to start it in, "" for none."""
    import agy_delivery
    settings, peer = store.settings, store.peer(session) or {"cwd": ""}
    known = agy_delivery.conversations(agy_delivery.data_dir(os.environ), [session]).get(session, {"cwd": ""})
    workspace = next((path for path in (peer["cwd"], known["cwd"]) if path and os.path.isdir(path)), "")
    program = agy_delivery.program(settings.agy_bin, os.environ) or settings.agy_bin or "agy"
    return agy_delivery.wake_command(program, session, settings.agy_wake_timeout, workspace, settings.agy_wake_args,
                                     phrase("kick", settings)), workspace


def _wake_once(store, session, lock, command, workspace):
    """One wake, to its end; the ids of the rows that still wait."""
    import agy_delivery
    settings = store.settings
    log, before = os.path.join(os.path.dirname(settings.db), "agy-wake.log"), _waiting_ids(store, session)

    os.ftruncate(lock, 0)

    # Neither a full disk nor a busy store may end what is under way.
    def write_log(data):
        try:
            append_log(log, data)
        except OSError:
            pass

    def started(pid):
        write_log(("== %s, pid %d\n" % (session, pid)).encode())
        try:
            _note_waiting(store, session, before, "agy-wake started: pid %d, log %s" % (pid, log))
        except StoreError as error:
            note_fault(settings, "agy-wake", error)
    try:
        status, last = agy_delivery.run_wake(
            command, agy_delivery.clean_environment(os.environ), workspace, write_log,
            duration_seconds(settings.agy_wake_timeout), started)
        why = "it left with status %d and took no mail%s" % (status, ": " + one_line(last) if last else "")
    except OSError as error:
        why = "%s: %s" % (command[0], error.strerror)
    look_for_evidence(store, [session])  # what no further hook of that agy can settle
    left = _waiting_ids(store, session)
    if not before - left:
        os.pwrite(lock, b"%d %s" % (now_ms(), _mark(command)), 0)
        _note_waiting(store, session, left, "agy-wake failed: %s; log %s" % (why, log))
    return left


def _note_waiting(store, session, ids, detail):
    with store.transaction():
        for row in store.queued(session):
            if row["id"] in ids:
                store.note(row, now_ms(), detail)


def waiting_word(store, row):
    """What a waiting message waits for, as of now; "" where there is no more to say than that it waits."""
    if row["target_host"] != "agy":
        return row["detail"] or ""
    import agy_delivery
    import host_process
    under_way = host_process.flock_holder(waiter_path(store, row["target"]))
    if under_way and _failed_wake(waiter_path(store, row["target"])):
        return (row["detail"] or "agy-wake failed") + "; one more follows"
    if under_way:
        return row["detail"] or "agy-wake is under way"
    holder = agy_delivery.presence(presence_folder(store), row["target"])
    if holder:
        return "agy is running, next PreInvocation"
    if (row["detail"] or "").startswith("agy-wake started"):
        return "agy-wake was cut off; a further message to it wakes it again"
    if row["detail"]:
        return row["detail"]
    windows, reason = route(direct_facts(store, {"host": "agy", "session": row["target"]}, True))
    return reason or "agy does not have this session open; a further message to it wakes it"


def check_sender(row, sender):
    """NotPossible if a session wants to withdraw what another one has sent."""
    if sender["session"] and row["sender_session"] != sender["session"]:
        raise NotPossible("#%d was not sent by this session; its sender or a person at a terminal can cancel it"
                          % row["id"])


def cancel(store, row, sender):
    """Withdraws a message that nobody has seen. NotPossible with its state if that is too late."""
    check_sender(row, sender)
    with store.transaction():
        if row["state"] != "queued" or not store.move(row, "cancelled", now_ms(), detail="withdrawn"):
            row = store.by_id(row["id"])
            raise NotPossible("#%d %s: it is %s%s" % (
                row["id"], "needs no cancelling" if row["state"] in ("cancelled", "expired", "refused") else
                "cannot be cancelled any more", shown_state(row), ", and Codex's own queue gives nothing back"
                if row["window"] == "codex-queue" else ""))
    store.lower_hint(row["target"])
    return row


RESOLUTIONS = {"delivered": ("delivered", "said to have arrived"), "requeue": ("queued", "sent once more"),
               "drop": ("cancelled", "dropped; it may have been seen")}


def settle(store, row, resolution):
    """Ends the doubt about a row, as a person says. NotPossible if there is none, or if its sender is still at work."""
    state, detail = RESOLUTIONS[resolution]
    possible = is_unknown(row) or (row["state"] == "held" and resolution == "drop")
    with store.transaction():
        if possible and row["state"] == "direct-inflight":
            store.move(row, "direct-uncertain", now_ms(), detail="its sender ended without an answer")
        now = now_ms()
        if not possible or not store.move(row, state, now, detail=detail + " (xmsg resolve)"):
            row = store.by_id(row["id"])
            raise NotPossible("#%d needs no resolving: it is %s" % (row["id"], shown_state(row)))
        if state == "queued":
            store.extend(row, now)
    return row
