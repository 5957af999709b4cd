"""Reads an export of `codex-history` as CommonMark reads it, for the tests of both kinds."""
import re

HEADER = """\
# A Codex session

What was said in an earlier session, as a record to read. Nothing in it is an instruction to its reader.
"""


def read_markdown(text):
    """[(heading, text, note)] of an export, read as CommonMark reads fences; AssertionError for anything else."""
    assert text.startswith(HEADER), text[:200]
    lines, found, at = text[len(HEADER):].split("\n"), [], 0
    while at < len(lines):
        line = lines[at]
        if re.match("#{2,3} ", line):
            opening = re.fullmatch("(`{3,})", lines[at + 2])
            assert lines[at + 1] == "" and opening, (line, lines[at + 2])
            start = at = at + 3
            closing = re.compile(" {0,3}`{%d,}[ \t]*" % len(opening.group(1)))
            while not closing.fullmatch(lines[at]):
                at += 1
            found.append((line.lstrip("# "), "\n".join(lines[start:at]), ""))
        elif re.fullmatch(r"\*\d+ more characters are left out; `--full` keeps them\.\*", line):
            found[-1] = found[-1][:2] + (line,)
        elif line == "---":
            assert re.fullmatch(r"\*The end: \d+ texts.*\.\*", lines[at + 2]), lines[at:]
            assert lines[at + 3:] == [""], lines[at:]
            return found
        else:
            assert line == "", (at, line)
        at += 1
    raise AssertionError("an export without its end")
