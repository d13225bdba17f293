"""Checks the dense side of a batch: where the K/V rows of each request start in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards._format import check_index, check_mirror
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch


def check_dense(batch: Batch, seq_lens: Tensor | None, device_type: str, *, is_exact: bool) -> int:
    """
    Return the number of K/V rows of a call; 0 where only the device knows it.

    Raises:
        BatchError: key_start_loc is absent or contradicts the lengths.
        NotNegotiatedError: The batch has pages.
        TensorError: key_start_loc has the wrong shape, dtype or device.
    """
    for name in ("block_table", "slot_mapping"):
        if getattr(batch, name) is not None:
            raise NotNegotiatedError(
                f"a batch with a {name} was given",
                "paged=False was negotiated: each call gets contiguous (non-paged) K/V",
                f"select again with paged=True, or leave {name} out of the batch",
            )
    if batch.key_start_loc is None:
        raise BatchError(
            "a dense batch without key_start_loc was given",
            "key_start_loc says where each request's K/V rows start",
            "pass key_start_loc=query_start_loc where keys are as long as queries, or use Batch.from_lengths",
        )
    check_index("key_start_loc", batch.key_start_loc, (batch.num_reqs + 1,), torch.int32, device_type)
    if batch.key_start_loc_cpu is None and not is_exact:
        return 0
    host = check_mirror("key_start_loc", batch.key_start_loc, batch.key_start_loc_cpu)
    starts: list[int] = host.tolist()
    lens = host.diff()
    if starts[0] != 0 or int(lens.amin()) < 0 or (seq_lens is not None and not torch.equal(lens, seq_lens)):
        raise BatchError(
            "a key_start_loc was given that contradicts seq_lens",
            "it starts at 0, never falls, and its steps are seq_lens",
            "pass [0, *itertools.accumulate(seq_lens)], or use Batch.from_lengths",
        )
    return starts[-1]
