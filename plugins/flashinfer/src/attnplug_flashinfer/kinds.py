"""The kinds of wrappers: the class of the library that each one uses, and the arguments of its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract import torch_dtype
from attnplug.errors import BatchError
from attnplug_flashinfer import library
from attnplug_flashinfer.arrays import without_empty
from attnplug_flashinfer.routes import kernels_of, kinds_of_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug.contract import AttentionImpl
    from attnplug_flashinfer.arrays import Buffers, Rows


_TILE: Final = 64
"""Query rows times heads of a thread block for latents. A pair of blocks has twice as many."""

_MOST_TILES: Final = 16384 - 256
"""Tiles of one plan for latents: its work lists have 16,384 entries, and each multiprocessor may add one."""


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

    def run_of(self, wrapper: Any) -> Callable[..., Any]:
        """Return the `run` of a wrapper."""
        run: Callable[..., Any] = wrapper.run
        return run


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
        self._values |= {"head_dim_qk": impl.head_size, "head_dim_vo": impl.head_size_v, "kv_data_type": self._dtype}

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        del buffers  # dense steps are not captured
        return library.ragged_wrapper(self._workspace, backend=self._kernels)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """Plan a wrapper for a step."""
        wrapper.plan(rows.starts, rows.indptr, causal=rows.causal, **self._values)


class Latent(Kind):
    """Absorbed attention over latents: decodes, prefills and both in one plan."""

    def __init__(self, impl: AttentionImpl, workspace: Tensor, kernels: str) -> None:
        super().__init__(impl, workspace, kernels)
        self._has_lse = impl.agreement.requirements.return_lse
        # With other numbers tiles end between the heads of a row, and the causal kernels hide its last key: they bound
        # the keys of a tile by its last whole row (``mla.cuh``, ``mla_hopper.cuh``; 0.7.2 refuses such plans).
        self._num_heads = 1 << (impl.num_q_heads - 1).bit_length()
        self._heads_added = self._num_heads - impl.num_q_heads
        self._page_size: int = impl.agreement.block_size or 1
        self._sizes = (impl.head_size_v, impl.head_size - impl.head_size_v)
        self._values = {
            "num_heads": self._num_heads,
            "head_dim_ckv": self._sizes[0],
            "head_dim_kpe": self._sizes[1],
            "page_size": self._page_size,
            "sm_scale": impl.scale,
            "q_data_type": self._dtype,
            "kv_data_type": torch_dtype(impl.agreement.kv_cache_dtype),
        }

    def make(self, buffers: Buffers | None) -> Any:
        """Return a wrapper: for a graph with buffers, for eager steps without."""
        return library.latent_wrapper(self._workspace, backend=self._kernels, buffers=buffers)

    def plan(self, wrapper: Any, rows: Rows) -> None:
        """
        Plan a wrapper for a step.

        Raises:
            BatchError: The step has more tiles than a plan of the library; nothing is written.
        """
        average = (rows.last - rows.first) * self._num_heads // rows.last_page_len.shape[0]
        if average <= _TILE < self._num_heads:  # tiles of 64, for requests with rows and without
            rows = without_empty(rows)
        self._check_tiles(rows)
        pages = rows.indptr.diff()
        lens = (pages - 1).clamp_(min=0).mul_(self._page_size).add_(rows.last_page_len)
        arrays = (rows.starts, rows.indptr, rows.indices, lens)
        # A single row sees every key. Without a mask its kernel compares no positions.
        causal = rows.causal and rows.longest > 1
        library.plan_latents(wrapper, arrays, self._values | {"causal": causal}, has_lse=self._has_lse)

    def _check_tiles(self, rows: Rows) -> None:
        """The library writes beyond its work lists without a check (0.6), or refuses in its own words (0.7)."""
        tokens, reqs = rows.last - rows.first, rows.last_page_len.shape[0]
        if tokens * self._num_heads // _TILE + reqs <= _MOST_TILES:
            return
        tile = _TILE if tokens * self._num_heads // reqs <= _TILE else 2 * _TILE
        tiles = int(torch.ceil(rows.starts.diff() * self._num_heads / tile).sum())
        if tiles > _MOST_TILES:
            raise BatchError(
                f"a step has {tokens} tokens of {self._num_heads} query heads over latents, {tiles} tiles",
                f"a plan of FlashInfer has at most {_MOST_TILES} tiles of {tile} query rows times heads",
                f"build steps of at most {_MOST_TILES * tile // self._num_heads} tokens",
            )

    def run_of(self, wrapper: Any) -> Callable[..., Any]:
        """Return a function of queries and latents, which splits both."""
        run = library.latent_run(wrapper, self._sizes, has_lse=self._has_lse)
        return partial(_run_with_more_heads, run, self._heads_added) if self._heads_added else run


def _run_with_more_heads(
    run: Callable[..., Any],
    added: int,
    query: Tensor,
    pages: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    return_lse: bool = False,
    **scales: float,
) -> None:
    """Run with heads of zeros behind those of the query, and copy the results of the others."""
    query = torch.nn.functional.pad(query, (0, 0, 0, added))
    whole = out.new_empty((*query.shape[:2], out.shape[2]))
    sums = None if lse is None else lse.new_empty(query.shape[:2])
    run(query, pages, out=whole, lse=sums, return_lse=return_lse, **scales)
    out.copy_(whole[:, : out.shape[1]])
    if lse is not None and sums is not None:
        lse.copy_(sums[:, : lse.shape[1]])


def kinds_of(impl: AttentionImpl, workspace: Tensor) -> Mapping[str, Kind]:
    """Return the kinds that the steps of a plan key use, by name."""
    return {name: make_kind(name, impl, workspace) for name in kinds_of_steps(impl.agreement)}


def make_kind(name: str, impl: AttentionImpl, workspace: Tensor) -> Kind:
    """Return a kind by its name in `attnplug_flashinfer.routes`."""
    prefill = Prefill if impl.layer.sinks is None else SinkPrefill
    made: dict[str, Callable[..., Kind]] = {"decode": Decode, "ragged": Ragged, "latent": Latent}
    return made.get(name, prefill)(impl, workspace, kernels_of(name, impl.agreement, impl.backend.device_properties))
