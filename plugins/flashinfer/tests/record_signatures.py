"""
Records the signatures of FlashInfer that the plugin depends on, from wheels, without importing them.

    python plugins/flashinfer/tests/record_signatures.py WHEEL...

writes ``signatures/VERSION.json`` for each wheel. A parameter has a name, a kind and, if any, a default. A post release
with the signatures of the release before gets no file.

Where a method passes its ``**kwargs`` to another method of its class, the keywords of that method are recorded.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER: Final = Path(__file__).parent / "signatures"
PACKAGE: Final = "flashinfer"
CALLABLES: Final = (
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__",
    "BatchPrefillWithRaggedKVCacheWrapper.plan",
    "BatchPrefillWithRaggedKVCacheWrapper.run",
    "BatchAttentionWithAttentionSinkWrapper.__init__",
    "BatchAttentionWithAttentionSinkWrapper.plan",
    "BatchAttentionWithAttentionSinkWrapper.run",
    "BatchMLAPagedAttentionWrapper.__init__",
    "BatchMLAPagedAttentionWrapper.plan",
    "BatchMLAPagedAttentionWrapper.run",
    "merge_state_in_place",
    "decode.fast_decode_plan",
)
"""The callables that the plugin uses, by their names in the package, or in one of its modules."""

Parameter = tuple[str, ...]
_Function = ast.FunctionDef


class Wheel:
    """The source of one release."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._modules: dict[str, ast.Module] = {}
        self.version = re.match(r"flashinfer_python-([^-]+)-", path.name).group(1)  # type: ignore[union-attr]

    def signatures(self) -> dict[str, list[Parameter]]:
        """Return the parameters of every callable."""
        return {name: self._signature(name) for name in CALLABLES}

    def _signature(self, name: str) -> list[Parameter]:
        owner, _, method = name.rpartition(".")
        inner = f"{PACKAGE}/{owner}.py"
        if not owner or inner in self._archive.namelist():
            _, node = self._defined(inner if owner else f"{PACKAGE}/__init__.py", method)
            return list(_parameters(node))
        module, node = self._defined(f"{PACKAGE}/__init__.py", owner)
        return self._method(module, node, method)

    def _method(self, module: str, node: ast.ClassDef, name: str) -> list[Parameter]:
        """Return the method of a class, or of its first base that defines it."""
        functions = {item.name: item for item in node.body if isinstance(item, _Function) and not _is_overload(item)}
        if name not in functions:
            base = node.bases[0].id  # type: ignore[attr-defined]
            return self._method(*self._defined(module, base), name)
        found = list(_parameters(functions[name]))
        if any(kind == "VAR_KEYWORD" for _, kind, *_ in found):
            known = {item[0] for item in found}
            handed = [item for item in _parameters(functions[_receiver(functions[name])]) if item[0] not in known]
            kept = [item for item in found if item[1] != "VAR_KEYWORD"]
            return kept + [(item[0], "KEYWORD_ONLY", *item[2:]) for item in handed]
        return found

    def _defined(self, module: str, name: str) -> tuple[str, Any]:
        """Follow imports to the definition of a class or function."""
        for node in self._tree(module).body:
            if isinstance(node, (ast.ClassDef, _Function)) and node.name == name:
                return module, node
        for node in ast.walk(self._tree(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._defined(self._path(module, node), alias.name)
                    if alias.name == "*" and node.level:
                        return self._defined(self._path(module, node), name)
        raise LookupError(f"{self.version}: {module} does not have {name}")

    def _path(self, module: str, node: ast.ImportFrom) -> str:
        package = module.split("/")[: -node.level] if node.level else []
        parts = "/".join([*package, *(node.module or "").split(".")]).rstrip("/")
        return next(name for name in (f"{parts}.py", f"{parts}/__init__.py") if name in self._archive.namelist())

    def _tree(self, module: str) -> ast.Module:
        if module not in self._modules:
            self._modules[module] = ast.parse(self._archive.read(module))
        return self._modules[module]


def _parameters(function: ast.FunctionDef) -> Iterator[Parameter]:
    """Yield name, kind (as in `inspect`) and default of each parameter except `self`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(given.defaults)), *given.defaults]
    for item, default in zip(positional, defaults, strict=True):
        if item.arg != "self" or function.col_offset == 0:  # also the first parameter of some functions
            kind = "POSITIONAL_ONLY" if item in given.posonlyargs else "POSITIONAL_OR_KEYWORD"
            yield _parameter(item.arg, kind, default)
    if given.vararg is not None:
        yield _parameter(given.vararg.arg, "VAR_POSITIONAL", None)
    for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(item.arg, "KEYWORD_ONLY", default)
    if given.kwarg is not None:
        yield _parameter(given.kwarg.arg, "VAR_KEYWORD", None)


def _parameter(name: str, kind: str, default: ast.expr | None) -> Parameter:
    return (name, kind) if default is None else (name, kind, ast.unparse(default))


def _receiver(function: ast.FunctionDef) -> str:
    """Return the method that a method passes its keywords to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
            target = node.func
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                return target.attr
    raise LookupError(f"{function.name} takes keywords, and passes them to no method of its class")


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(isinstance(item, ast.Name) and item.id == "overload" for item in function.decorator_list)


def _in_order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _text(signatures: dict[str, list[Parameter]]) -> str:
    """Return the JSON text with one parameter per line, so that a diff shows each change."""
    blocks = []
    for name, parameters in signatures.items():
        lines = ",\n".join(f"    {json.dumps(item)}" for item in parameters)
        blocks.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(paths: list[str]) -> None:
    """Write the records."""
    FOLDER.mkdir(exist_ok=True)
    former: dict[str, list[Parameter]] | None = None
    for wheel in sorted((Wheel(Path(path)) for path in paths), key=lambda wheel: _in_order(wheel.version)):
        found = wheel.signatures()
        if ".post" not in wheel.version or found != former:
            (FOLDER / f"{wheel.version}.json").write_text(_text(found), encoding="utf-8")
        former = found


if __name__ == "__main__":
    main(sys.argv[1:])
