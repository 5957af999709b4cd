"""Writes the generated tables into README.md: `python3 tests/make_readme.py`. tests/test_docs.py compares them."""
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


if __name__ == "__main__":
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as file:
        before = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(readme_with_tables(before))
