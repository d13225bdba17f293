"""The kinds of wrappers, each with what its plans say for one plan key beside a step's arrays."""

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
    Makes wrappers of a kind, and plans them.

    Args:
        impl: A layer of the plan key: all others of it have the same values.
        workspace: uint8, zero at first use, shared by all wrappers that run on one stream.
        kernels: Which kernels run, as `kernels_of` says.
    """

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        agreement, asked = impl.agreement, impl.agreement.requirements
        self._workspace = workspace
        self._kernels = kernels
        self._layout = agreement.kv_layout or "NHD"
        self._dtype = torch_dtype(asked.dtype)
        self._head_size = impl.head_size
        self._values: dict[str, Any] = {  # said in full: several defaults are those of another model
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
        """Return a wrapper, for a graph where there are buffers."""

    @abstractmethod
    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""

    def replan(self, wrapper: Any, rows: Rows, buffers: Buffers) -> None:
        """Plan a graph's wrapper for another step."""
        del buffers
        self.plan(wrapper, rows)


class Decode(Kind):
    """Decodes of one row per request. Their plans know no causal mask, and need none."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._tensor_cores = kernels != "cuda_cores"
        self._values |= {"head_dim": impl.head_size, "page_size": impl.agreement.block_size}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper, for a graph where there are buffers."""
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
    """Several rows per request, on pages."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._values |= {"head_dim_qk": impl.head_size, "head_dim_vo": impl.head_size}
        self._values |= {"page_size": impl.agreement.block_size}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper, for a graph where there are buffers."""
        return library.prefill_wrapper(self._workspace, self._layout, backend=self._kernels, buffers=buffers)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        # The longest query is said because the library, left alone, looks at every one in Python.
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
    """The same with sinks, which no other kernel reads, whatever its wrapper takes: decodes run here too."""

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper, for a graph where there are buffers."""
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
    """Keys and values that come with the call."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._values |= {"head_dim_qk": impl.head_size, "head_dim_vo": impl.head_size, "kv_data_type": self._dtype}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper, for a graph where there are buffers."""
        del buffers  # dense calls are not captured
        return library.ragged_wrapper(self._workspace, backend=self._kernels)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        wrapper.plan(rows.starts, rows.indptr, causal=rows.causal, **self._values)


def kinds_of(impl: AttentionImpl, workspace: Tensor) -> Mapping[str, Kind]:
    """Return the kinds that a layer's plan key needs, by name."""
    return {name: make_kind(name, impl, workspace) for name in kinds_of_steps(impl.agreement)}


def make_kind(name: str, impl: AttentionImpl, workspace: Tensor) -> Kind:
    """Return a kind by its name, as `attnplug_flashinfer.routes` has it."""
    of_several = Prefill if impl.layer.sinks is None else SinkPrefill
    cls = {"decode": Decode, "ragged": Ragged}.get(name, of_several)
    return cls(impl, workspace, kernels_of(name, impl.agreement, impl.backend.device_properties))
