"""The plugin's backend on kernels that compute in float64 and check every number of a call, on any machine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract import LoadedBackend
from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device
from attnplug_flash_attn.backend import FlashAttentionBackend
from attnplug_flash_attn.kernels.interface import Kernels

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Requirements
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall


class ExactKernels(Kernels):
    """Reads pages of any size."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        assert self.paged or call.block_table is None
        assert (call.leftpad_k is None) == (call.block_table is None or not self.wants_leftpad)
        starts = call.cu_seqlens_q.tolist()
        assert call.leftpad_k is None or call.leftpad_k.tolist() == [0] * (len(starts) - 1)
        assert starts[0] == 0
        assert query.dtype == key.dtype == value.dtype
        assert starts[-1] <= query.shape[0]
        assert out.shape == (*query.shape[:2], value.shape[-1])
        assert params.sinks is None or params.sinks.shape == (query.shape[1],)
        for request, (first, last) in enumerate(itertools.pairwise(starts)):
            assert last - first <= call.max_seqlen_q
            keys, values = (self._keys_of(request, rows, call) for rows in (key, value))
            rows = slice(first, last)
            found, sums = _attend(query[rows], keys, values, call, params)
            out[rows] = found.to(out.dtype)
            if lse is not None:
                lse[rows] = sums.float()

    def _keys_of(self, request: int, given: Tensor, call: VarlenCall) -> Tensor:
        starts, table = call.cu_seqlens_k, call.block_table
        assert (starts is not None) == (table is None or self.cumulative_keys)
        if table is None:
            keys = given[slice(*starts[request : request + 2].tolist())]
        else:
            count = int(call.seqused_k[request]) if starts is None else int(starts.diff()[request])
            blocks = table[request, : -(-count // given.shape[1])].long()
            keys = given[blocks].flatten(0, 1)[:count]
            assert keys.shape[0] == count
        assert keys.shape[0] <= call.max_seqlen_k
        return keys.double()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall, params: LayerParams
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    query = (
        _descaled(query.unflatten(1, (keys.shape[1], -1)).transpose(1, 2), params.q_descale)
        .transpose(1, 2)
        .flatten(1, 2)
    )
    keys, values = _descaled(keys, params.k_descale), _descaled(values, params.v_descale)
    keys, values = (rows.repeat_interleave(heads // rows.shape[1], 1) for rows in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", query, keys) * params.softmax_scale
    if params.softcap:
        scores = params.softcap * (scores / params.softcap).tanh()
    if call.causal:
        ahead = torch.ones(tokens, keys.shape[0], dtype=torch.bool).triu(keys.shape[0] - tokens + 1)
        scores = scores.masked_fill(ahead.unsqueeze(1), -torch.inf)
    sums = scores.logsumexp(2) if keys.shape[0] else scores.new_full((tokens, heads), -torch.inf)
    if params.sinks is not None:
        sums = torch.logaddexp(sums, params.sinks.double())
    weights = (scores - sums.unsqueeze(2)).exp()
    return torch.einsum("qhk,khd->qhd", weights, values), sums


def _descaled(rows: Tensor, scale: Tensor | None) -> Tensor:
    """``(..., kv_heads, size)``; a scale is one, or one for each KV head."""
    return rows.double() if scale is None else rows.double() * scale.double().view(-1, 1)


class CumulativeKernels(ExactKernels):
    """Takes cumulative key lengths, with pages too."""

    cumulative_keys = True


class PaddedKernels(ExactKernels):
    """Wants a padding to the left, of 0 slots."""

    wants_leftpad = True


class TiledKernels(ExactKernels):
    """Loads the keys of the call by tiles: keys behind a request's last one have the weight 0."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        super().attend(query, key, value, out, call, params, lse)
        if call.cu_seqlens_k is None or call.block_table is not None:
            return
        rows, keys = (itertools.pairwise(starts.tolist()) for starts in (call.cu_seqlens_q, call.cu_seqlens_k))
        for (first, last), (begin, end) in zip(rows, keys, strict=True):
            tiles = value[begin : begin + -(-(end - begin) // 128) * 128]
            out[first:last] += 0.0 * tiles.double().sum().to(out.dtype)


class PackedKernels(ExactKernels):
    """Reads no pages."""

    paged = False


KERNELS: Final = {
    "pages": ExactKernels,
    "cumulative": CumulativeKernels,
    "packed": PackedKernels,
    "padded": PaddedKernels,
    "tiles": TiledKernels,
}


class ExactBackend(FlashAttentionBackend):
    """All of the plugin but a kernel library, and what only its kernels need."""

    cache_alignment = 1
    kernels: Any = None


def make_backend(requirements: Requirements, kernel_kind: str = "pages", cudagraph: str = "never") -> LoadedBackend:
    """
    Return a backend.

    Args:
        requirements: With a block size.
        kernel_kind: The interface of the kernels: ``"pages"``, ``"cumulative"`` lengths with pages, ``"packed"`` keys,
            pages with zero left padding (``"padded"``), or full ``"tiles"``.
        cudagraph: The agreed graph level.
    """
    agreement = Agreement(
        backend="flash_attn",
        variant="exact",
        requirements=requirements,
        block_size=requirements.block_size,
        kv_layout=requirements.kv_layout or "NHD",
        kv_cache_form=requirements.kv_cache_form or "joint",
        kv_cache_dtype=requirements.kv_cache_dtype,
        cudagraph=cudagraph,
    )
    backend = ExactBackend(agreement, Device.cpu())
    backend.kernels = KERNELS[kernel_kind](agreement)
    return LoadedBackend(backend)
