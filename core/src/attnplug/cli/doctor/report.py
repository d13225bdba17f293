"""Everything that doctor finds out, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from attnplug.cli.doctor.collect import collected_warnings
from attnplug.cli.doctor.configured import problems_of_settings
from attnplug.cli.doctor.problem import Problem, problems_of
from attnplug.cli.doctor.trial import Trial, try_all
from attnplug.cli.look import Sight, look
from attnplug.commands import environment
from attnplug.discovery.registry import Registry
from attnplug.errors import DeviceError, SettingsError
from attnplug.request.device import Device
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.discovery.scan import Diagnostic
    from attnplug.negotiation.candidate import Candidate

_NAMES = ("backend", "allow", "block", "strict", "profile", "evidence", "kv_layout")


@frozen
class Report:
    """
    The state of an environment.

    Attributes:
        environment: Interpreter, platform and versions.
        sight: The device, and how it was found.
        settings: What the environment and the configuration file say.
        registry: Everything that is installed.
        candidates: Everything that is installed or known.
        notes: What is odd about the installation and does no harm.
        warnings: What has no effect, though somebody wrote it.
        trials: What became of loading, where that was asked for.
        problems: What is broken.
    """

    environment: Mapping[str, Any]
    sight: Sight
    settings: Settings
    registry: Registry
    candidates: tuple[Candidate, ...]
    notes: tuple[Diagnostic, ...]
    warnings: tuple[str, ...]
    trials: tuple[Trial, ...]
    problems: tuple[Problem, ...]

    def setting_rows(self) -> list[tuple[str, Any, str]]:
        """Return each setting with its value as JSON can carry it, and where it comes from."""
        rows = [(name, _plain(getattr(self.settings, name))) for name in _NAMES]
        rows += [
            (f"options.{backend}.{name}", v) for backend, o in self.settings.options.items() for name, v in o.items()
        ]
        return [(name, value, self._source(name)) for name, value in rows]

    def _source(self, name: str) -> str:
        return self.settings.sources.get(name, "default")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        from attnplug.cli.list import describe  # noqa: PLC0415 - only JSON lists the backends in full

        return {
            **self.environment,
            "device": {**self.sight.device.to_dict(), "found": self.sight.how},
            "settings": [
                {"name": name, "value": value, "source": source} for name, value, source in self.setting_rows()
            ],
            "backends": describe(self.candidates, self.registry),
            "notes": [attrs.asdict(note) for note in self.notes],
            "warnings": list(self.warnings),
            "trials": [trial.to_dict() for trial in self.trials],
            "problems": [problem.to_dict() for problem in self.problems],
        }


def examine(*, load: bool) -> Report:
    """
    Look at everything. What is wrong becomes a problem of the report, and is not raised.

    Args:
        load: Also import the plugins of all ready candidates, and load each for something simple.
    """
    problems: list[Problem] = []
    with collected_warnings() as warnings:
        settings = _settings(problems)
        sight = _sight(problems)
        registry = Registry.scan(attrs.evolve(settings, strict=False))
        candidates = registry.candidates(attrs.evolve(settings, strict=False))
        problems += problems_of(candidates)
        problems += problems_of_settings(registry, candidates, settings)
        trials = tuple(try_all(candidates, sight.device)) if load else ()
    problems += [Problem(trial.id, trial.text, trial.fix) for trial in trials if trial.status == "failed"]
    return Report(
        environment=environment(),
        sight=sight,
        settings=settings,
        registry=registry,
        candidates=candidates,
        notes=registry.notes,
        warnings=tuple(warnings),
        trials=trials,
        problems=tuple(problems),
    )


def _settings(problems: list[Problem]) -> Settings:
    try:
        return Settings.read()
    except SettingsError as error:
        problems.append(Problem.of("settings", error))
        return Settings()


def _sight(problems: list[Problem]) -> Sight:
    try:
        seen = look()
    except DeviceError as error:
        problems.append(Problem.of("device", error))
        return Sight(Device.cpu(), "the device could not be read")
    if seen.overlooked:
        problems.append(Problem("device", seen.overlooked, seen.fix))
    return seen


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value
