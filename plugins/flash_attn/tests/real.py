"""The plugin on the kernel libraries themselves, and which of them have what."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from tests.backends.plugin import RealPlugin

if TYPE_CHECKING:
    from attnplug_kit.oracle import Case

VARIANTS: Final = ("fa3_vllm", "fa3_tokenspeed", "fa4", "fa3", "fa2", "fa2_vllm", "torch")
SINKS: Final = ("fa3_vllm", "fa3_tokenspeed", "fa4")
ALIBI: Final = ("fa2", "fa2_vllm")
FP8: Final = ("fa3_vllm", "fa3_tokenspeed", "fa3")
GRAPHS: Final = tuple(variant for variant in VARIANTS if variant != "torch")
SOFT_CAP: Final = tuple(variant for variant in GRAPHS if variant != "fa3_tokenspeed")
GRAPHS_OF_ALL_STEPS: Final = FP8
BATCH_INVARIANT: Final = VARIANTS
DCP: Final = tuple(variant for variant in VARIANTS if variant not in {"fa2", "fa2_vllm"})

PAGES: Final = {"fa4": (16, 32, 256, 512), "fa2": (256, 512, 768)}
"""Sizes of pages to try, where they are not those of `pages_of`."""

_DISTRIBUTIONS: Final = {"fa3_tokenspeed": "tokenspeed-fa3", "fa4": "flash-attn-4", "fa2": "flash-attn"}
_OP_LIBRARIES: Final = {"fa3_vllm": "_vllm_fa3_C", "fa2_vllm": "_vllm_fa2_C"}
_MAJORS: Final = {"fa3_vllm": (9,), "fa3_tokenspeed": (9,), "fa3": (9,), "fa4": (9, 10, 11)}


def lacking(variant: str) -> str | None:
    """Return what a variant needs and is not here."""
    if not _is_installed(variant):
        return f"the library of {variant} is not installed"
    major = torch.cuda.get_device_capability()[0]
    if major not in _MAJORS.get(variant, range(8, 100)):
        return f"{variant} has no kernels for compute capability {major}.x"
    return None


def _is_installed(variant: str) -> bool:
    if variant in _OP_LIBRARIES:
        folders = (Path(path, "vllm", "vllm_flash_attn") for path in sys.path)
        return any(True for folder in folders for _ in folder.glob(f"{_OP_LIBRARIES[variant]}.*"))
    if variant == "fa3":  # another build has a module of that name
        return find_spec("flash_attn_interface") is not None and not _is_installed("fa3_tokenspeed")
    try:
        return variant == "torch" or bool(version(_DISTRIBUTIONS[variant]))
    except PackageNotFoundError:
        return False


def skip_unchecked_invariance(variant: str) -> None:
    """Skip a test of batch invariance where the manifest refuses it."""
    if variant == "fa4" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the batch invariance of fa4 was checked on compute capability 9.0 only")


FLASH_ATTN: Final = RealPlugin("flash_attn", "attnplug_flash_attn", lacking)


def pages_of(variant: str) -> tuple[int, ...]:
    """Return sizes of pages that a variant's library reads, the least first."""
    return PAGES.get(variant, (16, 32, 48, 128))


def block_of(variant: str) -> int:
    """Return the least of them."""
    return pages_of(variant)[0]


def fit(case: Case, variant: str, **changes: Any) -> Case:
    """Return a case in blocks that a variant's library reads."""
    return evolve(case, **{"block_size": block_of(variant), **changes})
