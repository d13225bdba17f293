"""
The smoke test of one distribution, in an environment that has it and what it requires: ``python -I smoke.py NAME``.

It imports what is installed there; of the repository it reads the smoke tests of hosts only.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REQUEST: Final = ["--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16"]


class SmokeError(Exception):
    """A distribution does not do what its smoke test expects."""


def need(holds: object, problem: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise SmokeError(problem)


def command(*words: str, codes: tuple[int, ...] = (0,), folder: str | None = None) -> str:
    """Run ``attnplug`` as its script, and return what it prints."""
    script = Path(sys.executable).with_name("attnplug")
    done = subprocess.run([str(script), *words], capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603 - the installed command
    need(done.returncode in codes, f"attnplug {' '.join(words)} exits with {done.returncode}: {done.stderr}")
    return done.stdout


def core() -> None:
    """Core alone, without torch: it imports, lists, decides and explains."""
    import attnplug  # noqa: PLC0415 - as a user does, once what is checked before it was

    need(find_spec("torch") is None, "torch is installed, and core is to be tested without it")
    need(command("--version").split() == ["attnplug", attnplug.__version__], "--version prints another version")
    backends = json.loads(command("list", "--json"))["backends"]
    need(any(each["built_in"] for each in backends), "`attnplug list` has no built-in backend")
    shown = command("explain", *_REQUEST, "--device", "cpu", codes=(1,))
    need("torch" in shown, "`attnplug explain` does not say that torch is missing")
    request = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    assumed = attnplug.explain(request, "cpu", assume_installed=True)
    need(assumed.chosen is not None, "nothing is chosen where kernel libraries are assumed to be installed")
    need("torch" not in sys.modules, "torch was imported")


def core_with_torch() -> None:
    """Core with torch: a dense call on the CPU equals torch's own."""
    import torch  # noqa: PLC0415 - likewise

    import attnplug  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 16, 4, 32)
    found = attnplug.attention(query, key, value)
    turned = (each.transpose(1, 2) for each in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*turned).transpose(1, 2)
    need(torch.allclose(found, expected, atol=1e-5), "attnplug.attention differs from torch's own")


def kit() -> None:
    """Write a plugin project, and check its manifest."""
    with TemporaryDirectory() as folder:
        command("new", "acme", folder=folder)
        command("check", "attnplug-acme", folder=folder)
    need("acme" not in command("list"), "the project is installed, and nothing installed it")


def plugin(name: str) -> None:
    """Find every backend of a plugin with `attnplug list`: with a manifest, and not broken."""
    listed = json.loads(command("list", "--json"))["backends"]
    entries = [entry.name for entry in distribution(name).entry_points if entry.group == "attnplug.backends"]
    need(entries, "it offers no backend")
    for entry in entries:
        found: list[Any] = [each for each in listed if each["name"] == entry]
        need(len(found) == 1, f"`attnplug list` has {len(found)} backends {entry!r}")
        need(
            found[0]["distribution"] == f"{name} {distribution(name).version}", f"{entry!r} is of another distribution"
        )
        broken = [each["id"] for each in found[0]["variants"] if each["availability"] in ("broken", "absent")]
        need(found[0]["manifest"] and not broken, f"the backend {entry!r} is broken: {broken}")


TESTS: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "attnplug": core,
        "attnplug[torch]": core_with_torch,
        "attnplug-kit": kit,
    }
)
"""The tests of core and kit. A host has its own in ``tests/smoke.py``; everything else is a plugin."""


def host_test(name: str) -> Path:
    """Return the file with the smoke test of a host."""
    return Path(__file__).parents[1] / "hosts" / name.removeprefix("attnplug-") / "tests" / "smoke.py"


def host(file: Path) -> None:
    """Run the function `smoke` of a file, which gets `need` and `command`."""
    runpy.run_path(str(file))["smoke"](need, command)


def common(name: str) -> None:
    """Whatever it is: its modules are found, from where it was installed, and no other of this project's is there."""
    here = Path(sys.prefix).resolve()
    for entry in distribution(name).entry_points:
        module = find_spec(entry.module)
        need(module is not None and module.origin, f"the module {entry.module!r} of an entry point is missing")
        need(
            module is not None and here in Path(str(module.origin)).resolve().parents, f"{entry.module!r} is elsewhere"
        )


def main(arguments: list[str]) -> int:
    """Run the test of one distribution, and return the exit status."""
    name = arguments[0]
    try:
        common(name.partition("[")[0])
        own = host_test(name)
        TESTS.get(name, lambda: host(own) if own.exists() else plugin(name))()
    except SmokeError as error:
        print(f"{name}: {error}")
        return 1
    print(f"{name}: its smoke test passes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
