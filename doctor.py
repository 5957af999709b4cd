"""`xmsg doctor`: one line for each thing that must be right, and what to do where it is not."""
import contextlib
import json
import os
import shlex
import time

from contract import OPEN, RemoteError, SCHEMA, Settings, StoreError, age, now_ms, one_line
from store import Store, is_unknown
from xmsg import all_peers, direct_facts, is_live, route, take_spooled
from sending import look_for_evidence

HERE = os.path.dirname(os.path.realpath(__file__))
SLOW_LOGIN_SHELL = 0.3  # seconds; above this it is worth a word
SLOW_HOOK = 0.5
VERSION_SECONDS = 5


def examine(settings, environ):
    """All checks, as a list of {check, ok, detail, advice}; advice only where something is to be done.

    ok is True, False, or None for what is merely worth knowing. It repairs hints and sweeps, and says so. One check
    that fails, as on a full disk, costs its own line only.
    """
    found = []

    def note(check, ok, detail, advice=""):
        found.append({"check": check, "ok": ok, "detail": detail, "advice": advice if ok is not True else ""})
    bad = []
    Settings(environ, bad)
    note("settings", not bad, "; ".join(bad) or "all are valid", "correct them or unset them")
    store, whole = _store(settings, note)
    checks = [(_interpreter, settings, environ), (_hosts, environ), (_hooks, store, environ), (_codex_trust, environ),
              (_app_server, environ), (_claude_inbound, store), (_hook, settings, environ), (_login_shell, environ),
              (_faults, settings)]
    if store:
        checks += [(_clock, store), (_rows, store, whole), (_machines, store), (_sessions, store),
                   (_agy_program, store)]
        checks += [(_spool, store), (_hints, store), (_sweep, store)] if whole else []
    for check, *subjects in checks:
        try:
            check(*subjects, note)
        except (StoreError, OSError) as error:
            name = check.__name__.strip("_").replace("_", " ")
            note(name, None if store and not whole else False, "could not be looked at: %s" % error,
                 "see the lines above")
    if store:
        store.close()
    return found


def _store(settings, note):
    """(the store, whether it can be written), opened for reading at least if it can be; (None, False) if it cannot."""
    store, problem = None, None
    try:
        store = Store(settings)
        store.try_to_write()
    except StoreError as error:
        problem = error
    try:
        store = store or Store(settings, write=False)
        damage = store.integrity()
        size = os.path.getsize(settings.db) // 1024 if os.path.exists(settings.db) else 0
        facts = "%s, schema %d, %d KiB, %d free pages" % (settings.db, SCHEMA, size, store.free_pages())
    except StoreError as error:
        store, problem = None, problem or error
    if problem:
        sentence, _, advice = str(problem).partition("; ")
        note("store", False, sentence, advice or "look at it by hand; nothing in it was changed")
    else:
        note("store", not damage, facts + (", damaged: " + damage if damage else ", every page is sound"),
             "the file is left as it is; move it away to begin a new one, and keep it for `sqlite3 FILE .recover`")
    if store:
        loose = store.loose_modes()
        note("modes", not loose, "only you can read it" if not loose else "others can read %s" % ", ".join(loose),
             "chmod go-rwx %s" % " ".join(map(shlex.quote, loose)))
    return store, not problem and not damage


def _recorded_interpreter(settings):
    try:
        with open(os.path.join(os.path.dirname(settings.db), "python")) as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _interpreter(settings, environ, note):
    import hook_install
    recorded = _recorded_interpreter(settings)
    works = hook_install.real_interpreter(recorded, environ) if recorded else None
    note("interpreter", works == recorded and bool(recorded), "none is recorded" if not recorded else recorded
         if works == recorded else "%s is gone, too old, or a version manager's shim" % recorded,
         "run `xmsg install`, which records a real one")


def _hosts(environ, note):
    """The hosts found and their versions, asked side by side."""
    import shutil
    import subprocess
    import hook_install
    asked = []
    for host in hook_install.hosts_found(environ):
        program, process = shutil.which(host, path=environ.get("PATH", "")), None
        if program:
            with contextlib.suppress(OSError):
                process = subprocess.Popen([program, "--version"], env=dict(environ), stdin=subprocess.DEVNULL,
                                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        asked.append((host, process))
    words = []
    for host, process in asked:
        version = _answer(process) if process else None
        words.append("%s %s" % (host, version) if version else "%s (%s)" % (
            host, "its program does not tell its version" if process else "its program is not on PATH"))
    note("hosts", True if asked else None, ", ".join(words) or "none found",
         "install Claude Code, Codex or agy, then run `xmsg install`")


def _answer(process):
    """The version in what a program prints, None if it says none in time."""
    import subprocess
    try:
        out = process.communicate(timeout=VERSION_SECONDS)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return next((word.lstrip("v") for word in out.split() if word.lstrip("v")[:1].isdigit() and "." in word), None)


def _hooks(store, environ, note):
    import hook_install
    for host in hook_install.hosts_found(environ):
        state = hook_install.check(host, os.path.join(HERE, "xmsg-hook.sh"), environ)
        whole = state["state"] == "installed" and not state["faults"]
        parts = [state["detail"]] if state["detail"] else []
        if state["missing"] and state["state"] == "partial":
            parts.append("missing " + ", ".join(state["missing"]))
        parts += state["faults"] + state["variants"]
        if host == "agy" and whole:
            parts.append("the file is strictly valid, as agy wants it")
        note("%s hooks" % host, whole, ": ".join(filter(None, ["%s (%s)" % (state["state"], state["path"]),
                                                               "; ".join(parts)])),
             "correct %s by hand where it says so, then `xmsg install --host %s`" % (state["path"], host)
             if state["state"] == "unreadable" or state["faults"] else "`xmsg install --host %s`" % host)
        seen, event = store.hook_last_seen(host) if store else (None, None)
        note("%s hooks seen" % host, True if seen else None,
             "%s, %s ago" % (event or "a hook", age(now_ms() - seen)) if seen else "none has run here yet",
             "say a word in a new session of it; if this stays, the host does not run them")


def _codex_trust(environ, note):
    import hook_install
    if "codex" not in hook_install.hosts_found(environ):
        return
    try:
        entries = hook_install.codex_trust(environ)
    except hook_install.Refused as error:
        return note("codex trust", False, str(error), "correct the file by hand, then `xmsg install --host codex`")
    by_state = {}
    for entry in entries:
        by_state.setdefault(entry["state"], []).append(entry["event"])
    well = list(by_state) == ["trusted"]
    words = ["all %d entries are trusted" % len(entries)] if well else [
        "%s: %s" % (state, ", ".join(events)) for state, events in by_state.items()]
    words += dict.fromkeys(filter(None, (entry["detail"].partition("; ")[2] for entry in entries)))
    if entries:
        note("codex trust", well, "%s; by %s" % ("; ".join(words), entries[0]["file"]),
             "start `codex` and choose \"Trust all and continue\", or look at /hooks there; Codex skips all others "
             "silently, and in a copied CODEX_HOME it trusts nothing")


def _app_server(environ, note):
    """Whether Codex's sessions have an app-server, by which they are reached at once, and what would give them one."""
    import codex_delivery
    import socket
    codex = codex_delivery.Codex(codex_delivery.codex_home(environ), codex_delivery.PROBE_SECONDS)
    path = os.path.join(codex.home, "app-server-control", "app-server-control.sock")
    if not os.path.lexists(path):
        if codex.tuis():
            note("codex app-server", None, "none runs, so %d sessions are reached by Codex's queue or their hooks"
                 % len(codex.tuis()), "`codex app-server daemon start`; what starts afterwards is reached at once")
        return
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(1)
        try:
            control.connect(path)
        except OSError as error:
            return note("codex app-server", None, "%s: %s" % (path, error.strerror or error),
                        "it was killed; restart it or the sessions attached to it, which until then are reached by "
                        "hooks")
    fault = codex.reach()
    if fault and codex.tuis():
        note("codex app-server", None, "listens on %s; %s" % (path, fault),
             "restart it, and update Codex if it is old; till then Codex's queue or the hooks reach its sessions")
    else:
        note("codex app-server", True, "listens on %s; %s" % (path, fault or "%d.%d.%d, %d windows are open" % (
            codex.version + (len(codex.tuis()),))))
    codex.close()


def _seconds(command, environ, data=b""):
    """(how long a command took, what it printed), (None, b"") if it failed to end."""
    import subprocess
    begin = time.monotonic()
    try:
        done = subprocess.run(command, input=data, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None, b""
    return time.monotonic() - begin, done.stdout


def _hook(settings, environ, note):
    """What one hook takes here, empty and with mail, in a store of its own."""
    import shutil
    import tempfile
    folder = tempfile.mkdtemp(prefix="xmsg-doctor-")
    clean = {key: value for key, value in environ.items()
             if not key.startswith(("XMSG_", "CLAUDE", "CODEX_", "ANTIGRAVITY_"))}
    clean["XMSG_DB"] = os.path.join(folder, "messages.sqlite3")
    payload = json.dumps({"session_id": "doctor-probe", "cwd": folder, "permission_mode": "default",
                          "hook_event_name": "PreToolUse"}, separators=(",", ":")).encode()
    hook = [os.path.join(HERE, "xmsg-hook.sh"), "claude"]
    send = [os.path.join(HERE, "bin", "xmsg"), "send", "doctor-probe", "a probe of xmsg doctor", "--no-direct"]
    try:
        with open(os.path.join(folder, "python"), "w") as file:
            file.write(_recorded_interpreter(settings) + "\n")
        _seconds(hook, clean, payload)
        empty = min((_seconds(hook, clean, payload)[0] or 10) for _ in range(3))
        _seconds(send, clean)
        mail, shown = _seconds(hook, clean, payload)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if mail is None or b"a probe of xmsg doctor" not in shown:
        return note("hook", False, "a test message did not come through",
                    "look at the faults below; `xmsg demo` shows the way step by step")
    note("hook", mail < SLOW_HOOK, "%.1f ms empty, %.0f ms with mail" % (empty * 1000, mail * 1000),
         "run `xmsg install`, which records an interpreter that starts directly; else the machine or its disk is slow")


def _login_shell(environ, note):
    shell = environ.get("SHELL") or "/bin/sh"
    taken, _ = _seconds([shell, "-lc", ":"], environ)
    note("login shell", None if taken is None or taken > SLOW_LOGIN_SHELL else True,
         "%s -lc takes %.0f ms, in which Codex starts every hook" % (shell, taken * 1000) if taken is not None
         else "%s does not answer" % shell, "make your shell's login files faster; xmsg cannot")


def _faults(settings, note):
    lines = []
    for path in (settings.db + ".faults.old", settings.db + ".faults", settings.db + ".faults.shell"):
        try:
            with open(path, errors="replace") as file:
                lines += file.read(1 << 20).splitlines()
        except OSError:
            pass
    newest = lines[-1] if lines else ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        fault = json.loads(newest)
        newest = "%s: %s" % (fault["where"], fault["fault"])
        newest = "%s ago, %s" % (age(now_ms() - fault["at"]), newest)
    note("faults", not lines, "no hook has failed" if not lines else "%d swallowed, the newest %s" % (
        len(lines), one_line(newest)[:300]), "mend what it says, then `rm %s.faults*`" % shlex.quote(settings.db))


def _clock(store, note):
    ahead = store.newest_time() - now_ms()
    right = ahead < 60000
    note("clock", right, "runs forward" if right else "the store holds times %s ahead of now" % age(ahead),
         "set the clock; waiting messages keep their time to live")


def _spool(store, note):
    import spool
    take_spooled(store, os.environ)
    left = spool.sessions(store.path, os.environ)
    note("spool", True if not left else None, "nothing has been left in a sandbox's folder" if not left else
         "messages from Codex's sandbox wait for a hook of %s" % ", ".join(left[:5]),
         "they go with that session's next tool call; if this stays, confirm its hooks with /hooks")


def _hints(store, note):
    changed = ["%d %s" % (count, what) for what, count in store.repair_hints().items() if count]
    note("hints", True, "repaired: " + ", ".join(changed) if changed else "agree with the store")


def _sweep(store, note):
    total = {}
    while True:
        counts = store.sweep(now_ms(), anything=True)
        total = {key: total.get(key, 0) + value for key, value in counts.items()}
        if not any(counts.values()):
            break
    note("sweep", True, ", ".join("%d %s" % (value, key) for key, value in total.items()))


def _machines(store, note):
    """Other machines, as far as this one knows without asking them."""
    import remote
    try:
        names = [machine["alias"] for machine in remote.read_remotes(store.settings).values()]
    except RemoteError as error:
        return note("machines", False, "no other machine can be reached", str(error))
    faults, rows = remote.bad_lines(store.settings), store.away()
    unsettled = [row["id"] for row in rows if is_unknown(row) or (row["state"] == "queued" and not row["far_state"])]
    if faults:
        note("machines", False, "lines of the remotes file lead nowhere: %d" % len(faults), "; ".join(faults[:5]))
    elif names or rows:
        note("machines", None if unsettled else True, (", ".join(names) or "none is set up") + (
            "; messages %s wait for the way there or were lost on it" % _ids(unsettled) if unsettled else ""),
            "`xmsg flush` carries and settles them; `xmsg remote check ALIAS` says what is wrong with the way")


def _rows(store, whole, note):
    if whole:
        look_for_evidence(store, store.targets_open(), seconds=2.0)
    rows = [row for row in store.messages(states=OPEN) if not row["remote"]]
    unknown = [row["id"] for row in rows if is_unknown(row)]
    held = [row["id"] for row in rows if row["state"] == "held"]
    note("UNKNOWN", not unknown, "none" if not unknown else "messages %s" % _ids(unknown),
         "look in the receiving session, then `xmsg resolve ID --delivered|--requeue|--drop`")
    note("held", None if held else True, "none" if not held else "messages %s" % _ids(held),
         "the receiving session asks its user, and an answer there ends it; one that shows no question has "
         "crossSessionInbound on hold")
    now = now_ms()
    lost = [row["id"] for row in store.queued() if not row["remote"] and not _reachable(store, row, now)]
    note("waiting", None if lost else True, "nothing waits for a session that is not open" if not lost
         else "messages %s wait for sessions that are not open" % _ids(lost),
         "open them again (claude --resume, codex resume), or `xmsg cancel ID`")


def _agy_program(store, note):
    """Whether a session of agy that has left can be woken."""
    import agy_delivery
    import hook_install
    if "agy" in hook_install.hosts_found(os.environ):
        program = agy_delivery.program(store.settings.agy_bin, os.environ)
        note("agy program", bool(program) or None, program or "none: a session of agy that has left is not woken",
             "put `agy` on PATH or set XMSG_AGY_BIN")


def _ids(numbers):
    return ", ".join("#%d" % number for number in numbers[:20]) + (" and more" if len(numbers) > 20 else "")


def _reachable(store, row, now):
    peer = store.peer(row["target"])
    return peer is not None and is_live(store, peer, now)


def _sessions(store, note):
    now = now_ms()
    live = [peer for peer in all_peers(store) if is_live(store, peer, now)]
    direct = [peer for peer in live if route(direct_facts(store, peer, True))[0]]
    note("sessions", True if live else None, "%d open, %d of them with a direct window" % (len(live), len(direct)),
         "a session appears with its first hook")


def _claude_inbound(store, note):
    """What stands between a message and the open Claude Code sessions: no inbox, or a setting of theirs."""
    import claude_delivery
    import host_process
    runtime = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("CLAUDE_CODE_TMPDIR") or ""
    for folder in (runtime, os.path.join(runtime, "cc-socks")) if os.path.isabs(runtime) else ():
        mode = os.stat(folder).st_mode if os.path.isdir(folder) else 0
        if mode & 0o022 and not mode & 0o1000:
            note("runtime directory", False, "others can write to %s, so Claude Code puts its inboxes elsewhere"
                 % folder, "chmod go-w %s, then start the sessions anew" % folder)
    direct = claude_delivery.sessions(claude_delivery.config_dirs(os.environ))
    if direct:
        note("Claude Code", True, "shows a message that comes to its inbox folded to one line; Ctrl+O opens it")
    for session in direct:
        name = session.name or session.session
        fault = session.socket and claude_delivery.socket_fault(session.socket)
        if not session.socket:
            note("inbox", None, "%s has none: its host switches messages between sessions off, before all settings"
                 % name, "messages to it go by its hooks; CLAUDE_CODE_HARBOR_KITE=1 at its start switches them on")
        elif fault:
            note("inbox", False, "%s: %s" % (name, fault),
                 "messages to it go by its hooks; start it anew for another inbox")
        word, where = claude_delivery.inbound_setting(session.config_dir, session.cwd,
                                                      host_process.arguments(session.pid))
        if word and word not in claude_delivery.INBOUND:
            note("inbound", False, "%s: crossSessionInbound is %s in %s; its host does not know that, and holds"
                 % (name, one_line(word), where), "make it accept, hold or refuse")
        elif word and word != "accept":
            note("inbound", None, "%s: crossSessionInbound is %s in %s" % (name, word, where),
                 "its user wants it so: messages stay held and nobody is asked" if word == "hold" else
                 "its user wants it so: `xmsg send` says refused; a project's file can only make it stricter")
