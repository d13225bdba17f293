"""Whether host engines see the backends, as the distributions of these engines say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.cli.engine import installed_engines
from attnplug.engines import EngineDiagnosis
from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.cli.engine import Engine


@frozen
class EngineState:
    """
    What one distribution says of its engine.

    Attributes:
        name: The engine's name.
        distributions: The distributions that offer it, with their versions.
        diagnosis: What it says; empty where it fails.
        failure: The error of an entry that is broken; None otherwise.
    """

    name: str
    distributions: tuple[str, ...]
    diagnosis: EngineDiagnosis
    failure: AttnplugError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong with it, and nothing to be warned of."""
        return self.failure is None and not self.diagnosis.problems and not self.diagnosis.warnings

    def lines(self) -> Iterator[str]:
        """Yield the engine, and what is said of it."""
        yield f"{self.name}  ({', '.join(self.distributions)})"
        yield from (f"  {line}" for line in self.diagnosis.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"name": self.name, "distributions": list(self.distributions), **self.diagnosis.to_dict()}


def examine_engines(*, load: bool) -> tuple[EngineState, ...]:
    """
    Return what each installed engine says. An entry that is broken carries its error, and is not raised.

    Args:
        load: Whether engines may be imported.
    """
    return tuple(_examine(engine, load=load) for engine in installed_engines().values())


def _examine(engine: Engine, *, load: bool) -> EngineState:
    try:
        return EngineState(engine.name, engine.distributions, engine.diagnose(load=load))
    except AttnplugError as error:
        return EngineState(engine.name, engine.distributions, EngineDiagnosis(()), error)
