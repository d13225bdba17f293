"""Only one module imports FlashInfer, and it adds what the library lacks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attnplug_flashinfer

SOURCES = sorted(Path(attnplug_flashinfer.__file__).parent.glob("*.py"))
IMPORTING = {"library.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_other_module_imports_it(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found = {name for name in imported if name.split(".")[0] == "flashinfer"}

    assert not found or path.name in IMPORTING


def test_it_uses_no_private_name_of_the_library(fakes) -> None:
    source = next(path for path in SOURCES if path.name == "library.py").read_text(encoding="utf-8")
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}

    assert not {name for name in attributes if name.startswith("_") and not name.startswith("__")}


def test_sink_modules_are_named_by_head_size(fakes, monkeypatch) -> None:
    import flashinfer  # noqa: PLC0415 - the fake, active by now

    from attnplug_flashinfer import library  # noqa: PLC0415 - likewise

    seen = []
    parent = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(parent, "__init__", lambda self, *args, **options: seen.append((args, options)))
    arguments = ["sink_bf16", "q", "kv", "o", "int32", 64, 64, ["sink"]]
    library._HeadSizeInModuleName("workspace", jit_args=arguments, backend="fa2")
    library._HeadSizeInModuleName("workspace", backend="fa2")

    assert seen[0] == (("workspace",), {"jit_args": ["sink_bf16_head_64_64", *arguments[1:]], "backend": "fa2"})
    assert seen[1] == (("workspace",), {"backend": "fa2"})


def test_the_sink_wrapper_is_constructed_with_that_name(fakes) -> None:
    import flashinfer  # noqa: PLC0415 - the fake, active by now

    from attnplug_flashinfer import library  # noqa: PLC0415 - likewise

    order = library.BatchAttentionWithAttentionSinkWrapper.__mro__
    places = [
        order.index(each)
        for each in (
            flashinfer.BatchAttentionWithAttentionSinkWrapper,
            library._HeadSizeInModuleName,
            flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        )
    ]
    assert places == sorted(places)
