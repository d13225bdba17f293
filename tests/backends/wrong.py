"""Attention that is wrong, whatever backend computes it: its layers are made with something else than was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.contract.impl import AttentionImpl
from attnplug.contract.inputs.layer import Layer
from attnplug_transformers.engine import groups

if TYPE_CHECKING:
    import pytest


def no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sinks take no weight, which is what a backend computes that ignores them."""
    _made_with(monkeypatch, "sinks", lambda sinks: None if sinks is None else torch.full_like(sinks, -1e4))


def other_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scores be a quarter larger."""
    _made_with(monkeypatch, "scale", lambda scale: 1.25 * scale)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens attend all that came before."""
    _forgetting(monkeypatch, "window", (-1, -1))


def no_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scores be as large as they come."""
    _forgetting(monkeypatch, "logits_soft_cap", None)


WRONG = (
    ("llama", other_scale),
    ("gpt_oss", no_sinks),
    ("gpt_oss", no_window),
    ("gemma2", no_window),
    ("gemma2", no_soft_cap),
)
"""Models, and what is wrong for them."""


def _made_with(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    monkeypatch.setattr(groups, "Layer", lambda **given: Layer(**given | {name: change(given[name])}))


def _forgetting(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    begin = AttentionImpl.__init__

    def begin_without(self: Any, layer: Any, agreement: Any) -> None:
        begin(self, layer, agreement)
        setattr(self, name, value)

    monkeypatch.setattr(AttentionImpl, "__init__", begin_without)
