"""What an engine picks by itself beside what attnplug picks, and why they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import abbreviated, wrapped
from attnplug.negotiation.ranking import why_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.cli.engine import Engine
    from attnplug.cli.explain.result import LayerGroup, Result
    from attnplug.cli.explain.short import Line
    from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device


@frozen
class Comparison:
    """
    One group of layers on one device, as the engine and as attnplug decide it.

    Attributes:
        engine: The engine with its version.
        group: The layers, and attnplug's decision.
        choice: The engine's own.
    """

    engine: str
    group: LayerGroup
    choice: EngineChoice

    @property
    def chosen(self) -> str | None:
        """The candidate that attnplug chose, or None."""
        decision = self.group.explanation.chosen
        return decision.id if decision else None

    @property
    def same_kernels(self) -> bool:
        """Whether both run the same kernels."""
        own = self.choice.backend
        return own is not None and self.chosen in own.same_as

    def summary(self) -> Iterator[str]:
        """Yield both choices, and why they differ, a sentence each."""
        own, decision = self.choice.backend, self.group.explanation.chosen
        decided = f" ({why_ahead(decision.decided_by)})" if decision and decision.decided_by else ""
        yield f"{self.engine} by itself: {own or 'none'}"
        yield f"attnplug: {self.chosen or 'none'}{decided}"
        if self.same_kernels:
            yield "both run the same kernels"
        yield from (f"- {line}" for line in self.why())

    def why(self) -> Iterator[str]:
        """Yield why they differ, and what the engine's selection does not consider."""
        if not self.same_kernels:
            yield from self._why_not_ours()
            yield from self._why_not_theirs()
        if self.choice.ignored:
            values = self.group.explanation.requirements.to_dict()
            listed = ", ".join(f"{name}={values[name]}" if name in values else name for name in self.choice.ignored)
            yield f"the selection of {self.engine} does not consider {listed}"

    def details(self) -> Iterator[str]:
        """Yield every backend that the engine considered, in its order, with its reasons, a line each."""
        for each in self.choice.backends:
            status = "chosen" if each.name == self.choice.chosen else "refused" if each.reasons else "eligible"
            yield f"{each}  {status}"
            yield from (f"    - {reason}" for reason in each.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "layers": [name for name in self.group.layers if name],
            **self.choice.to_dict(),
            "attnplug": self.chosen,
            "same_kernels": self.same_kernels,
            "why": list(self.why()),
        }

    def _why_not_ours(self) -> Iterator[str]:
        """Yield why the engine does not run the kernels of attnplug's choice."""
        if self.choice.reason:
            yield self.choice.reason
        elif self.chosen is not None:
            rivals = [each for each in self.choice.backends if self.chosen in each.same_as]
            yield from map(self._passed_over, rivals)
            if not rivals:
                yield f"{self.engine} itself has no backend with the kernels of {self.chosen}"

    def _passed_over(self, rival: EngineBackend) -> str:
        if rival.reasons:
            return f"{self.engine} refuses {rival}, with the kernels of {self.chosen}: {'; '.join(rival.reasons)}"
        return f"{self.engine} prefers {self.choice.chosen} to {rival}, with the kernels of {self.chosen}"

    def _why_not_theirs(self) -> Iterator[str]:
        """Yield why attnplug does not choose the kernels of the engine's choice."""
        own = self.choice.backend
        if own is None:
            return
        rivals = [verdict for verdict in self.group.explanation.verdicts if _is_one_of(verdict, own.same_as)]
        yield from (self._not_chosen(verdict, own) for verdict in rivals)
        if not rivals:
            yield f"attnplug knows no candidate with the kernels of {own.name}"

    def _not_chosen(self, verdict: Verdict, own: EngineBackend) -> str:
        name = f"{verdict.id}, with the kernels of {own.name}"
        fix = f" (fix: {verdict.fix})" if verdict.fix is not None else ""
        if verdict.status == "eligible":
            return f"attnplug prefers {self.chosen} to {name}"
        if verdict.status == "absent":
            return f"{name}, is not installed{fix}"
        verb = "lacks a dependency of" if verdict.status == "missing_dependency" else "refuses"
        return f"attnplug {verb} {name}: {'; '.join(map(str, verdict.reasons)) or verdict.status}{fix}"


@frozen
class EngineResult:
    """
    What an engine picks by itself on one device, beside attnplug's choices.

    Attributes:
        device: The device.
        answer: The engine's.
        comparisons: One for each group of layers.
    """

    device: Device
    answer: EngineAnswer
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "engine": self.answer.engine,
            "device": self.device.to_dict(),
            "assumed": list(self.answer.assumed),
            "warnings": list(self.answer.warnings),
            "choices": [comparison.to_dict() for comparison in self.comparisons],
        }


def summaries_of(compared: Sequence[EngineResult]) -> Iterator[Line]:
    """Yield the choices of an engine and of attnplug, and why they differ, for each device and group of layers."""
    for each in compared:
        yield from _lines(f"device: {each.device}")
        for text in each.answer.assumed:
            yield from _lines(f"assumed: {text}")
        for comparison in each.comparisons:
            yield from _layers(comparison.group)
            for text in comparison.summary():
                yield from _lines(text)
        yield ()


def details_of(compared: Sequence[EngineResult]) -> Iterator[Line]:
    """Yield every backend of an engine in its order, with its reasons, for each device and group of layers."""
    for each in compared:
        for comparison in each.comparisons:
            yield from _lines(f"backends of {each.answer.engine} on {each.device}, in its order of preference")
            yield from _layers(comparison.group)
            for text in comparison.details():
                yield from _lines(text, "    ")
            yield ()


def _layers(group: LayerGroup) -> Iterator[Line]:
    return iter(()) if group.layers == (ONE_LAYER,) else _lines(abbreviated(group.layers))


def _lines(text: str, indent: str = "") -> Iterator[Line]:
    return ((line,) for line in wrapped(text, indent))


def compare(engine: Engine, results: Sequence[Result], *, assume_installed: bool) -> tuple[EngineResult, ...]:
    """
    Compare an engine's own choices with attnplug's, a result for each device.

    Raises:
        PluginError: The engine's module is broken, or breaks its contract.
    """
    found = []
    for result in results:
        requests = [group.explanation.requirements for group in result.groups]
        answer = engine.choose(requests, result.device, assume_installed=assume_installed)
        pairs = zip(result.groups, answer.choices, strict=True)
        comparisons = tuple(Comparison(answer.engine, group, choice) for group, choice in pairs)
        found.append(EngineResult(result.device, answer, comparisons))
    return tuple(found)


def _is_one_of(verdict: Verdict, ids: Sequence[str]) -> bool:
    """Whether a verdict is about one of these candidates; of an absent plugin only the backend is known."""
    return verdict.id in ids or (verdict.status == "absent" and verdict.id in {each.partition("/")[0] for each in ids})
