"""The API reference shows the constructors that attrs makes, as the running classes have them."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from tools import api_pages

griffe = pytest.importorskip("griffe", reason="griffe, which reads the sources for the API reference, is not installed")

ROOT = Path(__file__).parents[1]
PUBLIC = [
    (page.source, module, name)
    for page in api_pages.PAGES
    for module in page.modules or (page.title,)
    for name in api_pages.public_names(page.source, module)
    if attrs.has(value := getattr(import_module(module), name)) and inspect.isclass(value)
]


@cache
def _read(source: str, package: str) -> Any:
    extensions = griffe.load_extensions(import_module("tools.griffe_attrs").AttrsConstructors())
    return griffe.load(package, search_paths=[ROOT / source], extensions=extensions, allow_inspection=False)


@pytest.mark.parametrize(("source", "module", "name"), PUBLIC, ids=lambda value: str(value).rpartition("/")[2])
def test_a_constructor_is_the_one_that_runs(source: str, module: str, name: str) -> None:
    public: Any = getattr(import_module(module), name)
    package, _, rest = f"{public.__module__}.{public.__qualname__}".partition(".")
    hidden = {field.alias for field in attrs.fields(public) if field.name.startswith("_")}
    parameters = inspect.signature(public.__init__).parameters.values()
    running = [item for item in parameters if item.name not in {"self", *hidden}]

    shown = list(_read(source, package)[rest].members["__init__"].parameters)[1:]

    assert [item.name for item in shown] == [item.name for item in running]
    assert [item.kind.value for item in shown] == [item.kind.description for item in running]
    assert [item.default is not None for item in shown] == [item.default is not item.empty for item in running]
