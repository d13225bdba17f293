"""The attention layers of a running model: what each was negotiated as, and its calls held against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import NotNegotiatedError
from attnplug_transformers.versions import version_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnplug.contract import AttentionImpl
    from attnplug.request import Requirements
    from attnplug_transformers.call import Call
    from attnplug_transformers.engine.attention import Asked


@frozen(eq=False)
class Learned:
    """
    One attention module, as a trial run has met it.

    Attributes:
        name: The layer's name.
        module: The module.
        requirements: What it asks of a backend.
        call: The facts of its calls.
        scale: Factor of the scores, as the call has it.
        sinks: Its sinks, and that tensor's version.
        takes_mask: Whether the model hands the step's mask to it, or none.
    """

    name: str
    module: nn.Module
    requirements: Requirements
    call: Call
    scale: float | None
    sinks: tuple[Tensor | None, int]
    takes_mask: bool

    def check(self, asked: Asked, mask: Tensor) -> None:
        """
        Hold a call against what was learned.

        Raises:
            NotNegotiatedError: It brings something else.
        """
        self._compare("the facts", asked.call, self.call)
        self._compare("scaling", asked.scale, self.scale)
        if asked.sinks is not self.sinks[0] or version_of(asked.sinks) != self.sinks[1]:
            self._refuse("other sinks (s_aux)", "a backend keeps the sinks that a layer was made with")
        if asked.mask is not (mask if self.takes_mask else None):
            self._refuse("a mask of its own", "a step attends as the layer was negotiated")

    def _compare(self, what: str, brought: object, learned: object) -> None:
        if brought != learned:
            self._refuse(f"{what} {brought}", f"the layer was made for {learned}")

    def _refuse(self, brought: str, expected: str) -> None:
        raise NotNegotiatedError(
            f"{self.name}: the call brings {brought}",
            f"{expected}, when the engine was made",
            "make a new engine after changing the model",
        )


@frozen(eq=False)
class PagedLayer:
    """
    One attention layer, ready to run.

    Attributes:
        learned: What its calls are held against.
        impl: Its implementation.
        group: The number of its group.
    """

    learned: Learned
    impl: AttentionImpl
    group: int
