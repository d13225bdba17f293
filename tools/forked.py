"""
Python processes that fork from a warm one: tests start hundreds, and importing torch takes longer than most of them do.

`run` replaces `subprocess.run` of this Python. The warm process has imported libraries, and nothing of this workspace:
a program that lacks an import fails as it would, and no state of attnplug has to be put back. `import torch` takes the
module that is there, and runs the autoload of its backends. What depends on how Python starts or ends (its options, the
order of hashes, which modules are imported, interrupts, standard streams that are closed) needs `run_fresh`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from copy import copy
from functools import cache, partial
from importlib import import_module, invalidate_caches
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.machinery import ModuleSpec

VISIBLE: Final = ("attrs", "numpy", "packaging.specifiers", "packaging.utils", "platformdirs", "pluggy", "pytest")
"""What each program finds in `sys.modules` from the start."""

HIDDEN: Final = ("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.models.llama.modeling_llama")
"""What is there for a program that imports any module of these, and not in `sys.modules` before that."""

_SOCKET: Final = "FORKED_PYTHON_SOCKET"
"""Environment variable of a forked program: where it starts others."""

_AT_START: Final = ("LC_ALL", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONWARNINGS", "TRITON_INTERPRET")
"""Environment variables that are read before a program runs: it starts afresh where they differ from ours."""


def run_fresh(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a real process, and capture what it prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - this Python


def run(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """
    Do the same in a fork of the warm process, where the system has one.

    Args:
        arguments: Perhaps ``-W error``; then ``-c CODE``, ``-m MODULE`` or a file, and its arguments.
        cwd: The working folder, this one by default.
        env: All environment variables, those of this process by default. ``PYTHONPATH`` has its usual effect.
    """
    environment = dict(os.environ if env is None else env)
    if sys.platform != "linux" or any(environment.get(name) != os.environ.get(name) for name in _AT_START):
        return run_fresh(*arguments, cwd=cwd, env=env)
    request = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "environment": environment}
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        status = _request(json.dumps(request).encode(), out.fileno(), err.fileno())
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def seconds() -> float:
    """Return the CPU seconds of the warm process that this one has started, and of all programs that ended there."""
    if not _start.cache_info().currsize:
        return 0.0
    fields = Path(f"/proc/{_start()[1].pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # user and system time, and those of children


def _request(text: bytes, *files: int) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ.get(_SOCKET) or _start()[0])
        socket.send_fds(connection, [b" "], files)
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(16)
    if not answer:
        raise RuntimeError("the warm process has ended; its standard error says why")
    return os.waitstatus_to_exitcode(int(answer))


@cache
def _start() -> tuple[str, subprocess.Popen[bytes]]:
    """Start the warm process, which ends with this one; return its socket, too."""
    folder = TemporaryDirectory()  # nobody else may connect
    path = f"{folder.name}/socket"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST", "PYTHONPATH"))}
    # One thread: a fork has no other.
    environment = {**kept, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, __file__, path, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=environment,
        )
    atexit.register(folder.cleanup)
    atexit.register(process.__exit__, None, None, None)
    return path, process


class _Imported(MetaPathFinder, Loader):
    """Finds hidden modules: importing any of them brings back all."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - of importlib
        if fullname not in self._modules:
            return None
        spec = cast("ModuleSpec", copy(self._modules[fullname].__spec__))
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        cast("Any", module.__spec__).loader = module.__loader__
        for name, other in self._modules.items():
            sys.modules.setdefault(name, other)
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
            self._modules["torch"]._import_device_backends()  # noqa: SLF001 - the end of `import torch`


def _main(path: str, listener: str) -> int:
    """Import, serve, and be each program in a fork; return its exit status."""
    del sys.path[0]  # of this file
    defaults = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _import(VISIBLE)
        visible = set(sys.modules)
        _import(HIDDEN)
        added = warnings.filters[: -len(defaults) - 1]
    hidden = {name for name in set(sys.modules) - visible if name.partition(".")[0] not in sys.stdlib_module_names}
    sys.meta_path.insert(0, _Imported({name: sys.modules.pop(name) for name in hidden}))
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("an import has started a thread, and a fork would not have it")
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public list
        finalizer.atexit = False  # freeing torch's libraries takes longer than most programs
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: our parent ends us
    with socket.socket(fileno=int(listener)) as requests:
        request = _serve(requests)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    filters = cast("list[Any]", warnings.filters)
    if strict := request["arguments"][:2] == ["-W", "error"]:
        del request["arguments"][:2]
        warnings.simplefilter("error")
    filters[:0] = added
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"], **{_SOCKET: path})
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    invalidate_caches()
    try:
        if strict and caught:
            warnings.warn(caught[0].message, stacklevel=1)
        _run_program(*request["arguments"])
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else error.code is not None
    except BaseException as error:  # noqa: BLE001 - it ends here
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        if find_spec(name.partition(".")[0]) is not None:  # some environments lack some
            import_module(name)


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Fork for each request, which the fork returns; end when standard input does."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by a pipe that is closed by the end of the fork
    while True:
        waiting: list[int | socket.socket] = [0, listener, *running]
        ready, _, _ = select.select(waiting, [], [])
        if 0 in ready:
            sys.exit()
        for ended in [pipe for pipe in running if pipe in ready]:
            pid, connection = running.pop(ended)
            os.close(ended)
            with connection:
                connection.sendall(b"%d" % os.waitpid(pid, 0)[1])
        if listener in ready:
            connection, _ = listener.accept()
            _, files, *_ = socket.recv_fds(connection, 1, 2)
            request = b"".join(iter(partial(connection.recv, 65536), b""))
            pipe, end = os.pipe()
            pid = os.fork()
            if pid == 0:
                for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
                    os.dup2(file, number)
                for file in (pipe, *running, *files):
                    os.close(file)
                for other in (listener, connection, *(other for _, other in running.values())):
                    other.close()
                return cast("dict[str, Any]", json.loads(request))
            for file in (end, *files):
                os.close(file)
            running[pipe] = pid, connection


def _run_program(kind: str, name: str = "", *arguments: str) -> None:
    """Do what Python does once it has set its path."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import_module("coverage").process_startup()  # as the .pth file of coverage does
    with suppress(ModuleNotFoundError):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")
    sys.argv[:] = [kind, *arguments]
    if kind == "-m":
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(name, "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)  # noqa: S102 - of a test
    else:
        sys.argv[1:] = [name, *arguments] if name else []
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    status = _main(*sys.argv[1:])
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what Python does at its end, up to here
    atexit._run_exitfuncs()  # noqa: SLF001 - likewise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing modules, likewise
