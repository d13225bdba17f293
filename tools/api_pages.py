"""
The pages of the API reference: one per public module, with a directive of mkdocstrings for each name of `__all__`.

The build reads docstrings and signatures from the sources. These pages say which names there are, in which order, and
which of them are documented with another module.
"""

from __future__ import annotations

import ast
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tools.toml import read_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = "docs/reference/api"


@frozen
class Page:
    """
    One page of the API reference.

    Attributes:
        name: The file, without folder and suffix.
        title: The heading.
        modules: The public modules whose names it documents, each with a sentence for readers.
    """

    name: str
    title: str
    modules: Mapping[str, str]


HOSTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        module: about
        for project in sorted(ROOT.glob("hosts/*/pyproject.toml"))
        for module, about in read_toml(project).get("tool", {}).get("attnplug", {}).get("api", {}).items()
    }
)
"""The public modules of hosts, from `[tool.attnplug.api]` of their projects."""

# In the order of the index. Names that `attnplug` exports, too, are documented there only.
PAGES: Final = (
    Page(
        "attnplug",
        "Main functions",
        {
            "attnplug": "Explain, select, plan and load: for hosts and notebooks. "
            "[Fields](../requirements.md) has the domain and the unit of each field of `Requirements`.",
        },
    ),
    Page(
        "decisions",
        "Requests and decisions",
        {
            "attnplug.request": "Requirements, devices and settings as data, and their fields.",
            "attnplug.models": "Requirements of each layer from a model configuration, without torch.",
            "attnplug.manifest": "Read, check and evaluate an `attnplug.toml`.",
            "attnplug.negotiation": "Negotiate with one candidate, and read its verdict.",
            "attnplug.evidence": "Read the results of conformance kit runs.",
        },
    ),
    Page(
        "contract",
        "Contract, batches and tensors",
        {
            "attnplug.contract": "Write or host a backend. [The contract](../contract.md) says who calls each member.",
            "attnplug.ops": "Tensor operations that backends share: KV-cache writes, gathers, quantization.",
            "attnplug.batching": "Assemble batches: slots, pages, positions, padding. "
            "[Batch utilities](../batching.md) shows them at work.",
            "attnplug.dense": "Attention as a function call, and its parts.",
        },
    ),
    Page(
        "extend",
        "Errors, commands, engines",
        {
            "attnplug.errors": "Every exception. [Troubleshooting](../../troubleshooting.md) has causes and fixes.",
            "attnplug.commands": "Add a command to `attnplug`.",
            "attnplug.engines": "Report the backend that a host engine selects by itself.",
        },
    ),
    Page("hosts", "Hosts", HOSTS),
    Page(
        "kit",
        "The conformance kit",
        {
            "attnplug_kit.conformance": "Test a backend against the oracle.",
            "attnplug_kit.oracle": "Attention in float64, and random batches.",
            "attnplug_kit.bench": "Measure a backend beside direct calls of its library.",
        },
    ),
)

# By module: the names that a page begins with, in the order of use. Other names follow by the alphabet.
LEADING: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attnplug": "explain select plan load Requirements Device Explanation Verdict Reason Fix Selection Agreement "
        "Plan Settings Layer Batch Limits Parallel NoBackendError AttnplugError attention attention_varlen using",
        "attnplug.models": "requirements requirements_from_json describe_model model_layers",
        "attnplug.manifest": "read_manifest parse_manifest locate Manifest Variant Rule Option",
        "attnplug.negotiation": "negotiate Candidate Request",
        "attnplug.evidence": "read_folder",
        "attnplug.contract": "Backend AttentionImpl MetadataBuilder Metadata State LoadedBackend Attention StepBuilder "
        "Step Captures KVCache CacheTensor",
        "attnplug.ops": "write_kv write_pages gather_packed gather_dense gather_blocks gather_slots",
        "attnplug.batching": "BatchAssembler SlotTable Pages",
        "attnplug.dense": "flash_attn_varlen_func flash_attn_with_kvcache prepare_attention prepare_attention_varlen",
        "attnplug_torch": "register explain report",
        "attnplug_transformers": "register continuous_batching",
        "attnplug_kit.conformance": "Conformance Tier",
        "attnplug_kit.oracle": "attend check compare",
    }
)

INTRODUCTION: Final = """\
# API

Look up a public name: its signature, its parameters with shapes and units, and its errors. The pages are made from the
docstrings of this revision; `help(attnplug.select)` in Python shows the same text. [Examples by
name](../examples/index.md) uses each name in code that runs.

Names that are not listed here are private and may change without notice; see the [API policy](../api-policy.md).
`Requirements`, `Batch`, `Verdict` and other data classes are frozen [attrs](https://www.attrs.org) classes: their
attributes are the arguments of the constructor, and `attrs.evolve` makes a copy with other values.

| module | purpose |
| --- | --- |
"""


def index(root: Path) -> str:
    """Return the page that lists the others."""
    del root
    rows = (
        f"| [`{module}`]({page.name}.md#{module.replace('.', '')}) | {about} |\n"
        for page in PAGES
        for module, about in page.modules.items()
    )
    return INTRODUCTION + "".join(rows)


def page_of(page: Page, root: Path) -> str:
    """Return the page of some modules: directives for its names, and links to those of the facade."""
    del root
    parts = [f"# {page.title}"]
    for module, about in page.modules.items():
        names = in_order_of_use(module)
        shared = [name for name in names if page is not PAGES[0] and name in facade_names(module)]
        parts += [f"## {module}", about, *(f"::: {_path(module, name)}" for name in names if name not in shared)]
        links = ", ".join(f"[`{name}`]({PAGES[0].name}.md#attnplug.{name})" for name in shared)
        parts += [f"Public here, too, and documented with `attnplug`: {links}."] if shared else []
    return "\n\n".join(parts) + "\n"


def in_order_of_use(module: str) -> list[str]:
    """Return the public names of a module, the leading ones first."""
    leading = LEADING.get(module, "").split()
    return [*leading, *(name for name in public_names(module) if name not in leading)]


def facade_names(module: str) -> list[str]:
    """Return the names that `attnplug` shares with its modules; other distributions share none."""
    return public_names("attnplug") if module.startswith("attnplug.") else []


def source_of(module: str) -> Path:
    """Return the source folder of a module's distribution."""
    package = module.partition(".")[0]
    return next(path.parent for place in ("core", "kit", "hosts/*") for path in ROOT.glob(f"{place}/src/{package}"))


def public_names(module: str) -> list[str]:
    """Return the `__all__` of a module without dunders: as it is written, or as the module computes it."""
    place = source_of(module) / Path(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names = _written(ast.parse(file.read_text("utf-8")))
    return [name for name in (import_module(module).__all__ if names is None else names) if not name.startswith("__")]


def _written(tree: ast.Module) -> list[str] | None:
    """Return a literal `__all__`; None where it is computed."""
    for node in tree.body:
        targets: Iterable[ast.expr] = (
            node.targets if isinstance(node, ast.Assign) else (node.target,) if isinstance(node, ast.AnnAssign) else ()
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            return sorted(ast.literal_eval(value), key=_first_classes) if isinstance(value, ast.List) else None
    return None


def _first_classes(name: str) -> tuple[bool, str]:
    return name.isupper(), name


def _path(module: str, name: str) -> str:
    """Return the path by which the build finds a name: its home where the module has it at run time only."""
    if module != "attnplug_kit.bench":
        return f"{module}.{name}"
    found: Any = getattr(import_module(module), name)
    return f"{found.__module__}.{found.__qualname__}"


WRITERS: Final[Mapping[str, Callable[[Path], str]]] = MappingProxyType(
    {f"{FOLDER}/index.md": index} | {f"{FOLDER}/{page.name}.md": partial(page_of, page) for page in PAGES}
)
"""The pages by their file, for `tools.tables`."""
