"""
Records the parameters of the functions that the plugin calls, from a wheel that is read and never imported.

    python plugins/flashmla/tests/record_signatures.py WHEEL

writes ``signatures/VERSION.json``: a parameter is its name and, if it has one, its default.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Final

from attnplug_flashmla.plugin import CALLS

FOLDER: Final = Path(__file__).parent / "signatures"
MODULE: Final = "flash_mla/flash_mla_interface.py"


def signatures(source: str) -> dict[str, list[list[str]]]:
    """Return the parameters of the functions in the source of the library's module."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in CALLS]
    return {node.name: _parameters(node.args) for node in nodes}


def _parameters(given: ast.arguments) -> list[list[str]]:
    required = len(given.args) - len(given.defaults)
    names = [item.arg for item in given.args]
    defaults = [ast.unparse(default) for default in given.defaults]
    return [[name] for name in names[:required]] + [list(both) for both in zip(names[required:], defaults, strict=True)]


def main(wheel: str) -> None:
    """Write the record of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        found = signatures(opened.read(MODULE).decode())
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(one)}" for one in parameters) + "\n  ]"
        for name, parameters in found.items()
    ]
    file = FOLDER / f"{Path(wheel).name.split('-')[1]}.json"
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
