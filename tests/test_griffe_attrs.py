"""The API reference shows the constructors that attrs makes, as the running classes have them."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import attrs
import pytest

from tools import api_pages

griffe = pytest.importorskip("griffe", reason="griffe, which reads the sources for the API reference, is not installed")

PUBLIC = [
    (module, name)
    for page in api_pages.PAGES
    for module in page.modules
    for name in api_pages.public_names(module)
    if attrs.has(value := getattr(import_module(module), name)) and inspect.isclass(value)
]


@cache
def _read(package: str) -> Any:
    extensions = griffe.load_extensions(import_module("tools.griffe_attrs").AttrsConstructors())
    source = api_pages.source_of(package)
    return griffe.load(package, search_paths=[source], extensions=extensions, allow_inspection=False)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_constructor_is_the_one_that_runs(module: str, name: str) -> None:
    public: Any = getattr(import_module(module), name)
    package, _, rest = f"{public.__module__}.{public.__qualname__}".partition(".")
    hidden = {field.alias for field in attrs.fields(public) if field.name.startswith("_")}
    parameters = inspect.signature(public.__init__).parameters.values()
    running = [item for item in parameters if item.name not in {"self", *hidden}]

    shown = list(_read(package)[rest].members["__init__"].parameters)[1:]

    assert [item.name for item in shown] == [item.name for item in running]
    assert [item.kind.value for item in shown] == [item.kind.description for item in running]
    assert [item.default is not None for item in shown] == [item.default is not item.empty for item in running]
