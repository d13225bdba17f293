"""The whole kit as one class."""

from __future__ import annotations

from attnplug.testing.kit.basic import Basic


class Conformance(Basic):
    """
    Everything that a backend has to pass.

        class TestMine(Conformance):
            backend = "mine/plain"
    """
