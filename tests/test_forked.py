"""A fork of the warm process does what a fresh Python does."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tools import forked

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.unmeasured,
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only"),
]

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, __name__, sys.flags.optimize); print('said', file=sys.stderr)",
    "path": "import sys; print([path for path in sys.path if not path.endswith('.zip')])",
    "environment": "import os; print(os.getcwd(), os.environ.get('ONE'), os.environ.get('HOME'))",
    "input": "import sys; print(repr(sys.stdin.read()))",
    "status": "import sys; sys.exit(7)",
    "large status": "import sys; sys.exit(259)",
    "text of an exit": "import sys; sys.exit('a reason')",
    "no status": "import sys; sys.exit(None)",
    "error": "def f(): 1 / 0\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "end": "import atexit, threading, time\natexit.register(print, 'registered')\n"
    "threading.Thread(target=lambda: time.sleep(0.05) or print('thread')).start()\nprint('program', end='')",
    "warning": "import warnings; warnings.warn('w')",
    "deprecation": "import warnings; warnings.warn('w', DeprecationWarning)",
    "modules": "import sys; print({'torch', 'transformers', 'attnplug', 'tools.forked'} & set(sys.modules))",
    "customized": "import sys; print(sys.modules['sitecustomize'].VALUE)",
    "pickled": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "distributions": "from importlib.metadata import version; print(version('scratch'), version('attnplug'))",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables by which a folder with a `sitecustomize` and a distribution is on the path."""
    (tmp_path / "sitecustomize.py").write_text("VALUE = 3\n")
    (tmp_path / "scratch-1.5.dist-info").mkdir()
    (tmp_path / "scratch-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: scratch\nVersion: 1.5\n")
    outside = {name: value for name, value in os.environ.items() if name != "HOME"}
    return {**outside, "PYTHONPATH": str(tmp_path), "ONE": "1"}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["", "strict"])
def test_a_fork_ends_as_a_fresh_process(
    name: str, options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    words = (*options, "-c", PROGRAMS[name], "an", "argument")

    forks, fresh = (start(*words, env=environment, cwd=tmp_path) for start in (forked.run, forked.run_fresh))

    assert (forks.returncode, forks.stdout) == (fresh.returncode, fresh.stdout)
    assert forks.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


@pytest.mark.parametrize("kind", ["module", "file"])
def test_modules_and_files_run(kind: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 4\n")
    (tmp_path / "program.py").write_text("import sys, beside; print(__name__, sys.argv, sys.path[0], __file__)\n")
    words = ("-m", "program", "a") if kind == "module" else (str(tmp_path / "program.py"), "a")

    forks, fresh = (start(*words, env=environment, cwd=tmp_path) for start in (forked.run, forked.run_fresh))

    assert (forks.returncode, forks.stdout, forks.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_importing_torch_runs_the_autoload_of_its_backends(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "scratch-1.5.dist-info" / "entry_points.txt").write_text("[torch.backends]\nscratch = scratch:load\n")
    (tmp_path / "scratch.py").write_text("def load(): print('loaded')\n")
    code = "import sys; print('torch' in sys.modules); import torch.nn; print(torch.nn is sys.modules['torch.nn'])"

    assert forked.run("-c", code, env=environment).stdout == "False\nloaded\nTrue\n"
    off = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert forked.run("-c", code, env=off).stdout == "False\nTrue\n"


def test_a_fork_starts_others() -> None:
    code = (
        "from tools import forked; print(forked.run('-c', 'import os; print(os.getppid())').stdout, forked.seconds())"
    )

    inner, started = forked.run("-c", code).stdout.split()

    assert inner == forked.run("-c", "import os; print(os.getppid())").stdout.strip()
    assert started == "0.0"


def test_what_python_reads_at_its_start_takes_a_fresh_process() -> None:
    code = "import sys; print(hash('a'))"
    seeded = {**os.environ, "PYTHONHASHSEED": "5"}

    assert forked.run("-c", code, env=seeded).stdout == forked.run_fresh("-c", code, env=seeded).stdout
