"""A machine that consists of the files of a test: for what a plugin's probe finds in installed packages."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from attnplug import Device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from attnplug import Agreement, Reason

CUDA_TORCH: Final = (
    "__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
)
CPU_TORCH: Final = CUDA_TORCH.replace("'13.0'", "None").replace("+cu130", "+cpu")
_SETTINGS: Final = ("ATTNPLUG_", "CUDA_", "FLASHINFER_", "CXX")  # of the environment of this process


@frozen
class FakeMachine:
    """
    A machine without packages, but for those that a test writes.

    Attributes:
        root: An empty folder.
        run_probe: The plugin's probe.
        libraries: The packages that the probe must not import, torch beside them.
    """

    root: Path
    run_probe: Callable[[str, Agreement, Device], Reason | None]
    libraries: tuple[str, ...]
    site: Path = field(init=False)

    @site.default
    def _site(self) -> Path:
        return self.root / "site"

    def write(self, name: str, text: str | bytes = "") -> Path:
        """Write a file, by its path from the root."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    def package(self, name: str, site: str = "site") -> None:
        """Install a package that raises when it is imported."""
        self.write(f"{site}/{name}/__init__.py", f"raise AssertionError('{name} is not to be imported')")

    def torch(self, version_file: str) -> None:
        """Install a torch with this ``version.py``."""
        self.package("torch")
        self.write("site/torch/version.py", version_file)

    def distribution(self, name: str, version: str, site: str = "site") -> Path:
        """Install the metadata of a distribution, and return its folder."""
        info = f"{site}/{name.replace('-', '_')}-{version}.dist-info"
        return self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n").parent

    def probe(self, agreement: Agreement, device: str = "cuda:9.0", *before: Path, **environment: str) -> Reason | None:
        """Return what the probe finds. It fails where the probe imports torch or a library."""
        with self.active(*before, **environment):
            return self.run_probe(agreement.variant, agreement, Device.parse(device))

    @contextmanager
    def active(self, *before: Path, **environment: str) -> Iterator[None]:
        """
        Show this process the machine's packages only, besides the standard library and what is already imported.

        Args:
            *before: Folders before the machine's packages on the path.
            **environment: Variables, in place of those of this process.
        """
        path, variables = list(sys.path), dict(os.environ)
        imported = {name: sys.modules.pop(name) for name in list(sys.modules) if self._is_library(name)}
        sys.path[:] = [*map(str, (*before, self.site)), *(one for one in path if "site-packages" not in one)]
        for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
            del os.environ[name]
        os.environ.update(environment)
        importlib.invalidate_caches()
        try:
            yield
            assert not [name for name in sys.modules if self._is_library(name)]
        finally:
            sys.path[:] = path
            sys.modules.update(imported)
            os.environ.clear()
            os.environ.update(variables)
            importlib.invalidate_caches()

    def _is_library(self, name: str) -> bool:
        return name.partition(".")[0] in {"torch", *self.libraries}

    def reason(self, agreement: Agreement, *before: Path, code: str = "broken") -> str:
        """Return the field and the text of a refusal on compute capability 9.0."""
        found = self.probe(agreement, "cuda:9.0", *before)
        assert found is not None
        assert found.code == code
        return f"{found.field} | {found}"
