"""What a batch may bring only where it was asked for: shared prefixes, masks, encoder lengths, local lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards._format import describe
from attnplug.contract.guards.pages import check_index, check_mirror
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.negotiation.agreement import Agreement


def check_negotiated(batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str) -> None:
    """
    Check that the batch brings what was asked for, and nothing else.

    Args:
        batch: The batch.
        agreement: What was negotiated.
        query_lens: ``(num_reqs,)`` int32 on the CPU.
        device_type: Where the batch's tensors have to be.

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
        _check_prefix(batch, agreement, query_lens)
    if batch.encoder_seq_lens is not None or asked.attn_type == "encoder_decoder":
        _check_encoder(batch, agreement, device_type)
    if batch.dcp_local_seq_lens is not None or asked.dcp_size > 1:
        _check_local(batch, agreement, device_type)
    if batch.custom_mask is not None or asked.custom_mask:
        _check_mask(batch, agreement, query_lens, device_type)
    if batch.extra:
        check_extra("a batch", batch.extra, agreement)


def check_extra(what: str, extra: Mapping[str, object], agreement: Agreement) -> None:
    """
    Check that only open features that were asked for bring something along.

    Raises:
        NotNegotiatedError: Another one does.
    """
    for name in extra:
        if name not in agreement.requirements.features:
            raise NotNegotiatedError(
                f"{what} with extra {name!r} was given",
                f"features={agreement.requirements.features} were negotiated",
                f"select again with features=({name!r},) in the requirements, or leave it out",
            )


def _refuse(given: str, expected: str, wanted: str) -> NoReturn:
    raise NotNegotiatedError(
        f"{given} was given", expected, f"select again with {wanted} in the requirements, or leave it out of the batch"
    )


def _check_prefix(batch: Batch, agreement: Agreement, query_lens: Tensor) -> None:
    length, size = batch.common_prefix_len, agreement.block_size
    if not agreement.requirements.cascade or size is None:
        _refuse(f"a batch with common_prefix_len={length}", "cascade was not asked for", "cascade=True")
    if length < 0 or length % size:
        raise BatchError(
            f"common_prefix_len={length} was given",
            f"it is a multiple of the block size {size}",
            f"pass {max(0, length // size * size)}",
        )
    running = query_lens > 0  # padded requests attend nothing
    _check_prefix_blocks(batch, running, length // size)
    _check_prefix_is_computed(batch, running, query_lens)


def _check_prefix_blocks(batch: Batch, running: Tensor, blocks: int) -> None:
    table = batch.block_table_cpu
    if table is None or not table.is_cpu or table.ndim != 2 or table.shape[0] != batch.num_reqs:
        return  # of another form, which the guard of pages refuses
    table = table[running, :blocks]
    if not bool((table == table[:1]).all()):
        raise BatchError(
            f"common_prefix_len={batch.common_prefix_len} was given, and the first {blocks} blocks differ",
            "a shared prefix lies in the same blocks for every request",
            "pass the length that is really shared, or 0",
        )


def _check_prefix_is_computed(batch: Batch, running: Tensor, query_lens: Tensor) -> None:
    computed = batch.num_computed_tokens_cpu
    if computed is None:
        if batch.seq_lens_cpu is None:
            return
        computed = batch.seq_lens_cpu - query_lens
    shortest = int(computed[running].amin())
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
    if asked.seq_lens_cpu_kind == "exact" or batch.encoder_seq_lens_cpu is not None:
        host = check_mirror(
            "encoder_seq_lens",
            batch.encoder_seq_lens,
            batch.encoder_seq_lens_cpu,
            exact=asked.seq_lens_cpu_kind == "exact",
        )
        _check_positive("encoder_seq_lens", int(host.amin()))
        _check_longest_encoder(batch, int(host.amax()), exact=asked.seq_lens_cpu_kind == "exact")
    elif batch.max_encoder_seq_len is None:
        raise BatchError(
            "no max_encoder_seq_len was given, and no encoder_seq_lens_cpu",
            "kernels are launched for the longest encoder, which nothing tells then",
            "pass either",
        )


def _check_longest_encoder(batch: Batch, longest: int, *, exact: bool) -> None:
    given = batch.max_encoder_seq_len
    if given is None or given < longest or (exact and given != longest):
        raise BatchError(
            f"max_encoder_seq_len={given} was given",
            f"the longest encoder has {longest} tokens",
            f"pass max_encoder_seq_len={longest}, or leave it out: it follows from encoder_seq_lens_cpu",
        )


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
        exact=asked.seq_lens_cpu_kind == "exact",
    )
    _check_positive("dcp_local_seq_lens", int(host.amin()))
    if (
        asked.seq_lens_cpu_kind == "exact"
        and batch.seq_lens_cpu is not None
        and bool((host > batch.seq_lens_cpu).any())
    ):
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


def _check_mask(batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str) -> None:
    if not agreement.requirements.custom_mask:
        _refuse("a batch with a custom_mask", "custom_mask was not asked for", "custom_mask=True")
    if batch.custom_mask is None:
        raise BatchError(
            "no custom_mask was given", "custom_mask was negotiated: each batch brings its mask", "pass custom_mask=..."
        )
    size = batch.custom_mask.numel()
    if batch.seq_lens_cpu is not None and agreement.requirements.seq_lens_cpu_kind == "exact":
        size = int((batch.seq_lens_cpu.long() * query_lens.long()).sum())
    check_index("custom_mask", batch.custom_mask, (size,), torch.bool, device_type)
