"""A `ForwardBatch` of SGLang as a batch of attnplug: lengths, pages and slots, in SGLang's order of requests."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.contract import Batch
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_sglang.pools import Pools


@frozen(eq=False)
class Lengths:
    """
    The requests of a step, without padding.

    Attributes:
        queries: New tokens of each request.
        sequences: Keys of each request, those of this step included.
        custom_mask: ``(sum(query * sequence),)`` bool of a tree of drafts; None where tokens attend to all before them.
        drafts: Query tokens of each request of a verified tree; 0 otherwise.
    """

    queries: list[int]
    sequences: list[int]
    custom_mask: Tensor | None = None
    drafts: int = 0


def lengths_of(step: Any) -> Lengths:
    """
    Return the lengths of a step.

    SGLang counts the drafts that are verified in no length. It pads steps of graphs, and those of ranks that run
    together, with requests of length 0 (`get_cuda_graph_seq_len_fill_value`), which come last and are left out here:
    core pads by itself.

    Args:
        step: SGLang's `ForwardBatch`.

    Raises:
        NotNegotiatedError: The mode of the step is not served.
    """
    mode = step.forward_mode
    if mode.is_idle():
        return Lengths([], [])
    spec = getattr(step, "spec_info", None)
    if mode.is_decode():
        check_decode(spec)
        sequences = _real(_on_cpu(step, "seq_lens"))
        return Lengths([1] * len(sequences), sequences)
    if mode.is_target_verify():
        check_verify(spec)
        return _verified(step, spec)
    if mode.name in _UNSERVED:
        raise NotNegotiatedError(
            f"a step of the mode {mode.name} was given",
            _UNSERVED[mode.name],
            "serve this model with one of SGLang's own backends",
        )
    sequences = _real(_on_cpu(step, "seq_lens"))
    return Lengths(_on_cpu(step, "extend_seq_lens")[: len(sequences)], sequences)


def check_decode(spec: Any) -> None:
    """
    Check the `spec_info` of a decode.

    Raises:
        NotNegotiatedError: It is of a tree of drafts.
    """
    if spec is not None and getattr(spec, "kv_indptr", None) is not None:
        raise NotNegotiatedError(
            "a decode of a draft model was given, with a list of slots for each branch of its tree",
            "attnplug-sglang reads the slots of requests from SGLang's table, which has one branch",
            "name one of SGLang's own backends for the drafts: --speculative-draft-attention-backend triton",
        )


def check_verify(spec: Any) -> None:
    """
    Check the `spec_info` of a step that verifies drafts.

    Raises:
        NotNegotiatedError: Requests have different numbers of drafts.
    """
    if getattr(spec, "ragged_verify_layout", None) is not None:
        raise NotNegotiatedError(
            "a step was given that verifies another number of drafts for each request",
            "attnplug-sglang verifies the same number for all",
            "unset SGLANG_RAGGED_VERIFY_MODE",
        )


_UNSERVED = {
    "DLLM_EXTEND": "tokens of a diffusion language model attend to later tokens of their block: no backend is asked so",
    "PREBUILT": "a step without a forward has no attention",
}


def has_tree(spec: Any) -> bool:
    """
    Whether drafts are a tree. Where each has one successor they are a chain, whatever mask comes with them.

    SGLang makes a mask for chains too, which its own FlashAttention backend leaves alone.

    Args:
        spec: The `spec_info` of a step that verifies drafts.
    """
    return getattr(spec, "custom_mask", None) is not None and getattr(spec, "topk", None) != 1


def _verified(step: Any, spec: Any) -> Lengths:
    """Return the lengths of a step that verifies drafts: a chain is a prefill, a tree has a mask."""
    drafts = int(spec.draft_token_num)
    sequences = [length + drafts for length in _real(_on_cpu(step, "seq_lens"))]
    mask = spec.custom_mask if has_tree(spec) else None
    if mask is not None:
        size = sum(drafts * length for length in sequences)
        if mask.numel() < size:
            raise NotNegotiatedError(
                f"a mask of {mask.numel()} elements was given with drafts",
                f"it has one for each draft and key: {size} for {len(sequences)} requests of {drafts} drafts",
                "leave the kind of the tree mask at its default, the full mask",
            )
        mask = mask.flatten()[:size].bool()
    return Lengths([drafts] * len(sequences), sequences, mask, drafts)


def _on_cpu(step: Any, name: str) -> list[int]:
    """Return lengths as numbers: the CPU copy, which is a tensor or a list, or what the device has."""
    found = getattr(step, f"{name}_cpu", None)
    found = getattr(step, name) if found is None else found
    return [int(length) for length in (found if isinstance(found, list) else found.tolist())]


def _real(lengths: list[int]) -> list[int]:
    return list(takewhile(bool, lengths))


def batch_of(step: Any, lengths: Lengths, pools: Pools, part: str, table: Tensor, *, causal: bool) -> Batch:
    """
    Return the batch of the layers that have their K/V in one part of the pools.

    Args:
        step: SGLang's `ForwardBatch`.
        lengths: Its lengths.
        pools: The pools.
        part: The part.
        table: SGLang's table of slots, ``(rows, tokens)``: a row for each request, a column for each position.
        causal: Whether tokens attend to no later token.
    """
    page, count = pools.page_size, len(lengths.sequences)
    width = -(-max(lengths.sequences) // page) * page
    # Slots of a page are consecutive, and its first one is a multiple of the page size.
    first = table[step.req_pool_indices[:count].long(), :width:page]
    slots = step.out_cache_loc[: sum(lengths.queries)]
    return Batch.from_lengths(
        lengths.queries,
        lengths.sequences,
        block_table=(pools.slots(part, first) // page).int(),
        slot_mapping=pools.slots(part, slots).long(),
        causal=causal,
        custom_mask=lengths.custom_mask,
    )
