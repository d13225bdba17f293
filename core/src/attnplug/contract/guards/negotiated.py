"""Checks what a batch has besides lengths and pages against the agreement: causality, prefix, encoder, mask, extras."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards._format import check_index, check_mirror, describe, refuse_unrequested
from attnplug.contract.guards.layer import check_extra
from attnplug.contract.inputs.kv_cache import TORCH_DTYPES
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.requirements import Requirements


def check_negotiated(
    batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str, *, is_exact: bool
) -> None:
    """
    Check that the batch has what was requested beyond lengths and pages, and nothing else.

    Args:
        batch: The batch, its lengths checked.
        agreement: What was negotiated.
        query_lens: ``(num_reqs,)`` int32 on the CPU.
        device_type: Where its tensors belong.
        is_exact: Whether its CPU sequence lengths are exact.

    Raises:
        BatchError: A value contradicts the batch or the agreement.
        NotNegotiatedError: Something was not requested.
        TensorError: A tensor has the wrong shape, dtype or device.
    """
    requested = agreement.requirements
    if batch.causal is not requested.causal:
        refuse_unrequested(
            f"a batch with causal={batch.causal!r}",
            f"causal={requested.causal} was negotiated",
            f"causal={batch.causal}",
        )
    if batch.common_prefix_len:
        _check_prefix(batch, agreement, query_lens)
    if batch.encoder_seq_lens is not None or requested.attn_type == "encoder_decoder":
        _check_encoder(batch, requested, device_type, is_exact=is_exact)
    if batch.dcp_local_seq_lens is not None or requested.dcp_size > 1:
        _check_local(batch, requested, device_type, is_exact=is_exact)
    _refuse_unread(batch, requested)
    if batch.custom_mask is not None or requested.custom_mask:
        _check_mask(batch, requested, query_lens if is_exact else None, device_type)
    if batch.attn_bias is not None or requested.attn_bias:
        _check_bias(batch, requested, query_lens if is_exact else None, device_type)
    if batch.mm_prefix_range is not None or batch.mm_prefix_range_cpu is not None:
        _check_spans(batch, requested, device_type)
    if batch.extra:
        check_extra("a batch", batch.extra, agreement)


def requests_plain(requested: Requirements) -> bool:
    """Whether batches have pages and lengths, and may have nothing else, as nearly always."""
    return (
        requested.paged is True
        and requested.dcp_size == 1
        and not (requested.custom_mask or requested.attn_bias or requested.mm_prefix)
        and requested.attn_type != "encoder_decoder"
    )


def is_plain(batch: Batch) -> bool:
    """Whether a batch has nothing beyond pages and lengths."""
    return (
        not (batch.common_prefix_len or batch.extra)
        and batch.custom_mask is None
        and batch.attn_bias is None
        and batch.mm_prefix_range is None
        and batch.mm_prefix_range_cpu is None
        and batch.key_start_loc is None
        and batch.key_start_loc_cpu is None
        and batch.encoder_seq_lens is None
        and batch.encoder_seq_lens_cpu is None
        and batch.max_encoder_seq_len is None
        and batch.dcp_local_seq_lens is None
        and batch.dcp_local_seq_lens_cpu is None
    )


def _check_encoder(batch: Batch, requested: Requirements, device_type: str, *, is_exact: bool) -> None:
    """Check the encoder's lengths, which paged cross attention needs and nothing else has."""
    if batch.encoder_seq_lens is None:
        if requested.paged:
            raise BatchError(
                "no encoder_seq_lens was given",
                "paged cross attention reads as many keys per request as the encoder has tokens",
                "pass encoder_seq_lens=..., (num_reqs,) int32",
            )
        return
    if requested.attn_type != "encoder_decoder" or not requested.paged:
        paged, attn_type = requested.paged, requested.attn_type
        refuse_unrequested(
            f"encoder_seq_lens of {describe(batch.encoder_seq_lens)}",
            f"attn_type={attn_type!r}, paged={paged} was negotiated; dense calls have key_start_loc",
            "attn_type='encoder_decoder' and paged=True",
        )
    host = _check_lens("encoder_seq_lens", batch, device_type, exact=is_exact, needed=is_exact)
    given = batch.max_encoder_seq_len
    if host is None:
        if given is None:
            raise BatchError(
                "no max_encoder_seq_len was given, and no encoder_seq_lens_cpu",
                "kernels are launched for the longest encoder, which is unknown without either",
                "pass either",
            )
        return
    longest = int(host.amax())
    if given is None or given < longest or (is_exact and given != longest):
        raise BatchError(
            f"max_encoder_seq_len={given} was given",
            f"the longest encoder has {longest} tokens",
            f"pass max_encoder_seq_len={longest}, or leave it out: it follows from encoder_seq_lens_cpu",
        )


def _check_local(batch: Batch, requested: Requirements, device_type: str, *, is_exact: bool) -> None:
    """Check the lengths of this rank's share of each sequence, which decode context parallelism alone has."""
    if batch.dcp_local_seq_lens is None:
        raise BatchError(
            "no dcp_local_seq_lens was given",
            f"dcp_size={requested.dcp_size} was negotiated, and each rank holds a part of every sequence",
            "pass attnplug.batching.num_local_tokens_per_dcp_rank(...)",
        )
    if requested.dcp_size == 1:
        found = f"dcp_local_seq_lens of {describe(batch.dcp_local_seq_lens)}"
        refuse_unrequested(found, "dcp_size=1 was negotiated", "dcp_size=...")
    host = _check_lens("dcp_local_seq_lens", batch, device_type, exact=is_exact, needed=False)
    if host is not None and is_exact and batch.seq_lens_cpu is not None and bool((host > batch.seq_lens_cpu).any()):
        raise BatchError(
            "dcp_local_seq_lens with a value beyond seq_lens was given",
            "a rank holds a part of each sequence",
            "pass attnplug.batching.num_local_tokens_per_dcp_rank(...)",
        )


def _check_lens(name: str, batch: Batch, device_type: str, *, exact: bool, needed: bool) -> Tensor | None:
    """Check a tensor of lengths, and return its CPU copy; None where it is absent and not needed."""
    tensor, host = getattr(batch, name), getattr(batch, f"{name}_cpu")
    check_index(name, tensor, (batch.num_reqs,), torch.int32, device_type)
    if host is None and not needed:
        return None
    host = check_mirror(name, tensor, host, exact=exact)
    low = int(host.amin())
    if low < 0:
        raise BatchError(
            f"{name} with the value {low} was given",
            "lengths are not negative",
            "pass the number of keys of each request",
        )
    return host


def _refuse_unread(batch: Batch, requested: Requirements) -> None:
    """Refuse what the host said about a tensor that the batch does not have: nothing reads it."""
    if batch.encoder_seq_lens is None:
        found = "max_encoder_seq_len" if batch.max_encoder_seq_len is not None else "encoder_seq_lens_cpu"
        if getattr(batch, found) is not None:
            refuse_unrequested(
                f"a batch with {found} and no encoder_seq_lens",
                f"attn_type={requested.attn_type!r}, paged={requested.paged} was negotiated; "
                "only paged cross attention has encoder lengths",
                "attn_type='encoder_decoder' and paged=True",
            )
    if batch.dcp_local_seq_lens is None and batch.dcp_local_seq_lens_cpu is not None:
        refuse_unrequested("a batch with dcp_local_seq_lens_cpu", "dcp_size=1 was negotiated", "dcp_size=...")
    if requested.paged:
        if batch.key_start_loc is None and batch.key_start_loc_cpu is not None:
            refuse_unrequested(
                "a batch with key_start_loc_cpu",
                "paged=True was negotiated: keys are found through the block table",
                "paged=False",
            )
        return
    for name in ("block_table_cpu", "slot_mapping_cpu"):
        if getattr(batch, name) is not None and getattr(batch, name.removesuffix("_cpu")) is None:
            refuse_unrequested(
                f"a batch with {name}",
                "paged=False was negotiated: each call gets contiguous (non-paged) K/V",
                "paged=True",
            )


def _check_prefix(batch: Batch, agreement: Agreement, query_lens: Tensor) -> None:
    length, size = batch.common_prefix_len, agreement.block_size
    if not agreement.requirements.cascade or size is None:
        refuse_unrequested(f"a batch with common_prefix_len={length}", "cascade was not requested", "cascade=True")
    if length < 0 or length % size:
        raise BatchError(
            f"common_prefix_len={length} was given",
            f"it is a multiple of the block size {size}",
            f"pass {max(0, length // size * size)}",
        )
    running = query_lens > 0  # padded requests attend to nothing
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
            "a shared prefix is in the same blocks for every request",
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
            f"a request has {shortest} tokens computed, and every query of the batch attends to the whole prefix",
            "pass at most that, cut to whole blocks",
        )


def _check_mask(batch: Batch, requested: Requirements, query_lens: Tensor | None, device_type: str) -> None:
    mask = batch.custom_mask
    if not requested.custom_mask:
        refuse_unrequested("a batch with a custom_mask", "custom_mask was not requested", "custom_mask=True")
    if mask is None:
        raise BatchError(
            "no custom_mask was given", "custom_mask was negotiated: each batch has its mask", "pass custom_mask=..."
        )
    check_index("custom_mask", mask, (_mask_size(batch, query_lens, mask.numel()),), torch.bool, device_type)


def _check_bias(batch: Batch, requested: Requirements, query_lens: Tensor | None, device_type: str) -> None:
    bias = batch.attn_bias
    if not requested.attn_bias:
        refuse_unrequested("a batch with an attn_bias", "attn_bias was not requested", "attn_bias=True")
    if bias is None:
        raise BatchError(
            "no attn_bias was given", "attn_bias was negotiated: each batch has its bias", "pass attn_bias=..."
        )
    size = _mask_size(batch, query_lens, bias.shape[-1] if bias.ndim else 0)
    heads = 1 if bias.ndim and bias.shape[0] == 1 else requested.num_q_heads
    check_index("attn_bias", bias, (heads, size), TORCH_DTYPES[requested.dtype], device_type)


def _check_spans(batch: Batch, requested: Requirements, device_type: str) -> None:
    """Check the spans of query tokens, where rows beyond the last token are not read."""
    spans = batch.mm_prefix_range
    if not requested.mm_prefix or spans is None:
        found = "mm_prefix_range_cpu" if spans is None else "mm_prefix_range"
        expected = "mm_prefix was not requested" if spans is not None else "it is the CPU copy of mm_prefix_range"
        refuse_unrequested(f"a batch with {found}", expected, "mm_prefix=True")
    rows = max(batch.num_actual_tokens, spans.shape[0] if spans.ndim else 0)
    check_index("mm_prefix_range", spans, (rows, 2), torch.int32, device_type)
    check_mirror("mm_prefix_range", spans, batch.mm_prefix_range_cpu)


def _mask_size(batch: Batch, query_lens: Tensor | None, given: int) -> int:
    """Return the pairs of a query and a key, where the CPU has exact lengths; else what was given."""
    if query_lens is None or batch.seq_lens_cpu is None:
        return given
    return int((batch.seq_lens_cpu.long() * query_lens.long()).sum())
