"""FlashInfer as this plugin uses it. No other module imports it: what differs between its releases is settled here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flashinfer
from flashinfer import decode as _decode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnplug_flashinfer.arrays import Buffers

_fast_decode_plan = getattr(_decode, "fast_decode_plan", None)


class _HeadSizeInModuleName(flashinfer.BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc]
    """Adds the head size to the name of the module that a wrapper compiles, which leads `jit_args`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        module = options.get("jit_args")
        if module:
            name, *rest = module
            options["jit_args"] = [f"{name}_head_{rest[4]}_{rest[5]}", *rest]
        super().__init__(*args, **options)


class BatchAttentionWithAttentionSinkWrapper(
    flashinfer.BatchAttentionWithAttentionSinkWrapper,  # type: ignore[misc]
    _HeadSizeInModuleName,
):
    """
    The library's wrapper, of a module for its head size alone.

    The library names the module by dtype, window and backend. A second head size in the same process would compile
    another module of that name and place, and be given the one that is loaded already: kernels for other heads. The
    library's class calls its parent's constructor next, which is the one above here.
    """


def decode_wrapper(workspace: Tensor, kv_layout: str, *, tensor_cores: bool, buffers: Buffers | None) -> Any:
    """
    Return a wrapper for decodes of one row per request.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        tensor_cores: Whether the kernels of prefills run, which are said to be those for Ampere: the library's own
            choice differs from release to release.
        buffers: What a graph reads; None for eager steps.
    """
    fixed: dict[str, Any] = {}
    if buffers is not None:
        fixed = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": buffers.indptr,
            "paged_kv_indices_buffer": buffers.indices,
            "paged_kv_last_page_len_buffer": buffers.last_page_len,
        }
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout, use_tensor_cores=tensor_cores, backend="fa2", **fixed
    )


def prefill_wrapper(workspace: Tensor, kv_layout: str, *, backend: str, buffers: Buffers | None) -> Any:
    """
    Return a wrapper for several rows per request.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        backend: ``"fa2"`` or ``"fa3"``.
        buffers: What a graph reads; None for eager steps.
    """
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend=backend, **_fixed(buffers))


def sink_wrapper(
    workspace: Tensor,
    kv_layout: str,
    *,
    backend: str,
    buffers: Buffers | None,
    dtype: torch.dtype,
    head_size: int,
    window_left: int,
) -> Any:
    """
    Return a wrapper for sinks, for decodes and prefills alike.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        backend: ``"fa2"`` or ``"fa3"``.
        buffers: What a graph reads; None for eager steps.
        dtype: Of queries, cache and outputs.
        head_size: Size of a head.
        window_left: As in plans: with a window the kernel is another one.
    """
    return BatchAttentionWithAttentionSinkWrapper(
        workspace,
        kv_layout,
        backend=backend,
        q_data_type=dtype,
        kv_data_type=dtype,
        head_dim_qk=head_size,
        head_dim_vo=head_size,
        window_left=window_left,
        **_fixed(buffers),
    )


def ragged_wrapper(workspace: Tensor, *, backend: str) -> Any:
    """Return a wrapper for keys and values that come with the call, ``(rows, num_kv_heads, head_size)``."""
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)


def replan_decode(
    wrapper: Any, buffers: Buffers, arrays: tuple[Tensor, Tensor, Tensor], values: dict[str, Any]
) -> None:
    """
    Plan a graph's decodes again: `plan` had those values, and the buffers hold the arrays already.

    The library's plan for tensor cores looks at every length by itself, in Python; its fast plan does not.

    Args:
        wrapper: A decode wrapper that was planned with these values.
        buffers: Its buffers.
        arrays: indptr and lengths of last pages on the host, and between them the indices on the device.
        values: The keywords of `plan`.
    """
    indptr, indices, last_page_len = arrays
    if _fast_decode_plan is None:
        wrapper.plan(*arrays, **values)
        return
    kept = {name: value for name, value in values.items() if name != "o_data_type"}  # as in the first plan
    _fast_decode_plan(wrapper, buffers.indptr, indices, last_page_len, **kept, global_override_indptr_cpu=indptr)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """
    Merge attention over other keys into `out` and `lse`, in place.

    Args:
        out: ``(rows, heads, head_size)``, contiguous like all four.
        lse: ``(rows, heads)`` float32, base 2.
        other: As `out`.
        other_lse: As `lse`.
    """
    flashinfer.merge_state_in_place(out, lse, other, other_lse)


def _fixed(buffers: Buffers | None) -> dict[str, Any]:
    if buffers is None:
        return {}
    return {
        "use_cuda_graph": True,
        "qo_indptr_buf": buffers.starts,
        "paged_kv_indptr_buf": buffers.indptr,
        "paged_kv_indices_buf": buffers.indices,
        "paged_kv_last_page_len_buf": buffers.last_page_len,
    }
