"""
The conformance kit: does a backend do what its manifest says, and refuse the rest?

    pytest --pyargs attnplug.testing --attn-backend=NAME[/variant]

or, among the tests of a plugin,

    from attnplug.testing.kit import Conformance

    class TestMine(Conformance):
        backend = "mine/plain"

`Conformance` has all tiers; each is a class of its own that can be inherited alone.
"""

from attnplug.testing.kit.basic import Basic
from attnplug.testing.kit.conformance import Conformance
from attnplug.testing.kit.tier import Tier

__all__ = ["Basic", "Conformance", "Tier"]
