"""Plugins written to a scratch folder, and a process that knows only them."""

from __future__ import annotations

import sys

import pytest

import attnplug
from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.manifest.reader import parse_manifest
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process

FLASH = """\
api = "1.0"
backend = { name = "flash", aliases = ["FLASH"], summary = "three libraries behind one name" }
[supports]
device_type = "cuda"
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
features = ["paged", "sliding_window", "logits_soft_cap", "cascade"]
[[rules]]
when = { cascade = true }
need = { sliding_window = false }
because = "the shared prefix is one dense pass"
[variants.old]
requires = ["flash-old >=2.7"]
[variants.old.supports]
compute_capability = { min = "8.0" }
block_size = { multiple_of = 256 }
alibi = "linear"
cudagraph = { max = "uniform_batch" }
[variants.hopper]
requires = ["flash-hopper"]
supports = { compute_capability = "9.0", block_size = { multiple_of = 16 }, cudagraph = { max = "always" } }
[variants.new]
requires = ["flash-new >=4"]
[variants.new.supports]
compute_capability = ["9.0", { min = "10.0", max = "11.0" }]
block_size = [128, { multiple_of = 16 }]
features = ["sinks"]
[[prefer]]
order = ["hopper", "new", "old"]
when = { compute_capability = "9.0" }
because = "measured"
[options.splits]
type = "int"
min = 0
default = 0
help = "number of splits"
"""
GENERIC = """\
api = "1.0"
backend = { name = "generic", summary = "serves everything, slowly" }
[supports]
device_type = ["cpu", "cuda"]
compute_capability = { min = "7.0" }
dtype = ["bfloat16", "float16", "float32"]
head_size = { min = 1 }
block_size = [16, { min = 1 }]
kv_layout = ["NHD", "HND"]
features = ["paged", "sliding_window", "logits_soft_cap", "sinks"]
[variants.default]
emulates = { paged = "gathers" }
"""
SOURCE = """\
from attnplug.contract import hookimpl

@hookimpl
def attnplug_backend(variant, agreement):
    from attnplug.contract import AttentionImpl, Backend

    class Impl(AttentionImpl):
        cache_write = "forward"
        def run(self, query, key, value, kv_cache, metadata, output, lse):
            output.zero_()

        def update_kv_cache(self, key, value, kv_cache, slot_mapping):
            raise AssertionError

    class Made(Backend):
        impl_class = Impl

    return Made
"""
USUAL = {"flash": FLASH, "generic": GENERIC}
INSTALLED = {"flash-old": "2.8.3", "flash-hopper": "1.0", "flash-new": "4.0"}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """
    Return ``make(*names, **sources)``: a process with these plugins and nothing else.

    A name is ``flash`` or ``generic``; a source is (manifest, code of the plugin module) under another name, None for
    the usual code. The kernel libraries of flash are installed, less ``missing``.
    """
    monkeypatch.syspath_prepend(tmp_path)
    before = process.PROCESS.state

    def make(*names, device=Device.cuda("9.0"), missing=(), settings=Settings(), **sources):  # noqa: B008 - frozen
        plugins = []
        for name, (manifest, code) in ({name: (USUAL[name], None) for name in names} | sources).items():
            package = tmp_path / f"scratch_{name}"
            package.mkdir(exist_ok=True)
            (package / "__init__.py").write_text("")
            (package / "plugin.py").write_text(code or SOURCE)
            (package / "attnplug.toml").write_text(manifest)
            parsed = parse_manifest(manifest, str(package / "attnplug.toml"))
            built_in = name == "generic"
            plugins.append(
                Plugin(parsed.name, f"scratch_{name}.plugin", f"dist-{name}", "1.0", parsed, built_in=built_in)
            )
        found = {name: version for name, version in INSTALLED.items() if name not in missing}
        registry = Registry(plugins, version_of=found.get, settings=settings)
        process.PROCESS.state = process.ProcessState(registry, settings, registry.generation, own_device=device)
        return registry

    yield make
    process.PROCESS.state = before
    for name in [name for name in sys.modules if name.startswith("scratch_")]:
        del sys.modules[name]


@pytest.fixture
def both(world):
    """Return a process with the flash plugin and the built_in generic one, on compute capability 9.0."""
    return world("flash", "generic")


@pytest.fixture
def flash_manifest():
    """Return the text of the flash plugin's manifest."""
    return FLASH


@pytest.fixture
def plugin_source():
    """Return the usual code of a plugin module."""
    return SOURCE


@pytest.fixture
def request_of():
    """Return a maker of requirements with usual head counts."""

    def make(**values):
        return attnplug.Requirements(
            **{"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16", **values}
        )

    return make


@pytest.fixture
def installed(world, monkeypatch):
    """A process in which a scan finds the flash plugin, and what was registered by hand, without any file."""
    registry = world("flash")
    plugins, version_of = registry.plugins, registry._version_of

    def scan(settings, by_hand=()):
        return Registry((*plugins, *by_hand), version_of=version_of, settings=settings)

    monkeypatch.setattr(Registry, "scan", scan)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
