"""The kit as pytest collects it: ``pytest --pyargs attnplug.testing --attn-backend=NAME[/variant]``."""

from __future__ import annotations

from attnplug.testing.kit.conformance import Conformance


class TestConformance(Conformance):
    """The backend that the command line names."""
