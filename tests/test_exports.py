"""The public names: what the facade says it has, it has, and both type checkers and users see the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import attnplug

FACADE = Path(attnplug.__file__)


def _typed_names() -> dict[str, str]:
    """Return what type checkers see: each name under TYPE_CHECKING with the module that it comes from."""
    tree = ast.parse(FACADE.read_text("utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def test_dir_lists_the_public_names() -> None:
    assert dir(attnplug) == sorted(attnplug.__all__)
    assert len(set(attnplug.__all__)) == len(attnplug.__all__)


def test_type_checkers_see_the_names_that_run_time_serves() -> None:
    assert {*_typed_names(), "__version__"} == set(attnplug.__all__)


@pytest.mark.parametrize("name", sorted(attnplug.__all__))
def test_each_public_name_resolves(name: str) -> None:
    first: Any = getattr(attnplug, name)

    assert first is not None
    assert getattr(attnplug, name) == first


@pytest.mark.parametrize(("name", "home"), sorted(_typed_names().items()))
def test_each_public_name_is_the_object_that_its_home_defines(name: str, home: str) -> None:
    assert getattr(attnplug, name) is getattr(import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'attnplug' has no attribute 'selekt'"):
        _ = attnplug.selekt


def test_a_star_import_has_exactly_the_public_names() -> None:
    namespace: dict[str, Any] = {}

    exec("from attnplug import *", namespace)  # noqa: S102 - the statement is the thing under test

    assert set(namespace) - {"__builtins__"} == set(attnplug.__all__)


def test_names_that_need_torch_say_so_without_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import attnplug\n"
        "try: attnplug.Batch\n"
        "except ImportError as error: print(error)\n"
        "attnplug.select, attnplug.Requirements"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "attnplug.Batch needs torch" in ran.stdout
    assert "pip install 'attnplug[torch]'" in ran.stdout
