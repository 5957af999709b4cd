"""Writes the generated parts of the documents: `python3 tests/make_readme.py`. tests/test_docs.py compares them.

They are the tables of README.md, and hook-config.diff, which shows what `xmsg install` adds.
"""
import difflib
import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)


def readme_with_tables(text):
    """The README's text with its tables made anew."""
    import command_line
    for name, lines in (("states", command_line.states_markdown()), ("settings", command_line.settings_markdown())):
        block = "<!-- %s -->\n%s\n<!-- end -->" % (name, "\n".join(lines))
        text = re.sub("<!-- %s -->.*?<!-- end -->" % name, lambda match: block, text, flags=re.S)
    return text


def hook_config_diff():
    """The entries of every host as a difference to a file that has none, for those who add them by hand."""
    import hook_install
    lines = []
    for host, path in (("claude", "~/.claude/settings.json"), ("codex", "~/.codex/hooks.json"),
                       ("agy", "~/.gemini/config/hooks.json")):
        after = json.dumps(hook_install.entries(host, "/path/to/xmsg/xmsg-hook.sh"), indent=2).splitlines(keepends=True)
        lines += difflib.unified_diff(["{}\n"], after[:-1] + [after[-1] + "\n"], path, path, n=0)
    return "".join(lines)


if __name__ == "__main__":
    with open(os.path.join(ROOT, "hook-config.diff"), "w", encoding="utf-8") as file:
        file.write(hook_config_diff())
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as file:
        before = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(readme_with_tables(before))
