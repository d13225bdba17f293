"""The kinds of wrappers: the class of the library that each one uses, and the arguments of its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from attnplug.contract import torch_dtype
from attnplug_flashinfer import library
from attnplug_flashinfer.routes import kernels_of, kinds_of_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug.contract import AttentionImpl
    from attnplug_flashinfer.arrays import Buffers, Rows


class Kind(ABC):
    """
    Makes wrappers of one kind, and plans them for one plan key.

    Args:
        impl: A layer of the plan key. All its layers have the same values.
        workspace: uint8, zero at first use, shared by all wrappers of one stream.
        kernels: The kernels that run, as `kernels_of` returns them.
    """

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        agreement, required = impl.agreement, impl.agreement.requirements
        self._workspace = workspace
        self._kernels = kernels
        self._layout = agreement.kv_layout or "NHD"
        self._dtype = torch_dtype(required.dtype)
        self._head_size = impl.head_size
        self._values: dict[str, Any] = {  # complete, since several defaults suit other models only
            "num_qo_heads": impl.num_q_heads,
            "num_kv_heads": impl.num_kv_heads,
            "window_left": impl.window[0],
            "logits_soft_cap": impl.logits_soft_cap,
            "sm_scale": impl.scale,
            "q_data_type": self._dtype,
            "kv_data_type": torch_dtype(agreement.kv_cache_dtype),
            "o_data_type": self._dtype,
        }

    @abstractmethod
    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""

    @abstractmethod
    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""

    def replan(self, wrapper: Any, rows: Rows, buffers: Buffers) -> None:
        """Plan a graph's wrapper for another step."""
        del buffers
        self.plan(wrapper, rows)


class Decode(Kind):
    """Decodes of one row per request. Their plans take no causal mask, and need none."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._tensor_cores = kernels != "cuda_cores"
        self._values |= {"head_dim": impl.head_size, "page_size": impl.agreement.block_size}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        return library.decode_wrapper(self._workspace, self._layout, tensor_cores=self._tensor_cores, buffers=buffers)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        wrapper.plan(rows.indptr, rows.indices, rows.last_page_len, **self._values)

    def replan(self, wrapper: Any, rows: Rows, buffers: Buffers) -> None:
        """Plan a graph's wrapper for another step."""
        if not self._tensor_cores:
            self.plan(wrapper, rows)
            return
        buffers.write(rows)
        library.replan_decode(wrapper, buffers, (rows.indptr, rows.indices, rows.last_page_len), self._values)


class Prefill(Kind):
    """Several rows per request, on a paged KV cache."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._values |= {"head_dim_qk": impl.head_size, "head_dim_vo": impl.head_size}
        self._values |= {"page_size": impl.agreement.block_size}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        return library.prefill_wrapper(self._workspace, self._layout, backend=self._kernels, buffers=buffers)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        # Without the longest query the library reads every length in Python.
        wrapper.plan(
            rows.starts,
            rows.indptr,
            rows.indices,
            rows.last_page_len,
            causal=rows.causal,
            max_token_per_sequence=rows.longest,
            **self._values,
        )


class SinkPrefill(Prefill):
    """Rows with attention sinks, decodes included. The other wrappers accept `sinks`, and ignore it."""

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        return library.sink_wrapper(
            self._workspace,
            self._layout,
            backend=self._kernels,
            buffers=buffers,
            dtype=self._dtype,
            head_size=self._head_size,
            window_left=self._values["window_left"],
        )


class Ragged(Kind):
    """Contiguous (non-paged) K/V."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._values |= {"head_dim_qk": impl.head_size, "head_dim_vo": impl.head_size, "kv_data_type": self._dtype}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        del buffers  # dense steps are not captured
        return library.ragged_wrapper(self._workspace, backend=self._kernels)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        wrapper.plan(rows.starts, rows.indptr, causal=rows.causal, **self._values)


def kinds_of(impl: AttentionImpl, workspace: Tensor) -> Mapping[str, Kind]:
    """Return the kinds that the steps of a plan key use, by name."""
    return {name: make_kind(name, impl, workspace) for name in kinds_of_steps(impl.agreement)}


def make_kind(name: str, impl: AttentionImpl, workspace: Tensor) -> Kind:
    """Return a kind by its name in `attnplug_flashinfer.routes`."""
    prefill = Prefill if impl.layer.sinks is None else SinkPrefill
    cls = {"decode": Decode, "ragged": Ragged}.get(name, prefill)
    return cls(impl, workspace, kernels_of(name, impl.agreement, impl.backend.device_properties))
