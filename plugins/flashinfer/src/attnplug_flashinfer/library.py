"""FlashInfer as this plugin uses it. No other module imports it, so that differences between releases stay here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flashinfer
import torch
from flashinfer import decode as _decode
from flashinfer import mla as _mla

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug_flashinfer.arrays import Buffers

_fast_decode_plan = getattr(_decode, "fast_decode_plan", None)


class _HeadSizeInModuleName(flashinfer.BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc]
    """Adds the head size to the module name in `jit_args`."""

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
    The library's wrapper for attention sinks, with one compiled module per head size.

    The library names the module by dtype, window and backend only. For a second head size the process would load the
    module of the first one, with kernels for other heads. In the method resolution order `_HeadSizeInModuleName` comes
    next, so that the library's constructor passes its `jit_args` through it.
    """


def decode_wrapper(workspace: Tensor, kv_layout: str, *, tensor_cores: bool, buffers: Buffers | None) -> Any:
    """
    Return a wrapper for decodes of one row per request.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        tensor_cores: Whether the prefill kernels run. They are always the Ampere ones, since the library's default
            differs between releases.
        buffers: The buffers of a graph; None for eager steps.
    """
    arguments: dict[str, Any] = {}
    if buffers is not None:
        arguments = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": buffers.indptr,
            "paged_kv_indices_buffer": buffers.indices,
            "paged_kv_last_page_len_buffer": buffers.last_page_len,
        }
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout, use_tensor_cores=tensor_cores, backend="fa2", **arguments
    )


def prefill_wrapper(workspace: Tensor, kv_layout: str, *, backend: str, buffers: Buffers | None) -> Any:
    """
    Return a wrapper for several rows per request.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        backend: ``"fa2"`` or ``"fa3"``.
        buffers: The buffers of a graph; None for eager steps.
    """
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, kv_layout, backend=backend, **_graph_arguments(buffers)
    )


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
    Return a wrapper for attention sinks, for decodes and prefills.

    Args:
        workspace: uint8, zero at first use.
        kv_layout: ``"NHD"`` or ``"HND"``.
        backend: ``"fa2"`` or ``"fa3"``.
        buffers: The buffers of a graph; None for eager steps.
        dtype: The dtype of queries, KV cache and outputs.
        head_size: The head size.
        window_left: The window of the plans. A kernel is compiled with or without one.
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
        **_graph_arguments(buffers),
    )


def ragged_wrapper(workspace: Tensor, *, backend: str) -> Any:
    """Return a wrapper for contiguous (non-paged) K/V, ``(rows, num_kv_heads, head_size)``."""
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)


def latent_wrapper(workspace: Tensor, *, backend: str, buffers: Buffers | None) -> Any:
    """
    Return a wrapper for absorbed attention over latents.

    Args:
        workspace: uint8.
        backend: ``"fa2"`` or ``"fa3"``.
        buffers: The buffers of a graph; None for eager steps.
    """
    arguments: dict[str, Any] = {}
    if buffers is not None:
        arguments = {
            "use_cuda_graph": True,
            "qo_indptr": buffers.starts,
            "kv_indptr": buffers.indptr,
            "kv_indices": buffers.indices,
            "kv_len_arr": buffers.last_page_len,
        }
    return flashinfer.BatchMLAPagedAttentionWrapper(workspace, backend=backend, **arguments)


def plan_latents(
    wrapper: Any, arrays: tuple[Tensor, Tensor, Tensor, Tensor], values: dict[str, Any], *, has_lse: bool
) -> None:
    """
    Plan a wrapper for latents.

    Args:
        wrapper: The wrapper.
        arrays: First rows and first pages on the CPU, pages on the device, keys per request on the CPU, all int32.
        values: The keywords of `plan` that every release has.
        has_lse: Whether runs return LSE. From 0.7 on that is planned, and for latents in FP8 that runs have scales.
    """
    metadata = _plan_metadata()
    csr = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), arrays, strict=True))
    if metadata is None:
        wrapper.plan(**csr, **values)
        return
    modes = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "base2" if has_lse else "none"}
    if values["kv_data_type"] != values["q_data_type"]:
        modes["scale_mode"] = "kv-per-tensor"
    wrapper.plan(metadata=metadata.csr(**csr), **modes, **values)


def latent_run(wrapper: Any, sizes: tuple[int, int], *, has_lse: bool) -> Callable[..., Any]:
    """
    Return a function that runs a wrapper for latents: of queries and latents, with `out`, `lse` and scales.

    Args:
        wrapper: The wrapper.
        sizes: The elements of a latent and its rotary elements, which follow them.
        has_lse: Whether its plans have LSE.
    """
    is_structural, widths = _plan_metadata() is not None, list(sizes)

    def run(
        query: Tensor,
        pages: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
        **scales: float,
    ) -> None:
        """Run; `query` and `out` are ``(rows, heads, ...)``, `pages` ``(pages, page_size, ...)``."""
        del return_lse  # planned: a call that wants no LSE gets one that nobody reads
        parts, halves = torch.split(query, widths, -1), torch.split(pages, widths, -1)
        if is_structural:
            wrapper.run(query=parts, kv_cache=halves, out=out, lse=lse, return_lse=has_lse, **scales)
        else:
            wrapper.run(*parts, *halves, out=out, lse=lse, return_lse=has_lse)

    return run


def replan_decode(
    wrapper: Any, buffers: Buffers, arrays: tuple[Tensor, Tensor, Tensor], values: dict[str, Any]
) -> None:
    """
    Plan the decodes of a graph again, with the same values and with buffers that already hold the arrays.

    The library's plan for tensor cores reads every length in Python; its fast plan does not.

    Args:
        wrapper: A decode wrapper that was planned with these values.
        buffers: Its buffers.
        arrays: indptr on the CPU, indices on the device, last_page_len on the CPU.
        values: The keywords of `plan`.
    """
    indptr, indices, last_page_len = arrays
    if _fast_decode_plan is None:
        wrapper.plan(*arrays, **values)
        return
    kept = {name: value for name, value in values.items() if name != "o_data_type"}  # the first plan's applies
    _fast_decode_plan(wrapper, buffers.indptr, indices, last_page_len, **kept, global_override_indptr_cpu=indptr)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """
    Merge the attention over other keys into `out` and `lse`, in place. All four are contiguous.

    Args:
        out: ``(rows, heads, head_size)``.
        lse: ``(rows, heads)`` float32, base 2.
        other: ``(rows, heads, head_size)``.
        other_lse: ``(rows, heads)`` float32, base 2.
    """
    flashinfer.merge_state_in_place(out, lse, other, other_lse)


def _plan_metadata() -> Any:
    """Return the class for the arrays of a plan for latents; None before 0.7, where plans take them one by one."""
    return getattr(_mla, "MLAPlanMetadata", None)


def _graph_arguments(buffers: Buffers | None) -> dict[str, Any]:
    if buffers is None:
        return {}
    return {
        "use_cuda_graph": True,
        "qo_indptr_buf": buffers.starts,
        "paged_kv_indptr_buf": buffers.indptr,
        "paged_kv_indices_buf": buffers.indices,
        "paged_kv_last_page_len_buf": buffers.last_page_len,
    }
