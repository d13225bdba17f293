"""Plugins of this workspace: on their real libraries, for GPU tests, and installed from their wheels by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import frozen

import attnplug
from attnplug.errors import DuplicateBackendError
from attnplug.selection.process import PROCESS
from tests.backends.fakes import manifest_of
from tools import forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from attnplug.contract import LoadedBackend
    from tests.backends.accuracy import Accuracy

_OURS: Final = ("ATTNPLUG_", "COV", "PYTEST", "PYTHONPATH")  # settings and coverage of this process
_PIP: Final = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
_COMMAND: Final = """
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
requirements = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
device = attnplug.Device.cuda("9.0")
try:
    attnplug.load(requirements, device, backend=BACKEND)
except attnplug.AttnplugError as error:
    print(error)
assert not set(UNWANTED) & set(sys.modules)
for verdict in attnplug.explain(requirements, device, backend=BACKEND).verdicts:
    print(verdict.id, verdict.status)
"""
_REQUEST: Final = ("--head-size", "128", "--num-q-heads", "32", "--num-kv-heads", "8", "--dtype", "bfloat16")


def register_unless_installed(name: str, package: str) -> None:
    """Register a plugin of this workspace in this process, unless its backend is installed."""
    try:
        attnplug.register(f"{package}.plugin", manifest=manifest_of(package))
    except DuplicateBackendError:
        assert name in {plugin.name for plugin in attnplug.registry().plugins}


def in_short(reason: attnplug.Reason) -> str:
    """Return the field of a reason, and what the manifest says about it."""
    if reason.code == "undeclared":
        return f"{reason.field} undeclared"
    return f"{reason.field}: {reason.because}" if reason.because else f"{reason.field} supported: {reason.supported}"


@frozen
class RealPlugin:
    """
    A plugin on its real kernel libraries.

    Attributes:
        name: The name of its backend.
        package: Its package, which has its manifest.
        missing: Returns which library or GPU of a variant is not available, or None.
            It does not use the plugin: what the plugin finds or refuses is tested.
    """

    name: str
    package: str
    missing: Callable[[str], str | None]

    def register(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Register it in this process for one test, unless it is installed."""
        monkeypatch.setattr(PROCESS, "state", None)
        register_unless_installed(self.name, self.package)

    def registered_fixture(self) -> Any:
        """Return a fixture that registers the plugin for all tests of a module, unless it is installed."""

        @pytest.fixture(scope="module", autouse=True)
        def registered() -> Iterator[None]:
            with pytest.MonkeyPatch.context() as patch:
                self.register(patch)
                yield

        return registered

    def verdicts_of(self, requirements: attnplug.Requirements, device: attnplug.Device) -> dict[str, attnplug.Verdict]:
        """Return the verdict of each variant, the preferred one first."""
        explanation = attnplug.explain(requirements, device, backend=self.name, assume_installed=True)
        found = ((each.id.partition("/"), each) for each in explanation.verdicts)
        return {variant: each for (name, _, variant), each in found if name == self.name}

    def refusals(self, requirements: attnplug.Requirements, variant: str, device: attnplug.Device) -> list[str]:
        """Return the reasons of a variant that refuses, in the manifest's words: core tests its own."""
        verdict = self.verdicts_of(requirements, device)[variant]
        assert verdict.status == "refused"
        return [in_short(reason) for reason in verdict.reasons]

    def load_fixture(self) -> Any:
        """Return a fixture, to be named `load_real`: `load` with the plugin registered."""

        @pytest.fixture
        def load_real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedBackend]:
            self.register(monkeypatch)
            return self.load

        return load_real

    def accuracy_fixture(self) -> Any:
        """Return a fixture, to be named `measure`: the accuracy of a model's generation through a variant."""
        from tests.backends.accuracy import LogitRecorder, generate  # noqa: PLC0415 - imports the engine

        @pytest.fixture
        def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Accuracy]:
            self.register(monkeypatch)
            recorder = LogitRecorder.attach(monkeypatch)

            def measure(name: str, variant: str, *, graphs: bool) -> Accuracy:
                self.skip_if_missing(variant)
                return generate(recorder, name, f"{self.name}/{variant}", graphs=graphs)

            return measure

        return measure

    def skip_if_missing(self, variant: str) -> None:
        """Skip the test where the library or the GPU of a variant is not available."""
        if why := self.missing(variant):
            pytest.skip(why)

    def load(self, requirements: attnplug.Requirements, variant: str, **options: Any) -> LoadedBackend:
        """Return the backend of a variant, with options, or skip the test as `skip_if_missing` does."""
        self.skip_if_missing(variant)
        return attnplug.load(requirements, backend=f"{self.name}/{variant}", options={self.name: options})


@frozen
class InstalledPlugin:
    """
    A plugin that pip has installed into a scratch folder, and libraries that consist of metadata alone.

    Attributes:
        folder: The folder.
        project: The folder of its source.
        backend: The name of its backend.
        packages: The packages of its libraries, which nothing may import.
    """

    folder: Path
    project: Path
    backend: str
    packages: tuple[str, ...]

    @classmethod
    def install(cls, folder: Path, project: Path, backend: str, packages: tuple[str, ...]) -> InstalledPlugin:
        """Install into an empty folder."""
        command = [sys.executable, "-m", "pip", *_PIP, "--target", str(folder), str(project)]
        subprocess.run(command, check=True)
        return cls(folder, project, backend, packages)

    @property
    def package(self) -> str:
        """The plugin's own package."""
        return f"attnplug_{self.backend}"

    def attnplug(self, *words: str, libraries: Path | None = None, status: int = 0) -> Any:
        """Run a command in a process that imports nothing of the plugin, and return its JSON output."""
        program = f"UNWANTED = {(self.package, *self.packages)!r}\n{_COMMAND}"
        return json.loads(self._run(program, *words, "--json", libraries=libraries, status=status))

    def load(self, libraries: Path) -> str:
        """Load the backend in a process without a GPU, and return the error and the verdicts after it."""
        unwanted = (f"{self.package}.backend", *self.packages)
        program = f"BACKEND, UNWANTED = {self.backend!r}, {unwanted!r}\n{_LOAD}"
        return self._run(program, libraries=libraries, start=forked.run)

    def _run(
        self, program: str, *words: str, libraries: Path | None = None, status: int = 0, start: Any = forked.run_fresh
    ) -> str:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        paths = (str(path) for path in (libraries, self.folder) if path is not None)
        home = str(self.folder)
        own = {"PYTHONPATH": os.pathsep.join(paths), "HOME": home, "XDG_CONFIG_HOME": home}
        done = start("-W", "error", "-c", program, *words, env={**outside, **own})
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def listed(self, libraries: Path | None = None) -> dict[str, Any]:
        """Return the plugin's entry of `attnplug list`."""
        backends = self.attnplug("list", libraries=libraries)["backends"]
        (found,) = [backend for backend in backends if backend["name"] == self.backend]
        return found

    def explanation(self, device: str, *words: str, libraries: Path | None = None, status: int = 0) -> dict[str, Any]:
        """Return the explanation of `attnplug explain` for a common decoder."""
        command = ("explain", *_REQUEST, "--device", device, *words)
        (found,) = self.attnplug(*command, libraries=libraries, status=status)["explanations"]
        return found

    def libraries(self, folder: Path, versions: Mapping[str, str]) -> Path:
        """Return a folder with the metadata of distributions, and their packages, which raise when imported."""
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
        Check that every module and the manifest are in the wheel.

        Args:
            least: Some of them.
        """
        source, kinds = self.project / "src" / self.package, ("*.py", "*.toml", "py.typed")
        written = {file.relative_to(source) for kind in kinds for file in source.rglob(kind)}
        package = self.folder / self.package
        assert written == {file.relative_to(package) for kind in kinds for file in package.rglob(kind)}
        assert set(least) <= written
