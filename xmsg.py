"""xmsg: one AI coding agent session sends a message to another, with a truthful answer to "did it arrive?".

What it promises: a receipt is printed only after the message is committed; a message is shown at most once; every
acknowledged message ends delivered, refused, expired, cancelled, or visibly UNKNOWN with a command that settles it;
"delivered" names the window that accepted it; a peer never poses as the user; a hook never harms its host.

What it does not promise: that the model acted on a message, or even read it. The Python interface is not stable; the
command line, its JSON and its exit codes are.

It is imported by its entry points (xmsg-hook.sh, and bin/xmsg by way of command_line.py) and never run as a script: a
module comes from its .pyc, a script is compiled at every start. On the hook's path nothing is imported at the top but
os, sys, json, sqlite3, time and the two modules below; everything else is imported where it is used.
"""
import json
import os
import sys
import time

from contract import (AGY_STEPS, Ambiguous, BUDGETS, BadPayload, HOSTS, ITEM_CHARS, LONGEST_NAME, LONGEST_PAYLOAD,
                      NoSuchTarget, PHRASES, RESERVED_NAMES, RemoteError, SHORTEST_LABEL_ID, SHORTEST_PREFIX,
                      SPOOL_MARK, STOPS_A_TURN, STOP_CONTEXT_SINCE, Settings, StoreError, UsageError,
                      WAITER_SECONDS, WATCH_DELAY, WINDOWS, age, clean_text, clip, is_label, is_session_id,
                      name_key, neutralize, now_ms, one_line, phrase, quote_imitations, spool_folders)
from store import Store, holder_lives, myself, note_fault, record_interpreter


# ---------------------------------------------------------------------------------------------------- registry

def project_root(cwd):
    """The project of a folder: its repository, the same for all worktrees; the folder itself outside of one.

    Reads what git writes: `.git` is a folder, or a file that names a git dir, whose `commondir` a worktree shares.
    """
    folder = os.path.realpath(cwd)
    here = folder
    while True:
        dot_git = os.path.join(here, ".git")
        if os.path.isdir(dot_git):
            return here
        if os.path.isfile(dot_git):
            return _shared_root(dot_git) or here
        above = os.path.dirname(here)
        if above == here:
            return folder
        here = above


def _shared_root(dot_git):
    """The main checkout of a worktree, from its `.git` file; None for a submodule, which is a project of its own."""
    try:
        with open(dot_git) as file:
            pointer = file.read(4096).strip()
        git_dir = os.path.join(os.path.dirname(dot_git), pointer[len("gitdir:"):].strip())
        with open(os.path.join(git_dir, "commondir")) as file:
            common = os.path.realpath(os.path.join(git_dir, file.read(4096).strip()))
    except (OSError, ValueError):
        return None
    return os.path.dirname(common) if os.path.basename(common) == ".git" else common


class Found:
    """What the hosts themselves tell, read once a command.

    peers: every registered session's row, by id. sessions: the rows of those that are open, registered or not.
    claude: {session: its host's records of it}. codex_homes: all that are known; writers: {home: {thread: pid}} of
    those that tell which of their threads are open. pids: of all processes.
    """

    def __init__(self, store):
        import agy_delivery
        import claude_delivery
        import codex_delivery
        import host_process
        read_locks = host_process.flock_holders_ahead()
        self.peers, self.sessions, self.writers = {peer["session"]: peer for peer in store.peers()}, {}, {}
        self.pids, self._projects = set(host_process.processes()), {}
        self.claude, records = {}, claude_delivery.sessions(claude_delivery.config_dirs(
            os.environ, self._homes("claude", claude_delivery.config_dir_of)))
        for record in sorted(records, key=lambda record: (record.socket is not None, record.updated_at)):
            self.claude.setdefault(record.session, []).append(record)
            self._add("claude", record.session, pid=record.pid, pid_start=record.start, cwd=record.cwd or "",
                      title=self._claude_title(record), activity=record.status)
        self.codex_homes = self._homes("codex", codex_delivery.home_of) | {codex_delivery.codex_home(os.environ)}
        for home in self.codex_homes:
            threads = codex_delivery.open_threads(home, read_locks)
            if threads is None:
                continue
            self.writers[home] = {thread["session"]: thread["pid"] for thread in threads}
            for thread in threads:
                if thread["session"] in self.peers or codex_delivery.is_session(thread):
                    self._add("codex", thread["session"], title=thread["name"], cwd=thread["cwd"],
                              model=thread["model"], activity=_codex_activity(thread))
        for conversation in agy_delivery.open_sessions(presence_folder(store), agy_delivery.data_dir(os.environ),
                                                       read_locks):
            if is_session_id(conversation["session"]):
                self._add("agy", conversation.pop("session"), **conversation)

    def _homes(self, host, home_of):
        """The host's homes that sessions have reported, by their transcripts."""
        return {home_of(peer["transcript"]) for peer in self.peers.values() if peer["host"] == host} - {None}

    def _claude_title(self, record):
        if record.name_source in ("user", "peer") and record.name:
            return record.name
        peer = self.peers.get(record.session)
        if peer and peer["title"]:
            return ""
        import transcripts
        return transcripts.claude_title(record.config_dir, record.session, record.cwd, peer and peer["transcript"])

    def _add(self, host, session, **facts):
        now = now_ms()
        peer = self.peers.get(session) or {
            "session": session, "host": host, "name": "", "name_key": "", "title": "", "title_key": "", "cwd": "",
            "project": "", "model": "", "permission_mode": "", "transcript": "", "pid": None, "pid_start": None,
            "successor": None, "first_seen": now, "last_seen": now, "hook_seen": None}
        peer.update({key: clean_text(value) if isinstance(value, str) else value
                     for key, value in facts.items() if value})
        peer.update(title=one_line(peer["title"])[:LONGEST_NAME], successor=None)
        peer.update(title_key=name_key(peer["title"]))
        if not peer["project"] and peer["cwd"]:
            if peer["cwd"] not in self._projects:
                self._projects[peer["cwd"]] = project_root(peer["cwd"])
            peer["project"] = self._projects[peer["cwd"]]
        self.sessions[session] = peer


def _codex_activity(thread):
    import transcripts
    return transcripts.codex_activity(thread["rollout"], thread["since"])


def presence_folder(store):
    """Where agy keeps its presence locks."""
    import agy_delivery
    return store.settings.agy_presence_dir or os.path.join(agy_delivery.data_dir(os.environ), "presence")


def found(store):
    """What the hosts tell of their sessions, read once a command."""
    if store.found is None:
        store.found = Found(store)
    return store.found


def all_peers(store):
    """Every session that is registered or open, the newest first."""
    told = found(store)
    return ([peer for session, peer in told.sessions.items() if session not in told.peers]
            + list(told.peers.values()))


def is_live(store, peer, now):
    """Whether a session is open, by fact where there is one.

    A Codex thread is open while somebody holds its writer lock, a conversation of agy its presence lock. A host process
    holds one session at a time, the one that was registered last. Where no fact is to be had, a session counts as live
    for XMSG_PEER_STALE_SECONDS after its last sign.
    """
    told = store.found
    if told and peer["session"] in told.sessions:
        return True
    if peer["successor"]:
        return False
    if in_sandbox(store):
        return now - store.seen_at(peer) < store.settings.peer_stale_seconds * 1000
    if peer["host"] == "codex":
        import codex_delivery
        home = codex_delivery.home_of(peer["transcript"])
        if told and home in told.writers:
            return False
        held = codex_delivery.writer(home, peer["session"]) if home else None
        if held is not None:
            return bool(held)
    if peer["host"] == "agy":
        import agy_delivery
        held = agy_delivery.presence(presence_folder(store), peer["session"])
        if held is not None:
            return bool(held)
    if peer["pid"]:
        import host_process
        if told and peer["pid"] not in told.pids or not host_process.alive(peer["pid"], peer["pid_start"]):
            return False
        return store.peers_of_process(peer["pid"], peer["pid_start"])[0]["session"] == peer["session"]
    stale = now - store.settings.peer_stale_seconds * 1000
    return peer["last_seen"] > stale or store.seen_at(peer) > stale


def in_sandbox(store):
    """Whether this process runs in Codex's sandbox, from where no process of a session can be seen."""
    if store.sandboxed is None:
        import spool
        store.sandboxed = spool.sandboxed(os.environ)
    return store.sandboxed


def activity(peer, facts=None):
    """What an open session does: idle, busy or waiting (a dialog is open), unknown where its host does not tell.

    facts: its direct_facts(), where they are known.
    """
    if facts and facts.get("flags"):
        return "waiting"
    if facts and facts.get("status") in ("idle", "active"):
        return "idle" if facts["status"] == "idle" else "busy"
    if "activity" in peer:  # told with the session itself
        return peer["activity"]
    if peer["host"] == "agy":
        import agy_delivery
        data = agy_delivery.data_dir_of(peer["transcript"]) or agy_delivery.data_dir(os.environ)
        known = agy_delivery.conversations(data, [peer["session"]])
        return known.get(peer["session"], {"activity": "unknown"})["activity"]
    if peer["host"] != "claude" or not peer["pid"]:
        return "unknown"
    import claude_delivery
    return claude_delivery.session_status(peer["session"], peer["pid"], claude_dirs(peer))


def host_queue_counts(store):
    """{session: how many inputs wait in its host's own queue}; only Codex has one."""
    import codex_delivery
    counts = {}
    for home in found(store).codex_homes:
        counts.update(codex_delivery.queue_counts(home))
    return counts


def host_queue(store):
    """What waits in Codex's own queue, as dicts: host, id, session, name, text, created_at (ms); in order a session."""
    import codex_delivery
    items = [dict(item, host="codex", name="") for home in sorted(found(store).codex_homes)
             for item in codex_delivery.queued_items(home)]
    for item in items:
        peer = found(store).sessions.get(item["session"]) or store.peer(item["session"])
        item.update(name=display_name(peer) if peer else "")
    return items


def process_of_session(host):
    """The (pid, start) of the host process above a hook, (None, None) if it is not the session's own.

    Not the shell or wrapper in between; and not a Codex daemon, which holds threads of many windows.
    """
    import host_process
    found = host_process.nearest_host()
    if not found or found.kind != host or found.role == "server":
        return None, None
    return found.pid, found.start


def sender_identity(store, environ, label="", notification=False):
    """Who sends: a dict of kind, label, host, session, and self (the session that a group never includes).

    process: the host process above, if that is the session's own. told_by: the pid of the host process above, if it is
    of this session's host and the variables that it gave its own child named this very session; only then a host's own
    envelope may name it.
    Explicit variables first, then the hosts' own; of several hosts' inherited variables, the nearest host ancestor's.
    """
    import host_process
    settings = store.settings
    nearest = host_process.nearest_host()
    process = (nearest.pid, nearest.start) if nearest and nearest.role != "server" else None
    given = label or settings.from_
    if settings.from_tool and not is_label(settings.from_tool):
        raise UsageError("XMSG_FROM_TOOL=%s is no name of a host; it is one of %s" % (
            one_line(settings.from_tool)[:LONGEST_NAME], ", ".join(HOSTS)))
    if notification:
        return {"kind": "notification", "host": "", "session": "", "self": "", "process": None, "told_by": None,
                "label": _given_label(store, label, "") if label else "xmsg"}
    host, session = _host_variables(store, environ, nearest)
    told = nearest and session
    if settings.from_session:
        if not is_session_id(settings.from_session):
            raise UsageError("XMSG_FROM_SESSION=%s is not a session id" % one_line(settings.from_session))
        session = settings.from_session
        peer = store.peer(session)
        host = settings.from_tool or (peer["host"] if peer else host)
    elif settings.from_tool and settings.from_tool != host:
        host, session = settings.from_tool, ""
    if not session and not host and nearest and nearest.role != "server":
        held = store.peers_of_process(nearest.pid, nearest.start)
        host, session = nearest.kind, held[0]["session"] if held else ""
    if session and host in HOSTS:
        return {"kind": "agent", "host": host, "session": session, "self": session, "process": process,
                "told_by": nearest.pid if told == session and nearest.kind == host and _began_in(
                    session, nearest) else None,
                "label": _given_label(store, given, session) if given else session_label(store, session)}
    operator = not host and not nearest and os.isatty(0)
    return {"kind": "operator" if operator else "unknown", "host": one_line(host)[:LONGEST_NAME], "session": "",
            "self": session, "process": process, "told_by": None,
            "label": _given_label(store, given, "") if given else host or _login_name()}


def _began_in(session, host):
    """Whether a Codex named a session to the process that it started itself, above all who could say another since."""
    if host.kind != "codex":
        return True
    import host_process
    given = host_process.environment(host.child) or {}
    return session in (given.get("CODEX_THREAD_ID"), given.get("CODEX_SESSION_ID"))


def _host_variables(store, environ, nearest):
    """(host, session) as the hosts tell their children, ("", "") if none does or another host stands in between."""
    # In a Codex subagent CODEX_THREAD_ID is its own thread, which no hook ever registers, and CODEX_SESSION_ID is the
    # root's; before 0.148 there is only the first (measured on 0.156.1 and 0.171.0).
    thread, root = environ.get("CODEX_THREAD_ID"), environ.get("CODEX_SESSION_ID")
    told = {"codex": root if root and not (thread and store.peer(thread)) else thread,
            "agy": environ.get("ANTIGRAVITY_CONVERSATION_ID"),
            "claude": environ.get("CLAUDE_CODE_SESSION_ID")}
    told = {host: session for host, session in told.items() if session and is_session_id(session)}
    if nearest:
        return (nearest.kind, told[nearest.kind]) if nearest.kind in told else ("", "")
    # No ancestor can be seen from inside Codex's sandbox, so there its own variable beats inherited ones.
    return next(iter(told.items()), ("", ""))


def _given_label(store, label, session):
    if not is_label(label):
        raise UsageError("%r cannot be a sender's label: it is one line of up to %d characters without brackets"
                         % (one_line(label)[:LONGEST_NAME], LONGEST_NAME))
    if session and (name_key(label) in RESERVED_NAMES or ":" in label or label == "."):
        raise UsageError("%s cannot be a session's label: a reply to it would go elsewhere" % label)
    others = [peer for peer in store.peers_named(label) if peer["session"] != session]
    others += begins_other_ids(store, label, session)
    if others and session:
        raise UsageError("the label %s is the name of another session (%s); replies to you would go there"
                         % (label, others[0]["session"]))
    return label


def begins_other_ids(store, word, session=None):
    """The other sessions whose id begins with a word; a name that looks like that is no address."""
    if not is_session_id(word) or len(word) < SHORTEST_PREFIX:
        return []
    return [peer for peer in store.peers_beginning(word) if peer["session"] != session]


def session_label(store, session):
    """The address that a session signs with: its name if no other live session has it, else the start of its id."""
    peer = store.peer(session)
    for name in (peer["name"], peer["title"]) if peer else ():
        if is_label(name) and name_key(name) not in RESERVED_NAMES and ":" not in name:
            others = [other for other in store.peers_named(name) if other["session"] != session]
            others += begins_other_ids(store, name, session)
            if not any(is_live(store, other, now_ms()) for other in others):
                return name
    return store.short_id(session)


def display_name(peer):
    """The name that people know a session by: the given one, else its host's title."""
    return peer["name"] or peer["title"]


def describe_peer(store, peer, now):
    """A candidate of an ambiguous target, on one line."""
    return "%s  %s  %s, seen %s ago" % (peer["session"], one_line(display_name(peer)) or "-", peer["host"],
                                        age(now - store.seen_at(peer)))


def _login_name():
    import pwd
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return one_line("%s@%s" % (user, os.uname().nodename))[:LONGEST_NAME]


# ---------------------------------------------------------------------------------------------------- routing

def resolve(store, spec, sender, force=False):
    """The sessions that a TARGET means, as a list of peers' rows. Groups leave out the sender's own session.

    Full id, then exact name, then unique id prefix; HOST:X within one host; all, project, HOST: are groups.
    Errors: UsageError, NoSuchTarget, Ambiguous (with the candidates).
    """
    spec = spec.strip()
    now = now_ms()
    if not spec:
        raise UsageError("the target is empty; `xmsg list` shows who can be reached")
    host, colon, rest = spec.partition(":")
    if spec == "peer" or (colon and host == "peer"):
        raise RemoteError("%s is on another machine, and this can only be about a session of this one" % one_line(spec))
    if colon and host not in HOSTS:
        raise NoSuchTarget("%s is no host, and no machine that this is about; a session whose name has a colon is "
                           "reached as HOST:NAME or by its id, `xmsg remote list` shows the machines"
                           % one_line(host)[:LONGEST_NAME])
    if not colon:
        host, rest = None, spec
    if rest == "" or (host is None and rest in ("all", "project")):
        return _group(store, spec, host, sender, now)
    peers = list({peer["session"]: peer for peer in _matches(store, rest, host, now)}.values())
    if len(peers) > 1:
        raise Ambiguous("%s means %d sessions; use a full id or a longer prefix" % (one_line(spec), len(peers)),
                        [describe_peer(store, peer, now) for peer in peers])
    if peers:
        if peers[0]["session"] == sender["self"]:
            raise UsageError("%s is this session itself" % one_line(spec))
        return peers
    if force and is_session_id(rest):
        return [{"session": rest, "host": host or "", "name": "", "title": "", "pid": None, "hook_seen": None,
                 "transcript": "", "forced": True}]
    raise NoSuchTarget("no session is called %s%s; `xmsg list --all` shows every one that is known%s" % (
        one_line(spec)[:LONGEST_NAME],
        "" if len(rest) >= SHORTEST_PREFIX else " (the start of an id takes %d characters)" % SHORTEST_PREFIX,
        ", --force queues for a full id all the same" if is_session_id(rest) and "report" not in sender else ""))


def resolve_one(store, spec):
    """The row of the one session that a word means, for commands that take no group, the own session among them."""
    host, colon, rest = spec.partition(":")
    if spec in ("all", "project") or (colon and host in HOSTS and not rest):
        raise UsageError("%s is a group; name one session" % one_line(spec))
    return resolve(store, spec, {"self": "", "report": True})[0]


def _matches(store, word, host, now):
    """The sessions that a word means by the first rule that finds any; host: only this one's, None for all."""
    def of_host(sessions):
        return [peer for peer in sessions if peer and host in (None, peer["host"])]

    def present(sessions):
        return of_host(store.peer(store.successor(session)) for session in sessions)
    full = present([word]) if is_session_id(word) and store.peer(word) else []
    if full:
        return full
    told, key = found(store).sessions, name_key(word)
    if word in told:
        return of_host([told[word]])
    named = {peer["session"]: peer for peer in store.peers_named(word)}
    named.update(told)  # an open session is called what its host calls it now
    named = {session: peer for session, peer in named.items() if key and key in (peer["title_key"], peer["name_key"])}
    # A host's title is anybody's text: one that looks like the beginning of another session's id means that session.
    named = of_host(peer for peer in named.values() if peer["name_key"] == key
                    or not begins_other_ids(store, word, peer["session"]))
    pool = [peer for peer in named if is_live(store, peer, now)] or named
    given = [peer for peer in pool if peer["name_key"] == key]
    if pool:
        return given if len(given) == 1 else pool
    if len(word) >= SHORTEST_PREFIX and is_session_id(word):
        begun = present(peer["session"] for peer in store.peers_beginning(word))
        begun += of_host(peer for session, peer in told.items()
                         if session.startswith(word) and not store.peer(session))
        if begun:
            return begun
    # A label that a sender gave itself (XMSG_FROM) leads back to it as well.
    signed = present(store.sessions_of_label(word))
    return [peer for peer in signed if is_live(store, peer, now)] or signed or of_host(_kept_by_agy(store, word))


def _kept_by_agy(store, word):
    """The conversations of agy that a word means, of those that no hook has told of: any that it keeps can be woken."""
    import agy_delivery
    blank = dict.fromkeys(("name", "name_key", "project", "model", "permission_mode", "transcript"), "")
    data, peers = agy_delivery.data_dir(os.environ), []
    for session, facts in agy_delivery.conversations(data).items():
        title = one_line(clean_text(facts["title"]))[:LONGEST_NAME]
        begins = len(word) >= SHORTEST_PREFIX and session.startswith(word)
        if not (begins or name_key(title) == name_key(word)) or not is_session_id(session) or store.peer(session):
            continue
        if agy_delivery.has_conversation(data, session):
            peers.append(dict(blank, session=session, host="agy", title=title, title_key=name_key(title),
                              cwd=clean_text(facts["cwd"]), pid=None, pid_start=None, successor=None, first_seen=0,
                              last_seen=0, hook_seen=None))
    full = [peer for peer in peers if peer["session"] == word]
    return full or [peer for peer in peers if peer["title_key"] == name_key(word)] or peers


def _group(store, spec, host, sender, now):
    project = None
    if spec == "project":
        own = store.peer(sender["self"]) if sender["self"] else None
        project = own["project"] if own else project_root(os.getcwd())
    peers = [peer for peer in all_peers(store)
             if host in (None, peer["host"]) and project in (None, peer["project"])
             and peer["session"] != sender["self"] and is_live(store, peer, now)]
    if not peers:
        raise NoSuchTarget("nobody else is live in %s; `xmsg list --all` shows every session that is known" % spec)
    return peers


def route(facts):
    """The windows to try before the hooks, best first, and the reason if there is none. A pure function.

    facts: host; direct, whether the sender allows it; inbox_fault, why a Claude Code session's inbox cannot be used;
    for Codex what codex_delivery.Codex.facts() tells;
    agy: holder (a pid, 0, None for unknown), inside (the sender is in agy), wake, known (agy keeps it), program.
    """
    if not facts["direct"]:
        return [], "not tried (--no-direct)"
    if facts["host"] == "claude":
        return ([], facts["inbox_fault"]) if facts["inbox_fault"] else (["uds-direct"], None)
    if facts["host"] == "agy":
        return _route_to_agy(facts["agy"])
    if facts["host"] == "codex":
        import codex_delivery
        return codex_delivery.windows(facts)
    return [], "no direct window"


def _route_to_agy(facts):
    """A session that may be running is never woken: two agys would overwrite each other's steps."""
    if facts["holder"]:
        if facts["inside"]:
            return ["agy-message"], None
        return [], "agy is running: its next PreInvocation takes it"
    if facts["holder"] is None:
        return [], ("it cannot be told whether agy has this session open, so it is not woken: its next PreInvocation "
                    "takes it")
    if not facts["wake"]:
        return [], "agy does not have this session open, and XMSG_WAKE=off"
    if not facts["known"]:
        return [], "agy does not have this session open, and keeps none of this id that could be woken"
    if not facts["program"]:
        return [], "agy does not have this session open, and there is no program `agy` to wake it; set XMSG_AGY_BIN"
    return ["agy-wake"], None


def direct_facts(store, peer, direct, sender=None):
    """What route() decides on, gathered for one target. sender: who sends, as sender_identity() says."""
    facts, told = {"host": peer["host"], "direct": direct, "inbox_fault": None}, store.found
    if direct and peer["host"] == "claude":
        import claude_delivery
        # After a first drop the host reports further ones late, and then not at all: silence would not be acceptance.
        if store.dropped_lately(peer["session"], now_ms() - 60000):
            facts["inbox_fault"] = "the host dropped a message less than a minute ago"
        else:
            records = told.claude.get(peer["session"], []) if told else claude_delivery.sessions(claude_dirs(peer))
            facts["inbox_fault"] = claude_delivery.find_inbox(peer["session"], (), records)[1]
    if direct and peer["host"] == "codex":
        facts.update(codex_of(store, peer).facts(peer["session"], codex_sender(sender)))
    if direct and peer["host"] == "agy":
        facts["agy"] = _agy_facts(store, peer["session"])
    return facts


def codex_of(store, peer):
    """The codex_delivery.Codex of a session's CODEX_HOME; one a command, so that its deadline is the command's."""
    import codex_delivery
    home = codex_delivery.home_of(peer["transcript"]) or codex_delivery.codex_home(os.environ)
    if home not in store.codex:
        store.codex[home] = codex_delivery.Codex(home, store.settings.codex_timeout, store.settings.codex_bin,
                                                 store.found and store.found.writers.get(home))
    return store.codex[home]


def codex_sender(sender):
    """(thread, pid of the host above) of a sender that Codex itself may name to the receiver, else None."""
    verified = sender and sender["host"] == "codex" and sender.get("told_by")
    return (sender["session"], sender["told_by"]) if verified else None


def _agy_facts(store, session):
    import agy_delivery
    import host_process
    # agy's address and secret are inherited; only a sender whose nearest host is agy speaks as what they say.
    nearest = host_process.nearest_host()
    return {"holder": agy_delivery.attached(presence_folder(store), session), "wake": store.settings.wake == "on",
            "known": agy_delivery.has_conversation(agy_delivery.data_dir(os.environ), session),
            "program": agy_delivery.program(store.settings.agy_bin, os.environ),
            "inside": bool(nearest and nearest.kind == "agy" and agy_delivery.api_program(os.environ))}


def claude_dirs(peer):
    """The configuration directories in which a Claude Code session may be registered."""
    import claude_delivery
    reported = [claude_delivery.config_dir_of(peer["transcript"])] if peer.get("transcript") else []
    return claude_delivery.config_dirs(os.environ, filter(None, reported))


# ---------------------------------------------------------------------------------------------------- rendering

def source_line(store, row):
    """The one line above a body that says who speaks, and that it is not the user.

    A row may hold it as `head`, as it was shown: names change, and the line with them.
    """
    if row.get("head"):
        return row["head"]
    key, who = _source(store, row)
    return phrase(key, store.settings) % who


def source_lines(store, row):
    """The line in every language, as a transcript may hold it."""
    key, who = _source(store, row)
    return [line % who for line in PHRASES[key]]


def _source(store, row):
    if row["sender_kind"] == "notification":
        return "notification", row["sender_label"]
    if row["sender_kind"] == "agent" and ":" in row["sender_session"]:
        # Of another machine: the label is the address, as ALIAS:NAME, and no id of there means anything here.
        return "peer", "%s · %s" % (row["sender_label"], row["sender_host"])
    if row["sender_kind"] != "agent":
        who = row["sender_label"]
        if row["sender_host"] and row["sender_host"] != who:
            who += " · " + row["sender_host"]
        return "unknown", who
    address = "%s:%s" % (row["sender_host"], store.short_id(row["sender_session"]))
    label = row["sender_label"]
    # A label that has since become another session's name would lead a reply astray.
    if (len(label) >= SHORTEST_LABEL_ID and row["sender_session"].startswith(label)) or any(
            peer["session"] != row["sender_session"] for peer in store.peers_named(label)):
        return "peer", address
    return "peer", "%s · %s" % (label, address)


def render(store, row):
    """(source line, body) as a hook shows them."""
    return source_line(store, row), quote_imitations(neutralize(row["body"]))


def injection_size(host, text):
    """The size of an injection as its host counts: UTF-16 units (Claude Code), escaped bytes (Codex), bytes (agy)."""
    if host == "claude":
        return len(text.encode("utf-16-le")) // 2
    if host == "codex":
        return len(text.encode()) + 3 * text.count("<") + 3 * text.count(">") + 4 * text.count("&")
    return len(text.encode())


def compose(store, rows, host, shape, first=False):
    """(count, text): how many of the rows, from the first on, fit into one injection, and its text.

    A row that does not fit stays for the next one. The first one, if it is too long alone, is cut visibly.
    first: the session has just started, so below a peer's mail one line of ours tells how to answer.
    """
    answer = "\n\n" + phrase("answer", store.settings) if first else ""
    budget = (BUDGETS.get((host, shape)) or BUDGETS[host]) - injection_size(host, answer)
    count, text = 0, ""
    for row in rows:
        head, body = render(store, row)
        item = "%s\n%s" % (head, body)
        if len(body) > ITEM_CHARS:
            item = _cut_item(store, row, head, body, host, budget)
        joined = text + "\n\n" + item if text else item
        if injection_size(host, joined) > budget:
            if count:
                break
            joined = _cut_item(store, row, head, body, host, budget)
        count, text = count + 1, joined
    return count, text + (answer if any(row["sender_kind"] == "agent" for row in rows[:count]) else "")


def _cut_item(store, row, head, body, host, budget):
    """As much of a long body as fits, then a line of ours that says what is missing and how to read it."""
    def cut(length):
        return "%s\n%s\n%s" % (head, body[:length], phrase("cut", store.settings) % (len(body) - length, row["id"]))
    low, high = 0, min(len(body), ITEM_CHARS)
    while low < high:
        middle = (low + high + 1) // 2
        if injection_size(host, cut(middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return cut(low)


def hook_output(event, shape, text, watch=None):
    """The JSON object of a hook, in the exact shape that its host takes; unknown keys void it on Codex and agy."""
    if shape == "block":
        return {"decision": "block", "reason": text}
    if shape == "continue":
        # agy puts words of its own, of any version, before a reason; after an empty line the text begins for everybody.
        return {"decision": "continue", "reason": "\n\n" + text}
    if shape == "systemMessage":
        return {"injectSteps": [{"systemMessage": {"systemMessage": text}}]}
    if shape == "ephemeralMessage":
        return {"injectSteps": [{"ephemeralMessage": text}]}
    output = {"hookEventName": event}
    if text:
        output["additionalContext"] = text
    if watch:
        output["watchPaths"] = [watch]
    return {"hookSpecificOutput": output}


# ---------------------------------------------------------------------------------------------------- hook

def hook_main(arguments):
    """The hook entry: xmsg-hook.sh's `HOST [EVENT [3]]`. Returns the exit status, 0 whatever happens.

    The third word says that descriptor 3 is the host's stderr. XMSG_NO_FAILOPEN=1 lets faults through.
    """
    os.umask(0o077)
    host, event, stderr = (list(arguments) + ["", "", ""])[:3]
    faults, settings = [], None
    try:
        payload = os.environb.pop(b"XMSG_HOOK_HEAD", b"") + sys.stdin.buffer.read(LONGEST_PAYLOAD + 1)
        while len(payload) > LONGEST_PAYLOAD and sys.stdin.buffer.read(1 << 20):
            pass  # a payload that nobody reads is a broken pipe to the host
        settings = Settings(os.environ, faults)
        for fault in faults:
            note_fault(settings, "settings", UsageError(fault))
        run_hook(settings, host, event, payload, 3 if stderr == "3" else None)
    except BaseException as error:
        if os.environ.get("XMSG_NO_FAILOPEN") == "1":
            raise
        if settings:
            note_fault(settings, "%s %s" % (host, event), error)
    return 0


def run_hook(settings, host, event, payload, stderr=None):
    """One hook: register what changed, claim what waits, show it, and only then tidy up.

    stderr: the descriptor on which a wake's text reaches the host; without one there is no wake.
    """
    call = parse_call(host, event, payload)
    if call is None:
        return
    try:
        store = Store(settings, busy_seconds=1.0)
        try:
            if call["subagent"]:
                take_spooled(store, os.environ, call["session"], call["printed"])
            elif call["shape"] == "wake":
                if stderr:
                    wake_idle_session(store, call, stderr)
            else:
                _serve(store, call)
        finally:
            store.close()
    except StoreError:
        if call["printed"]:  # which no later hook is given
            import spool
            for line in spool.marked_lines(call["printed"]):
                spool.leave_line(settings.db, os.environ, call["session"], line)
        raise


def _serve(store, call):
    now, session = now_ms(), call["session"]
    seen_before = store.peer(session)
    if call["host"] == "agy" and not call["transcript"]:
        call["transcript"] = _agy_transcript(session)
    if call["host"] == "agy" and (call["turn_begins"] or call["event"] == "Stop"):
        _add_summary(call)
    peer = register_session(store, call, now)
    if call["host"] == "agy":
        # Not by the registry: two agys may have one session open.
        call["process"] = list(process_of_session("agy"))
        settle_injections(store, call, now)
    shown = show_mail(store, call, now, write_json)
    if call["event"] == "SessionStart":
        record_interpreter(store.settings)
    if store.settings.tty_banner and shown:
        banner(shown)
    take_spooled(store, os.environ, session, call["printed"])
    if call["tool_call"]:
        import spool
        if call["event"] == "PreToolUse":
            spool.note_call(store.path, os.environ, session, call["tool_call"], call["transcript"])
        else:
            spool.forget_call(store.path, os.environ, session, call["tool_call"])
    # Another hook of this session may have registered something else meanwhile.
    if call["prefix"] and same_session(peer, store.peer(session)):
        store.remember_prefix(session, call["prefix"], same_session(peer, seen_before))
    if call["event"] == "Stop" and call["host"] == "claude":
        store.touch_hint(session)
    store.lower_hint(session)
    store.sweep(now_ms(), store.settings.hook_sweep_interval * 1000)


def parse_call(host, event, payload):
    """What a payload says, as a dict; None for an event that is none of ours. BadPayload if it is malformed.

    A key that stands twice is refused: the fast path saw the first, a parser keeps the last.
    """
    if host not in HOSTS:
        raise BadPayload("no host is called %r" % host[:40])
    if len(payload) > LONGEST_PAYLOAD:
        raise BadPayload("a payload of over %d bytes" % LONGEST_PAYLOAD)
    try:
        fields = json.loads(payload, object_pairs_hook=_marked_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadPayload("not JSON: %s" % error)
    if not isinstance(fields, dict) or fields.pop(_DOUBLE, False):
        raise BadPayload("not one JSON object with each key once")
    return _agy_call(event, fields) if host == "agy" else _claude_or_codex_call(host, event, fields, payload)


_DOUBLE = object()


def _marked_pairs(pairs):
    fields = dict(pairs)
    if len(fields) != len(pairs):
        fields[_DOUBLE] = True
    return fields


def _no_constant(name):
    raise ValueError("the constant %s" % name)


def _claude_or_codex_call(host, event, fields, payload):
    told = _text(fields, "hook_event_name")
    if event != "FileChanged" and event:
        told = event
    known = (host, event if event == "FileChanged" else told)
    # The fast path never sees what stands behind its prefix, so a title counts only in events that it leaves alone.
    title = _text(fields, "session_title") if told in ("SessionStart", "UserPromptSubmit") else ""
    printed = json.dumps(fields.get("tool_response"), skipkeys=True) if known == ("codex", "PostToolUse") else ""
    printed = printed if SPOOL_MARK in printed else ""
    sends = host == "codex" and told in ("PreToolUse", "PostToolUse") and "xmsg" in str(fields.get("tool_input"))
    # A subagent's tool call carries its parent's session id; what it is shown, the parent never sees.
    subagent = bool(fields.get("agent_id") or fields.get("agent_type"))
    if known not in WINDOWS or (subagent and not printed):
        return None
    return {"host": host, "event": told, "shape": WINDOWS[known], "session": _session(fields, "session_id"),
            "cwd": _path(fields.get("cwd")), "model": _text(fields, "model"), "title": title,
            "permission_mode": _text(fields, "permission_mode"), "source": _text(fields, "source"),
            "transcript": _path(fields.get("transcript_path")),
            "turn": _text(fields, "turn_id"), "stop_active": bool(fields.get("stop_hook_active")),
            "prefix": registered_prefix(payload), "subagent": subagent, "printed": printed,
            "tool_call": _text(fields, "tool_use_id") if sends else ""}


def _agy_call(event, fields):
    """agy's payload does not name its event: without the argument nothing is claimed that could not be shown."""
    if ("agy", event) not in WINDOWS:
        return None
    folders = fields.get("workspacePaths")
    ended_well = fields.get("terminationReason") in (None, "", "NO_TOOL_CALL") and fields.get("fullyIdle") is not False
    executions = fields.get("executionNum")
    spent = isinstance(executions, int) and executions >= STOPS_A_TURN
    return {"host": "agy", "event": event, "shape": WINDOWS["agy", event],
            "session": _session(fields, "conversationId"),
            "cwd": _path(folders[0] if isinstance(folders, list) and folders else None),
            "model": _text(fields, "modelName"), "title": "", "permission_mode": "", "source": "", "turn": "",
            "transcript": _path(fields.get("transcriptPath")), "first_step": _count(fields, "initialNumSteps"),
            "turn_begins": event == "PreInvocation" and not _count(fields, "invocationNum"),
            "stop_active": spent or not ended_well, "prefix": None, "subagent": False, "printed": "",
            "tool_call": ""}


def _count(fields, key):
    """A whole number of a payload, 0 where it is left out, as protojson leaves out every 0."""
    value = fields.get(key)
    return value if isinstance(value, int) else 0


def _session(fields, key):
    session = fields.get(key)
    if not is_session_id(session):
        raise BadPayload("%s is not a session id" % key)
    return session


def _text(fields, key):
    value = fields.get(key)
    return clean_text(value)[:1000] if isinstance(value, str) else ""


def _path(value):
    return clean_text(value) if isinstance(value, str) and value.startswith("/") and len(value) < 4096 else ""


def registered_prefix(payload):
    """The first bytes of a payload up to its permission mode, if they are flat strings and short; else None.

    A later payload that begins with them says nothing of its session that is not registered.
    """
    from json.decoder import scanstring
    try:
        text = payload[:1024].decode("utf-8", "ignore")
        at, key = 1, None
        while text[at] == '"':
            key, at = scanstring(text, at + 1)
            if text[at:at + 2] != ':"':
                return None
            _, at = scanstring(text, at + 2)
            if key == "permission_mode":
                prefix = text[:at].encode()
                return prefix if payload.startswith(prefix) else None  # a byte that is no text was left out
            at += 1
    except (ValueError, IndexError):
        pass
    return None


def register_session(store, call, now):
    """Brings the registry up to date with a hook's payload, and returns the session's row.

    The process is looked up where it can be another one than before: at the start of a session or of a turn.
    """
    known = store.peer(call["session"])
    pid = start = None
    if not known or call["event"] in ("SessionStart", "UserPromptSubmit", "PreInvocation"):
        pid, start = process_of_session(call["host"])
    peer = {"session": call["session"], "host": call["host"], "cwd": call["cwd"], "model": call["model"],
            "permission_mode": call["permission_mode"], "transcript": call["transcript"],
            "title": one_line(call["title"])[:LONGEST_NAME], "pid": pid, "pid_start": start,
            "opened": call["event"] == "SessionStart", "event": call["event"]}
    if call["cwd"] and not (known and known["cwd"] == call["cwd"]):
        peer["project"] = project_root(call["cwd"])
    before = []
    if call["host"] == "claude" and call["source"] == "clear" and pid:
        before = [other for other in store.peers_of_process(pid, start)
                  if other["session"] != call["session"] and not other["successor"]]
    return store.register(peer, now, before[0] if before else None)


def take_spooled(store, environ, own="", printed=""):
    """Takes in what senders in a sandbox have left: this session's, and that of sessions which have no hook any more.

    Then a process of its own tries the direct windows. printed: what a tool call of this session has printed.
    """
    has_key = os.path.exists(store.path + ".key")
    if has_key and not printed and not any(map(os.path.exists, spool_folders(store.path, environ))):
        return  # as nearly always, and without another module
    import spool
    if own and not has_key:
        spool.make_key(store.path + ".key")
    left = spool.sessions(store.path, environ)
    if printed and own not in left:
        left.append(own)
    for session in left:
        peer = store.peer(session)
        if session == own or not peer or not is_live(store, peer, now_ms()):
            uids = spool.take(store, environ, session, printed if session == own else "", session != own)
            if uids:
                import host_process
                host = host_process.nearest_host() if session == own else None
                spool.start_delivery(store.settings, uids, host.pid if host and host.kind == "codex" else 0)


def same_session(peer, earlier):
    """Whether two readings of a session's row differ in nothing but the time."""
    times = ("last_seen", "hook_seen")
    return earlier is not None and all(peer[key] == earlier[key] for key in peer if key not in times)


def show_mail(store, call, now, write):
    """Claims what waits, shows it through write(text), and says so in the store. Returns the rows that were shown."""
    if call["host"] == "agy":
        return show_to_agy(store, call, now, write)
    shape, session = call["shape"], call["session"]
    output_shape, watch = _shape_now(shape), None
    # Claude Code forgets what it watches when its shell changes the folder (2.1.281 and 2.1.332).
    if call["host"] == "claude" and call["event"] in ("SessionStart", "CwdChanged") and store.settings.wake == "on":
        watch = os.path.join(store.hints, "mail", session)
    rows, text = [], ""
    if shape and may_claim(store, call):
        def choose(waiting):
            nonlocal text
            count, text = compose(store, waiting, call["host"], shape, call["event"] == "SessionStart")
            return count
        rows = store.claim(session, now, store.settings.max_per_inject, choose, call["event"], myself())
    if not rows and not watch:
        return []
    output = hook_output(call["event"], output_shape, text, watch)
    show(store, rows, call["event"], lambda: write(output))
    if rows and shape == "block":
        count_stop(store, call)
    return rows


def show(store, rows, window, write, until_traced=None):
    """Runs write() and moves the claimed rows on: delivered once all is out, queued again if nothing is.

    write raises NothingWritten for the second; after any other failure the rows stay, and are shown as UNKNOWN.
    until_traced: (what is noted, the host's process): then they stay in flight, held by the host, for a later hook.
    """
    try:
        write()
    except NothingWritten as error:
        with store.transaction():
            for row in rows:
                store.move(row, "queued", now_ms(), detail="the hook could not write: %s" % error)
        raise
    if rows:
        with store.transaction():
            for row in rows:
                if until_traced:
                    store.note(row, now_ms(), *until_traced)
                else:
                    store.move(row, "delivered", now_ms(), window=window)


class NothingWritten(Exception):
    """A write failed before its first byte."""


def write_json(output):
    write_all(1, json.dumps(output, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def write_all(descriptor, content):
    written = 0
    while written < len(content):
        try:
            written += os.write(descriptor, content[written:])
        except OSError as error:
            if written:
                raise
            raise NothingWritten(error.strerror) from error


def may_claim(store, call):
    """Whether this hook may take mail at all."""
    if call["event"] != "Stop":
        return True
    if call["host"] != "codex":
        return not call["stop_active"]
    return _stops(store, call) < STOPS_A_TURN


def _stops(store, call):
    turn, _, count = (store.meta("stops:" + call["session"]) or "").rpartition(" ")
    return int(count) if turn == call["turn"] and count.isdigit() else 0


def count_stop(store, call):
    count = _stops(store, call) + 1
    with store.transaction():
        store.set_meta("stops:" + call["session"], "%s %d" % (call["turn"], count))


def _shape_now(shape):
    """At Stop, what this version of Claude Code takes. It names its version in AI_AGENT, as claude-code_2-1-332_..."""
    if shape != "stop":
        return shape
    parts = os.environ.get("AI_AGENT", "").partition("claude-code_")[2].partition("_")[0].split("-")
    version = tuple(int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9)
    return "context" if version >= STOP_CONTEXT_SINCE else "block"


# ---- agy: a hook's output may be dropped whole, so only the transcript tells whether it was used

def show_to_agy(store, call, now, write):
    """As show_mail. The rows stay in flight: the session's next hook settles them by its transcript.

    What is known of each injection is kept with its claim, in one transaction, under `agy:SESSION`.
    """
    session = call["session"]
    if not call["shape"] or not may_claim(store, call) or not store.waiting(session):
        return []
    memory = _agy_memory(store, session)
    if memory["process"] != call["process"] or not memory["process"][0]:
        import agy_delivery
        memory.update(process=call["process"], version=agy_delivery.version(call["process"][0] or 0))
    shape = "continue" if call["shape"] == "continue" else _agy_step(store, memory["version"])
    entry = {"process": call["process"], "version": memory["version"], "shape": shape, "first": call["first_step"],
             "at": _size(call["transcript"]), "claimed": now}
    text = ""

    def choose(waiting):
        nonlocal text
        count, text = compose(store, waiting, "agy", shape)
        taken = waiting[:count]
        shown = _agy_memory(store, session)["shown"][-20:] + [dict(
            entry, rows=[row["id"] for row in taken], heads=[source_line(store, row) for row in taken])]
        store.set_meta("agy:" + session, json.dumps(dict(memory, shown=shown)))
        return count
    rows = store.claim(session, now, store.settings.max_per_inject, choose, call["event"], myself())
    if rows:
        show(store, rows, call["event"], lambda: write(hook_output(call["event"], shape, text)),
             ("as %s of agy %s; not in its transcript yet" % (shape, memory["version"] or "?"), call["process"]))
    return rows


def settle_injections(store, call, now):
    """Says by the transcript what became of what earlier hooks of this session of agy have shown.

    A trace proves that it arrived. If the very agy that was shown it went on without it, it is queued again, for the
    other shape. Anything else is never shown again by itself. call: session, transcript, and process if a hook asks.
    Returns the ids of the rows that it moved.
    """
    memory = _agy_memory(store, call["session"])
    rows = store.open_rows("hook-inflight", call["session"])
    if not rows and not memory["shown"]:
        return []
    import transcripts
    traces = _traces(store, rows, memory["shown"], call["transcript"]) if rows else {}
    steps = [transcripts.agy_steps_since(call["transcript"], entry["at"])
             if not traces.keys() >= set(entry["rows"]) else None for entry in memory["shown"]]
    with store.transaction():
        for row in rows:
            if row["id"] in traces:
                store.move(row, "delivered", now, window=row["window"], evidence=traces[row["id"]])
        left = [entry for entry, since in zip(memory["shown"], steps)
                if _settle_injection(store, call, entry, since, now)]
        newest = _agy_memory(store, call["session"])
        left += [entry for entry in newest["shown"] if entry not in memory["shown"]]  # another hook's, meanwhile
        store.set_meta("agy:" + call["session"], json.dumps(dict(newest, shown=left)))
    return [row["id"] for row in rows if store.by_id(row["id"])["state"] != "hook-inflight"]


def _settle_injection(store, call, entry, steps, now):
    """Settles what no trace has settled of one injection; true if that has to wait for a later hook.

    steps: what the transcript got since, None if that cannot be read.
    """
    import agy_delivery
    import host_process
    shape, version = entry["shape"], entry["version"]
    rows = [row for row in map(store.by_id, entry["rows"]) if row]
    if any(row["evidence"] for row in rows):
        _agy_learn(store, version, shape, True)
    # Another hook, or `xmsg resolve`, may have let a row be shown once more: that is another injection's.
    rows = [row for row in rows if row["state"] == "hook-inflight" and row["state_at"] == entry.get("claimed")]
    if not rows:
        return False
    at_its_next_hook = entry["process"][0] and entry["process"] == call.get("process")
    gone = not host_process.alive(*entry["process"])
    hook_at_work = any(holder_lives(row) and [row["holder_pid"], row["holder_start"]] != entry["process"]
                       for row in rows)
    if steps is None or hook_at_work:
        return not gone or hook_at_work
    # A version that has left no trace of any other shape may not write it down at all. An agy that ended at a Stop may
    # have died on its way on, and another agy with the same session open writes steps of its own.
    tells = _agy_takes(store, version).get(shape) or shape == AGY_STEPS[0]
    if tells and (at_its_next_hook or gone and shape != "continue") and agy_delivery.was_refused(
            steps, entry["first"], shape, [head for _, head in _heads(store, entry)]):
        _agy_learn(store, version, shape, False)
        for row in rows:
            store.move(row, "queued", now, detail="agy %s went on without this %s" % (version or "?", shape))
    elif gone or at_its_next_hook and any(kind == "USER_INPUT" for _, _, kind, _ in steps):
        for row in rows:
            store.note(row, now, "its transcript does not tell whether agy used this %s" % shape, (None, None))
    else:
        return True
    return False


def _traces(store, rows, entries, path):
    """{row id: the trace's name} of the rows that stand in a transcript, each injection as a whole first.

    As a whole, since a text that was cut, or that two messages share, cannot be told by itself.
    """
    import transcripts
    by_id, found, wanted, texts = {row["id"]: row for row in rows}, {}, [], {}
    for number, entry in enumerate(entries):
        mine = [dict(by_id[number], head=head) for number, head in _heads(store, entry)
                if number in by_id and by_id[number]["state_at"] == entry.get("claimed")]
        if mine and len(mine) == len(entry["rows"]):
            # Each item begins where the text of those before it ends.
            starts = [len(compose(store, mine[:count], "agy", "step")[1]) + 2 for count in range(1, len(mine))]
            texts[number] = (mine, [0] + starts)
            wanted.append({"key": number, "id": None, "text": compose(store, mine, "agy", "step")[1],
                           "since": mine[0]["state_at"]})
    taken = store.occurrences(rows[0]["target"])
    for number, trace in transcripts.evidence("agy", path, wanted, taken, seconds=0.3).found.items():
        place, _, start = trace.name.rpartition("+")
        for row, offset in zip(*texts[number]):
            found[row["id"]] = "%s+%d" % (place, int(start) + offset)
    heads = {}
    for entry in entries:
        for number, head in _heads(store, entry):
            heads.setdefault(number, set()).add(head)
    rest = [{"key": row["id"], "id": None, "since": row["state_at"], "text": [
        "%s\n%s" % (line, render(store, row)[1]) for line in heads.get(row["id"]) or source_lines(store, row)]}
        for row in rows if row["id"] not in found]
    if rest:
        more = transcripts.evidence("agy", path, rest, taken + list(found.values()), seconds=0.3).found
        found.update((number, trace.name) for number, trace in more.items())
    return found


def _heads(store, entry):
    """[(row id, source line)] of an injection, as it was shown: a name may be another one by now."""
    return list(zip(entry["rows"], entry.get("heads", ())))


def _agy_memory(store, session):
    """What the hooks of a session of agy know of it: its process and version, and what they have shown."""
    return dict({"process": [None, None], "version": "", "shown": []},
                **json.loads(store.meta("agy:" + session) or "{}"))


def _agy_takes(store, version):
    """{shape: whether this version of agy has been seen to take it}."""
    return json.loads(store.meta("agy-takes:" + version) or "{}")


def _agy_step(store, version):
    """The shape of a step for this version: the lasting one, unless it was seen to refuse that."""
    return AGY_STEPS[1 if _agy_takes(store, version).get(AGY_STEPS[0]) is False else 0]


def _agy_learn(store, version, shape, took):
    """Keeps what was seen; once a shape was taken, one that was dropped tells nothing of the version."""
    takes = _agy_takes(store, version)
    if takes.get(shape) is None or took:
        store.set_meta("agy-takes:" + version, json.dumps(dict(takes, **{shape: took})))


def _agy_transcript(session):
    """Where agy keeps a session's transcript if its payload does not tell, "" if it is not there."""
    import agy_delivery
    import transcripts
    return transcripts.transcript_path("agy", session, [agy_delivery.data_dir(os.environ)]) or ""


def _add_summary(call):
    """What agy's own summaries say of a session and no payload does: its title, and the folder of `agy -p`."""
    import agy_delivery
    data = agy_delivery.data_dir_of(call["transcript"])
    known = agy_delivery.conversations(data, [call["session"]]) if data else {}
    if call["session"] in known:
        call["title"], folder = known[call["session"]]["title"], known[call["session"]]["cwd"]
        call["cwd"] = call["cwd"] or folder


def _size(path):
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


# ---- Claude Code: an idle session is woken through the file that it watches

def wake_idle_session(store, call, stderr):
    """Claude Code's FileChanged entry: waits until the session is idle or its mail is gone, then claims.

    What it prints makes xmsg-hook.sh leave with 2, which wakes the session. One waiter a session, whatever the number
    of events. Second entries, at SessionStart and CwdChanged, come here too, for mail that came before the host began
    to watch.
    """
    # `claude -p` ends when it is idle: it would not live to see what is claimed for it.
    if store.settings.wake != "on" or os.environ.get("CLAUDE_CODE_ENTRYPOINT") == "sdk-cli":
        return
    if call["event"] != "FileChanged":
        time.sleep(WATCH_DELAY)
    deadline = time.monotonic() + WAITER_SECONDS
    # A waiter that found no mail looks again after it let the lock go: the event of mail that came in between may have
    # found the lock still taken.
    while store.waiting(call["session"]):
        lock = waiter_lock(store, call["session"])
        if lock is None:
            return
        try:
            if _wait_and_wake(store, call, lock, deadline, stderr):
                return
        except NothingWritten:
            return  # the host is gone; the mail is queued again
        finally:
            os.close(lock)
    store.lower_hint(call["session"])


def waiter_path(store, session):
    """The file whose lock makes that one waiter at a time wakes a session."""
    return os.path.join(store.hints, "wake", session)


def waiter_lock(store, session):
    """The descriptor of the session's waiter file, locked; None if another waiter holds it."""
    import fcntl
    descriptor = os.open(waiter_path(store, session),
                         os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _wait_and_wake(store, call, lock, deadline, stderr):
    """True once the session was woken, or will be by a later event, or is gone; False if the mail is gone."""
    import host_process
    session = call["session"]
    hint = os.path.join(store.hints, "mail", session)
    peer = {"host": "claude", "session": session, "pid": _claude_pid(), "transcript": call["transcript"]}
    while os.path.exists(hint) or store.waiting(session):
        if peer["pid"] and host_process.start_time(peer["pid"]) is None:
            return True  # nobody is left to wake
        last_wake = os.pread(lock, 32, 0)
        too_soon = last_wake.isdigit() and 0 <= now_ms() - int(last_wake) < 1000
        if not too_soon and activity(peer) in ("idle", "unknown"):
            if not store.waiting(session):
                return False
            if show_mail(store, dict(call, event="FileChanged"), now_ms(), lambda output: _write_wake(stderr, output)):
                os.pwrite(lock, str(now_ms()).encode(), 0)
                return True
        if time.monotonic() > deadline:
            store.touch_hint(session)
            return True
        time.sleep(0.2)
    return False


def _claude_pid():
    text = os.environ.get("CLAUDE_PID", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else process_of_session("claude")[0]


def _write_wake(stderr, output):
    """The text goes to the host, then one line to xmsg-hook.sh: nothing else that Python prints can wake anybody."""
    write_all(stderr, output["hookSpecificOutput"]["additionalContext"].encode() + b"\n")
    os.write(1, b"xmsg wakes\n")


def banner(rows):
    """One line on the session's terminal. It never waits: a terminal that flow control stopped would hang the hook."""
    senders = ", ".join(sorted({one_line(row["sender_label"]) for row in rows})[:3])
    text = "\U0001f4e8 xmsg: %d from %s" % (len(rows), senders)
    try:
        descriptor = os.open("/dev/tty", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            width = os.get_terminal_size(descriptor).columns
            os.write(descriptor, ("\r\n%s\r\n" % clip(text, max(20, width - 1))).encode())
        finally:
            os.close(descriptor)
    except OSError:
        pass
