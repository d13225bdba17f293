"""Runs the kernels on requests, without a backend."""

from __future__ import annotations

import torch

from attnplug_int8_ixformer.prompts import Prompts, attend_prompts, column_bytes
from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_provider import Tokens, attend_tokens, scratch_bytes
from plugins.int8_ixformer.tests.dense import CANARY, lens, starts
from tests.backends.triton_on_cpu import DEVICE


def run_decode(case, *, tiles=None, splits=1, writes=True, cache=None):
    query, pages = torch.cat(case.queries), case.cache(written=not writes) if cache is None else cache
    out = torch.full_like(query, CANARY)
    heads, size = query.shape[1:]
    tokens = Tokens(
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        table=case.table,
        longest_query=max(case.query_lens),
        num_splits=splits,
        scratch=torch.full((scratch_bytes(len(query) * splits, heads, size),), 255, dtype=torch.uint8, device=DEVICE),
        tiles=tiles or DecodeTiles(keys=32),
    )
    attend_tokens(query, case.new() if writes else None, pages, out, tokens, case.terms)
    return out, pages


def run_prefill(case, tiles=None, columns=1024, *, cache=None, scratch=None, by_descriptors=False):
    query, pages = torch.cat(case.queries), case.cache(written=True) if cache is None else cache
    out = torch.full_like(query, CANARY)
    units = [-(-length // 128) * 128 for length in case.seq_lens]
    if scratch is None:
        each = column_bytes(case.kv_heads, case.size, with_keys=by_descriptors)
        scratch = torch.full((columns * each,), 99, dtype=torch.uint8, device=DEVICE)
    prompts = Prompts(
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        table=case.table,
        key_starts=starts(units)[:-1],
        first=0,
        count=len(units),
        longest_query=max(case.query_lens),
        longest_seq=max(case.seq_lens),
        scratch=scratch,
        tiles=tiles or PrefillTiles(rows=32, keys=32, warps=4),
        by_descriptors=by_descriptors,
    )
    attend_prompts(query, pages, out, prompts, case.terms)
    return out
