"""The op libraries in vLLM's wheel, found by the files of its distribution. vLLM itself is never imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import torch

from attnplug.errors import PluginLoadError

DISTRIBUTION: Final = "vllm"
FOLDER: Final = "vllm/vllm_flash_attn"

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
}
"""The ops that the adapters call, by library, and the names of their arguments: they are passed by position."""


def find(library: str) -> Path | None:
    """Return the file of an op library, or None where vLLM is not installed or its wheel has no such file."""
    try:
        folder = Path(str(distribution(DISTRIBUTION).locate_file(FOLDER)))
    except PackageNotFoundError:
        return None
    return next(iter(sorted(folder.glob(f"{library}*.so"))), None)


def load(library: str) -> Any:
    """
    Return the namespace of a library's ops. They are registered once per process, whoever did it first.

    Raises:
        PluginLoadError: It is not there, its file does not load, or its ops take other arguments.
    """
    if not _is_registered(library):
        path = find(library)
        if path is None:
            raise PluginLoadError(
                f"The op library {library!r} is not installed.",
                f"It is a file of vLLM's wheel, in {FOLDER}.",
                f"Install {DISTRIBUTION}, or let attnplug choose another variant.",
            )
        _load_file(library, path)
    for op in changed_ops(library):
        raise PluginLoadError(
            f"{library}.{op} of the installed {DISTRIBUTION} takes other arguments than this plugin passes.",
            f"It passes, by position: {ARGUMENTS[library][op].replace(' ', ', ')}.",
            f"Install a release of {DISTRIBUTION} that the plugin's manifest allows.",
        )
    return getattr(torch.ops, library)


def changed_ops(library: str) -> list[str]:
    """Return which ops of a loaded library are gone, or do not take what the adapters pass."""
    return [op for op, names in ARGUMENTS[library].items() if not _takes(library, op, names.split())]


def _takes(library: str, op: str, names: list[str]) -> bool:
    packet = getattr(getattr(torch.ops, library), op, None)
    if packet is None:
        return False
    arguments = packet.default._schema.arguments  # noqa: SLF001 - there is no other way to ask
    more = arguments[len(names) :]
    return [item.name for item in arguments[: len(names)]] == names and all(item.has_default_value() for item in more)


def _is_registered(library: str) -> bool:
    return any(hasattr(getattr(torch.ops, library), op) for op in ARGUMENTS[library])


def _load_file(library: str, path: Path) -> None:
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PluginLoadError(
            f"The op library {library!r} does not load: {error}.",
            "It is built for one release of torch and of CUDA each.",
            f"Install the release of {DISTRIBUTION} that goes with this torch.",
        ) from error
