"""
The command with the plugins that a test installs, and no others.

`empty` and `site` are scratch folders on the path of the test's process and of those that it starts. They hide the
workspace's plugins, which are installed beside core, through `without_plugins/sitecustomize.py`; a test that only needs
these hidden takes `no_plugins`. Any other process needs `WITHOUT_PLUGINS` on its PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import frozen

import attnplug
from attnplug.cli.main import main
from tests.without_plugins import sitecustomize
from tools import forked

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHOUT_PLUGINS = Path(sitecustomize.__file__).parent
"""A folder for PYTHONPATH: the process has none of the plugins and engines of the workspace."""

FLASH = """\
api = "1.0"
backend = { name = "flash", aliases = ["FLASH"], summary = "three libraries behind one name" }
[supports]
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
features = ["paged", "sliding_window"]
[variants.old]
requires = ["flash-old >=2.7"]
[variants.old.supports]
device_type = "cuda"
compute_capability = { min = "8.0", max = "9.0" }
block_size = { multiple_of = 256 }
cudagraph = { max = "uniform_batch" }
[variants.new]
requires = ["flash-new >=4"]
[variants.new.supports]
device_type = "cuda"
compute_capability = ["9.0", { min = "10.0", max = "11.0" }]
block_size = [128, { multiple_of = 16 }]
features = ["sinks"]
[variants.host]
supports = { device_type = "cpu", block_size = { multiple_of = 16 } }
[options.splits]
type = "int"
min = 0
default = 0
help = "number of splits"
"""
FROM_A_VENDOR = FLASH.replace(
    'requires = ["flash-new >=4"]',
    'requires = ["flash-new >=4", "flash-tools"]\ninstall = { flash-new = "from its vendor" }',
)
SOURCE = """\
from attnplug.contract import hookimpl
from attnplug.negotiation.reason import Reason

print("this plugin talks while it is imported")

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

@hookimpl
def attnplug_probe(variant, agreement, device):
    return PROBE
"""


class Site:
    """A folder on ``sys.path``, of this process and of those that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, manifest: str, *, distribution: str | None = None, probe: str = "None") -> Path:
        """Install a plugin; return its manifest's path."""
        package = self.folder / f"scratch_{name}_{distribution or name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(SOURCE.replace("PROBE", probe))
        (package / "attnplug.toml").write_text(manifest)
        points = f"[attnplug.backends]\n{name} = {package.name}.plugin\n"
        self.metadata(distribution or f"attnplug-{name}", "1.0", points)
        return package / "attnplug.toml"

    def metadata(self, distribution: str, version: str, entry_points: str = "") -> None:
        """Install the metadata of a distribution."""
        folder = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if entry_points:
            (folder / "entry_points.txt").write_text(entry_points)


@frozen
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the workspace's plugins from this process, and from those that it starts."""
    monkeypatch.setattr(os, "listdir", sitecustomize.listdir)
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT_PLUGINS), prepend=os.pathsep)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None) -> Iterator[Site]:
    """A folder for plugins, on the path, with nothing in it yet; no other plugin is installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    attnplug.refresh()
    yield Site(folder)
    attnplug.refresh()
    for name in [name for name in sys.modules if name.startswith("scratch_")]:
        del sys.modules[name]


@pytest.fixture
def site(empty: Site) -> Site:
    """The same, with the flash plugin, one of whose libraries is installed."""
    empty.add("flash", FLASH)
    empty.metadata("flash-old", "2.8.3")
    return empty


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process."""

    def call(*words: str) -> Outcome:
        capsys.readouterr()
        attnplug.refresh()
        code = main(words)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def start():
    """Run Python in another process, without what makes it import more."""

    def call(*arguments: str, **environment: str) -> Outcome:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
        done = forked.run_fresh(*arguments, env={**own, **environment})
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def on_terminal():
    """Run the command on a terminal of 80 columns."""

    def call(*words: str, **environment: str) -> Outcome:
        ours, theirs = pty.openpty()
        variables = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **environment}
        process = subprocess.Popen([sys.executable, "-m", "attnplug", *words], stdout=theirs, stderr=-1, env=variables)
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        error = process.communicate()[1]
        return Outcome(process.returncode, shown.decode().replace("\r\n", "\n"), error.decode())

    return call


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the writer has closed it
        return b""
