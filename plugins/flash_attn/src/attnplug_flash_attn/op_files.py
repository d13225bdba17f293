"""
The op libraries inside wheels: their files, and the ops that they declare. Nothing is loaded.

The file of a library contains the schemas of its ops as text: ``varlen_fwd(Tensor! q, Tensor k, ...) -> Tensor[]``.
"""

from __future__ import annotations

import mmap
import re
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES: Final = {"fa2_vllm": "_vllm_fa2_C", "fa3_vllm": "_vllm_fa3_C", "fa3_tokenspeed": "flash_attn_3"}
"""The library of each variant: its namespace in ``torch.ops``."""

DISTRIBUTIONS: Final = {"_vllm_fa2_C": "vllm", "_vllm_fa3_C": "vllm", "flash_attn_3": "tokenspeed-fa3"}
"""The distribution of each library. Another distribution has a module of the same name: `flash-attn-3`."""

FILES: Final = {
    "_vllm_fa2_C": "vllm/vllm_flash_attn/_vllm_fa2_C",
    "_vllm_fa3_C": "vllm/vllm_flash_attn/_vllm_fa3_C",
    "flash_attn_3": "flash_attn_3/_C",
}
"""The file of each library in its wheel, without its suffix."""

ARGUMENTS: Final = {
    "_vllm_fa2_C": {
        "varlen_fwd": (
            "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes max_seqlen_q "
            "max_seqlen_k p_dropout softmax_scale zero_tensors is_causal window_size_left window_size_right softcap "
            "return_softmax num_splits gen"
        ),
    },
    "_vllm_fa3_C": {
        "fwd": (
            "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
            "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
            "v_descale softmax_scale is_causal window_size_left window_size_right softcap is_rotary_interleaved "
            "scheduler_metadata num_splits pack_gqa sm_margin s_aux cp_world_size cp_rank cp_tot_seqused_k"
        ),
        "get_scheduler_metadata": (
            "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k "
            "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new is_causal "
            "window_size_left window_size_right has_softcap num_splits pack_gqa sm_margin"
        ),
    },
    "flash_attn_3": {
        "fwd": (
            "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
            "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
            "v_descale softmax_scale is_causal window_size_left window_size_right attention_chunk softcap "
            "is_rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin sinks"
        ),
        "get_scheduler_metadata": (
            "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k "
            "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new is_causal "
            "window_size_left window_size_right attention_chunk has_softcap num_splits pack_gqa sm_margin"
        ),
    },
}
"""The ops that this plugin calls, by library, and the names of their arguments, which it passes by position."""

CPP_TYPES: Final = {"bfloat16": "10bfloat16_t", "float16": "6half_t", "fp8_e4m3": "12float_e4m3_t"}
"""The mangled names of CUTLASS's types."""

_LONGEST: Final = 4096  # characters of a schema
_NAME: Final = re.compile(r"\w+(?=\s*(?:=.*)?$)")


def find(library: str) -> Path | None:
    """Return the file of an op library; None if its distribution is not installed or lacks it."""
    path = Path(FILES[library])
    for folder in _folders(DISTRIBUTIONS[library], path.parent):
        found = sorted(folder.glob(f"{path.name}*.so"))
        if found:
            return found[0]
    return None


def changed_ops(library: str, file: Path) -> list[str]:
    """Return the ops that a file lacks, or declares with other arguments."""
    expected = ARGUMENTS[library]
    if not file.stat().st_size:  # an empty file cannot be mapped
        return list(expected)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [op for op, names in expected.items() if names.split() not in _declared(data, op)]


def has_kernels(file: Path, dtype: str, size: int, size_v: int) -> bool:
    """
    Return whether a file of FlashAttention 3 has its Hopper kernels for a pair of head sizes.

    A build may leave pairs out (``FLASHATTENTION_DISABLE_HDIMDIFF64``), and no schema says so. The names of functions
    do, ``run_mha_fwd_<90, cutlass::bfloat16_t, 64, 512, ...>``, which other parts of the library import.
    """
    name = f"run_mha_fwd_ILi90EN7cutlass{CPP_TYPES[dtype]}ELi{size}ELi{size_v}E".encode()
    if not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(name) >= 0


def _folders(name: str, folder: Path) -> Iterator[Path]:
    """Yield a folder of a distribution, then that of its package, which differs for an editable install."""
    try:
        yield Path(str(distribution(name).locate_file(folder)))
    except PackageNotFoundError:
        return
    spec = find_spec(folder.parts[0])
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(place).parent / folder


def _declared(data: mmap.mmap, op: str) -> Iterator[list[str]]:
    """Yield the argument names of each schema of an op."""
    mark, at = f"\0{op}(".encode(), -1
    while (at := data.find(mark, at + 1)) >= 0:
        text = data[at + len(mark) : at + len(mark) + _LONGEST].partition(b"\0")[0].decode("ascii", "replace")
        arguments, closed, _ = text.partition(") -> ")
        if closed:
            yield [name[0] for part in arguments.split(",") if (name := _NAME.search(part.strip()))]
