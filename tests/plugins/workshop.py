"""
Builds the plugins of this folder and installs them for real.

Adding one is adding a folder with a pyproject.toml, a package, its ``plugin.py`` and its ``attnplug.toml``. A folder
without a pyproject.toml has the content of a wheel that no build backend would make.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tests.command import WITHOUT_PLUGINS
from tools.forked import run as run_forked
from tools.forked import run_fresh

PLUGINS = Path(__file__).parent
_BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
for folder in sys.argv[3:]:
    print(next(WheelBuilder(folder).build(directory=sys.argv[2], versions=[sys.argv[1]])))
"""


class Workshop:
    """
    A folder of wheels, each built once, when it is first installed.

    Args:
        folder: Where the wheels go.
        kind: ``standard``, or ``editable`` for wheels that point at the sources here.
    """

    def __init__(self, folder: Path, kind: str = "standard") -> None:
        self.folder = folder
        self.kind = kind
        self._wheels: dict[str, Path] = {}

    def build(self, *names: str) -> list[Path]:
        """Return the wheels of these plugins."""
        missing = [name for name in dict.fromkeys(names) if name not in self._wheels]
        projects = [name for name in missing if (PLUGINS / name / "pyproject.toml").is_file()]
        if projects:
            folders = (str(PLUGINS / name) for name in projects)
            command = [sys.executable, "-c", _BUILD, self.kind, str(self.folder), *folders]
            built = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            self._wheels.update(zip(projects, map(Path, built), strict=True))
        self._wheels.update({name: self._pack(PLUGINS / name) for name in missing if name not in projects})
        return [self._wheels[name] for name in names]

    def _pack(self, content: Path) -> Path:
        (metadata,) = content.glob("*.dist-info")
        wheel = self.folder / f"{metadata.stem}-py3-none-any.whl"
        with ZipFile(wheel, "w") as archive:
            for file in sorted(content.rglob("*")):
                if file.is_file() and file.suffix != ".pyc":
                    archive.write(file, file.relative_to(content))
        return wheel

    def install(self, target: Path, *names: str) -> Path:
        """Unpack the wheels of these plugins into a folder for ``sys.path``, as an installer does; return it."""
        target.mkdir(parents=True, exist_ok=True)
        for wheel in self.build(*names):
            with ZipFile(wheel) as archive:
                archive.extractall(target)
        return target


def run(code: str, *sites: Path, home: Path, forked: bool = False, **environment: str) -> Any:
    """
    Run code in a fresh Python that has these folders first on its path, and none of the workspace's plugins.

    Returns what it printed last, read as JSON.

    Args:
        code: The program.
        sites: Folders for ``sys.path``.
        home: Where the program and the user's configuration are.
        forked: Run it in a fork that has imported torch, as `tools.forked` says: for programs that load a backend.
        environment: Further variables; those of the project that are set outside are not seen.
    """
    program = home / "program.py"
    program.write_text(code, encoding="utf-8")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (*sites, WITHOUT_PLUGINS))),
        "XDG_CONFIG_HOME": str(home),
        "HOME": str(home),
    }
    start = run_forked if forked else run_fresh
    done = start("-W", "error", str(program), env={**outside, **variables, **environment}, cwd=home)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
