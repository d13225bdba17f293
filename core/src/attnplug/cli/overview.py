"""What ``attnplug`` prints without a command: the device, the installed backends, and three commands to go on with."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from attrs import asdict, frozen

from attnplug._version import __version__
from attnplug.cli.device_report import report_device
from attnplug.cli.found_model import has_config
from attnplug.cli.list import device_objections
from attnplug.commands import OK, STYLES, escaped, say_json, say_styled, shortened, width, wrapped
from attnplug.discovery.registry import Registry
from attnplug.negotiation.reason import Fix
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.device import Device

_DOCTOR: Final = ("attnplug doctor", "what is broken, and its fix")


@frozen
class _Backend:
    """
    An installed backend on this machine.

    Attributes:
        name: Its name.
        distribution: The distribution that offers it, with its version.
        built_in: Whether it is part of core.
        status: ``broken`` where a variant is; otherwise the best of ``ready``, ``missing_dependency``, ``refused`` and
            ``other_device``.
        variants: The variants with this status.
        install: The command that installs what is missing; empty where nothing is, or no command does.
    """

    name: str
    distribution: str
    built_in: bool
    status: str
    variants: tuple[str, ...]
    install: str

    @property
    def text(self) -> str:
        """What there is to say about it, in a line."""
        if self.status == "missing_dependency":
            return f"needs a library: {self.install or f'attnplug list {self.name}'}"
        if self.status in ("refused", "broken"):
            return f"{self.status}: attnplug list {self.name}"
        return f"can run: {', '.join(self.variants)}" if self.status == "ready" else "does not support this device"


def show(*, as_json: bool) -> int:
    """Print the state of this environment, and what to do next. The exit code is 0, whatever is missing."""
    settings = Settings.read()
    candidates = Registry.scan(settings).candidates(settings)
    device = report_device().device
    installed = [each for each in candidates if each.availability != "absent"]
    backends = [_backend(tuple(group), device) for _, group in groupby(installed, key=lambda c: c.backend)]
    following = tuple(_next(backends, elsewhere=device.type == "cpu"))
    if as_json:
        say_json(
            {
                "version": __version__,
                "device": device.to_dict(),
                "backends": [asdict(backend) for backend in backends],
                "next": [{"command": command, "purpose": purpose} for command, purpose in following],
            }
        )
        return OK
    say_styled(_lines(backends, device, following))
    return OK


def _backend(candidates: Sequence[Candidate], device: Device) -> _Backend:
    by_status: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        is_usable = candidate.availability in ("ready", "missing_dependency")
        elsewhere = is_usable and device_objections(candidate, device)
        by_status.setdefault("other_device" if elsewhere else candidate.availability, []).append(candidate)
    order = ("broken", "ready", "missing_dependency", "refused", "other_device")
    status = min(by_status, key=order.index)
    first = by_status[status][0]
    steps = tuple(Fix(install=first.install, action=first.fix).steps()) if status == "missing_dependency" else ()
    return _Backend(
        first.backend,
        first.distribution,
        first.built_in,
        status,
        tuple(candidate.id.partition("/")[2] for candidate in by_status[status]),
        steps[0] if len(steps) == 1 and steps[0].startswith("pip install ") else "",
    )


def _next(backends: Sequence[_Backend], *, elsewhere: bool) -> Iterator[tuple[str, str]]:
    """
    Yield three commands, each with its purpose, for what was found: problems first, then what can be installed.

    `elsewhere` says that there is no GPU here: whoever installs libraries of GPUs asks for another machine.
    """
    config, statuses = ("" if has_config() else " --config path/to/config.json"), {each.status for each in backends}
    model = "this folder's model" if not config else "a model"
    explain = (f"attnplug explain{config}", f"which backend {model} gets, and why not the others")
    install = next((each for each in backends if each.status == "missing_dependency" and each.install), None)
    if "broken" in statuses or not statuses:
        yield from (_DOCTOR, ("attnplug list", "every backend, and what each is missing"), explain)
    elif install is not None:
        yield install.install, f"what {install.name} is missing"
        named = " --device l40s" if elsewhere else ""
        yield f"{explain[0]}{named} --assume-installed", f"which backend {model} gets once libraries are installed"
        yield _DOCTOR
    elif all(each.built_in for each in backends):
        yield "attnplug list", "the plugins that you can install, each with its command"
        yield f"attnplug explain{config} --device h100", f"which backend {model} gets on a GPU that you don't have"
        yield _DOCTOR
    else:
        yield explain
        if elsewhere and "other_device" in statuses:
            gpu = f"which backend {model} gets on a GPU that you don't have"
            yield f"{explain[0]} --device l40s --assume-installed", gpu
        else:
            where = "config.json" if not config else "path/to/config.json"
            yield f"attnplug plan {where}", "the same for all layers together, with the size of the KV cache"
        yield "attnplug doctor --load", "load each backend that can run here"


def _lines(
    backends: Sequence[_Backend], device: Device, following: Sequence[tuple[str, str]]
) -> Iterator[tuple[str | tuple[str, str], ...]]:
    yield (("attnplug", "bold"), f" {__version__} picks the attention backend for a model on a device, and says why")
    yield ()
    yield ("device: ", "dim"), str(device)
    yield (("installed:", "dim"), "" if backends else " nothing")
    longest = max((len(escaped(backend.name)) for backend in backends), default=0)
    for backend in backends:
        name = f"  {escaped(backend.name):<{longest}}  "
        origin = f"  ({'built in' if backend.built_in else backend.distribution})"
        fits = len(escaped(f"{name}{backend.text}{origin}")) <= width()
        # A command is shown whole.
        text = backend.text if backend.install else shortened(backend.text, width() - len(name))
        yield (name, STYLES["ready"] if backend.status == "ready" else ""), text, (origin if fits else "", "dim")
    yield ()
    yield (("next:", "dim"),)
    for command, purpose in following:
        yield ((f"  {command}", "bold"),)
        yield from (((line, "dim"),) for line in wrapped(purpose, "      "))
    yield ()
    yield ("attnplug --help lists all commands.",)
