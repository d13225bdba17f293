"""What a batch may bring only where it was asked for: shared prefixes, masks, encoder lengths, local lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards.index import check_index, check_mirror
from attnplug.contract.guards.wording import describe
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from typing import NoReturn

    from attnplug.contract.batch import Batch
    from attnplug.negotiation.agreement import Agreement


def check_negotiated(batch: Batch, agreement: Agreement, device_type: str) -> None:
    """
    Check that the batch brings what was asked for, and nothing else.

    Raises:
        NotNegotiatedError: It brings what was not asked for.
        BatchError: It lacks what was, or the values contradict the batch.
    """
    asked = agreement.requirements
    if batch.causal is not asked.causal:
        _refuse(
            f"a batch with causal={batch.causal!r}", f"causal={asked.causal} was negotiated", f"causal={batch.causal}"
        )
    if batch.common_prefix_len:
        _check_prefix(batch, agreement)
    if batch.encoder_seq_lens is not None or asked.attn_type == "encoder_decoder":
        _check_encoder(batch, agreement, device_type)
    if batch.dcp_local_seq_lens is not None or asked.dcp_size > 1:
        _check_local(batch, agreement, device_type)
    if batch.custom_mask is not None or asked.custom_mask:
        _check_mask(batch, agreement, device_type)


def _refuse(given: str, allowed: str, wanted: str) -> NoReturn:
    raise NotNegotiatedError(
        f"{given} was given", allowed, f"select again with {wanted} in the requirements, or leave it out of the batch"
    )


def _check_prefix(batch: Batch, agreement: Agreement) -> None:
    length, size = batch.common_prefix_len, agreement.block_size
    if not agreement.requirements.cascade or size is None:
        _refuse(f"a batch with common_prefix_len={length}", "cascade was not asked for", "cascade=True")
    if length < 0 or length % size:
        raise BatchError(
            f"common_prefix_len={length} was given",
            f"it is a multiple of the block size {size}",
            f"pass {max(0, length // size * size)}",
        )
    _check_prefix_is_computed(batch)
    table = batch.block_table_cpu
    blocks = length // size
    if table is not None and not bool((table[:, :blocks] == table[:1, :blocks]).all()):
        raise BatchError(
            f"common_prefix_len={length} was given, and the first {blocks} blocks differ between requests",
            "a shared prefix lies in the same blocks for every request",
            "pass the length that is really shared, or 0",
        )


def _check_prefix_is_computed(batch: Batch) -> None:
    if batch.seq_lens_cpu is None or batch.query_start_loc_cpu is None:
        return
    computed = batch.num_computed_tokens_cpu
    shortest = int((batch.seq_lens_cpu - batch.query_start_loc_cpu.diff() if computed is None else computed).amin())
    if batch.common_prefix_len > shortest:
        raise BatchError(
            f"common_prefix_len={batch.common_prefix_len} was given",
            f"a request has {shortest} tokens computed, and every query of the batch attends the whole prefix",
            "pass at most that, cut to whole blocks",
        )


def _check_encoder(batch: Batch, agreement: Agreement, device_type: str) -> None:
    asked = agreement.requirements
    if batch.encoder_seq_lens is None:
        if asked.paged:
            raise BatchError(
                "no encoder_seq_lens was given",
                "paged cross attention reads as many keys per request as the encoder has tokens",
                "pass encoder_seq_lens=..., (num_reqs,) int32",
            )
        return
    if asked.attn_type != "encoder_decoder" or not asked.paged:
        _refuse(
            f"encoder_seq_lens of {describe(batch.encoder_seq_lens)}",
            f"attn_type={asked.attn_type!r}, paged={asked.paged} was negotiated; dense calls have key_start_loc",
            "attn_type='encoder_decoder' and paged=True",
        )
    check_index("encoder_seq_lens", batch.encoder_seq_lens, (batch.num_reqs,), torch.int32, device_type)
    if asked.host_lengths == "exact" or batch.encoder_seq_lens_cpu is not None:
        host = check_mirror(
            "encoder_seq_lens", batch.encoder_seq_lens, batch.encoder_seq_lens_cpu, exact=asked.host_lengths == "exact"
        )
        _check_positive("encoder_seq_lens", int(host.amin()))


def _check_local(batch: Batch, agreement: Agreement, device_type: str) -> None:
    asked = agreement.requirements
    if batch.dcp_local_seq_lens is None:
        raise BatchError(
            "no dcp_local_seq_lens was given",
            f"dcp_size={asked.dcp_size} was negotiated, and each rank holds a part of every sequence",
            "pass attnplug.batching.num_local_tokens_per_dcp_rank(...)",
        )
    if asked.dcp_size == 1:
        _refuse(
            f"dcp_local_seq_lens of {describe(batch.dcp_local_seq_lens)}", "dcp_size=1 was negotiated", "dcp_size=..."
        )
    check_index("dcp_local_seq_lens", batch.dcp_local_seq_lens, (batch.num_reqs,), torch.int32, device_type)
    if batch.dcp_local_seq_lens_cpu is None:
        return
    host = check_mirror(
        "dcp_local_seq_lens",
        batch.dcp_local_seq_lens,
        batch.dcp_local_seq_lens_cpu,
        exact=asked.host_lengths == "exact",
    )
    _check_positive("dcp_local_seq_lens", int(host.amin()))
    if asked.host_lengths == "exact" and batch.seq_lens_cpu is not None and bool((host > batch.seq_lens_cpu).any()):
        raise BatchError(
            "dcp_local_seq_lens with a value beyond seq_lens was given",
            "a rank holds a part of each sequence",
            "pass attnplug.batching.num_local_tokens_per_dcp_rank(...)",
        )


def _check_positive(name: str, low: int) -> None:
    if low < 0:
        raise BatchError(
            f"{name} with the value {low} was given",
            "lengths are not negative",
            "pass the number of keys of each request",
        )


def _check_mask(batch: Batch, agreement: Agreement, device_type: str) -> None:
    if not agreement.requirements.custom_mask:
        _refuse("a batch with a custom_mask", "custom_mask was not asked for", "custom_mask=True")
    if batch.custom_mask is None:
        raise BatchError(
            "no custom_mask was given", "custom_mask was negotiated: each batch brings its mask", "pass custom_mask=..."
        )
    shape = tuple(batch.custom_mask.shape)
    if (
        batch.seq_lens_cpu is not None
        and batch.query_start_loc_cpu is not None
        and agreement.requirements.host_lengths == "exact"
    ):
        shape = (int((batch.seq_lens_cpu.long() * batch.query_start_loc_cpu.diff().long()).sum()),)
    check_index(
        "custom_mask",
        batch.custom_mask,
        shape if len(shape) == 1 else (batch.custom_mask.numel(),),
        torch.bool,
        device_type,
    )
