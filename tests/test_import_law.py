"""
The import law: which part of the core may know which other, read from the syntax trees.

An arrow may be followed in one direction only, and an import inside a function is an import like any other.
Types are free, since what stands under ``if TYPE_CHECKING:`` never runs. The facade (``attnplug/__init__.py``)
is exempt: it names everything and imports nothing until asked.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "attnplug"

# Each part and those directly beneath it; what is beneath those may be imported as well.
BENEATH = {
    "errors": set(),
    "request": {"errors"},
    "manifest": {"request"},
    "negotiation": {"manifest"},
    "discovery": {"negotiation"},
    "selection": {"discovery"},
    "contract": {"negotiation"},
    "triton_launch": {"errors"},
    "batching": {"contract", "triton_launch"},
    "ops": {"contract", "triton_launch"},
    "torch_backend": {"batching", "ops"},
    "testing": {"batching", "ops", "selection"},
    "hosts": {"batching", "ops", "selection"},
    "cli": {"hosts", "testing", "torch_backend"},
    "__main__": {"cli"},
}
# Arrows that only an import inside a function may follow, each with its reason.
LATE = {
    ("selection", "contract"): "loading checks the class that a plugin hands over; selecting must not pay for torch",
    ("batching", "selection"): "the layout in force is a setting, and a utility of hosts; no other one needs settings",
    ("cli", "contract"): "only the verbs that run a model need it",
    ("cli", "batching"): "likewise",
    ("cli", "ops"): "likewise",
    ("cli", "torch_backend"): "likewise",
    ("cli", "testing"): "likewise",
    ("cli", "hosts"): "likewise",
}
TENSOR_LIBRARIES = {"torch", "transformers", "numpy", "triton"}
TENSOR_FREE = {"errors", "request", "manifest", "negotiation", "discovery", "selection"}
FACADE_USERS = {"hosts", "cli", "testing"}
# What a plugin is written against, beside the facade: the doors that third parties have. Its tests have all of them.
PUBLIC = ("contract", "batching", "ops", "errors", "request", "negotiation.reason")


class Import(NamedTuple):
    """One imported module, where it stands, whether a function body postpones it, and the names taken from it."""

    module: str
    line: int
    late: bool
    names: tuple[str, ...] = ()


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Yield what a module of ``package`` imports when it runs, by statement or by a call with a literal name."""
    yield from _walk(ast.parse(source), package, late=False)


def _walk(node: ast.AST, package: str, *, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.orelse:
            yield from _walk(child, package, late=late)
        return
    names = tuple(alias.name for alias in node.names) if isinstance(node, ast.ImportFrom) else ()
    yield from (Import(module, node.lineno, late, names) for module in _modules(node, package))
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, late=late)


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        # `from attnplug import request` names a part, and `from attnplug import Device` the facade: the alias tells.
        return [f"{base}.{alias.name}" for alias in node.names] if base == "attnplug" else [base]
    if isinstance(node, ast.Call) and _called(node.func) in {"import_module", "__import__"} and node.args:
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def below(part: str) -> set[str]:
    """Return everything that a part may import at any place."""
    return BENEATH[part].union(*(below(other) for other in BENEATH[part]))


def core_violations(files: dict[str, str]) -> list[str]:
    """Judge the core, given as texts by their path relative to the package."""
    return [
        f"{path}:{found.line} {why}"
        for path, source in files.items()
        if path != "__init__.py"
        for found in imports_of(source, ".".join(["attnplug", *Path(path).parent.parts]))
        if (why := _judge(Path(path).parts[0].removesuffix(".py"), found))
    ]


def _judge(part: str, found: Import) -> str | None:
    if part not in BENEATH:
        return f"{part} has no place in the import law"
    root, _, rest = found.module.partition(".")
    return _judge_own(part, rest.partition(".")[0], found) if root == "attnplug" else _judge_foreign(part, root, found)


def _judge_foreign(part: str, root: str, found: Import) -> str | None:
    if root.startswith("attnplug_"):
        return f"core imports the plugin {root}"
    if root in TENSOR_LIBRARIES and part in TENSOR_FREE:
        return f"{part} imports {root}, and stands left of the contract"
    if root in TENSOR_LIBRARIES and part == "cli" and not found.late:
        return f"cli imports {root} before anyone asks for it"
    return None


def _judge_own(part: str, target: str, found: Import) -> str | None:
    if target == part:
        return None
    if target not in BENEATH:
        return None if part in FACADE_USERS else f"{part} reaches for the facade ({found.module})"
    if (part, target) in LATE:
        return None if found.late else f"{part} imports {target} at once, and may do so in a function only"
    return None if target in below(part) else f"{part} imports {target}, against the order"


def plugin_violations(own: str, files: dict[str, str], *, tests: bool = False) -> list[str]:
    """Judge one plugin package, or its tests: no other plugin, no private name, no part of the core but the public."""
    return [
        f"{path}:{found.line} {own} imports {told}"
        for path, source in files.items()
        for found in imports_of(source, ".".join([own, *Path(path).parent.parts]))
        if not _is_within(own, found.module)
        for told in _forbidden(own, found, tests=tests)
    ]


def _forbidden(own: str, found: Import, *, tests: bool) -> list[str]:
    if _is_other_plugin(own, found.module) or _is_private(found.module):
        return [found.module]
    if found.module.partition(".")[0] != "attnplug":
        return []
    part = found.module.partition(".")[2]
    if not tests and part.partition(".")[0] in BENEATH and not any(_is_within(door, part) for door in PUBLIC):
        return [f"{found.module}, which is no door for plugins"]
    return [f"{found.module}.{name}" for name in found.names if name.startswith("_")]


def _is_within(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_other_plugin(own: str, module: str) -> bool:
    root = module.partition(".")[0]
    return root.startswith("attnplug_") and root != own


def _is_private(module: str) -> bool:
    return module.startswith("attnplug.") and any(name.startswith("_") for name in module.split("."))


def _read(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text("utf-8") for file in sorted(folder.rglob("*.py"))}


def _plugins() -> dict[str, Path]:
    """Return the plugin packages of the workspace and those that the tests install, by package name."""
    found = [*ROOT.glob("plugins/*/src/attnplug_*/"), *ROOT.glob("tests/plugins/*/attnplug_*/")]
    return {folder.name: folder for folder in found}


def test_the_core_obeys_the_import_law() -> None:
    assert core_violations(_read(CORE)) == []


def test_no_plugin_knows_another() -> None:
    ours = {"attnplug_blocksparse", "attnplug_flash_attn", "attnplug_flashinfer", "attnplug_int8_ixformer"}
    assert {"attnplug_good", *ours} <= set(_plugins())
    assert [line for own, folder in _plugins().items() for line in plugin_violations(own, _read(folder))] == []


def test_the_tests_of_a_plugin_know_no_other_and_nothing_private() -> None:
    tests = {folder.name: folder.parents[1] / "tests" for folder in ROOT.glob("plugins/*/src/attnplug_*/")}
    found = {own: plugin_violations(own, _read(folder), tests=True) for own, folder in tests.items()}

    assert found == {own: [] for own in tests}
    assert tests


def test_the_embedded_backend_has_no_private_door() -> None:
    assert plugin_violations("attnplug.torch_backend", _read(CORE / "torch_backend")) == []


def test_the_law_has_no_circle() -> None:
    assert [part for part in BENEATH if part in below(part)] == []


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("request/device.py", "from attnplug.selection.select import select", "against the order"),
        ("request/device.py", "def f():\n    import attnplug.selection.select", "against the order"),
        ("request/device.py", "from ..selection import select", "against the order"),
        ("contract/layer.py", "class A:\n    def f(self):\n        from attnplug import ops", "against the order"),
        ("batching/split.py", "import attnplug.ops.merge", "against the order"),
        ("errors.py", "from attnplug.request import fields", "against the order"),
        ("selection/load.py", "import attnplug.contract.backend", "in a function only"),
        ("cli/main.py", "from attnplug_transformers import demo", "in a function only"),
        ("negotiation/fix.py", "from attnplug import Device", "facade"),
        ("negotiation/fix.py", "import attnplug", "facade"),
        ("manifest/parse.py", "import torch.nn", "left of the contract"),
        ("request/device.py", "def f():\n    return __import__('torch')", "left of the contract"),
        ("request/device.py", "import importlib\nt = importlib.import_module('torch')", "left of the contract"),
        ("cli/main.py", "import torch", "before anyone asks"),
        ("ops/merge.py", "import attnplug_flashinfer", "the plugin attnplug_flashinfer"),
        ("novelty/thing.py", "import os", "no place"),
        ("request/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "left of the contract"),
    ],
)
def test_a_violation_is_found(path: str, source: str, why: str) -> None:
    (found,) = core_violations({path: source})

    assert why in found
    assert found.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("request/device.py", "if TYPE_CHECKING:\n    import torch\n    from attnplug.selection.select import select"),
        ("selection/load.py", "def f():\n    from attnplug.contract.backend import Backend"),
        ("cli/main.py", "def f():\n    import torch\n    from attnplug_transformers import demo"),
        ("cli/main.py", "import attnplug\nfrom attnplug import select"),
        ("torch_backend/impl.py", "import torch\nfrom attnplug.negotiation.agreement import Agreement"),
        ("torch_backend/impl.py", "from .mask import mask\nfrom attnplug.torch_backend import plugin"),
        ("__init__.py", "from importlib import import_module\nimport_module('attnplug.cli')"),
    ],
)
def test_what_the_law_allows_passes(path: str, source: str) -> None:
    assert core_violations({path: source}) == []


def test_a_plugin_that_knows_another_is_found() -> None:
    source = "import attnplug_a.sub\ndef f():\n    from attnplug_b.impl import B\n    import attnplug._secret"

    found = plugin_violations("attnplug_a", {"impl.py": source})

    assert found == ["impl.py:3 attnplug_a imports attnplug_b.impl", "impl.py:4 attnplug_a imports attnplug._secret"]


@pytest.mark.parametrize(
    ("source", "told", "in_tests"),
    [
        ("from attnplug.ops import _merge", "attnplug.ops._merge", True),
        ("from attnplug.contract.guards import _x as x", "attnplug.contract.guards._x", True),
        ("import attnplug.selection.load", "attnplug.selection.load, which is no door for plugins", False),
        ("def f():\n    from attnplug import cli", "attnplug.cli, which is no door for plugins", False),
        (
            "from attnplug_kit.conformance import Conformance",
            "attnplug_kit.conformance, which is no door for plugins",
            False,
        ),
        ("from attnplug.negotiation.candidate import C", "attnplug.negotiation.candidate, which is no door", False),
        ("from attnplug.torch_backend import plugin", "attnplug.torch_backend, which is no door for plugins", False),
    ],
)
def test_a_plugin_that_takes_another_door_is_found(source: str, told: str, *, in_tests: bool) -> None:
    (found,) = plugin_violations("attnplug_a", {"impl.py": source})

    assert told in found
    assert bool(plugin_violations("attnplug_a", {"impl.py": source}, tests=True)) is in_tests


@pytest.mark.parametrize(
    "source",
    [
        "from attnplug import Reason, Device\nimport attnplug",
        "from attnplug.contract.hooks import hookimpl\nfrom attnplug.batching import pages_of",
        "from attnplug.negotiation.verdict import Reason\nfrom attnplug.errors import BatchError",
        "from attnplug_a.plan import _private\nfrom ._own import _secret",
        "if TYPE_CHECKING:\n    from attnplug.selection.selection import Selection",
    ],
)
def test_what_plugins_are_written_against_passes(source: str) -> None:
    assert plugin_violations("attnplug_a", {"impl.py": source}) == []
