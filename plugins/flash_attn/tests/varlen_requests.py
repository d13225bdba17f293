"""Requests with random tokens, as calls of a kernel library: in pages, or one behind the other."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug import Agreement, Requirements
from attnplug_flash_attn.kernels import ADAPTERS, kernels_of
from attnplug_flash_attn.kernels.interface import Kernels, LayerParams, VarlenCall

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS, KV_HEADS, SIZE = 4, 2, 16


def starts_of(lens: Sequence[int]) -> Tensor:
    """Return where each request starts, and where the last one ends."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def kernels(variant: str, **required: Any) -> Kernels:
    """Return the adapter of a variant."""
    requirements = Requirements(head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", **required)
    agreement = Agreement(
        backend="flash_attn", variant=variant, requirements=requirements, block_size=256, kv_layout="NHD",
        kv_cache_form="joint", kv_cache_dtype=requirements.kv_cache_dtype, cudagraph="never",
    )  # fmt: skip
    return kernels_of(variant)(agreement)


def module_of(variant: str) -> Any:
    """Return the module of a variant's adapter."""
    return import_module(f"attnplug_flash_attn.kernels.{ADAPTERS[variant].partition(':')[0]}")


@frozen(eq=False)
class Requests:
    """
    Rows and keys.

    Attributes:
        rows: Query rows of each request.
        keys: Keys of each request.
        query: ``(rows, heads, size)``.
        packed: Keys and values, ``(keys, kv_heads, size)`` each.
        pages: The same in pages of 256, behind a null page.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    query: Tensor
    packed: tuple[Tensor, ...]
    pages: Tensor

    @property
    def table(self) -> Tensor:
        """Two pages of each request."""
        return 1 + torch.arange(2 * len(self.keys), dtype=torch.int32).view(-1, 2)

    def call(self, adapter: Kernels, *, paged: bool = True, **more: Any) -> VarlenCall:
        """Return the call as an adapter takes it."""
        in_pages = paged and adapter.paged
        found = VarlenCall(
            cu_seqlens_q=starts_of(self.rows),
            max_seqlen_q=max(self.rows),
            max_seqlen_k=max(self.keys),
            seqused_k=torch.tensor(self.keys, dtype=torch.int32) if in_pages else None,
            cu_seqlens_k=starts_of(self.keys) if not in_pages or adapter.cumulative_keys else None,
            block_table=self.table if in_pages else None,
            leftpad_k=torch.zeros(len(self.keys), dtype=torch.int32) if in_pages and adapter.wants_leftpad else None,
        )
        return evolve(found, **more)

    def attend(
        self, adapter: Kernels, call: VarlenCall, params: LayerParams, *, lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return output and LSE; NaN where nothing was written."""
        key, value = self.packed if call.block_table is None else self.pages.unbind(0)
        out = torch.full_like(self.query, torch.nan)
        sums = torch.full(self.query.shape[:2], torch.nan)
        adapter.attend(self.query, key, value, out, call, params, sums if lse else None)
        return out, sums

    def truth(self, params: LayerParams, *, causal: bool = True) -> tuple[Tensor, Tensor]:
        """Return output and LSE by plain loops in float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -torch.inf, dtype=torch.float64)
        first_rows, first_keys = starts_of(self.rows).tolist(), starts_of(self.keys).tolist()
        for request, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
            for row in range(rows):
                at, last = first_rows[request] + row, keys - rows + row
                places = [p for p in range(keys) if _sees(last, p, params.window, causal=causal)]
                for head in range(HEADS if places else 0):
                    where = [first_keys[request] + place for place in places]
                    key, value = (each[where, head // (HEADS // KV_HEADS)].double() for each in self.packed)
                    scores = params.softmax_scale * key @ self.query[at, head].double()
                    if params.alibi_slopes is not None:
                        scores -= params.alibi_slopes[head].double() * (last - torch.tensor(places)).abs()
                    lse[at, head] = torch.logsumexp(scores, 0)
                    out[at, head] = torch.softmax(scores, 0) @ value
        return out, lse


def _sees(row: int, key: int, window: tuple[int, int], *, causal: bool) -> bool:
    left, right = window[0], 0 if causal else window[1]
    return (left < 0 or key >= row - left) and (right < 0 or key <= row + right)


def requests(rows: tuple[int, ...], keys: tuple[int, ...]) -> Requests:
    """Return requests with random tokens."""
    torch.manual_seed(len(keys))
    query = torch.randn(sum(rows), HEADS, SIZE).bfloat16()
    packed = torch.randn(2, sum(keys), KV_HEADS, SIZE).bfloat16()
    pages = torch.zeros(2, 1 + 2 * len(keys), 256, KV_HEADS, SIZE).bfloat16()
    for request, (first, last) in enumerate(pairwise(starts_of(keys).tolist())):
        pages[:, 1 + 2 * request : 3 + 2 * request].flatten(1, 2)[:, : last - first] = packed[:, first:last]
    return Requests(rows, keys, query, packed.unbind(0), pages)
