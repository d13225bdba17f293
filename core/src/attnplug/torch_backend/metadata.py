"""What a build of the embedded backend hands to its forwards."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from attnplug.contract.metadata import Metadata


@frozen(eq=False, kw_only=True)
class TorchMetadata(Metadata):
    """
    A plan per plan key, and the memory that gathered pages go through.

    Attributes:
        workspace: The state's workspace, uint8; each layer writes it before it reads it.
    """

    workspace: Tensor
