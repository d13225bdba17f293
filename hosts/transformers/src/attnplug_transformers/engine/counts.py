"""What an engine has done so far."""

from __future__ import annotations

from attrs import frozen


@frozen
class Counts:
    """
    The counters of an engine, at one moment.

    Attributes:
        steps: Times that the model was run.
        replayed_steps: Those of them that were recorded decode steps, replayed.
        preemptions: Times that a request gave its blocks to an older one, to be computed again later.
        blocks_in_use: Blocks that requests own now.
    """

    steps: int
    replayed_steps: int
    preemptions: int
    blocks_in_use: int
