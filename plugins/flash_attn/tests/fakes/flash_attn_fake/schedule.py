"""The schedules that vLLM's FlashAttention 3 makes ahead of a call. Sizes are the library's, contents are not."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

MOST_REQUESTS = 992  # with more of them keys are not split


@frozen(eq=False, kw_only=True)
class Plan:
    """
    What a schedule is made for.

    Attributes:
        starts: cu_seqlens_q.
        used: seqused_k.
        shape: Everything else that the number of splits depends on.
        num_splits: As the caller says; 0 leaves it to the library.
        swizzles: Whether the kernels are causal, or have a window.
    """

    starts: Tensor
    used: Tensor
    shape: tuple[int, ...]
    num_splits: int
    swizzles: bool

    @property
    def splits(self) -> int:
        """Into how many parts keys are split, at most."""
        return self.num_splits if self.num_splits > 0 else 1 + sum(self.shape) % 3

    def make(self) -> Tensor:
        """
        Return the schedule: vectors of one number per request, padded with zeros, and a semaphore.

        Here the first holds rows and keys, the others the number of splits and whether heads are swizzled.
        """
        requests = len(self.used)
        padded = -(-requests // 4) * 4
        vectors = [self.starts.diff() + 1009 * self.used]
        if self.splits > 1 and requests <= MOST_REQUESTS:
            vectors.append(torch.full_like(self.used, self.splits))
        if self.swizzles:
            vectors.append(torch.ones_like(self.used))
        made = torch.zeros(len(vectors) * padded + 1, dtype=torch.int32, device=self.used.device)
        for number, vector in enumerate(vectors):
            made[number * padded : number * padded + requests] = vector
        return made
