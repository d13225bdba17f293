"""A plugin's wheel, installed by pip into a scratch folder, and libraries of which nothing but metadata is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_OURS: Final = ("ATTNPLUG_", "COV", "PYTEST", "PYTHONPATH")  # settings and measurements of this run
_PIP: Final = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
_PROGRAM: Final = """
import sys
from attnplug.cli.main import main
status = main(sys.argv[1:])
unwanted = {name.partition(".")[0] for name in sys.modules} & {"torch", "pluggy", *UNWANTED}
assert not unwanted, unwanted
sys.exit(status)
"""
_LOAD: Final = """
import sys
import torch
torch.cuda.is_available = lambda: False  # on a machine with a GPU too
import attnplug
asked = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
device = attnplug.Device.cuda("9.0")
try:
    attnplug.load(asked, device, backend=BACKEND)
except attnplug.AttnplugError as error:
    print(error)
assert not set(UNWANTED) & set(sys.modules)
for verdict in attnplug.explain(asked, device, backend=BACKEND).verdicts:
    print(verdict.id, verdict.status)
"""
_ASKED: Final = ("--head-size", "128", "--num-q-heads", "32", "--num-kv-heads", "8", "--dtype", "bfloat16")


@frozen
class Site:
    """
    A folder that pip has installed a plugin into.

    Attributes:
        folder: The folder.
        project: Where its source is.
        backend: Its backend.
        packages: Its libraries' packages, which nothing may import.
    """

    folder: Path
    project: Path
    backend: str
    packages: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, project: Path, backend: str, packages: tuple[str, ...]) -> Site:
        """Install into an empty folder."""
        command = [sys.executable, "-m", "pip", *_PIP, "--target", str(folder), str(project)]
        subprocess.run(command, check=True)
        return cls(folder, project, backend, packages)

    @property
    def package(self) -> str:
        """The plugin's own package."""
        return f"attnplug_{self.backend}"

    def attnplug(self, *words: str, libraries: Path | None = None, status: int = 0) -> Any:
        """Run a verb in a fresh Python that imports nothing of the plugin; return what it says to a program."""
        program = f"UNWANTED = {(self.package, *self.packages)!r}\n{_PROGRAM}"
        return json.loads(self._run(program, *words, "--json", libraries=libraries, status=status))

    def load(self, libraries: Path) -> str:
        """Load the backend in a fresh Python without a GPU, and return how it ends, and the verdicts after that."""
        unwanted = (f"{self.package}.backend", *self.packages)
        return self._run(f"BACKEND, UNWANTED = {self.backend!r}, {unwanted!r}\n{_LOAD}", libraries=libraries)

    def _run(self, program: str, *words: str, libraries: Path | None = None, status: int = 0) -> str:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        paths = (str(path) for path in (libraries, self.folder) if path is not None)
        home = str(self.folder)
        own = {"PYTHONPATH": os.pathsep.join(paths), "HOME": home, "XDG_CONFIG_HOME": home}
        command = [sys.executable, "-W", "error", "-c", program, *words]
        done = subprocess.run(command, env={**outside, **own}, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def listed(self, libraries: Path | None = None) -> dict[str, Any]:
        """Return what `attnplug list` says of the plugin."""
        backends = self.attnplug("list", libraries=libraries)["backends"]
        (found,) = [backend for backend in backends if backend["name"] == self.backend]
        return found

    def explanation(self, device: str, *words: str, libraries: Path | None = None, status: int = 0) -> dict[str, Any]:
        """Return what `attnplug explain` answers to a common decoder."""
        asked = ("explain", *_ASKED, "--device", device, *words)
        (found,) = self.attnplug(*asked, libraries=libraries, status=status)["explanations"]
        return found

    def libraries(self, folder: Path, versions: Mapping[str, str]) -> Path:
        """Return a folder with the metadata of distributions, and the packages, which raise where they are imported."""
        for name, version in versions.items():
            metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir(parents=True)
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        for name in self.packages:
            package = folder / name / "__init__.py"
            package.parent.mkdir(parents=True)
            package.write_text(f"raise AssertionError('{name} is not to be imported')\n", encoding="utf-8")
        return folder

    def check_files(self, least: Iterable[Path]) -> None:
        """
        See that every module and the manifest are in the wheel.

        Args:
            least: Some of them.
        """
        source, kinds = self.project / "src" / self.package, ("*.py", "*.toml", "py.typed")
        written = {file.relative_to(source) for kind in kinds for file in source.rglob(kind)}
        package = self.folder / self.package
        assert written == {file.relative_to(package) for kind in kinds for file in package.rglob(kind)}
        assert set(least) <= written
