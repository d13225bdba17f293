"""The kit's public names; modules that every run of pytest or the command line imports stay cheap."""

from __future__ import annotations

from importlib import import_module

import pytest

FACADES = ("attnplug_kit.bench", "attnplug_kit.conformance", "attnplug_kit.oracle")


@pytest.mark.parametrize("facade", FACADES)
def test_each_public_name_resolves(facade: str) -> None:
    module = import_module(facade)

    assert len(set(module.__all__)) == len(module.__all__)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'attnplug_kit\.bench' has no attribute 'Baselin'"):
        _ = import_module("attnplug_kit.bench").Baselin


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("attnplug_kit.bench", "torch hypothesis rich attnplug_kit.bench.rig attnplug_kit.bench.result"),
        ("attnplug_kit.check", "torch hypothesis rich packaging attnplug_kit.check.examine"),
        ("attnplug_kit.new", "torch hypothesis rich packaging attnplug_kit.new.project"),
        ("attnplug_kit.pytest_plugin", "torch hypothesis attnplug attnplug_kit.conformance"),
    ],
)
def test_what_is_always_imported_imports_little(start, module: str, absent: str) -> None:
    code = f"import sys, {module}; print(sorted(set({absent.split()}) & set(sys.modules)))"

    assert start("-c", code).out == "[]\n"
