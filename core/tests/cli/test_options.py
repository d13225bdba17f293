"""`attnplug options` and `Registry.options`: what can be set for a backend, as its manifest declares it."""

from __future__ import annotations

import json

import pytest

from attnplug.cli.main import main
from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import SettingsError, UnknownBackendError
from attnplug.manifest.reader import parse_manifest
from attnplug.request.settings import Settings
from attnplug.selection.options import check_options

MANIFEST = """\
api = "1.0"
backend = { name = "flash", aliases = ["FLASH"], summary = "three libraries behind one name" }
[supports]
device_type = "cpu"
dtype = "bfloat16"
head_size = 64
[options.splits]
type = "int"
min = 0
default = 0
help = "number of splits"
[options.mode]
type = "str"
choices = ["fast", "exact"]
default = "fast"
help = "how sums are ordered"
"""


@pytest.fixture
def registry(tmp_path):
    manifest = parse_manifest(MANIFEST, tmp_path / "attnplug.toml")
    return Registry([Plugin("flash", "flash.plugin", "flash", "1.0", manifest)])


@pytest.mark.parametrize("name", [None, "flash", "FLASH"])
def test_a_registry_lists_options_by_backend(registry, name):
    found = registry.options(name)

    assert {backend: list(options) for backend, options in found.items()} == {"flash": ["splits", "mode"]}
    assert str(found["flash"]["splits"]) == "splits (int from 0, default 0): number of splits"
    assert str(found["flash"]["mode"]) == "mode (str one of 'fast', 'exact', default 'fast'): how sums are ordered"


def test_an_unknown_backend_is_an_error_with_near_names(registry):
    with pytest.raises(UnknownBackendError, match="did you mean 'flash'"):
        registry.options("flsh")


def test_an_unknown_option_lists_what_there_is(registry):
    with pytest.raises(SettingsError) as caught:
        check_options(registry, Settings(options={"flash": {"split": 2}}))

    assert "did you mean 'splits'?" in caught.value.problem
    assert caught.value.expected == "'flash' has splits, mode"
    assert "`attnplug options flash`" in caught.value.fix


def test_the_command_prints_every_option_of_every_backend(capsys):
    assert main(["options"]) == 0
    printed = capsys.readouterr().out

    backends = Registry.scan(Settings()).options()
    assert "torch" in backends
    for name, options in backends.items():
        assert f"{name}: " in printed
        assert all(f"  {option} (" in printed for option in options)


def test_the_command_prints_json(capsys):
    assert main(["options", "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)["backends"]
    found = Registry.scan(Settings()).options()
    assert {name: set(options) for name, options in printed.items()} == {
        name: set(each) for name, each in found.items()
    }
    for name, options in found.items():
        for option in options.values():
            assert printed[name][option.name]["default"] == option.default


def test_an_unknown_backend_of_the_command_exits_with_2(capsys):
    assert main(["options", "torhc"]) == 2
    assert "did you mean 'torch'?" in capsys.readouterr().err
