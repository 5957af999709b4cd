"""Hook entries in the hosts' own configuration: plan, apply, remove, check.

Three files belong to other people: Claude Code's settings.json, Codex's hooks.json and agy's hooks.json. Only the bytes
of our own entries change in them; a file that cannot be changed safely stays as it is, and the record says why.
All three hosts read strict JSON: measured on Claude Code 2.1.281 and 2.1.332, Codex 0.156.1 and 0.171.0, a comment or a
trailing comma makes the host drop the whole file, so such a file counts as malformed here too.
Nothing here prints or exits: functions return records, plain dicts that go into JSON as they are.
"""
import contextlib
import difflib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections import namedtuple

Entry = namedtuple("Entry", "host event matcher words timeout wakes")
Entry.__doc__ = """One hook handler of ours. words: what follows the wrapper in its command; timeout: seconds;
wakes: the handler runs in the background, and its exit 2 wakes an idle session (Claude Code's asyncRewake)."""

# Everything derives from this table; entries of one event that stand together share a group.
ENTRIES = (
    Entry("claude", "SessionStart", None, "claude", 5, False),
    Entry("claude", "SessionStart", None, "claude FileChanged", 600, True),
    Entry("claude", "UserPromptSubmit", None, "claude", 5, False),
    Entry("claude", "PreToolUse", "*", "claude", 5, False),
    Entry("claude", "PostToolUse", "*", "claude", 5, False),
    Entry("claude", "Stop", None, "claude", 5, False),
    Entry("claude", "FileChanged", None, "claude FileChanged", 600, True),
    Entry("claude", "CwdChanged", None, "claude", 5, False),
    Entry("claude", "CwdChanged", None, "claude FileChanged", 600, True),
    Entry("codex", "SessionStart", None, "codex", 5, False),
    Entry("codex", "UserPromptSubmit", None, "codex", 5, False),
    Entry("codex", "PreToolUse", "*", "codex", 5, False),
    Entry("codex", "PostToolUse", "*", "codex", 5, False),
    Entry("codex", "Stop", None, "codex", 5, False),
    Entry("agy", "SessionStart", None, "agy SessionStart", 5, False),
    Entry("agy", "PreInvocation", None, "agy PreInvocation", 5, False),
    Entry("agy", "Stop", None, "agy Stop", 5, False),
)
HOSTS = ("claude", "codex", "agy")
WRAPPER_NAME = "xmsg-hook.sh"
# The member of the file that holds lists by event.
HOLDER = {"claude": "hooks", "codex": "hooks", "agy": "xmsg"}
# Codex binds trust to <file>:<event>:<group>:<handler>, so what stands before somebody's handler has to keep its place.
# Measured on 0.156.1 and 0.171.0: an empty group is silent; a handler with an empty command is skipped, with a warning.
EMPTY_GROUP = {"matcher": "xmsg-placeholder", "hooks": []}
EMPTY_HANDLER = {"type": "command", "command": "", "statusMessage": "xmsg-placeholder"}
# A handler with any other field (async, once, if, ...) may not do what ours has to do.
KNOWN_FIELDS = {"type", "command", "timeout", "asyncRewake", "statusMessage"}
BACKUP_SUFFIX = ".before-xmsg"
NO_FILE_BEFORE = "# xmsg: there was no file here before; folders made: "
LARGEST_FILE = 16 << 20
DEEPEST = 128
LOCK_PATIENCE = 5.0
CODEX_TRUST = ("Codex runs them only after you confirm them: the next start of codex asks (\"Hooks need review\"), "
               "later /hooks does")
BOM = b"\xef\xbb\xbf"


class Refused(Exception):
    """A file that stays as it is; the text says why, and where when it is about its content."""


# ---------------------------------------------------------------- entries

def _handler(entry, wrapper):
    handler = {"type": "command", "command": "%s %s" % (shlex.quote(wrapper), entry.words), "timeout": entry.timeout}
    return dict(handler, asyncRewake=True) if entry.wakes else handler


def _group(chosen, wrapper):
    group = {} if chosen[0].matcher is None else {"matcher": chosen[0].matcher}
    return dict(group, hooks=[_handler(entry, wrapper) for entry in chosen])


def _by_event(host):
    events = {}
    for entry in ENTRIES:
        if entry.host == host:
            events.setdefault(entry.event, []).append(entry)
    return events


def _additions(host, chosen, wrapper):
    """What goes into a list by event for these entries: groups, and for agy the handlers themselves."""
    return [_handler(entry, wrapper) for entry in chosen] if host == "agy" else [_group(chosen, wrapper)]


def entries(host, wrapper):
    """The whole content of a host's file that holds nothing but our entries. wrapper: absolute path, not quoted."""
    lists = {event: _additions(host, chosen, wrapper) for event, chosen in _by_event(host).items()}
    return {HOLDER[host]: lists}


def label(entry):
    """How an entry is called in reports: its event, and for a waking entry beside an ordinary one also its words."""
    return "%s (%s)" % (entry.event, entry.words) if entry.wakes and entry.event != "FileChanged" else entry.event


def _own_command(handler):
    """(path of the wrapper, the words after it) of a handler of ours or of the earlier xmsg, else None."""
    command = handler.get("command") if isinstance(handler, dict) else None
    return _own_words(command) if isinstance(command, str) and WRAPPER_NAME in command else None


@functools.lru_cache(maxsize=64)
def _own_words(command):
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if 2 <= len(words) <= 3 and os.path.basename(words[0]) == WRAPPER_NAME and words[1] in HOSTS:
        return words[0], " ".join(words[1:])
    return None


def _same_file(script, wrapper):
    try:
        return script == wrapper or os.path.samefile(os.path.expanduser(os.path.expandvars(script)), wrapper)
    except OSError:
        return False


def _covers_all(group):
    return group.get("matcher") in (None, "", "*")


def _serves(handler, entry, wrapper):
    """Whether this handler of ours does all that the entry has to do, though it may be written differently.

    What serves stays to the byte: in Codex any other command, timeout or matcher would have to be confirmed again.
    """
    timeout = handler.get("timeout", entry.timeout)
    return (_same_file(_own_command(handler)[0], wrapper) and set(handler) <= KNOWN_FIELDS
            and handler.get("type") == "command" and bool(handler.get("asyncRewake", False)) == entry.wakes
            and type(timeout) is int and timeout >= entry.timeout)


# ---------------------------------------------------------------- places of the files

def _home(environ):
    return environ.get("HOME") or os.path.expanduser("~")


def config_path(host, environ):
    """The file that a host reads hooks from; honours CLAUDE_CONFIG_DIR, CODEX_HOME and HOME."""
    if host == "claude":
        folder, name = environ.get("CLAUDE_CONFIG_DIR") or os.path.join(_home(environ), ".claude"), "settings.json"
    elif host == "codex":
        folder, name = environ.get("CODEX_HOME") or os.path.join(_home(environ), ".codex"), "hooks.json"
    else:
        folder, name = os.path.join(_home(environ), ".gemini", "config"), "hooks.json"
    return os.path.abspath(os.path.join(folder, name))


def _codex_source(environ):
    """The path of hooks.json as Codex writes it into its keys.

    Measured on 0.156.1 and 0.171.0: links are resolved in CODEX_HOME if it is set, not in HOME or ~/.codex, and never
    in the last component.
    """
    path = config_path("codex", environ)
    if environ.get("CODEX_HOME"):
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return path


def hosts_found(environ):
    """The hosts of this user: one counts as found by its folder or by its program on PATH."""
    found = []
    for host in HOSTS:
        folders = [os.path.dirname(config_path(host, environ))]
        if host == "agy":
            folders.append(os.path.join(_home(environ), ".gemini", "antigravity-cli"))
        if any(map(os.path.isdir, folders)) or shutil.which(host, path=environ.get("PATH", "")):
            found.append(host)
    return found


# ---------------------------------------------------------------- JSON with places

# kind: object, array, scalar; start and end: offsets in the text; items: of a container, in order, else ().
Node = namedtuple("Node", "kind start end items")
# key and start: of an object's member (start is where its key begins); in an array None and where the value begins.
Item = namedtuple("Item", "key start node")

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"')
_WORD = re.compile(r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9A-Za-z_.+-])")


def _place(text, position):
    line = text.count("\n", 0, position) + 1
    return "%d:%d" % (line, position - (text.rfind("\n", 0, position) + 1) + 1)


def _fail(text, position, reason):
    raise Refused("%s: %s" % (_place(text, position), reason))


def _unexpected(text, position, expected):
    if position >= len(text):
        _fail(text, position, "the text ends where %s should be" % expected)
    if text[position] in "/#":
        _fail(text, position, "a comment; the host does not load a file with comments")
    if text[position] == '"':
        _fail(text, position, "a string that is not closed or holds what JSON does not allow")
    _fail(text, position, "%s should be here, not %r" % (expected, text[position]))


def _parse_value(text, position, depth):
    mark = text[position:position + 1]
    if mark == "{" or mark == "[":
        if depth >= DEEPEST:
            _fail(text, position, "nested deeper than %d levels" % DEEPEST)
        return _parse_container(text, position, depth + 1)
    match = (_STRING if mark == '"' else _WORD).match(text, position)
    if not match:
        _unexpected(text, position, "a value")
    return Node("scalar", position, match.end(), ())


def _parse_container(text, start, depth):
    is_object, close = text[start] == "{", "}" if text[start] == "{" else "]"
    items, skip = [], _SPACE.match
    position = skip(text, start + 1).end()
    while not (text.startswith(close, position) and not items):
        begin, key = position, None
        if text.startswith(close, position):
            _fail(text, position, "a comma before the closing %s; the host does not load such a file" % close)
        if is_object:
            match = _STRING.match(text, position)
            if not match:
                _unexpected(text, position, "a name in double quotes")
            key = match.group()[1:-1] if "\\" not in match.group() else json.loads(match.group())
            position = skip(text, match.end()).end()
            if not text.startswith(":", position):
                _unexpected(text, position, "':'")
            position = skip(text, position + 1).end()
        node = _parse_value(text, position, depth)
        items.append(Item(key, begin, node))
        position = skip(text, node.end).end()
        if text.startswith(close, position):
            break
        if not text.startswith(",", position):
            _unexpected(text, position, "',' or '%s'" % close)
        position = skip(text, position + 1).end()
    return Node("object" if is_object else "array", start, position + 1, items)


@functools.lru_cache(maxsize=4)
def _parse(text):
    """The tree of a JSON text whose root is an object; Refused with line:column otherwise."""
    root = _parse_value(text, _SPACE.match(text).end(), 0)
    rest = _SPACE.match(text, root.end).end()
    if rest < len(text):
        _unexpected(text, rest, "the end of the text")
    if root.kind != "object":
        _fail(text, root.start, "the file should hold an object")
    return root


def _value(text, node):
    return json.loads(text[node.start:node.end])


def _member(text, node, key):
    """The member of an object by its name, None if absent. Hosts differ on a name that stands twice: Refused."""
    found = [item for item in node.items if item.key == key]
    if len(found) > 1:
        _fail(text, found[1].start, "%s stands twice" % json.dumps(key))
    return found[0] if found else None


def _expect(text, item, kind, path):
    if item.node.kind != kind:
        _fail(text, item.node.start, "%s should be %s" % (path, "an object" if kind == "object" else "a list"))


# ---------------------------------------------------------------- edits that keep the style of a file

Style = namedtuple("Style", "eol unit inline spaced")


def _own_line(text, position):
    """The white space before the position if nothing else precedes it on its line, else None."""
    start = text.rfind("\n", 0, position) + 1
    return text[start:position] if start and not text[start:position].strip(" \t\r") else None


def _line_indent(text, position):
    start = text.rfind("\n", 0, position) + 1
    return re.compile(r"[ \t]*").match(text, start, position).group()


def _style_of(text, root):
    newline = text.find("\n")
    eol = "\r\n" if newline > 0 and text[newline - 1] == "\r" else "\n"
    if not root.items:
        return Style(eol, "  ", False, True)
    first, outer = root.items[0], _line_indent(text, root.start)
    indent = _own_line(text, first.start)
    spaced = text[first.node.start - 1] in " \t"
    if indent is None:
        return Style(eol, "  ", True, spaced)
    return Style(eol, indent[len(outer):] if indent.startswith(outer) else "  ", False, True)


def _render(value, style, indent, inline, key=None):
    """JSON text for a value, as a member if key is given, for a line that begins with indent."""
    if inline:
        separators = (", ", ": ") if style.spaced else (",", ":")
        text = json.dumps(value, ensure_ascii=False, separators=separators)
    else:
        text = json.dumps(value, ensure_ascii=False, indent=style.unit).replace("\n", style.eol + indent)
    if key is None:
        return text
    return json.dumps(key, ensure_ascii=False) + (":" if inline and not style.spaced else ": ") + text


def _rewrite(text, style, container, drop, add):
    """Edits (start, end, text) that drop items by index and add (key, value) pairs at the end of a container.

    Where both are asked for, an addition takes the place of what goes.
    """
    items, drop, add = container.items, sorted(drop), list(add)
    last = items[-1] if items else None
    indent = _own_line(text, last.start) if last else None
    inline = indent is None if last else style.inline
    edits = []
    while drop and add:
        index, (key, value) = drop.pop(0), add.pop(0)
        edits.append((items[index].start, items[index].node.end, _render(value, style, indent or "", inline, key)))
    if add and last:
        gap = (", " if style.spaced else ",") if inline else "," + style.eol + indent
        added = "".join(gap + _render(value, style, indent or "", inline, key) for key, value in add)
        edits.append((last.node.end, last.node.end, added))
    elif add:
        outer = _line_indent(text, container.start)
        inner = outer + style.unit
        rendered = [_render(value, style, inner, inline, key) for key, value in add]
        if inline:
            filling = (", " if style.spaced else ",").join(rendered)
        else:
            filling = "".join([style.eol + inner, ("," + style.eol + inner).join(rendered), style.eol + outer])
        edits.append((container.start + 1, container.end - 1, filling))
    elif drop and len(drop) == len(items):
        edits.append((container.start + 1, container.end - 1, ""))
    else:
        kept = max(set(range(len(items))) - set(drop), default=0)
        edits += [(items[index].start, items[index + 1].start, "") if index < kept else
                  (items[index - 1].node.end, items[index].node.end, "") for index in drop]
    return edits


def _replacement(text, style, node, value):
    inline = "\n" not in text[node.start:node.end]
    return node.start, node.end, _render(value, style, _line_indent(text, node.start), inline)


def _apply_edits(text, edits):
    parts, position = [], 0
    for start, end, replacement in sorted(edits):
        if start < position:
            raise Refused("two changes would overlap; nothing was changed")
        parts += [text[position:start], replacement]
        position = end
    return "".join(parts) + text[position:]


# ---------------------------------------------------------------- the plan

# One handler in a file. holder, event, group, index: names and positions; whole: the group that holds it ({} for agy).
Slot = namedtuple("Slot", "holder event group index whole handler node")


def _holders(host, text, root):
    """The members that hold lists by event: "hooks", for agy every named hook."""
    item = _member(text, root, HOLDER[host])
    if item is not None:
        _expect(text, item, "object", '"%s"' % HOLDER[host])
    if host == "agy":
        return [item for item in root.items if item.node.kind == "object"]
    return [] if item is None else [item]


def _lists(host, text, root):
    """(holder, member) for every list by event. A list that we do not need and that is none is not ours to judge."""
    for holder in _holders(host, text, root):
        events = _by_event(host) if holder.key == HOLDER[host] else ()
        for event in events:
            item = _member(text, holder.node, event)
            if item is not None:
                _expect(text, item, "array", "%s.%s" % (holder.key, event))
        for item in holder.node.items:
            if item.node.kind == "array":
                yield holder, item


def _slots(host, text, holder, member):
    """Every handler of one list, with its place."""
    values = _value(text, member.node)
    for position, (item, value) in enumerate(zip(member.node.items, values)):
        if host == "agy":
            yield Slot(holder.key, member.key, None, position, {}, value, item.node)
        elif isinstance(value, dict) and isinstance(value.get("hooks"), list):
            hooks = _member(text, item.node, "hooks").node
            for index, (inner, handler) in enumerate(zip(hooks.items, value["hooks"])):
                yield Slot(holder.key, member.key, position, index, value, handler, inner.node)


def _own_slots(host, text, root):
    return [slot for holder, member in _lists(host, text, root) for slot in _slots(host, text, holder, member)
            if _own_command(slot.handler)]


def _choose(host, own, wrapper):
    """({slot: entry} that stay or change in place, entries that are missing)."""
    chosen, missing = {}, []
    for event, wanted in _by_event(host).items():
        for entry in wanted:
            fitting = [slot for slot in own if slot.event == event and _covers_all(slot.whole)
                       and _own_command(slot.handler)[1] == entry.words]
            serving = [slot for slot in fitting if _serves(slot.handler, entry, wrapper)]
            if fitting:
                chosen[(serving or fitting)[0].node.start] = entry
            else:
                missing.append(entry)
    return chosen, missing


def _plan_handlers(host, text, style, slots, container, drop):
    """Edits that take handlers out of one list of handlers; in Codex those before somebody else's leave a stand-in."""
    stay = [slot.index for slot in slots if slot.node.start not in drop]
    last = max(stay, default=-1) if host == "codex" else -1
    edits, gone = [], []
    for slot in slots:
        if slot.node.start in drop:
            if slot.index > last:
                gone.append(slot.index)
            elif slot.handler != EMPTY_HANDLER:
                edits.append(_replacement(text, style, slot.node, EMPTY_HANDLER))
    return edits + (_rewrite(text, style, container, gone, ()) if gone else [])


def _plan_list(host, text, style, holder, member, drop, add, purge):
    """(edits, whether the list is left empty) for one list by event.

    drop: where the handlers start that go; add: groups (agy: handlers) that come; purge: also our stand-ins go.
    """
    slots = list(_slots(host, text, holder, member))
    drop = drop | {slot.node.start for slot in slots if purge and slot.handler == EMPTY_HANDLER}
    if host == "agy":
        gone = [slot.index for slot in slots if slot.node.start in drop]
        left = len(member.node.items) - len(gone) + len(add)
        return _rewrite(text, style, member.node, gone, [(None, value) for value in add]), left == 0
    values, edits, going = _value(text, member.node), [], []
    groups = [[] for _ in values]
    for slot in slots:
        groups[slot.group].append(slot)
    for value, inner in zip(values, groups):
        going.append(value == EMPTY_GROUP and purge or
                     bool(inner) and all(slot.node.start in drop for slot in inner))
    last = max((position for position, goes in enumerate(going) if not goes), default=-1) if host == "codex" else -1
    gone = [position for position, goes in enumerate(going) if goes and position > last]
    for position, (value, inner) in enumerate(zip(values, groups)):
        group = member.node.items[position].node
        if add and host == "codex" and (value == EMPTY_GROUP or going[position] and position not in gone):
            edits.append(_replacement(text, style, group, add.pop(0)))
        elif going[position]:
            if position not in gone and value != EMPTY_GROUP:
                edits.append(_replacement(text, style, group, EMPTY_GROUP))
        elif any(slot.node.start in drop for slot in inner):
            hooks = _member(text, group, "hooks").node
            edits += _plan_handlers(host, text, style, inner, hooks, drop)
    edits += _rewrite(text, style, member.node, gone, [(None, value) for value in add])
    return edits, len(gone) == len(values) and not add


def _fill_stand_ins(host, text, style, slots, missing, wrapper):
    """Handlers of ours go back into the places that an uninstall kept for them: (edits, entries still missing)."""
    edits, left = [], list(missing)
    for slot in slots:
        if slot.handler == EMPTY_HANDLER and _covers_all(slot.whole):
            entry = next((entry for entry in left if entry.event == slot.event), None)
            if entry:
                left.remove(entry)
                edits.append(_replacement(text, style, slot.node, _handler(entry, wrapper)))
    return edits, left


def _plan(host, text, wrapper, keep=frozenset()):
    """The text with our entries in it, or without them if wrapper is None.

    keep: members (holder,) and (holder, event) that stay though nothing is left in them.
    Entries that serve stay as they are, others of ours change in place, what is missing comes at the end.
    """
    root = _parse(text)
    style = _style_of(text, root)
    own = _own_slots(host, text, root)
    chosen, missing = _choose(host, own, wrapper) if wrapper else ({}, [])
    by_start = {slot.node.start: slot for slot in own}
    drop = set(by_start) - set(chosen)
    edits = [_replacement(text, style, by_start[start].node, _handler(entry, wrapper))
             for start, entry in chosen.items() if not _serves(by_start[start].handler, entry, wrapper)]
    lists = list(_lists(host, text, root))
    if wrapper and host == "codex":
        slots = [slot for holder, member in lists for slot in _slots(host, text, holder, member)]
        filled, missing = _fill_stand_ins(host, text, style, slots, missing, wrapper)
        edits += filled
    additions = {event: _additions(host, [entry for entry in missing if entry.event == event], wrapper)
                 for event in _by_event(host) if any(entry.event == event for entry in missing)}
    gone_holders, added_holder = [], []
    members = {}
    for holder, member in lists:
        members.setdefault(holder.start, []).append(member)
    for holder in _holders(host, text, root):
        ours, gone = holder.key == HOLDER[host], []
        for member in members.get(holder.start, ()):
            add = additions.pop(member.key, []) if ours else []
            list_edits, empty = _plan_list(host, text, style, holder, member, drop, add, purge=not wrapper)
            touched = bool(list_edits)
            if empty and touched and (holder.key, member.key) not in keep:
                gone.append(holder.node.items.index(member))
            else:
                edits += list_edits
        add = list(additions.items()) if ours else []
        if ours:
            additions = {}
        if gone and len(gone) == len(holder.node.items) and not add and (holder.key,) not in keep:
            gone_holders.append(root.items.index(holder))
        else:
            edits += _rewrite(text, style, holder.node, gone, add)
    if additions:
        added_holder = [(HOLDER[host], additions)]
    edits = [edit for edit in edits if not any(root.items[index].start <= edit[0] < root.items[index].node.end
                                               for index in gone_holders)]
    edits += _rewrite(text, style, root, gone_holders, added_holder)
    planned = _apply_edits(text, [edit for edit in edits if text[edit[0]:edit[1]] != edit[2]])
    _verify(host, text, planned, wrapper)
    return planned


def _foreign(host, text):
    """(everything that is not ours, the places of other people's handlers in Codex): what no plan may change."""
    content, places = json.loads(text), []
    names = list(content) if host == "agy" else [HOLDER[host]]
    for name in names:
        holder = content.get(name)
        if not isinstance(holder, dict):
            continue
        for event, groups in list(holder.items()):
            if not isinstance(groups, list):
                continue
            left = []
            for position, group in enumerate(groups):
                if host != "agy" and isinstance(group, dict) and isinstance(group.get("hooks"), list):
                    for index, handler in enumerate(group["hooks"]):
                        if not _own_command(handler) and handler != EMPTY_HANDLER:
                            places.append((event, position, index, json.dumps(handler)))
                    others = [handler for handler in group["hooks"]
                              if not _own_command(handler) and handler != EMPTY_HANDLER]
                    if others or not group["hooks"] and group != EMPTY_GROUP:
                        left.append(dict(group, hooks=others))
                elif not _own_command(group):
                    left.append(group)
            holder[event] = left
            if not left:
                del holder[event]
        if not holder:
            del content[name]
    return content, places if host == "codex" else None


def _verify(host, before, after, wrapper):
    """Reads a plan's result as the host will, and refuses it unless only our entries differ."""
    try:
        own = _own_slots(host, after, _parse(after))
        chosen, missing = _choose(host, own, wrapper) if wrapper else ({}, [])
        complete = not missing and len(chosen) == len(own) and all(
            _serves(slot.handler, chosen[slot.node.start], wrapper) for slot in own)
        unchanged = _foreign(host, before) == _foreign(host, after)
    except (Refused, ValueError) as fault:
        raise Refused("the change could not be made safely (%s); nothing was changed" % fault)
    if not complete or not unchanged:
        raise Refused("the change would have touched other entries; nothing was changed")


def _fresh(host, wrapper):
    return json.dumps(entries(host, wrapper), indent=2, ensure_ascii=False) + "\n"


def _with_ours(host, text, wrapper):
    return _plan(host, text, wrapper) if text.strip(" \t\r\n") else _fresh(host, wrapper)


def _members_to_keep(host, text):
    """What uninstall leaves although it is empty, because it was there without anything of ours in it."""
    if not text or not text.strip(" \t\r\n"):
        return frozenset()
    root = _parse(text)
    own = _own_slots(host, text, root)
    keep = {(holder.key,) for holder in _holders(host, text, root)}
    keep |= {(holder.key, member.key) for holder, member in _lists(host, text, root)}
    return frozenset(keep - {(slot.holder,) for slot in own} - {(slot.holder, slot.event) for slot in own})


# ---------------------------------------------------------------- files

def _read(path):
    """(bytes, stat) of a regular file, (None, None) if there is none. Never blocks on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("it is not a regular file")
        if status.st_size > LARGEST_FILE:
            raise Refused("it is larger than %d MiB" % (LARGEST_FILE >> 20))
        return file.read(), status


def _decode(host, raw):
    """(byte order mark, text) of a file's bytes; Refused with line:column if a host could not read it."""
    mark, rest = (BOM, raw[len(BOM):]) if raw.startswith(BOM) else (b"", raw)
    if mark and host == "codex":
        raise Refused("1:1: a byte order mark, with which Codex does not load the file")
    try:
        return mark, rest.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = rest.count(b"\n", 0, fault.start) + 1
        column = len(rest[rest.rfind(b"\n", 0, fault.start) + 1:fault.start].decode("utf-8", "replace")) + 1
        raise Refused("%d:%d: not UTF-8" % (line, column))


def _missing_folders(path):
    """The folders above a path that do not exist, innermost first."""
    missing, folder = [], os.path.dirname(path)
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _require_writable(path, target, status):
    if status is not None and not (status.st_mode & 0o222 and os.access(target, os.W_OK)):
        raise Refused("it is read-only (mode %04o); make it writable, or add the entries of hook-config.diff where "
                      "it is made" % stat.S_IMODE(status.st_mode))
    if status is not None and status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise Refused("it belongs to another user")
    for name in {path, target}:
        missing = _missing_folders(name)
        if missing and name != path:
            raise Refused("it is a link into a folder that does not exist: %s" % os.path.dirname(target))
        folder = os.path.dirname(missing[-1]) if missing else os.path.dirname(name)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise Refused("its folder %s is read-only" % folder)


def _sync_folder(folder):
    """Best effort: what was renamed stands, whether or not the file system can promise it for a power cut."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write(path, raw, like):
    """Puts bytes in the place of a file at once: a crash leaves the old file or the new one. like: stat to keep."""
    folder, name = os.path.split(path)
    # One name suffices below the lock, and what a killed run left behind goes with the next one.
    temporary = os.path.join(folder, ".%s.xmsg-new" % name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            made = os.fstat(descriptor)
            if like is not None:
                if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                    os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
            file.write(raw)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


@contextlib.contextmanager
def _locked(folders):
    """One installer at a time per folder; the lock goes with the process. Refused after LOCK_PATIENCE seconds."""
    deadline = time.monotonic() + LOCK_PATIENCE
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Refused("another installation is at work in %s" % folder)
                    time.sleep(0.02)
                except OSError:  # a file system without locks
                    break
        yield


def _read_backup(path):
    """What was there before xmsg: (bytes or None for "no file", folders made), or None without a backup."""
    try:
        descriptor = os.open(path + BACKUP_SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        raw = file.read(LARGEST_FILE)
    match = re.match(re.escape(NO_FILE_BEFORE.encode()) + rb"([0-9]{1,2})\n\Z", raw)
    return (None, int(match.group(1))) if match else (raw, 0)


def _forget(path, backup, file_is_gone):
    """Removes the backup, and after a file that install made also the folders that it made for it."""
    if backup is None:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + BACKUP_SUFFIX)
    folder = os.path.dirname(path)
    for _ in range(backup[1] if file_is_gone else 0):
        with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
            os.rmdir(folder)
        folder = os.path.dirname(folder)


# ---------------------------------------------------------------- diff and records

def _lines(text):
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _diff(path, before, after):
    """A unified diff of two texts, None standing for a file that is not there."""
    old, new = _lines(before or ""), _lines(after or "")
    # What is equal at both ends goes first: difflib is slow on large files.
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    skip, cut = max(same - 3, 0), max(tail - 3, 0)
    shown = difflib.unified_diff(old[skip:len(old) - cut], new[skip:len(new) - cut],
                                 "/dev/null" if before is None else path, "/dev/null" if after is None else path)
    out = []
    for line in shown:
        if line.startswith("@@"):
            line = re.sub(r"(?<=[-+])(\d+)", lambda number: str(int(number.group()) + skip), line)
        out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out)


def _record(host, path, action, detail="", diff=""):
    return {"host": host, "path": path, "action": action, "detail": detail, "diff": diff}


def _sentence(fault):
    return "%s (%s)" % (fault.strerror or fault, fault.filename) if fault.filename else str(fault)


def _each(hosts, environ, change):
    """One record a host, whatever happens to the others."""
    records = []
    for host in hosts:
        path = config_path(host, environ)
        try:
            records.append(change(host, path))
        except Refused as fault:
            records.append(_record(host, path, "refused", str(fault)))
        except OSError as fault:
            records.append(_record(host, path, "refused", _sentence(fault)))
    return records


# ---------------------------------------------------------------- install and uninstall

def _check_wrapper(wrapper):
    if not os.path.isabs(wrapper) or os.path.basename(wrapper) != WRAPPER_NAME:
        raise ValueError("the wrapper is not an absolute path of %s: %r" % (WRAPPER_NAME, wrapper))
    try:
        wrapper.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("the path of xmsg is not UTF-8, which no host's file can hold: %s" % ascii(wrapper))


def install(hosts, wrapper, environ, dry_run=False):
    """Adds our entries to the configuration of these hosts; one record a host, never an exception for a file.

    A record is {host, path, action, detail, diff}; action: added, replaced (entries of ours or of the earlier xmsg were
    there and changed), unchanged, refused (the file is as it was). With dry_run nothing is written.
    wrapper: absolute path of xmsg-hook.sh, else ValueError.
    """
    def change(host, path):
        _check_wrapper(wrapper)
        return _install_one(host, path, wrapper, dry_run)
    return _each(hosts, environ, change)


def _plan_install(host, path, target, wrapper):
    raw, status = _read(target)
    mark, text = _decode(host, raw or b"")
    planned = _with_ours(host, text, wrapper)
    return raw, status, None if raw is None else text, planned, mark + planned.encode("utf-8")


def _install_one(host, path, wrapper, dry_run):
    target = os.path.realpath(path)
    raw, status, text, planned, new = _plan_install(host, path, target, wrapper)
    own = _own_slots(host, text, _parse(text)) if text and text.strip(" \t\r\n") else []
    remarks = _faults(host, text) + _variants(host, text) if text and text.strip(" \t\r\n") else []
    if raw == new:
        return _record(host, path, "unchanged", "; ".join(["all entries are there"] + remarks))
    _require_writable(path, target, status)
    action = "replaced" if own else "added"
    chosen, missing = _choose(host, own, wrapper)
    by_start = {slot.node.start: slot for slot in own}
    changed = [entry for start, entry in chosen.items() if not _serves(by_start[start].handler, entry, wrapper)]
    parts = []
    if missing:
        parts.append("added " + ", ".join(map(label, missing)))
    if changed:
        parts.append("replaced " + ", ".join(map(label, changed)))
    if len(own) > len(chosen):
        parts.append("removed %d older or doubled" % (len(own) - len(chosen)))
    if status is not None and status.st_nlink > 1:
        parts.append("the file's other hard links keep the old text")
    if host == "codex" and (missing or changed):
        parts.append(CODEX_TRUST)
    record = _record(host, path, action, "; ".join(parts + remarks), _diff(path, text, planned))
    if not dry_run:
        made = _missing_folders(path)
        for folder in reversed(made):
            os.mkdir(folder, 0o700)
        with _locked({os.path.dirname(path), os.path.dirname(target)}):
            if _read(target)[0] != raw:
                raise Refused("it changed while we looked at it; nothing was changed, try again")
            first = not own or _read_backup(path) is None
            try:
                if first:
                    before = (NO_FILE_BEFORE + "%d\n" % len(made)).encode() if raw is None else raw
                    _write(path + BACKUP_SUFFIX, before, status)
                _write(target, new, status)
            except OSError:
                if first:
                    _forget(path, (None, len(made)), True)
                raise
    return record


def uninstall(hosts, wrapper, environ, dry_run=False):
    """Removes our entries and our backup from the configuration of these hosts; records as install, action: removed,
    unchanged, refused.

    A file that nobody edited since gets its earlier bytes back; one that was not there goes. Entries of any copy of
    xmsg go, whatever their path; `wrapper` tells how install wrote them.
    """
    return _each(hosts, environ, lambda host, path: _uninstall_one(host, path, wrapper, environ, dry_run))


def _without_ours(host, text, backup, wrapper):
    """The text after uninstall; None: the file goes."""
    before = base = None
    if backup is not None:
        with contextlib.suppress(Refused):  # a backup of somebody else's making only loses its say
            base = _decode(host, backup[0])[1] if backup[0] is not None else ""
            replayed = base is not None and _with_ours(host, base, wrapper) == text
            if replayed and backup[0] is None:
                return None
            if replayed:
                return _plan(host, base, None, _members_to_keep(host, base)) if base.strip(" \t\r\n") else base
            before = base
    keep = frozenset()
    with contextlib.suppress(Refused):
        keep = _members_to_keep(host, before)
    left = _plan(host, text, None, keep)
    if backup is not None and backup[0] is None and json.loads(left) == {}:
        return None
    return left


def _uninstall_one(host, path, wrapper, environ, dry_run):
    target = os.path.realpath(path)
    raw, status = _read(target)
    backup = _read_backup(path)
    mark, text = _decode(host, raw or b"")
    if not text.strip(" \t\r\n"):
        if not dry_run:
            _forget(path, backup, raw is None)
        return _record(host, path, "unchanged", "nothing of ours is there")
    own = _own_slots(host, text, _parse(text))
    left = _without_ours(host, text, backup, wrapper) if own else _plan(host, text, None)
    stand_ins = _stand_ins(host, left) if left and left.strip(" \t\r\n") else []
    note = ("%d empty place%s stay%s, so that Codex goes on trusting the hooks behind" % (
        len(stand_ins), "s"[:len(stand_ins) != 1], "s"[:len(stand_ins) == 1])) if stand_ins else ""
    if left == text:
        if not dry_run:
            _forget(path, backup, False)
        return _record(host, path, "unchanged", note or "nothing of ours is there")
    _require_writable(path, target, status)
    parts = ["removed %d entr%s" % (len(own), "y" if len(own) == 1 else "ies")] + [note] * bool(note)
    if host == "codex" and _consents(environ):
        parts.append("Codex's own records of your consent stay in config.toml, as [hooks.state.\"%s:...\"]"
                     % _codex_source(environ))
    record = _record(host, path, "removed", "; ".join(parts + _variants(host, text)), _diff(path, text, left))
    if not dry_run:
        with _locked({os.path.dirname(path), os.path.dirname(target)}):
            if _read(target)[0] != raw:
                raise Refused("it changed while we looked at it; nothing was changed, try again")
            if left is None:
                os.unlink(target)
                _sync_folder(os.path.dirname(target))
            else:
                _write(target, mark + left.encode("utf-8"), status)
            _forget(path, backup, left is None)
    return record


def _stand_ins(host, text):
    """The places that an uninstall kept, as <event>:<group>[:<handler>]."""
    if host != "codex":
        return []
    places = []
    for holder, member in _lists(host, text, _parse(text)):
        for position, value in enumerate(_value(text, member.node)):
            if value == EMPTY_GROUP:
                places.append("%s:%d" % (member.key, position))
            elif isinstance(value, dict) and isinstance(value.get("hooks"), list):
                places += ["%s:%d:%d" % (member.key, position, index)
                           for index, handler in enumerate(value["hooks"]) if handler == EMPTY_HANDLER]
    return places


# ---------------------------------------------------------------- check

def _variants(host, text):
    """Handlers that name our wrapper in a form that we neither count nor touch, with their places."""
    return ["%s: a form of its own of an xmsg hook in %s, which stays: %s" % (
        _place(text, slot.node.start), slot.event, slot.handler["command"])
        for holder, member in _lists(host, text, _parse(text)) for slot in _slots(host, text, holder, member)
        if isinstance(slot.handler, dict) and isinstance(slot.handler.get("command"), str)
        and WRAPPER_NAME in slot.handler["command"] and not _own_command(slot.handler)]


def _fault_of_agys_handler(handler):
    """Why agy drops the whole file for the sake of one handler, measured on its engine; None if it does not."""
    if not isinstance(handler, dict):
        return None
    if isinstance(handler.get("timeout"), float):
        return "a timeout that is not a whole number"
    kind = handler.get("type", "command")
    if kind not in ("command", "prompt"):
        return "a handler of the type %s" % json.dumps(kind)
    if isinstance(handler.get("hooks"), list):  # the group of a tool event
        return next(filter(None, map(_fault_of_agys_handler, handler["hooks"])), None)
    if kind == "command" and not isinstance(handler.get("command"), str):
        return "a handler that has no command"
    return None


def _faults(host, text):
    """What makes this host ignore a file, or our part of it, though it is valid JSON."""
    root, faults = _parse(text), []

    def fault(item, sentence):
        faults.append("%s: %s" % (_place(text, item.start), sentence))
    for item in root.items:
        if host == "codex" and item.key not in ("hooks", "description"):
            fault(item, "Codex loads no file with %s in this place" % json.dumps(item.key))
        if host == "claude" and item.key == "disableAllHooks" and _value(text, item.node) is True:
            fault(item, "\"disableAllHooks\" switches all hooks off")
        if host == "agy" and item.node.kind != "object":
            fault(item, "agy loads no file in which %s is not an object" % json.dumps(item.key))
    for holder in _holders(host, text, root):
        if host == "codex":
            names = [item.key for item in holder.node.items]
            for item in holder.node.items:
                if names.count(item.key) > 1:
                    fault(item, "Codex loads no file in which %s stands twice" % json.dumps(item.key))
        enabled = _member(text, holder.node, "enabled") if host == "agy" else None
        if enabled and holder.key == HOLDER[host] and _value(text, enabled.node) is False:
            fault(enabled, "\"enabled\" switches xmsg's hooks off")
    if host == "agy":
        for holder, member in _lists(host, text, root):
            for slot in _slots(host, text, holder, member):
                reason = _fault_of_agys_handler(slot.handler)
                if reason:
                    fault(slot.node, "agy loads no file with %s" % reason)
    return faults


def check(host, wrapper, environ):
    """What of ours a host's file holds: {host, path, state, present, missing, variants, faults, detail}.

    state: installed, partial, missing (no entry of ours), absent (no file), unreadable (detail says where and why).
    present, missing: labels of entries; variants: xmsg hooks in other forms or of another copy, with line:column;
    faults: why the host ignores the file, or our part of it, all the same.
    """
    path = config_path(host, environ)
    report = {"host": host, "path": path, "state": "absent", "present": [], "missing": [], "variants": [],
              "faults": [], "detail": ""}
    wanted = [entry for entry in ENTRIES if entry.host == host]
    report["missing"] = [label(entry) for entry in wanted]
    try:
        raw, _ = _read(path)
        if raw is None:
            return report
        text = _decode(host, raw)[1]
        if not text.strip(" \t\r\n"):
            return dict(report, state="missing", detail="the file is empty")
        own = _own_slots(host, text, _parse(text))
        chosen, missing = _choose(host, own, wrapper)
        report["variants"], report["faults"] = _variants(host, text), _faults(host, text)
    except Refused as fault:
        return dict(report, state="unreadable", detail=str(fault))
    except OSError as fault:
        return dict(report, state="unreadable", detail=_sentence(fault))
    for slot in own:
        entry = chosen.get(slot.node.start)
        if entry and _serves(slot.handler, entry, wrapper):
            report["present"].append(label(entry))
        else:
            report["variants"].append("%s: another form in %s: %s" % (
                _place(text, slot.node.start), slot.event, slot.handler["command"]))
    report["missing"] = [label(entry) for entry in wanted if label(entry) not in report["present"]]
    state = "installed" if not report["missing"] else "partial" if own else "missing"
    return dict(report, state=state)


# ---------------------------------------------------------------- Codex's trust, read only

def _hook_hash(event, group, handler):
    """The hash by which Codex remembers consent; recipe checked against hooks/list of 0.156.1 and 0.171.0."""
    timeout = handler.get("timeout")
    hook = {"async": bool(handler.get("async", False)), "command": handler.get("command"), "type": "command",
            "timeout": max(1, timeout) if type(timeout) is int else 600}
    if handler.get("statusMessage") is not None:
        hook["statusMessage"] = handler["statusMessage"]
    identity = {"event_name": _snake(event), "hooks": [hook]}
    if group.get("matcher") is not None and event not in ("UserPromptSubmit", "Stop"):
        identity["matcher"] = group["matcher"]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _snake(event):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()


_STATE_TABLE = re.compile(r"\s*\[\s*hooks\s*\.\s*state\s*\.\s*(\"(?:[^\"\\]|\\.)*\"|'[^']*')\s*\]\s*(?:#.*)?$")
_STATE_FIELD = re.compile(r"\s*(trusted_hash|enabled)\s*=\s*(?:\"([^\"\\]*)\"|'([^']*)'|(true|false))\s*(?:#.*)?$")


def _trust_states(text):
    """{key: {"trusted_hash": ..., "enabled": ...}} of the [hooks.state."..."] tables, the form that Codex writes."""
    states, current = {}, None
    for line in text.splitlines():
        table = _STATE_TABLE.match(line)
        if table:
            quoted = table.group(1)
            try:
                key = quoted[1:-1] if quoted[0] == "'" else json.loads(quoted)
            except ValueError:
                key = quoted
            current = states.setdefault(key, {})
        elif line.lstrip().startswith("["):
            current = None
        elif current is not None:
            field = _STATE_FIELD.match(line)
            if field:
                name, basic, literal, word = field.groups()
                current[name] = word if word else basic if basic is not None else literal
    return states


def _consents(environ):
    """{key: fields} of what Codex remembers of its user's consent to the hooks of this hooks.json."""
    source = _codex_source(environ)
    with contextlib.suppress(OSError, Refused):
        states = _trust_states((_read(os.path.join(os.path.dirname(source), "config.toml"))[0] or b"").decode(
            "utf-8", "replace"))
        return {key: fields for key, fields in states.items() if key.startswith(source + ":")}
    return {}


def _read_or_refuse(path):
    try:
        return _read(path)[0] or b""
    except OSError as fault:
        raise Refused(_sentence(fault))


def codex_trust(environ):
    """Whether Codex's user has confirmed our entries: [{event, key, state, file, detail}], one for each entry of ours
    in hooks.json. Reads only; Refused if hooks.json or config.toml cannot be read.

    state: trusted, changed (confirmed in another form: Codex skips it), untrusted, disabled (switched off in Codex).
    file: the config.toml that says so.
    """
    text = _decode("codex", _read_or_refuse(config_path("codex", environ)))[1]
    if not text.strip(" \t\r\n"):
        return []
    source = _codex_source(environ)
    config = os.path.join(os.path.dirname(source), "config.toml")
    states = _trust_states(_read_or_refuse(config).decode("utf-8", "replace"))
    report = []
    for slot in _own_slots("codex", text, _parse(text)):
        place = ":%s:%d:%d" % (_snake(slot.event), slot.group, slot.index)
        current, known = _hook_hash(slot.event, slot.whole, slot.handler), states.get(source + place, {})
        state, detail = "untrusted", CODEX_TRUST
        if known.get("enabled") == "false":
            state, detail = "disabled", "switched off in Codex; /hooks switches it on"
        elif known.get("trusted_hash") == current:
            state, detail = "trusted", ""
        elif known.get("trusted_hash"):
            state = "changed"
        else:
            other = next((key for key, value in states.items() if value.get("trusted_hash") == current), None)
            if other:
                detail += "; the consent for %s does not count in this place" % other
        report.append({"event": slot.event, "key": source + place, "state": state, "file": config, "detail": detail})
    return report


# ---------------------------------------------------------------- the command and its interpreter

def _link_path(program, environ):
    return os.path.join(_home(environ), ".local", "bin", os.path.basename(program))


def _path_word(path, environ):
    folders = [os.path.realpath(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    folder = os.path.dirname(path)
    return "" if os.path.realpath(folder) in folders else "%s is not on your PATH" % folder


def _leads_to(path):
    """Where a symlink leads, None if the path is none."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    except OSError:
        return None


def _is_copy_of_xmsg(program):
    return os.path.isfile(os.path.join(os.path.dirname(os.path.dirname(program)), WRAPPER_NAME))


def link(program, environ, dry_run=False):
    """Links ~/.local/bin/NAME to a program of bin/ (absolute path); a record as install's, action: added, replaced (it
    led to another copy of xmsg, or nowhere), unchanged, refused (somebody else's). detail: a word if it is not on PATH.
    """
    path = _link_path(program, environ)
    word = _path_word(path, environ)
    try:
        known = _leads_to(path)
        if known is not None and (known == program or os.path.realpath(path) == os.path.realpath(program)):
            return _record(None, path, "unchanged", word)
        if known is None and os.path.lexists(path):
            return _record(None, path, "refused", "a file that is not ours stands there")
        if known is not None and os.path.exists(path) and not _is_copy_of_xmsg(os.path.realpath(path)):
            return _record(None, path, "refused", "it leads to %s, which is not ours" % known)
        if not dry_run:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            temporary = "%s.%d" % (path, os.getpid())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.symlink(program, temporary)
            os.replace(temporary, path)
    except OSError as fault:
        return _record(None, path, "refused", _sentence(fault))
    before = ["it led to %s before" % known] if known is not None else []
    return _record(None, path, "added" if known is None else "replaced", "; ".join(before + [word] * bool(word)))


def unlink(program, environ, dry_run=False):
    """Removes ~/.local/bin/NAME if it leads to program, and folders that this leaves empty; action: removed, unchanged,
    refused."""
    path = _link_path(program, environ)
    known = _leads_to(path)
    if known is None or known != program and os.path.realpath(path) != os.path.realpath(program):
        return _record(None, path, "unchanged", "it leads elsewhere" if known else "no link of ours is there")
    try:
        if not dry_run:
            os.unlink(path)
            for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
    except OSError as fault:
        return _record(None, path, "refused", _sentence(fault))
    return _record(None, path, "removed")


_ASK = "import sys, json, sqlite3; print(getattr(sys, '_base_executable', '') or sys.executable, *sys.version_info[:2])"


def _ask_interpreter(path):
    """The real path of the Python behind a path, shims followed; None if it does not answer or is below 3.9."""
    try:
        answer = subprocess.run([path, "-I", "-S", "-c", _ASK], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, timeout=10).stdout.decode("utf-8", "surrogateescape")
        real, major, minor = answer.rstrip("\n").rsplit(" ", 2)
        is_new_enough = (int(major), int(minor)) >= (3, 9)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return real if is_new_enough and os.path.isabs(real) else None


def _is_script(path):
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def real_interpreter(recorded=None, environ=os.environ):
    """The absolute path of a Python 3.9+ with sqlite3 that starts directly, never a pyenv or asdf shim; None if there
    is none. recorded: an earlier answer, which stands as long as it works.
    """
    if recorded and not _is_script(recorded) and _ask_interpreter(recorded) is not None:
        return recorded
    candidates = [getattr(sys, "_base_executable", None), sys.executable,
                  shutil.which("python3", path=environ.get("PATH", "")), "/usr/bin/python3"]
    for candidate in filter(None, candidates):
        real = _ask_interpreter(candidate)
        if real is not None and not _is_script(real):
            return real
    return None
