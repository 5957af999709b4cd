"""`xmsg doctor`: one line for each thing that must be right, and what to do where it is not."""
import json
import os
import time

from contract import OPEN, SCHEMA, Settings, StoreError, age, now_ms, one_line
from store import Store, is_unknown
from xmsg import all_peers, direct_facts, display_name, is_live, route
from sending import look_for_evidence

HERE = os.path.dirname(os.path.realpath(__file__))
SLOW_LOGIN_SHELL = 0.3  # seconds; above this it is worth a word
SLOW_HOOK = 0.5


def examine(settings, environ):
    """All checks, as a list of {check, ok, detail, advice}; advice only where something is to be done.

    ok is True, False, or None for what is merely worth knowing. It repairs hints and sweeps, and says so.
    """
    found = []

    def note(check, ok, detail, advice=""):
        found.append({"check": check, "ok": ok, "detail": detail, "advice": advice if ok is not True else ""})
    bad = []
    Settings(environ, bad)
    note("settings", not bad, "; ".join(bad) or "all are valid", "correct them or unset them")
    store = _store(settings, note)
    _interpreter(settings, environ, note)
    _hooks(store, environ, note)
    _codex_trust(environ, note)
    _costs(settings, environ, note)
    _faults(settings, note)
    for check in (_clock, _hints, _sweep, _rows, _sessions, _claude_inbound) if store else ():
        try:
            check(store, note)
        except StoreError as error:
            note(check.__name__.strip("_"), False, "could not be looked at", str(error))
    return found


def _store(settings, note):
    try:
        store = Store(settings)
    except StoreError as error:
        note("store", False, "cannot be used", str(error))
        return None
    broken = store.integrity()
    note("store", not broken, "%s, schema %d, %d KiB, %d free pages%s" % (
        settings.db, SCHEMA, os.path.getsize(settings.db) // 1024, store.free_pages(),
        ", damaged: " + broken if broken else ""),
        "the file is left as it is; move it away to begin a new one, and keep it for `sqlite3 FILE .recover`")
    loose = store.loose_modes()
    note("modes", not loose, "only you can read it" if not loose else "others can read %s" % ", ".join(loose),
         "chmod go-rwx %s" % " ".join(loose))
    return store


def _interpreter(settings, environ, note):
    import hook_install
    path = os.path.join(os.path.dirname(settings.db), "python")
    try:
        with open(path) as file:
            recorded = file.read(4096).strip()
    except OSError:
        recorded = ""
    works = hook_install.real_interpreter(recorded or None, environ) if recorded else None
    note("interpreter", works == recorded and bool(recorded), recorded or "none is recorded",
         "run `xmsg install`, which records one")


def _hooks(store, environ, note):
    import hook_install
    found = hook_install.hosts_found(environ)
    note("hosts", bool(found) or None, ", ".join(found) or "none found", "install Claude Code, Codex or agy")
    for host in found:
        state = hook_install.check(host, os.path.join(HERE, "xmsg-hook.sh"), environ)
        whole = state["state"] == "installed" and not state["faults"]
        detail = state["state"] + (": " + "; ".join(map(str, state["faults"])) if state["faults"] else "") + (
            ", missing " + ", ".join(state["missing"]) if state["missing"] and state["state"] == "partial" else "")
        note("%s hooks" % host, whole, detail + (" (%s)" % state["detail"] if state["detail"] else ""),
             "`xmsg install --host %s`; a malformed file is corrected by hand first" % host)
        seen = store and store.hook_last_seen(host)
        note("%s hooks seen" % host, True if seen else None,
             "%s ago" % age(now_ms() - seen) if seen else "none has run here yet",
             "start a new session and say a word in it; if this stays, its host does not run the hooks")


def _codex_trust(environ, note):
    import hook_install
    if "codex" not in hook_install.hosts_found(environ):
        return
    try:
        entries = hook_install.codex_trust(environ)
    except hook_install.Refused as error:
        return note("codex trust", False, str(error), "correct the file by hand, then `xmsg install --host codex`")
    bad = [entry for entry in entries if entry["state"] != "trusted"]
    if entries:
        note("codex trust", not bad, "all %d entries are trusted" % len(entries) if not bad else ", ".join(
            "%s %s" % (entry["event"], entry["state"]) for entry in bad),
            "start `codex` and review the hooks (/hooks shows them); Codex skips untrusted ones silently, and trusts "
            "nothing in a copied CODEX_HOME")


def _costs(settings, environ, note):
    """What one hook takes here, empty and with mail, in a store of its own; and the login shell that Codex adds."""
    import shutil
    import subprocess
    import tempfile
    folder = tempfile.mkdtemp(prefix="xmsg-doctor-")
    clean = {key: value for key, value in environ.items()
             if not key.startswith(("XMSG_", "CLAUDE", "CODEX_", "ANTIGRAVITY_"))}
    clean["XMSG_DB"] = os.path.join(folder, "messages.sqlite3")
    payload = json.dumps({"session_id": "doctor-probe", "cwd": folder, "permission_mode": "default",
                          "hook_event_name": "PreToolUse"}, separators=(",", ":")).encode()

    def seconds(command, data=b""):
        begin = time.monotonic()
        try:
            done = subprocess.run(command, input=data, env=clean, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None, b""
        return time.monotonic() - begin, done.stdout
    hook = [os.path.join(HERE, "xmsg-hook.sh"), "claude"]
    try:
        seconds(hook, payload)
        empty = min((seconds(hook, payload)[0] or 10) for _ in range(3))
        seconds([os.path.join(HERE, "bin", "xmsg"), "send", "doctor-probe", "a probe of xmsg doctor", "--no-direct"])
        mail, shown = seconds(hook, payload)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    works = mail is not None and b"a probe of xmsg doctor" in shown
    note("hook", works and mail < SLOW_HOOK, "%.1f ms empty, %.0f ms with mail" % (empty * 1000, mail * 1000) if works
         else "a test message did not come through", "look at the faults below; `xmsg demo` shows the way step by step")
    shell = environ.get("SHELL") or "/bin/sh"
    login, _ = seconds([shell, "-lc", ":"])
    note("login shell", None if login is None or login > SLOW_LOGIN_SHELL else True,
         "%s -lc takes %.0f ms, in which Codex starts every hook" % (shell, login * 1000) if login is not None
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
    try:
        newest = "%(where)s: %(fault)s" % json.loads(newest)
    except (ValueError, KeyError, TypeError):
        pass
    note("faults", not lines, "no hook has failed" if not lines else "%d swallowed, the newest: %s" % (
        len(lines), one_line(newest)[:300]), "mend what it says, then `rm %s.faults*`" % settings.db)


def _clock(store, note):
    ahead = store.newest_time() - now_ms()
    right = ahead < 60000
    note("clock", right, "runs forward" if right else "the store holds times %s ahead of now" % age(ahead),
         "set the clock; waiting messages keep their time to live")


def _hints(store, note):
    raised = store.repair_hints()
    note("hints", True, "agree with the store" if not raised else "%d were missing and are there again" % raised)


def _sweep(store, note):
    total = {}
    while True:
        counts = store.sweep(now_ms(), anything=True)
        total = {key: total.get(key, 0) + value for key, value in counts.items()}
        if not any(counts.values()):
            break
    note("sweep", True, ", ".join("%d %s" % (value, key) for key, value in total.items()))


def _rows(store, note):
    look_for_evidence(store, store.targets_open(), seconds=2.0)
    rows = store.messages(states=OPEN)
    unknown = [row["id"] for row in rows if is_unknown(row)]
    held = [row["id"] for row in rows if row["state"] == "held"]
    note("UNKNOWN", not unknown, "none" if not unknown else "messages %s" % _ids(unknown),
         "look in the receiving session, then `xmsg resolve ID --delivered|--requeue|--drop`")
    note("held", None if held else True, "none" if not held else "messages %s" % _ids(held),
         "the receiving session asks its user; answer there")
    now = now_ms()
    lost = [row["id"] for row in store.queued() if not _reachable(store, row, now)]
    note("waiting", None if lost else True, "nothing waits for a session that is not open" if not lost
         else "messages %s wait for sessions that are not open" % _ids(lost),
         "open them again (claude --resume, codex resume), or `xmsg cancel ID`")


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
                 "its user wants it so: messages wait for an answer there" if word == "hold" else
                 "its user wants it so: `xmsg send` says refused; a project's file can only make it stricter")
