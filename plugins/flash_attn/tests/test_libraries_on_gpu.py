"""Properties of the installed libraries that the plugin relies on: what they support and what they refuse."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.errors import NoBackendError
from attnplug_flash_attn import op_files
from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall
from plugins.flash_attn.tests.real import FLASH_ATTN, VARIANTS, lacking

pytestmark = pytest.mark.gpu

ASKED = attnplug.Requirements(head_size=128, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")

load_real = FLASH_ATTN.load_fixture()


def public_fa4() -> Any:
    """Return what FlashAttention 4 exports."""
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415 - seconds, where it is

    return flash_attn_varlen_func


def ints(numbers: list[Any]) -> torch.Tensor:
    """Return an index tensor."""
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def status_of(variant: str) -> str:
    """Return what an explanation says of a variant."""
    (verdict,) = [v for v in attnplug.explain(ASKED).verdicts if v.id == f"flash_attn/{variant}"]
    return verdict.status


@pytest.mark.parametrize("variant", VARIANTS)
def test_installed_libraries_are_ready_and_others_missing(load_real, variant) -> None:
    """Files and versions decide: how an import ends says nothing."""
    if lacking(variant) is None:
        assert status_of(variant) in ("chosen", "eligible")
        assert load_real(ASKED, variant).variant == variant
    else:
        with pytest.raises((NoBackendError, attnplug.errors.PluginLoadError)):
            attnplug.load(ASKED, backend=f"flash_attn/{variant}")


def test_fa4_alone_is_not_taken_for_2(load_real) -> None:
    """The module `flash_attn` imports where the distribution of FlashAttention 2 is not installed."""
    FLASH_ATTN.skip_if_missing("fa4")
    try:
        pytest.skip(f"flash-attn {version('flash-attn')} is installed here beside it")
    except PackageNotFoundError:
        assert find_spec("flash_attn") is not None
    assert status_of("fa2") not in ("chosen", "eligible")


def test_flashattention_3_is_the_first_choice_on_hopper(load_real) -> None:
    FLASH_ATTN.skip_if_missing("fa3_vllm")

    assert attnplug.select(ASKED, backend="flash_attn").id == "flash_attn/fa3_vllm"
    assert attnplug.load(ASKED, backend="flash_attn").id == "flash_attn/fa3_vllm"


@pytest.mark.parametrize(("variant", "has_unequal"), [("fa3_vllm", True), ("fa3_tokenspeed", False)])
def test_pairs_of_head_sizes_are_read_from_a_library(variant, has_unequal) -> None:
    FLASH_ATTN.skip_if_missing(variant)
    file = op_files.find(op_files.LIBRARIES[variant])
    assert file is not None

    for dtype in ("bfloat16", "float16"):
        assert op_files.has_kernels(file, dtype, 128, 128)
        for pair in ((64, 512), (64, 256), (192, 128)):
            assert op_files.has_kernels(file, dtype, *pair) == has_unequal
    assert not op_files.has_kernels(file, "fp8_e4m3", 64, 512)


OUTPUTS = {
    "its own": lambda rows: torch.full_like(rows, torch.nan),
    "rows between others": lambda rows: rows.new_full((len(rows) + 5, *rows.shape[1:]), torch.nan)[3 : 3 + len(rows)],
    "columns between others": lambda rows: rows.new_full((len(rows), 1040), torch.nan)[:, 8:1032].view(-1, 8, 128),
    "rows of 2056 bytes": lambda rows: rows.new_full((len(rows), 1028), torch.nan)[:, :1024].view(-1, 8, 128),
}  # fmt: skip


@pytest.mark.parametrize("made", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("heads", [2, 8], ids="kv_heads={}".format)
@pytest.mark.parametrize("paged", [True, False])
def test_fa4_writes_to_the_given_output(load_real, paged, heads, made) -> None:
    """The same numbers as its public function's, and none beside the rows; several heads, or one, share keys."""
    kernels = load_real(evolve(ASKED, num_kv_heads=heads, block_size=16), "fa4").kernels
    assert kernels.fills_output
    rows = torch.randn(300, 8, 128, device="cuda").bfloat16()  # the last 20 belong to no request
    keys, values = torch.randn(2, *((40, 16) if paged else (640,)), heads, 128, device="cuda").bfloat16()
    starts, ends, used = ints([0, 1, 280]), ints([0, 200, 600]), ints([200, 400])
    table = ints([[*range(13), *[0] * 12], [*range(13, 38)]])
    in_pages: dict[str, Any] = {"seqused_k": used, "block_table": table} if paged else {"cu_seqlens_k": ends}
    call = VarlenCall(cu_seqlens_q=starts, max_seqlen_q=279, max_seqlen_k=400, **in_pages)
    out, lse = made(rows), torch.full((300, 8), torch.nan, device="cuda")

    kernels.attend(rows, keys, values, out, call, LayerParams(softmax_scale=0.1), lse)

    if "block_table" in in_pages:
        in_pages["page_table"] = in_pages.pop("block_table")
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 279, "max_seqlen_k": 400, "softmax_scale": 0.1, "causal": True}
    found, sums = public_fa4()(rows, keys, values, return_lse=True, **given, **in_pages)
    torch.testing.assert_close(out[:280], found[:280], rtol=0, atol=0)
    torch.testing.assert_close(lse[:280], sums.T[:280], rtol=0, atol=0)
    if made is not OUTPUTS["rows of 2056 bytes"]:  # copied, with whatever is behind the rows
        assert out[280:].isnan().all()
        assert int((~out._base.isnan()).sum() if out._base is not None else 280 * 1024) == 280 * 1024


def test_fa4_refuses_by_assertions_and_returns_two_tensors() -> None:
    FLASH_ATTN.skip_if_missing("fa4")
    flash_attn_varlen_func = public_fa4()
    rows = torch.randn(3, 8, 128, device="cuda").bfloat16()
    pages = torch.randn(4, 128, 2, 128, device="cuda").bfloat16()
    starts, table, keys = ints([0, 1, 3]), ints([[1, 2], [3, 0]]), ints([200, 90])
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 2, "max_seqlen_k": 256, "page_table": table, "causal": True}

    found = flash_attn_varlen_func(rows, pages, pages, seqused_k=keys, **given)
    assert len(found) == 2
    assert found[0].shape == rows.shape
    with pytest.raises(AssertionError, match="cu_seqlens_k"):
        flash_attn_varlen_func(rows, pages, pages, cu_seqlens_k=starts, **given)
