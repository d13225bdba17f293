"""What is so of the installed libraries, and the plugin relies on; what they refuse, and what they are taken for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
import torch

import attnplug
from attnplug.errors import NoBackendError
from plugins.flash_attn.tests.real import FLASH_ATTN, VARIANTS, lacking

pytestmark = pytest.mark.gpu

ASKED = attnplug.Requirements(head_size=128, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")

load_real = FLASH_ATTN.fixture()


def status_of(variant: str) -> str:
    """Return what an explanation says of a variant."""
    (verdict,) = [v for v in attnplug.explain(ASKED).verdicts if v.id == f"flash_attn/{variant}"]
    return verdict.status


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_here_is_offered_and_what_is_not_is_not(load_real, variant) -> None:
    """Held against files and versions: how an import ends says nothing."""
    if lacking(variant) is None:
        assert status_of(variant) in ("chosen", "eligible")
        assert load_real(ASKED, variant).variant == variant
    else:
        with pytest.raises((NoBackendError, attnplug.errors.PluginLoadError)):
            attnplug.load(ASKED, backend=f"flash_attn/{variant}")


def test_flashattention_4_alone_is_not_taken_for_2(load_real) -> None:
    """The module `flash_attn` imports where the distribution of FlashAttention 2 is not installed."""
    FLASH_ATTN.check_here("fa4")
    try:
        pytest.skip(f"flash-attn {version('flash-attn')} is installed here beside it")
    except PackageNotFoundError:
        assert find_spec("flash_attn") is not None
    assert status_of("fa2") not in ("chosen", "eligible")


def test_flashattention_3_is_the_first_choice_on_hopper(load_real) -> None:
    FLASH_ATTN.check_here("fa3_vllm")

    assert attnplug.select(ASKED, backend="flash_attn").id == "flash_attn/fa3_vllm"
    assert attnplug.load(ASKED, backend="flash_attn").id == "flash_attn/fa3_vllm"


def test_flashattention_4_refuses_by_assertions_and_returns_two_tensors() -> None:
    FLASH_ATTN.check_here("fa4")
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415 - seconds, where it is

    rows = torch.randn(3, 8, 128, device="cuda").bfloat16()
    pages = torch.randn(4, 128, 2, 128, device="cuda").bfloat16()
    starts, table, keys = (
        torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in ([0, 1, 3], [[1, 2], [3, 0]], [200, 90])
    )
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 2, "max_seqlen_k": 256, "page_table": table, "causal": True}

    found = flash_attn_varlen_func(rows, pages, pages, seqused_k=keys, **given)
    assert len(found) == 2
    assert found[0].shape == rows.shape
    with pytest.raises(AssertionError, match="cu_seqlens_k"):
        flash_attn_varlen_func(rows, pages, pages, cu_seqlens_k=starts, **given)
