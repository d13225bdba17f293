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
        title: The heading: the module, or the package of a distribution.
        about: What a reader finds here, one sentence.
        modules: The public modules whose names it has; the title where empty.
        source: The folder of the sources.
    """

    name: str
    title: str
    about: str
    modules: tuple[str, ...] = ()
    source: str = "core/src"


_FACADE: Final = Page(
    "attnplug",
    "attnplug",
    "Request, select, explain, plan and load: what a host or a notebook calls. [Fields](../requirements.md) has the "
    "domain and the unit of each field of `Requirements`.",
)


def _hosts() -> Iterable[Page]:
    """Yield the pages of hosts: of those that say in `[tool.attnplug]` what their API is for."""
    for project in sorted(ROOT.glob("hosts/*/pyproject.toml")):
        host, table = project.parent.name, read_toml(project).get("tool", {}).get("attnplug", {})
        if "api" in table:
            modules = tuple(table.get("api-modules", ()))
            yield Page(host, f"attnplug_{host}", table["api"], modules, source=f"hosts/{host}/src")


HOSTS: Final = tuple(_hosts())

# In the order of the index. What the facade has, too, is documented there only.
PAGES: Final = (
    _FACADE,
    Page("request", "attnplug.request", "Requirements, devices and settings as data, and the fields they consist of."),
    Page("models", "attnplug.models", "Requirements of each layer from a model configuration, without torch."),
    Page("manifest", "attnplug.manifest", "Read, check and evaluate an `attnplug.toml`."),
    Page("negotiation", "attnplug.negotiation", "Negotiate with one candidate, and read its verdict."),
    Page("evidence", "attnplug.evidence", "Read what runs of the conformance kit have shown."),
    Page(
        "contract",
        "attnplug.contract",
        "Write a backend, or host one. [The contract](../contract.md) says who calls each member.",
    ),
    Page("ops", "attnplug.ops", "Tensor operations that backends share: KV-cache writes, gathers, quantization."),
    Page(
        "batching",
        "attnplug.batching",
        "Assemble batches: slots, pages, positions, padding. [Batch utilities](../batching.md) shows them at work.",
    ),
    Page("dense", "attnplug.dense", "Attention as a function call, and what it is made of."),
    Page(
        "errors",
        "attnplug.errors",
        "Every exception. [Troubleshooting](../../troubleshooting.md) has causes and fixes.",
    ),
    Page("commands", "attnplug.commands", "Add a command to `attnplug`."),
    Page("engines", "attnplug.engines", "Report what a host engine selects by itself."),
    *HOSTS,
    Page(
        "kit",
        "attnplug_kit",
        "Test a backend against the oracle, and measure it.",
        modules=("attnplug_kit.conformance", "attnplug_kit.oracle", "attnplug_kit.bench"),
        source="kit/src",
    ),
)

INTRODUCTION: Final = """\
# API

Look up a public name: its signature, its parameters with shapes and units, and the errors that it raises. The pages are
made from the docstrings of this revision; `help(attnplug.select)` in Python shows the same text.
[Examples by name](../examples/index.md) uses each name in code that runs.

What is not listed here is private and may change without notice. [The API policy](../api-policy.md) says what may
change when. Data, such as `Requirements`, `Batch` or `Verdict`, are frozen [attrs](https://www.attrs.org) classes: the
attributes of a class are the arguments of its constructor, and `attrs.evolve` makes a copy with other values.

| module | what it is for |
| --- | --- |
"""


def index(root: Path) -> str:
    """Return the page that lists the others."""
    del root
    return INTRODUCTION + "".join(f"| [`{page.title}`]({page.name}.md) | {page.about} |\n" for page in PAGES)


def page_of(page: Page, root: Path) -> str:
    """Return the page of some modules: directives for its names, and links to those of the facade."""
    del root
    several = len(page.modules) > 1
    options = "\n    options:\n      heading_level: 3" if several else ""
    parts = [f"# {page.title}", page.about]
    for module in page.modules or (page.title,):
        names = public_names(page.source, module)
        shared = [name for name in names if page is not _FACADE and name in facade_names(module)]
        parts += [f"## {module}"] if several else []
        parts += [f"::: {_path(module, name)}{options}" for name in names if name not in shared]
        links = ", ".join(f"[`{name}`]({_FACADE.name}.md#attnplug.{name})" for name in shared)
        parts += [f"Public here, too, and documented with `attnplug`: {links}."] if shared else []
    return "\n\n".join(parts) + "\n"


def facade_names(module: str) -> list[str]:
    """Return the names that `attnplug` shares with its modules; other distributions share none."""
    return public_names(_FACADE.source, _FACADE.title) if module.startswith("attnplug.") else []


def public_names(source: str, module: str) -> list[str]:
    """Return the `__all__` of a module without dunders: as it is written, or as the module computes it."""
    place = ROOT / source / Path(*module.split("."))
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
