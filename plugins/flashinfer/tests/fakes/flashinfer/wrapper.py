"""The base of all wrappers: a number, a workspace, a plan, and loops over requests."""

from __future__ import annotations

import math

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from flashinfer.csr import Lengths, key_lengths
from flashinfer.exact import ScoreParams, attend
from flashinfer.journal import journal
from flashinfer.misuse import require
from flashinfer.workspace import check_workspace


@frozen(eq=False)
class Planned:
    """
    The values of the last plan.

    Attributes:
        lengths: The lengths that the schedule is made for.
        num_qo_heads: The number of query heads.
        num_kv_heads: The number of KV heads.
        head_size: The head size.
        page_size: Keys per page; 1 for ragged K/V.
        q: The dtype of queries.
        kv: The dtype of keys and values.
        o: The dtype of outputs.
        params: The parameters of the scores.
        backend: ``fa2``, ``fa3`` or ``cuda_cores``.
        head_size_v: The size of values.
    """

    lengths: Lengths
    num_qo_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    q: torch.dtype
    kv: torch.dtype
    o: torch.dtype
    params: ScoreParams
    backend: str
    head_size_v: int = field()

    @head_size_v.default
    def _as_keys(self) -> int:
        return self.head_size

    @property
    def kernel(self) -> tuple[object, ...]:
        """Return the values that a kernel is compiled for."""
        sizes = (self.head_size, self.head_size_v)
        return self.q, self.kv, self.o, sizes, self.params.window_left >= 0, self.params.soft_cap > 0

    def row_shape(self, rows: int) -> tuple[int, int, int]:
        """Return the shape of `rows` query rows."""
        return rows, self.num_qo_heads, self.head_size

    def scaled(self, q_scale: float | None, k_scale: float | None) -> ScoreParams:
        """
        Return the parameters of the scores with the scales applied.

        Raises:
            MisuseError: A scale is not a Python number: reading a tensor would synchronize.
        """
        scale = self.params.scale
        for name, given in (("q_scale", q_scale), ("k_scale", k_scale)):
            require(given is None or isinstance(given, float), f"{name} is a {type(given).__name__}, not a float")
            scale *= 1.0 if given is None else given
        return evolve(self.params, scale=scale)


class Wrapper:
    """A wrapper with a number, which the journal records."""

    def _begin(self, float_workspace_buffer: Tensor, kv_layout: str, *, use_cuda_graph: bool) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        check_workspace(float_workspace_buffer)
        self.number = journal.number()
        self.device = float_workspace_buffer.device
        self._workspace = float_workspace_buffer
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._planned: Planned | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written into the buffers of a graph."""
        return self._use_cuda_graph

    def _buffer(self, name: str, buffer: Tensor | None, length: int | None = None) -> Tensor:
        """Check a buffer of a graph."""
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")  # noqa: TRY004 - as the library does
        if length is not None and len(buffer) != length:
            raise ValueError(f"The length of {name} should be {length}, and is {len(buffer)}")
        require(buffer.dtype == torch.int32, f"{name} is {buffer.dtype}, and is read as int32")
        require(buffer.device == self.device, f"{name} is on {buffer.device}, and the wrapper on {self.device}")
        require(buffer.ndim == 1 and buffer.is_contiguous(), f"{name} is not a flat, contiguous tensor")
        return buffer

    def _fixed(self, batch_size: int, fixed: int) -> None:
        if batch_size != fixed:
            raise ValueError(
                f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch_size} mismatches the "
                f"batch size {fixed} set during initialization"
            )

    def _plan_of(self) -> Planned:
        require(self._planned is not None, "called before plan()")
        return self._planned  # type: ignore[return-value]


class PagedWrapper(Wrapper):
    """A wrapper for a paged KV cache. Its arrays are the buffers of a graph, or those of the last plan."""

    _indptr: Tensor
    _indices: Tensor
    _last_page_len: Tensor

    def _take_pages(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """Copy CPU arrays. Without graph buffers, a device array is not copied."""
        if not self._use_cuda_graph:
            self._indptr, self._indices, self._last_page_len = indptr.clone(), indices, last_page_len.clone()
            return
        if len(indices) > len(self._indices):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        self._indptr.copy_(indptr)
        self._indices[: len(indices)].copy_(indices)
        self._last_page_len.copy_(last_page_len)

    def _attend(
        self,
        rows: Tensor,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor | None,
        params: ScoreParams,
        sink: Tensor | None = None,
    ) -> None:
        """Run with the current contents of the buffers. `rows` is an indptr of the query rows."""
        planned = self._plan_of()
        lengths = Lengths(
            tuple(rows.diff().tolist()), key_lengths(self._indptr, self._last_page_len, planned.page_size)
        )
        require(
            (lengths.rows, lengths.keys) == (planned.lengths.rows, planned.lengths.keys),
            f"the buffers hold {lengths}, and the schedule is made for {planned.lengths}: plan() again",
        )
        for request, keys in enumerate(lengths.keys):
            first, last = int(rows[request]), int(rows[request + 1])
            if first < last:
                key, value = self._gathered(request, keys, pages)
                write(
                    query[first:last],
                    key,
                    value,
                    params,
                    out[first:last],
                    lse if lse is None else lse[first:last],
                    sink,
                )

    def _gathered(self, request: int, keys: int, pages: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        indices = self._indices[int(self._indptr[request]) : int(self._indptr[request + 1])].long()
        inside = not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < pages[0].shape[0])
        require(inside, f"request {request} has pages {indices.tolist()}, and the KV cache has {pages[0].shape[0]}")
        key, value = (half[indices].flatten(0, 1)[:keys] for half in pages)
        return key, value


def write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: ScoreParams,
    out: Tensor,
    lse: Tensor | None,
    sink: Tensor | None = None,
) -> None:
    """Write the exact results of one request, each rounded once."""
    output, base2 = attend(query, key, value, params, sink)
    out.copy_(output)
    if lse is not None:
        lse.copy_(base2.masked_fill(base2 == -math.inf, -49_997.7))  # what the decode kernels have for no key


def scale_output(out: Tensor, v_scale: float | None) -> None:
    """
    Multiply the output after it is rounded, as the library does, which rounds twice.

    Raises:
        MisuseError: The scale is not a Python number.
    """
    require(v_scale is None or isinstance(v_scale, float), f"v_scale is a {type(v_scale).__name__}, not a float")
    if v_scale is not None and v_scale != 1.0:
        out.mul_(v_scale)


def params_of(
    sm_scale: float | None, head_size: int, logits_soft_cap: float | None, window_left: int, *, causal: bool
) -> ScoreParams:
    """Return the parameters of the scores, with the library's defaults."""
    scale = 1.0 / math.sqrt(head_size) if sm_scale is None else sm_scale
    return ScoreParams(scale, logits_soft_cap or 0.0, window_left, causal)
