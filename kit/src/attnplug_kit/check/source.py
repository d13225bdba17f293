"""What the source of a plugin module shows without running it: its hooks, and the options that it reads."""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING, Final

from attnplug.manifest import locate
from attnplug.request import near
from attnplug_kit.check.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from attnplug.manifest import Manifest

HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "attnplug_backend": ("variant", "agreement"),
    "attnplug_probe": ("variant", "agreement", "device"),
}
"""The hooks with their arguments, as `attnplug.contract` specifies them."""


def check_hooks(file: Path) -> Iterator[Finding]:
    """Yield what is wrong with the hooks of a plugin module."""
    path = str(file)
    try:
        source = file.read_bytes()
        tree = ast.parse(source, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)  # finds what parsing does not: a late `from __future__`
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the latter two of what is nested deeply
        line = getattr(error, "lineno", None)
        yield Finding(
            f"it is not Python: {str(error) or type(error).__name__}",
            "the plugin module is a Python module",
            "correct it",
            path,
            line,
        )
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("attnplug_"):
            yield from _check_hook(node, path)
    if "attnplug_backend" not in _names(tree):
        expected = "the plugin module has it: attnplug_backend(variant, agreement), marked with @hookimpl"
        yield Finding("no hook 'attnplug_backend'", expected, "write it, or import it there", path)


def check_options(manifest: Manifest, text: str, package: Path) -> Iterator[Finding]:
    """Yield options that no module of the package names."""
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    source = "\n".join(file.read_text("utf-8", errors="replace") for file in files) if manifest.options else ""
    for name in manifest.options:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            yield Finding(
                f"the option {name!r}",
                "a module of the package reads it; no one names it, so that setting it changes nothing",
                "read it from agreement.options, or remove it",
                manifest.path,
                locate(text, ("options", name)),
                "note",
            )


def _check_hook(node: ast.FunctionDef, path: str) -> Iterator[Finding]:
    if node.name not in HOOKS:
        problem = f"the hook {node.name!r}{near(node.name, tuple(HOOKS))}"
        yield Finding(problem, f"the hooks are {', '.join(HOOKS)}", "correct the name", path, node.lineno)
        return
    known = HOOKS[node.name]
    for argument in (*node.args.posonlyargs, *node.args.args):
        if argument.arg not in known:
            yield Finding(
                f"the argument {argument.arg!r} of {node.name}{near(argument.arg, known)}",
                f"the arguments are {', '.join(known)}, or some of them",
                "correct the name, or remove it",
                path,
                argument.lineno,
            )
    if not any(_last_name(decorator) == "hookimpl" for decorator in node.decorator_list):
        expected = "a hook is marked with attnplug.contract.hookimpl; without it, it is not found"
        yield Finding(f"{node.name} without @hookimpl", expected, "mark it", path, node.lineno, "note")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module may define: the hook's too where it imports with a star."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {"attnplug_backend" if a.name == "*" else a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
