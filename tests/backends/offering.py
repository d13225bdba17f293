"""A plugin of this workspace on its real libraries, installed or offered by hand: for tests on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import frozen

import attnplug
from attnplug.errors import DuplicateBackendError
from attnplug.selection import process as state

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Backend
    from tests.backends.rounding import Verdict


@frozen
class Plugin:
    """
    A plugin.

    Attributes:
        name: Its backend.
        package: Its package, which its manifest lies in.
        lacking: Says, for a variant, what of its library or its GPU is not here; None where all is.
            It does not ask the plugin: what a plugin finds, or refuses, is tested.
    """

    name: str
    package: str
    lacking: Callable[[str], str | None]

    def offer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Offer it to this process for one test, where it is not installed."""
        monkeypatch.setattr(state, "_state", None)
        manifest = Path(str(importlib.import_module(self.package).__file__)).with_name("attnplug.toml")
        try:
            attnplug.register(f"{self.package}.plugin", manifest=manifest)
        except DuplicateBackendError:  # it is installed
            assert self.name in {plugin.name for plugin in state.registry().plugins}

    def fixture(self) -> Any:
        """Return a fixture, for a module's name `load_real`: what `load` is, with the plugin offered."""

        @pytest.fixture
        def load_real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Backend]:
            self.offer(monkeypatch)
            return self.load

        return load_real

    def judge_fixture(self) -> Any:
        """Return a fixture, for a module's name `judge`: a `Judge` of models generated through a variant."""
        from tests.backends.judging import Judge  # noqa: PLC0415 - the engine, which other tests do without
        from tests.backends.rounding import Recorder  # noqa: PLC0415 - as above

        @pytest.fixture
        def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdict]:
            self.offer(monkeypatch)
            judged = Judge(Recorder.listening(monkeypatch))

            def judge(name: str, variant: str, *, graphs: bool) -> Verdict:
                self.check_here(variant)
                return judged(name, f"{self.name}/{variant}", graphs=graphs)

            return judge

        return judge

    def check_here(self, variant: str) -> None:
        """Skip the test where a variant's library or its GPU is not here."""
        if why := self.lacking(variant):
            pytest.skip(why)

    def load(self, requirements: attnplug.Requirements, variant: str, **options: Any) -> Backend:
        """Return the backend for a variant, with options, or skip the test as `check_here` does."""
        self.check_here(variant)
        return attnplug.load(requirements, backend=f"{self.name}/{variant}", options={self.name: options})
