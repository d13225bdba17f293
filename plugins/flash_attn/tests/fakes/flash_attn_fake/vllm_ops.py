"""Fakes of the op libraries in wheels: the schemas of the releases, for tensors on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor

from flash_attn_fake import generation2, generation3
from flash_attn_fake.exact import ScoreParams
from flash_attn_fake.journal import journal
from flash_attn_fake.keys import Keys, check_index, check_leftpad
from flash_attn_fake.refusal import check, require
from flash_attn_fake.schedule import Plan
from flash_attn_fake.tiles import OWN, VLLM

if TYPE_CHECKING:
    from flash_attn_fake.tiles import Build

RECORDS = ("vllm-0.24.0", "tokenspeed-fa3-3.0.0.post20260810")
SIGNATURES = Path(__file__).parents[2] / "signatures"
BUILD = generation2.Build(page_multiple=16, folded_lse="packed")


def register() -> list[torch.library.Library]:
    """Define the ops; they are there as long as what is returned."""
    made = []
    for record in RECORDS:
        for name, schemas in json.loads((SIGNATURES / f"{record}.json").read_text()).items():
            library = torch.library.Library(name, "DEF")
            for op, schema in schemas.items():
                library.define(schema)
                library.impl(op, OPS[name, op], "CPU")
            made.append(library)
    return made


def _record(library: str, op: str, given: dict[str, Any]) -> None:
    journal.record(library, op, len(given), given, ())


def varlen_fwd(  # noqa: PLR0917 - the library's own
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
    max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right, softcap,
    return_softmax, num_splits, gen,
):  # fmt: skip
    """FlashAttention 2."""
    given = dict(locals())
    require(leftpad_k is None and not p_dropout and not zero_tensors and gen is None, "the fake does not support these")
    check(not return_softmax, "return_softmax is only supported when p_dropout > 0.0")
    _check_out(out, q, q.dtype, v.shape[-1])
    rows = generation2.Rows(
        query=q, starts=cu_seqlens_q, longest=max_seqlen_q, longest_keys=max_seqlen_k, num_splits=num_splits
    )
    check_index("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), q.device)
    if block_table is not None:
        require(seqused_k is not None, "with pages and without seqused_k, cu_seqlens_k is read: say which it is")
        cu_seqlens_k = None
    keys = Keys(key=k, value=v, starts=cu_seqlens_k, used=seqused_k, table=block_table)
    params = ScoreParams(
        scale=softmax_scale, softcap=softcap, left=window_size_left, right=window_size_right, alibi=alibi_slopes
    )
    found, lse = generation2.varlen_fwd(BUILD, rows, keys, params, causal=is_causal)
    _record("fa2_vllm", "varlen_fwd", given)
    return [_write_rows(out, found, cu_seqlens_q), lse]


def fwd(  # noqa: PLR0917 - the library's own
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap, is_rotary_interleaved,
    scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_tot_seqused_k,
):  # fmt: skip
    """FlashAttention 3."""
    given = dict(locals())
    check(cp_world_size > 0 and cp_rank == 0, "cp_world_size must be positive, required by downstream code path")
    require(cp_world_size == 1 and cp_tot_seqused_k is None, "the fake does not support these")
    return list(_fwd("fa3_vllm", VLLM, given, s_aux))


def fwd_tokenspeed(  # noqa: PLR0917 - the library's own
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    sinks=None,
):  # fmt: skip
    """FlashAttention 3 as compiled for the package index."""
    given = dict(locals())
    check(not softcap, "This flash attention build does not support tanh softcapping.")
    require(not attention_chunk, "the fake does not support it")
    require(not 64 < q.shape[-1] <= 96, "there are no kernels for head size 96")
    return _fwd("fa3_tokenspeed", OWN, given, sinks)


def _fwd(variant: str, build: Build, given: dict[str, Any], sink: Tensor | None) -> tuple[Tensor, ...]:
    unknown = ("k_new", "v_new", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "rotary_cos", "rotary_sin")
    require(
        all(given[name] is None for name in (*unknown, "seqlens_rotary", "pack_gqa")) and not given["sm_margin"],
        "the fake does not support these",
    )
    query, value, out, starts = given["q"], given["v"], given["out"], given["cu_seqlens_q"]
    _check_out(out, query, torch.bfloat16 if query.dtype == generation3.FP8 else query.dtype, value.shape[-1])
    rows = generation3.Rows(
        query=query, starts=starts, longest=given["max_seqlen_q"], longest_keys=given["max_seqlen_k"],
        descales=(given["q_descale"], given["k_descale"], given["v_descale"]), latent=given["q_v"],
    )  # fmt: skip
    keys = Keys(
        key=given["k"], value=value, starts=given["cu_seqlens_k"], used=given["seqused_k"], table=given["page_table"],
        leftpad=given["leftpad_k"],
    )  # fmt: skip
    require(keys.used is not None or keys.table is None, "pages without seqused_k: each row of the table is read whole")
    params = ScoreParams(
        scale=given["softmax_scale"], softcap=given["softcap"], left=given["window_size_left"],
        right=given["window_size_right"], sink=sink,
    )  # fmt: skip
    found, lse = generation3.fwd(build, rows, keys, params, causal=given["is_causal"])
    if given["scheduler_metadata"] is not None:
        if build is OWN and keys.table is not None:  # as on an H100: it counts the pages of the table
            rows = evolve(rows, longest_keys=keys.table.shape[1] * keys.key.shape[1])
        plan = _plan(build, rows, keys, params, given["is_causal"], given["num_splits"])
        _apply_schedule(given["scheduler_metadata"], plan, found)
    _record(variant, "fwd", given)
    return _write_rows(out, found, starts), lse, torch.empty(0), torch.empty(0)


def get_scheduler_metadata(  # noqa: PLR0917 - the library's own
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size, max_seqlen_k_new, is_causal,
    window_size_left, window_size_right, has_softcap, num_splits, pack_gqa, sm_margin,
):  # fmt: skip
    """FlashAttention 3's schedule."""
    return _schedule("fa3_vllm", VLLM, dict(locals()))


def schedule_tokenspeed(  # noqa: PLR0917 - the library's own
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
    cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None, page_size=None,
    max_seqlen_k_new=0, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """FlashAttention 3's schedule, as compiled for the package index."""
    given = dict(locals())
    require(not attention_chunk, "the fake does not support it")
    return _schedule("fa3_tokenspeed", OWN, given)


def _schedule(variant: str, build: Build, given: dict[str, Any]) -> Tensor:
    unknown = (given["cu_seqlens_k_new"], given["seqused_q"], given["pack_gqa"])
    require(
        all(each is None for each in unknown) and not given["max_seqlen_k_new"] and not given["sm_margin"],
        "the fake does not support it",
    )
    used, starts, requests = given["seqused_k"], given["cu_seqlens_q"], given["batch_size"]
    require(len(used) == requests, "seqused_k is read for batch_size requests, whatever its length")
    check_index("seqused_k", used, (requests,), used.device)
    check_index("cu_seqlens_q", starts, (requests + 1,), used.device)
    check_leftpad(given["leftpad_k"], requests, used.device)
    page_size, heads, kv_heads = given["page_size"] or 0, given["num_heads"], given["num_heads_k"]
    require(
        (not page_size) == (given["cu_seqlens_k"] is not None),
        "keys are packed or in pages: say which, as the call does",
    )
    check(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    longest, longest_keys, size = given["max_seqlen_q"], given["max_seqlen_k"], given["headdim"]
    rows = generation3.Rows(query=torch.empty(0), starts=starts, longest=longest, longest_keys=longest_keys)
    params = ScoreParams(scale=1.0, left=given["window_size_left"], right=given["window_size_right"])
    window, swizzles = _swizzles(rows, params, given["is_causal"])
    is_narrow = _dtype_of(given["qkv_dtype"]).itemsize == 1
    resolved, causal = generation3.resolved(rows, params, causal=given["is_causal"])
    tile = build.tile(
        (size, given["headdim_v"]), page_size, longest * (heads // kv_heads), resolved, is_narrow=is_narrow,
        causal=causal, padded=given["leftpad_k"] is not None,
    )  # fmt: skip
    shape = (
        longest, longest_keys, heads, kv_heads, size, given["headdim_v"], int(is_narrow), page_size, int(tile > 0),
        *window, int(given["has_softcap"]),
    )  # fmt: skip
    _record(variant, "get_scheduler_metadata", given)
    return Plan(starts=starts, used=used, shape=shape, num_splits=given["num_splits"], swizzles=swizzles).make()


OPS = {
    ("_vllm_fa2_C", "varlen_fwd"): varlen_fwd,
    ("_vllm_fa3_C", "fwd"): fwd,
    ("_vllm_fa3_C", "get_scheduler_metadata"): get_scheduler_metadata,
    ("flash_attn_3", "fwd"): fwd_tokenspeed,
    ("flash_attn_3", "get_scheduler_metadata"): schedule_tokenspeed,
}


def _plan(build: Build, rows: generation3.Rows, keys: Keys, params: ScoreParams, causal: bool, num_splits: int) -> Plan:
    """Return what the call itself would plan."""
    require(keys.used is not None, "a schedule for a call without seqused_k")
    assert keys.used is not None
    window, swizzles = _swizzles(rows, params, causal)
    shape = (
        rows.longest, rows.longest_keys, rows.query.shape[1], keys.key.shape[-2], rows.query.shape[2],
        keys.value.shape[-1], int(rows.query.itemsize == 1), 0 if keys.table is None else keys.key.shape[1],
        int(generation3.tile_of(build, rows, keys, params, causal=causal) > 0), *window, int(params.softcap > 0),
    )  # fmt: skip
    return Plan(starts=rows.starts, used=keys.used, shape=shape, num_splits=num_splits, swizzles=swizzles)


def _swizzles(rows: generation3.Rows, params: ScoreParams, causal: bool) -> tuple[tuple[int, int], bool]:
    resolved, _ = generation3.resolved(rows, params, causal=causal and rows.longest > 1)
    return (resolved.left, resolved.right), resolved.left >= 0 or resolved.right >= 0


def _apply_schedule(schedule: Tensor, plan: Plan, out: Tensor) -> None:
    """Kernels do what a schedule says: with another one than their own, they write rows that are not theirs."""
    expected = plan.make()
    check_index("scheduler_metadata", schedule, tuple(expected.shape), out.device)
    if not torch.equal(schedule, expected):
        out.fill_(torch.nan)


def _dtype_of(dtype: Any) -> torch.dtype:
    """Schemas hand dtypes to CPU implementations as numbers."""
    return dtype if isinstance(dtype, torch.dtype) else _NUMBERS[dtype]


_NUMBERS = {5: torch.float16, 15: torch.bfloat16, 24: torch.float8_e4m3fn}


def _check_out(out: Tensor | None, query: Tensor, dtype: torch.dtype, size: int) -> None:
    if out is not None:
        check(out.dtype == dtype, "Output must have the same dtype as inputs; bf16 for fp8")
        check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(tuple(out.shape) == (*query.shape[:2], size), "out must have the rows and heads of q")
        require(out.stride(0) * out.itemsize % 16 == 0, "out is written in steps of 16 bytes")


def _write_rows(out: Tensor | None, found: Tensor, starts: Tensor) -> Tensor:
    """Write the rows that requests have, and no others."""
    if out is None:
        return found
    count = int(starts[-1])
    out[:count] = found[:count]
    return out
