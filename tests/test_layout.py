"""Who may know whom: read from the syntax trees."""
import ast
import os
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# module -> what of xmsg it may import; the order is that of the layers.
MAY_IMPORT = {
    "host_process": set(),
    "app_server": set(),
    "claude_delivery": {"host_process"},
    "codex_delivery": {"host_process", "app_server"},
    "codex_history": {"contract", "app_server", "codex_delivery"},
    "agy_delivery": {"host_process"},
    "transcripts": {"host_process"},
    "hook_install": {"host_process"},
    "contract": set(),
    "remote": {"contract"},
    "adoption": {"contract"},
    "store": {"contract", "host_process", "adoption"},
    "spool": {"contract", "store", "host_process", "transcripts"},
    "xmsg": {"contract", "store", "spool", "host_process", "claude_delivery", "codex_delivery", "agy_delivery",
             "transcripts"},
    "sending": {"contract", "store", "spool", "xmsg", "host_process", "claude_delivery", "codex_delivery", "agy_delivery",
                "transcripts"},
    "forwarding": {"contract", "store", "xmsg", "sending", "remote"},
    "receiving": {"contract", "store", "xmsg", "sending", "remote", "forwarding"},
    "doctor": {"contract", "store", "spool", "xmsg", "sending", "hook_install", "host_process", "claude_delivery",
               "codex_delivery", "agy_delivery", "remote"},
    "command_line": {"contract", "store", "spool", "xmsg", "sending", "doctor", "hook_install", "codex_delivery",
                     "codex_history", "forwarding", "receiving", "remote"},
}
HOOK_PATH = ("contract", "store", "xmsg")
HOOK_IMPORTS = {"os", "sys", "json", "sqlite3", "time"}
SQL_FILES = {"store", "adoption", "codex_delivery", "codex_history", "agy_delivery"}  # the last three read hosts' own


def tree(module):
    with open(os.path.join(ROOT, module + ".py"), encoding="utf-8") as file:
        return ast.parse(file.read())


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


PRODUCT = {name[:-3] for name in os.listdir(ROOT) if name.endswith(".py")}


class TheLayout(unittest.TestCase):
    def test_has_a_place_for_every_product_file(self):
        self.assertLessEqual(PRODUCT, set(MAY_IMPORT))

    def test_lets_imports_go_one_way_and_only_to_the_standard_library(self):
        standard = getattr(sys, "stdlib_module_names", None)
        for module in PRODUCT:
            allowed = MAY_IMPORT[module]
            for name in imports(ast.walk(tree(module))):
                if name in MAY_IMPORT:
                    self.assertIn(name, allowed, module)
                elif standard:
                    self.assertIn(name, standard, module)

    def test_keeps_the_path_of_the_hook_light(self):
        for module in HOOK_PATH:
            self.assertLessEqual(set(imports(tree(module).body)), HOOK_IMPORTS | set(HOOK_PATH), module)

    def test_prints_in_one_place_only(self):
        for module in PRODUCT - {"command_line"}:
            for node in ast.walk(tree(module)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    self.assertNotEqual("print", node.func.id, module)

    def test_keeps_sql_in_the_store(self):
        for module in PRODUCT - SQL_FILES:
            for node in ast.walk(tree(module)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    words = node.value.split()
                    self.assertFalse(words[:1] in (["select"], ["update"], ["delete"], ["pragma"]) and len(words) > 2
                                     or words[:2] == ["insert", "into"], (module, node.value))

    def test_keeps_files_readable(self):
        for module in PRODUCT:
            with open(os.path.join(ROOT, module + ".py"), encoding="utf-8") as file:
                lines = file.read().split("\n")
            self.assertLess(len(lines), 1800, module)
            self.assertEqual([], [number for number, line in enumerate(lines, 1) if len(line) > 120], module)


if __name__ == "__main__":
    unittest.main()
