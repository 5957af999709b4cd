#!/bin/bash -p
# Hook entry of xmsg: xmsg-hook.sh HOST [EVENT], the host's payload on stdin.
#
# It answers with one JSON object or nothing and always leaves with 0. The one exception is `claude FileChanged`, which
# wakes an idle session by status 2 with the text on stderr, and only for text that xmsg.py has claimed and marked so.
# XMSG_NO_FAILOPEN=1 lets every fault through: it exists to prove that the net is real.
#
# Fast path: builtins alone decide "nothing to do" from files that xmsg.py keeps beside the database; any doubt starts
# Python. `bash -p` ignores BASH_ENV and exported functions; stdin is a socket under Node, so it is only ever read().

ALRM=14
umask 077
stderr=3
exec 3>&2 || stderr=''
[[ ${XMSG_NO_FAILOPEN-} == 1 ]] || exec 2>/dev/null

host=${1-} event=${2-}
here=${BASH_SOURCE[0]%/*}
impl=${XMSG_IMPL:-$here/xmsg.py}
[[ -n ${HOME-} ]] || unset HOME  # set but empty, ~ would be the root of the file system
db=${XMSG_DB:-~/.local/share/agent-msg/messages.sqlite3}
hints=$db.hints
head='' more=''

drain() {
    /bin/cat >/dev/null
}

# Takes up to 1,024 bytes of the payload into $head; more=1 if bytes may be left on stdin.
# `read` takes a byte per system call and -t adds three more, so -t stands on the first byte only.
take_head() {
    local LC_ALL=C first='' rest=''
    IFS= read -r -t 2 -d '' -n 1 first || return
    if IFS= read -r -d '' -n 1023 rest; then
        more=1
        # A read that ends early has swallowed a NUL byte, which no JSON holds: keep the payload as broken as it is.
        [[ ${#rest} == 1023 ]] || rest+=$'\1'
    fi
    [[ -n $first ]] || first=$'\1'
    head=$first$rest
}

# True if Python would have nothing to do: the payload begins with exactly what was registered last, and no mail waits.
nothing_to_do() {
    local LC_ALL=C session prefix spool known=''
    [[ $head == '{"session_id":"'* ]] || return 1
    session=${head:15:130}
    session=${session%%\"*}
    [[ $session == [0-9A-Za-z]* && $session != *[!0-9A-Za-z._-]* && ${#session} -le 128 ]] || return 1
    [[ -e $db && ! -e $hints/mail/$session ]] || return 1
    if [[ $event == FileChanged ]]; then
        [[ $head == *'"hook_event_name":"FileChanged"'* ]]
        return
    fi
    # These say or tell something every time: what the session is to watch, and its title.
    [[ $head != *SessionStart* && $head != *CwdChanged* && $head != *UserPromptSubmit* ]] || return 1
    if [[ $host == codex ]]; then
        # What left a sandbox: a file, or a line that a tool call printed, of which the payload's end may hold all.
        [[ $head != *'"hook_event_name":"P'*'ToolUse"'*xmsg* ]] || return 1
        spool=xmsg-$EUID${db//\//%}/$session
        [[ ! -e /tmp/$spool && ! -e ${TMPDIR:-/tmp}/$spool ]] || return 1
    fi
    while IFS= read -r prefix; do
        [[ -n $prefix && $head == "$prefix"* ]] && known=1 && break
    done < "$hints/peer/$session"
    [[ -n $known ]] || return 1
    printf . 1<> "$hints/live/$session" || return 1  # not truncated, which would take a third of a millisecond
    # The time of peer/ lies ahead: it is the deadline of the next full run, compared by the file system alone.
    [[ ! $hints/live/$session -nt $hints/peer/$session ]]
}

find_python() {
    local recorded=${db%/*}/python
    python=''
    [[ -f $recorded && -O $recorded ]] && IFS= read -r python < "$recorded"
    [[ $python == /* && -x $python ]] && return
    for python in /usr/bin/python3 /usr/local/bin/python3 /opt/homebrew/bin/python3 "$(type -P python3)"; do
        [[ -x $python ]] && return
    done
}

# The alarm keeps its default action, which ends Python even inside SQLite's own waiting; `timeout` is missing on macOS.
# _exit leaves out the interpreter's own tidying, a tenth of the whole; `_signal`, the enums of `signal`;
# and a process of 30 ms has no garbage to collect.
run_python() {
    XMSG_HOOK_HEAD=$head "$python" -I -S -c '
import _signal, gc, os, sys
gc.disable()
_signal.setitimer(_signal.ITIMER_REAL, float(sys.argv[2]))
if sys.version_info < (3, 9):
    os._exit(3)
sys.path.append(sys.argv[1])
from xmsg import hook_main
os._exit(hook_main(sys.argv[3:]))' "${impl%/*}" "$limit" "$host" "$event" "$@"
}

take_head
if [[ $? -gt 128 ]]; then  # a host that sends nothing
    exit 0
fi
if nothing_to_do; then
    [[ -z $more ]] || drain
    exit 0
fi

status=2
wakes=''
if [[ -r $impl ]] && find_python; then
    if [[ $host == claude && $event == FileChanged ]]; then
        limit=580
        # The text goes straight to the host's stderr, once it is claimed; this line says that it did.
        text=$(run_python $stderr)
        status=$?
        [[ $text != 'xmsg wakes' ]] || wakes=1
    else
        limit=${XMSG_HOOK_TIMEOUT:-3}
        # Below the 5 s that the hosts give, whatever the environment says.
        [[ $limit =~ ^[0-4](\.[0-9])?$ && $limit != 0 && $limit != 0.0 ]] || limit=3
        run_python 3>&-
        status=$?
    fi
fi
# The newest fault that Python could not write down itself, an alarm among them.
if [[ $status != 0 && ${XMSG_NO_FAILOPEN-} != 1 && -d $hints ]]; then
    printf '{"where": "%s %s", "fault": "python ended with status %d"}\n' "${host//[!a-z]/}" "${event//[!A-Za-z]/}" \
        "$status" > "$db.faults.shell"
fi
# After the alarm stdin may never end; any other fault may have left it unread, and an unread stdin is an error to Codex.
[[ $status == 0 || $status == $((128 + ALRM)) ]] || drain
[[ -z $wakes ]] || exit 2
[[ ${XMSG_NO_FAILOPEN-} != 1 ]] || exit "$status"
exit 0
