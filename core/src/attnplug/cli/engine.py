"""The host engines that distributions add: entry points in the group `attnplug.engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from attrs import frozen

from attnplug._install import install_text
from attnplug.cli.extension import Extension, entries_of, offered
from attnplug.engines import GROUP, EngineAnswer, EngineDiagnosis
from attnplug.errors import PluginError, RequestError, near

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements

KNOWN: Final = {
    "diffusers": ("diffusers", "attnplug-diffusers"),
    "sglang": ("SGLang", "attnplug-sglang"),
    "torch": ("torch", "attnplug-torch"),
    "vllm": ("vLLM", "attnplug-vllm"),
}
"""Engine -> how it is written, and this project's distribution for it."""


@frozen
class Engine(Extension):
    """An engine that a distribution adds."""

    kind: ClassVar[str] = "engine"
    functions: ClassVar[tuple[str, ...]] = ("choose", "diagnose")
    reference: ClassVar[str] = GROUP

    def choose(self, requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
        """
        Return what the engine picks by itself for each request.

        Raises:
            PluginError: The module does not load, raises an error that is not one of this project, or breaks its
                contract.
        """
        choose = self.load().choose
        answer = self.running(lambda: choose(requirements, device, assume_installed=assume_installed))
        if not isinstance(answer, EngineAnswer):
            raise self.wrong_return("choose", answer, "an EngineAnswer")
        if len(answer.choices) != len(requirements):
            raise PluginError(
                f"choose of {self.label} returned {len(answer.choices)} choices for {len(requirements)} requests",
                "it returns one for each, in the same order",
                f"correct choose in {self.modules[0]}, see {self.reference}",
            )
        return answer

    def diagnose(self, *, load: bool) -> EngineDiagnosis:
        """
        Return whether the engine sees the backends of attnplug.

        Args:
            load: Whether the engine may be imported.

        Raises:
            PluginError: As for `choose`.
        """
        diagnose = self.load().diagnose
        found = self.running(lambda: diagnose(load=load))
        if not isinstance(found, EngineDiagnosis):
            raise self.wrong_return("diagnose", found, "an EngineDiagnosis")
        return found


def installed_engines() -> dict[str, Engine]:
    """Return the engines that installed distributions add, by name. None of them is imported."""
    return offered(Engine, entries_of(GROUP))


def find_engine(name: str) -> Engine:
    """
    Return an engine that is installed.

    Raises:
        RequestError: It is not; the fix is what to install.
    """
    found = installed_engines()
    if name in found:
        return found[name]
    if name in KNOWN:
        written, distribution = KNOWN[name]
        raise RequestError(
            f"the engine {name!r} is not installed",
            f"it comes with {distribution}, in the environment of {written}",
            f"{install_text(distribution)}, in the environment of {written}",
        )
    names = sorted({*found, *KNOWN})
    raise RequestError(
        f"the engine {name!r} was given{near(name, names)}", f"the engines are {', '.join(names)}", "name one of these"
    )
