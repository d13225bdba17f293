"""
Records what the kernel libraries take, from files that are read and never imported.

    python plugins/flash_attn/tests/record_signatures.py NAME-VERSION FILE...

writes ``signatures/NAME-VERSION.json``. Of a Python module it holds the functions that the plugin calls: a parameter is
its name, its kind and, if it has one, its default. Of an op library, the schemas that its file declares.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER: Final = Path(__file__).parent / "signatures"
FUNCTIONS: Final = ("flash_attn_varlen_func", "flash_attn_with_kvcache", "_flash_attn_fwd")
OPS: Final = {
    "_vllm_fa2_C": ("varlen_fwd",),
    "_vllm_fa3_C": ("fwd", "get_scheduler_metadata"),
    "flash_attn_3": ("fwd", "get_scheduler_metadata"),
}

Parameter = tuple[str, ...]


def signatures(source: str) -> dict[str, list[Parameter]]:
    """Return the parameters of the functions that a module has."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: list(_parameters(node)) for node in nodes if node.name in FUNCTIONS}


def schemas(library: str, content: bytes) -> dict[str, str]:
    """Return the schemas of a library's ops, as texts in its file, blanks made one."""
    found = {}
    for op in OPS[library]:
        text = re.search(rb"\0(%s\([^\0]*\) ?-> [^\0]*)\0" % op.encode(), content)
        if text is None:
            raise LookupError(f"{library} declares no {op}")
        found[op] = re.sub(r"\s+", " ", text[1].decode()).replace("( ", "(")
    return found


def _parameters(function: ast.FunctionDef) -> Iterator[Parameter]:
    """Yield name, kind and default of each parameter, as `inspect` names kinds."""
    given = function.args
    defaults: list[ast.expr | None] = [*[None] * (len(given.args) - len(given.defaults)), *given.defaults]
    for item, default in zip(given.args, defaults, strict=True):
        yield _parameter(item.arg, "POSITIONAL_OR_KEYWORD", default)
    for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(item.arg, "KEYWORD_ONLY", default)


def _parameter(name: str, kind: str, default: ast.expr | None) -> Parameter:
    return (name, kind) if default is None else (name, kind, ast.unparse(default))


def _read(path: Path) -> dict[str, Any]:
    library = path.name.partition(".")[0]
    library = path.parent.name if library == "_C" else library
    return {library: schemas(library, path.read_bytes())} if library in OPS else dict(signatures(path.read_text()))


def _text(record: dict[str, Any]) -> str:
    """One parameter or schema per line, so that a change of the library's reads as one."""
    blocks = []
    for name, found in record.items():
        is_library = isinstance(found, dict)
        lines = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()] if is_library else []
        lines = lines or [f"    {json.dumps(item)}" for item in found]
        left, right = "{}" if is_library else "[]"
        blocks.append(f"  {json.dumps(name)}: {left}\n" + ",\n".join(lines) + f"\n  {right}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(name: str, *paths: str) -> None:
    """Write a record."""
    record: dict[str, Any] = {}
    for path in paths:
        record |= _read(Path(path))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(_text(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
