"""A progress bar is shown on a terminal alone, and changes no token."""

from __future__ import annotations

import io
import sys

import pytest

from attnplug.errors import RequirementsError
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.models import model


class Terminal(io.StringIO):
    """A standard error that is a terminal, or is none."""

    def __init__(self, *, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize(("tty", "progress"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_shown_on_a_terminal(host, monkeypatch, tty, progress):
    stream = Terminal(tty=tty)
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with Engine(model("llama")) as engine:
        expected = engine.generate([[1, 2], [3]], max_new_tokens=3)
        assert engine.generate([[1, 2], [3]], max_new_tokens=3, progress=progress) == expected

    shown = stream.getvalue()
    assert bool(shown) == (tty and progress)
    if shown:
        assert "2/2" in shown
        assert "6 tokens" in shown


def test_other_values_are_refused(host):
    with Engine(model("llama")) as engine, pytest.raises(RequirementsError, match="progress='yes'"):
        engine.generate([[1]], max_new_tokens=1, progress="yes")
