"""
Rewrites source that was written before handles: ``python -m attnplug_kit.upgrade FILE...``.

A host gets handles from `attnplug.load` now, and their types have other names. A plugin's classes keep theirs; its
`warmup` gets the handle that makes layers and caches, which was the backend itself.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLES: Final = {
    "Backend": "LoadedBackend",
    "AttentionImpl": "Attention",
    "MetadataBuilder": "StepBuilder",
    "State": "Captures",
}
"""What a plugin subclasses -> what a host has."""

_OF_HANDLE: Final = (
    "make_impl",
    "make_cache",
    "bind_cache",
    "make_state",
    "make_builder",
)
_Edit = tuple[int, int, str, str]  # line, column in bytes, what stands there, what will


def upgrade(source: str) -> str:
    """
    Return the source for handles. What needs no change, or was changed before, stays as it is.

    Args:
        source: A Python module.

    Raises:
        SyntaxError: The source does not parse.
    """
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) for alias in _of_contract(node)]
    ours = {alias.asname or alias.name: alias.name for alias in imported if alias.name in HANDLES}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _extends(node, ours)]
    edits = [edit for cls in classes for edit in _in_warmup(cls)] if classes else list(_renamed(tree, imported, ours))
    lines = source.encode().splitlines(keepends=True)
    for line, column, old, new in sorted(set(edits), reverse=True):
        text = lines[line - 1]
        assert text[column:].startswith(old.encode()), (line, column, old)  # noqa: S101 - positions are ast's
        lines[line - 1] = text[:column] + new.encode() + text[column + len(old.encode()) :]
    return b"".join(lines).decode()


def _of_contract(node: ast.AST) -> list[ast.alias]:
    is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == ["attnplug", "contract"]
    return node.names if is_ours and isinstance(node, ast.ImportFrom) else []


def _extends(cls: ast.ClassDef, ours: dict[str, str]) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ours for base in cls.bases)


def _renamed(tree: ast.AST, imported: list[ast.alias], ours: dict[str, str]) -> Iterator[_Edit]:
    """Yield the new types of a host: they are named in imports and annotations."""
    for alias in imported:
        if alias.name in HANDLES:
            yield alias.lineno, alias.col_offset, alias.name, HANDLES[alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and ours.get(node.id) == node.id:
            yield node.lineno, node.col_offset, node.id, HANDLES[node.id]


def _in_warmup(cls: ast.ClassDef) -> Iterator[_Edit]:
    """Yield the handle as an argument of a backend's `warmup`, and as what makes layers and caches in there."""
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or method.name != "warmup" or len(method.args.args) != 2:
            continue
        shapes = method.args.args[1]
        yield shapes.lineno, shapes.col_offset, shapes.arg, f"loaded, {shapes.arg}"
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr in _OF_HANDLE and _is_self(node.value):
                yield node.value.lineno, node.value.col_offset, "self", "loaded"
            elif isinstance(node, ast.Call):  # helpers such as `warm_up`, which take the backend
                yield from ((each.lineno, each.col_offset, "self", "loaded") for each in node.args if _is_self(each))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def main(paths: list[str]) -> int:
    """Rewrite files in place, and print which ones changed."""
    if not paths:
        sys.stderr.write("usage: python -m attnplug_kit.upgrade FILE...\n")
        return 2
    for path in map(Path, paths):
        before = path.read_text("utf-8")
        after = upgrade(before)
        if after != before:
            path.write_text(after, "utf-8")
        sys.stdout.write(f"{path}: {'rewritten' if after != before else 'nothing to change'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
