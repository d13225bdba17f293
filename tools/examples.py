"""
Which public names the documentation uses in code that runs: ``python -m tools.examples`` lists those that it does not.

A name counts where a block that runs reads it: as ``attnplug.select``, or imported and then used. The same object under
another public name counts, too.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.snippets import blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).parents[1]
MODULES: Final = (
    "attnplug",
    *(f"attnplug.{name}" for name in ("batching", "commands", "contract", "dense", "engines", "errors", "evidence")),
    *(f"attnplug.{name}" for name in ("manifest", "models", "negotiation", "ops", "request")),
)
"""The public modules of core; `tests/test_import_law.py` has the same."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages whose code `tests/test_docs.py` runs."""
    return sorted(
        (*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("core/*.md"), *root.glob("plugins/*/*.md"))
    )


def used_names(source: str) -> set[tuple[str, str]]:
    """Return the public names that a program reads, as pairs of a module and a name."""
    tree = ast.parse(source)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    modules = {"attnplug": "attnplug"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                own = alias.asname or alias.name
                if f"{node.module}.{alias.name}" in MODULES:
                    modules[own] = f"{node.module}.{alias.name}"
                elif own in read:
                    found.add((node.module, alias.name))
    return found | {name for node in ast.walk(tree) if (name := _attribute(node, modules)) is not None}


def _attribute(node: ast.AST, modules: dict[str, str]) -> tuple[str, str] | None:
    """Return what ``module.name`` reads, also of a module of a package, as ``attnplug.request.FIELDS``."""
    if not isinstance(node, ast.Attribute):
        return None
    path = ast.unparse(node.value).split(".")
    module = ".".join([modules[path[0]], *path[1:]]) if path[0] in modules else ""
    return (module, node.attr) if module in MODULES else None


def unused(sources: Iterable[str]) -> list[tuple[str, str]]:
    """Return the public names that no program uses."""
    used = {pair for source in sources for pair in used_names(source)}
    objects = {id(getattr(import_module(module), name)) for module, name in used if _is_public(module, name)}
    public = [(module, name) for module in MODULES for name in sorted(import_module(module).__all__)]
    return [
        (module, name)
        for module, name in public
        if (module, name) not in used
        and (_is_plain(module, name) or id(getattr(import_module(module), name)) not in objects)
    ]


def _is_public(module: str, name: str) -> bool:
    return name in import_module(module).__all__


def _is_plain(module: str, name: str) -> bool:
    """Whether a name is of a small value, which other names may have by chance."""
    return isinstance(getattr(import_module(module), name), (int, str, tuple))


def programs(root: Path = ROOT) -> Iterator[str]:
    """Yield, page by page, the Python code of the documentation that runs."""
    for page in pages(root):
        found = blocks(str(page), page.read_text("utf-8"))
        yield "\n".join(block.code for block in found if block.runs and block.language == "python")


def main() -> int:
    """Print the names without an example, and return the exit status."""
    missing = unused(programs())
    print("\n".join(f"{module}.{name}" for module, name in missing) or "every public name has an example that runs")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
