"""
The import law, read from the syntax trees: what may import what inside core, across distributions, and how large a
circle of modules may be.

An import inside a function counts. Imports under ``if TYPE_CHECKING:`` are free between parts, since they never run,
but they count in circles: a reader has to follow them.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tools import api_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "attnplug"
LARGEST_CIRCLE = 7

# Each part of core and those directly below it; what is below those may be imported as well.
BELOW = {
    "_lazy": set(),
    "_version": set(),
    "_install": set(),
    "_escape": set(),
    "_html": {"_escape"},
    "_columns": {"_escape"},
    "_foreign": {"_escape"},
    "errors": {"_foreign"},
    "request": {"errors", "_lazy"},
    "manifest": {"request"},
    "negotiation": {"manifest"},
    "discovery": {"negotiation", "_html", "_version", "_install"},
    "evidence": {"discovery"},
    "selection": {"evidence", "_columns"},
    "models": {"request"},
    "contract.inputs": {"negotiation"},
    "contract.guards": {"contract.inputs"},
    "contract.graphs": {"contract.guards"},
    "contract": {"contract.graphs"},
    "ops": {"contract"},
    "batching": {"ops"},
    "torch_backend": {"batching"},
    "dense": {"selection", "ops"},
    "commands": {"request", "_columns", "_install"},
    "engines": {"request"},
    "cli": {"selection", "models", "commands", "engines"},
    "__main__": {"cli"},
}
# Imports against the order, which only a function may make, each with its reason.
LATE = {
    ("selection", "contract"): "loading checks the class that a plugin returns; selecting must not pay for torch",
    ("discovery", "evidence"): "the registry loads evidence on demand; a decision needs none",
    ("batching", "selection"): "the KV-cache layout in force is a setting",
}
TENSOR_LIBRARIES = {"torch", "transformers", "numpy", "triton"}
TENSOR_FREE = {
    *(
        "_lazy",
        "_version",
        "_install",
        "_escape",
        "_foreign",
        "_html",
        "_columns",
        "errors",
        "request",
        "manifest",
        "negotiation",
        "discovery",
        "evidence",
        "selection",
    ),
    *("models", "commands", "engines", "cli", "__main__"),
}
# What other distributions import: these modules, and of them what `__all__` names.
PUBLIC = {
    "attnplug",
    *(f"attnplug.{name}" for name in ("batching", "commands", "contract", "dense", "engines")),
    *("attnplug.errors", "attnplug.evidence", "attnplug.manifest"),
    "attnplug.models",
    *(f"attnplug.{name}" for name in ("negotiation", "ops", "request")),
    *("attnplug_kit.bench", "attnplug_kit.conformance", "attnplug_kit.oracle"),
    *api_pages.HOSTS,
}
PLACES = ("core", "kit", "hosts/*", "plugins/*")
DISTRIBUTIONS = {
    folder.name: folder
    for place in (*(f"{each}/src" for each in PLACES), "tests/plugins/*")
    for folder in sorted(ROOT.glob(f"{place}/attnplug*/"))
    if (folder / "__init__.py").exists()
}
NEEDS = {  # beside core
    "attnplug_flash_attn": {"attnplug_kit"},  # the direct library calls of `attnplug bench`, an extra
    "attnplug_flashinfer": {"attnplug_kit"},  # likewise
}


class Import(NamedTuple):
    """One imported module, its line, whether it runs, whether a function postpones it, and the names taken from it."""

    module: str
    line: int
    runs: bool
    late: bool
    names: tuple[str, ...] = ()


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Yield what a module of ``package`` imports, by statement or by a call with a literal name."""
    yield from _walk(ast.parse(source), package, runs=True, late=False)


def _walk(node: ast.AST, package: str, *, runs: bool, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from _walk(child, package, runs=False, late=late)
        for child in node.orelse:
            yield from _walk(child, package, runs=runs, late=late)
        return
    names = tuple(alias.name for alias in node.names) if isinstance(node, ast.ImportFrom) else ()
    yield from (Import(module, node.lineno, runs, late, names) for module in _modules(node, package))
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, runs=runs, late=late)


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        return [".".join([*parents, *([node.module] if node.module else [])])]
    if isinstance(node, ast.Call) and _called(node.func) in {"import_module", "__import__"} and node.args:
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def below(part: str) -> set[str]:
    """Return everything that a part may import at any place."""
    return BELOW[part].union(*(below(other) for other in BELOW[part]))


def part_of(module: str) -> str | None:
    """Return the part of core that a module belongs to, or None for the facade itself."""
    words = module.split(".")[1:]
    if words[:1] == ["contract"] and ".".join(words[:2]) in BELOW:
        return ".".join(words[:2])
    return words[0] if words else None


def core_violations(files: dict[str, str]) -> list[str]:
    """Check core, given as texts by their path relative to the package. The facade imports lazily."""
    return [
        f"{path}:{found.line} {why}"
        for path, source in files.items()
        if path != "__init__.py"
        for found in imports_of(source, ".".join(["attnplug", *Path(path).parent.parts]))
        if found.runs and (why := _judge(_module_of("attnplug", path), found))
    ]


def _module_of(package: str, path: str) -> str:
    parts = [*Path(path).parent.parts, *([] if Path(path).name == "__init__.py" else [Path(path).stem])]
    return ".".join([package, *parts])


def _judge(module: str, found: Import) -> str | None:
    part = part_of(module)
    if part not in BELOW:
        return f"{part} has no place in the import law"
    root = found.module.partition(".")[0]
    if root.startswith("attnplug_"):
        return f"core imports {root}"
    if root in TENSOR_LIBRARIES and part in TENSOR_FREE and not (part == "cli" and found.late):
        return f"{part} imports {root}, and is free of tensors"
    return _judge_own(part, found) if root == "attnplug" else None


def _judge_own(part: str, found: Import) -> str | None:
    target = part_of(found.module)
    if target is None:
        return None if part == "cli" else f"{part} imports the facade"
    if target == part or target in below(part):
        return None
    if (part, target.partition(".")[0]) in LATE:
        return None if found.late else f"{part} imports {target} at once, and may do so in a function only"
    return f"{part} imports {target}, against the order"


def foreign_violations(own: str, files: dict[str, str], *, tests: bool = False) -> list[str]:
    """
    Check one distribution: of others it imports only what is public, and only from those that it needs.

    Tests may import any module without an underscore of core, kit and hosts.
    """
    return [
        f"{path}:{found.line} {own} imports {wrong}"
        for path, source in files.items()
        for found in imports_of(source, ".".join([own, *Path(path).parent.parts]))
        for wrong in _not_public(own, found, tests=tests)
    ]


def _not_public(own: str, found: Import, *, tests: bool) -> list[str]:
    root = found.module.partition(".")[0]
    if root == own or not (root == "attnplug" or root.startswith("attnplug_")):
        return []
    if any(word.startswith("_") for word in found.module.split(".")):
        return [found.module]
    allowed = {"attnplug", "attnplug_kit", "attnplug_transformers"} if tests else {"attnplug", *NEEDS.get(own, ())}
    if root not in allowed:
        return [f"{found.module}, another distribution"]
    if tests:
        return [f"{found.module}.{name}" for name in found.names if name.startswith("_")]
    if found.module not in PUBLIC:
        return [f"{found.module}, which is not public"]
    public = {*import_module(found.module).__all__, *(name.rpartition(".")[2] for name in PUBLIC)}
    return [f"{found.module}.{name}, which is not public" for name in found.names if name not in public]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, largest first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted((one for one in found if len(one) > 1), key=len, reverse=True)


def import_graph(package: str, files: dict[str, str]) -> dict[str, set[str]]:
    """Return which module of a package imports which, type-only and function-level imports counted."""
    modules = {_module_of(package, path): (path, source) for path, source in files.items()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, (path, source) in modules.items():
        if Path(path).name == "__init__.py":
            continue  # a facade imports what it names when the name is used, and nothing else
        for found in imports_of(source, ".".join([package, *Path(path).parent.parts])):
            targets = [found.module, *(f"{found.module}.{name}" for name in found.names)]
            graph[module] |= {target for target in targets if target in modules and target != module}
    return graph


def _read(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text("utf-8") for file in sorted(folder.rglob("*.py"))}


def test_core_obeys_the_import_law() -> None:
    assert core_violations(_read(CORE)) == []


@pytest.mark.parametrize("own", sorted(DISTRIBUTIONS))
def test_a_distribution_imports_only_what_is_public(own: str) -> None:
    found = [] if own == "attnplug" else foreign_violations(own, _read(DISTRIBUTIONS[own]))

    assert found == []


@pytest.mark.parametrize(
    "own", [name for name, folder in DISTRIBUTIONS.items() if (ROOT / "plugins") in folder.parents]
)
def test_the_tests_of_a_plugin_import_nothing_private(own: str) -> None:
    found = foreign_violations(own, _read(DISTRIBUTIONS[own].parents[1] / "tests"), tests=True)

    assert found == []


def test_the_built_in_backend_imports_only_what_is_public_to_plugins() -> None:
    files = {f"torch_backend/{path}": source for path, source in _read(CORE / "torch_backend").items()}
    private = [
        f"{path}:{found.line} {found.module}.{name}"
        for path, source in files.items()
        for found in imports_of(source, "attnplug.torch_backend")
        for name in (*found.module.split("."), *found.names)
        if found.module.startswith("attnplug") and name.startswith("_")
    ]

    assert private == []


def test_the_law_has_no_circle() -> None:
    assert [part for part in BELOW if part in below(part)] == []


@pytest.mark.parametrize("package", [name for name, folder in DISTRIBUTIONS.items() if "plugins" not in folder.parts])
def test_no_circle_of_modules_is_too_large(package: str) -> None:
    found = circles(import_graph(package, _read(DISTRIBUTIONS[package])))

    assert [one for one in found if len(one) > LARGEST_CIRCLE] == []


def test_public_modules_name_what_they_have() -> None:
    for name in sorted(PUBLIC):
        module = import_module(name)
        assert all(hasattr(module, each) for each in module.__all__), name


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("request/device.py", "from attnplug.selection.load import load", "against the order"),
        ("request/device.py", "from ..discovery import registry", "against the order"),
        ("contract/inputs/layer.py", "from attnplug.contract.guards import layer", "against the order"),
        ("contract/guards/batch.py", "from attnplug.contract.graphs.shape import GraphShape", "against the order"),
        ("contract/graphs/shape.py", "from attnplug.contract.vendor import Backend", "against the order"),
        ("contract/inputs/layer.py", "def f():\n    from attnplug.ops.merge import a", "against the order"),
        ("ops/merge.py", "import attnplug.batching.slots", "against the order"),
        ("models/layers.py", "from attnplug.selection.select import select", "against the order"),
        ("errors.py", "from attnplug.request import fields", "against the order"),
        ("selection/load.py", "import attnplug.contract.vendor", "in a function only"),
        ("negotiation/fix.py", "from attnplug import Device", "the facade"),
        ("negotiation/fix.py", "import attnplug", "the facade"),
        ("manifest/reader.py", "import torch.nn", "free of tensors"),
        ("request/device.py", "def f():\n    return __import__('torch')", "free of tensors"),
        ("request/device.py", "import importlib\nt = importlib.import_module('torch')", "free of tensors"),
        ("cli/main.py", "import torch", "free of tensors"),
        ("ops/merge.py", "import attnplug_flashinfer", "core imports attnplug_flashinfer"),
        ("novelty/thing.py", "import os", "no place"),
        ("request/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "free of tensors"),
    ],
)
def test_a_violation_is_found(path: str, source: str, why: str) -> None:
    (found,) = core_violations({path: source})

    assert why in found
    assert found.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("request/device.py", "if TYPE_CHECKING:\n    import torch\n    from attnplug.selection.load import load"),
        ("selection/load.py", "def f():\n    from attnplug.contract.vendor import Backend"),
        ("cli/main.py", "def f():\n    import torch"),
        ("cli/main.py", "import attnplug\nfrom attnplug import select"),
        ("torch_backend/impl.py", "import torch\nfrom attnplug.negotiation.agreement import Agreement"),
        ("torch_backend/impl.py", "from .masks import mask\nfrom attnplug.torch_backend import plugin"),
        ("__init__.py", "from importlib import import_module\nimport_module('attnplug.cli')"),
    ],
)
def test_what_the_law_allows_passes(path: str, source: str) -> None:
    assert core_violations({path: source}) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import attnplug_flashinfer.plan", "attnplug_flashinfer.plan, another distribution"),
        ("def f():\n    import attnplug_kit.oracle", "attnplug_kit.oracle, another distribution"),
        ("if TYPE_CHECKING:\n    from attnplug.selection.load import load", "attnplug.selection.load, which is not"),
        ("from attnplug.contract.guards import layer", "attnplug.contract.guards, which is not public"),
        ("from attnplug.contract import ForwardGuard", "attnplug.contract.ForwardGuard, which is not public"),
        ("from attnplug import errors_of", "attnplug.errors_of, which is not public"),
        ("import attnplug._lazy", "attnplug._lazy"),
    ],
)
def test_an_import_that_is_not_public_is_found(source: str, wrong: str) -> None:
    (found,) = foreign_violations("attnplug_mine", {"impl.py": source})

    assert wrong in found


@pytest.mark.parametrize(
    "source",
    [
        "from attnplug import Reason, Device\nimport attnplug",
        "from attnplug.contract import hookimpl, Backend\nfrom attnplug.batching import pages_of",
        "from attnplug.errors import BatchError\nfrom attnplug.request import Device",
        "from attnplug_mine.plan import _private\nfrom ._own import _secret",
    ],
)
def test_what_plugins_are_written_against_passes(source: str) -> None:
    assert foreign_violations("attnplug_mine", {"impl.py": source}) == []


def test_a_circle_is_found_with_all_its_modules() -> None:
    files = {
        "a.py": "from attnplug_x.b import b",
        "b.py": "if TYPE_CHECKING:\n    from attnplug_x import c",
        "c.py": "def f():\n    import attnplug_x.a",
        "d.py": "import attnplug_x.a",
    }

    assert circles(import_graph("attnplug_x", files)) == [["attnplug_x.a", "attnplug_x.b", "attnplug_x.c"]]
