"""FlashAttention 4 writes to the given output by a private function, if a release has it and the output is aligned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from inspect import signature
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug_flash_attn.kernels.interface import LayerParams
from plugins.flash_attn.tests.varlen_requests import HEADS, SIZE, kernels, requests

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.usefixtures("fakes")

PUBLIC, PRIVATE = "flash_attn_varlen_func", "_flash_attn_fwd"
PLAIN = LayerParams(softmax_scale=0.3)
MIXED = requests((5, 1, 7), (20, 300, 7))
ROWS = len(MIXED.query)


@pytest.fixture
def library() -> Any:
    """The module that has both functions."""
    return import_module("flash_attn.cute.interface")


@pytest.fixture
def given(library, monkeypatch) -> list[Tensor]:
    """The outputs that the private function received, by call."""
    found, forward = [], getattr(library, PRIVATE)

    def recording(q, k, v, **named):
        found.append(named["out"])
        return forward(q, k, v, **named)

    recording.__signature__ = signature(forward)
    monkeypatch.setattr(library, PRIVATE, recording)
    return found


def attend(out: Tensor, params: LayerParams = PLAIN, **call: Any) -> Tensor:
    """Run the adapter, and return the LSE."""
    adapter = kernels("fa4")
    lse = torch.full((ROWS, HEADS), torch.nan)
    adapter.attend(MIXED.query, *MIXED.pages, out, MIXED.call(adapter, **call), params, lse)
    return lse


def assert_right(out: Tensor, lse: Tensor, params: LayerParams = PLAIN) -> None:
    exact, sums = MIXED.truth(params)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)


def rows_of(tokens: int, width: int, *, first: int = 0, row: int = 0) -> Callable[[], Tensor]:
    """Return a function that makes an output: rows of a wider tensor, behind others."""

    def made() -> Tensor:
        wide = torch.full((tokens, width), torch.nan).bfloat16()
        return wide[row : row + ROWS, first : first + HEADS * SIZE].view(-1, HEADS, SIZE)

    return made


FILLED = {
    "its own": rows_of(ROWS, HEADS * SIZE),
    "rows between others": rows_of(ROWS + 5, HEADS * SIZE, row=3),
    "columns between others": rows_of(ROWS, HEADS * SIZE + 24, first=16),
    "heads apart": lambda: torch.full((ROWS, HEADS, SIZE + 8), torch.nan).bfloat16()[..., :SIZE],
    "heads before rows": lambda: torch.full((HEADS, ROWS, SIZE), torch.nan).bfloat16().transpose(0, 1),
}
COPIED = {
    "columns behind 4 others": rows_of(ROWS, HEADS * SIZE + 8, first=4),
    "rows that 16 bytes do not divide": rows_of(ROWS, HEADS * SIZE + 4),
    "heads that 16 bytes do not divide": lambda: torch.full((ROWS, HEADS, SIZE + 4), torch.nan).bfloat16()[..., :SIZE],
    "a tensor behind 2 bytes": lambda: torch.full((1 + MIXED.query.numel(),), 0.0).bfloat16()[1:].view(-1, HEADS, SIZE),
    "elements apart": lambda: torch.full((ROWS, HEADS, 2 * SIZE), torch.nan).bfloat16()[..., ::2],
}  # fmt: skip


@pytest.mark.parametrize("made", FILLED.values(), ids=FILLED)
def test_results_are_written_where_they_belong(journal, given, made) -> None:
    out = made()
    around = torch.full_like(out._base, True, dtype=torch.bool) if out._base is not None else None

    assert_right(out, attend(out))

    assert [call.function for call in journal.calls] == [PRIVATE]
    assert given[0] is out
    if around is not None:
        around.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        assert out._base.isnan()[around].all()


@pytest.mark.parametrize("made", COPIED.values(), ids=COPIED)
def test_results_are_copied_where_the_kernels_may_not_write(journal, given, made) -> None:
    out = made()

    assert_right(out, attend(out))

    assert [call.function for call in journal.calls] == [PUBLIC]
    assert not given


@pytest.mark.parametrize("made", COPIED.values(), ids=COPIED)
def test_the_library_refuses_to_write_there(library, made) -> None:
    call = MIXED.call(kernels("fa4"))
    with pytest.raises(AssertionError, match="out must have aligned strides"):
        library._flash_attn_fwd(
            MIXED.query, *MIXED.pages, out=made(), cu_seqlens_q=call.cu_seqlens_q, max_seqlen_q=7, max_seqlen_k=300,
            seqused_k=call.seqused_k, page_table=call.block_table,
        )  # fmt: skip


def test_one_row_that_is_broadcast_is_copied(journal) -> None:
    step = requests((1,), (20,))
    adapter, out = (
        kernels("fa4"),
        torch.full((HEADS, SIZE), torch.nan).bfloat16().as_strided((1, HEADS, SIZE), (0, SIZE, 1)),
    )
    adapter.attend(step.query, *step.pages, out, step.call(adapter), PLAIN, None)

    torch.testing.assert_close(out.double(), step.truth(PLAIN)[0], rtol=1e-2, atol=1e-2)
    assert [call.function for call in journal.calls] == [PUBLIC]


def test_rows_of_no_request_are_not_written() -> None:
    wide = evolve(MIXED, query=torch.cat([MIXED.query, MIXED.query[:2]]))
    adapter = kernels("fa4")
    out, _ = wide.attend(adapter, MIXED.call(adapter), PLAIN)

    assert out[-2:].isnan().all()
    assert out[:-2].isfinite().all()


def without_function(monkeypatch: Any, library: Any) -> None:
    """A release without the function."""
    monkeypatch.delattr(library, PRIVATE)


def with_public_window(monkeypatch: Any, library: Any) -> None:
    """A release whose function takes a window as the public one does."""
    monkeypatch.setattr(library, PRIVATE, _unlike)


def with_further_argument(monkeypatch: Any, library: Any) -> None:
    """A release whose function needs something that is not passed."""
    monkeypatch.setattr(library, PRIVATE, _demanding)


def unreadable(monkeypatch: Any, library: Any) -> None:
    """A release whose function has no readable signature."""
    monkeypatch.setattr(library, PRIVATE, max)


def _unlike(q, k, v, *, out=None, window_size=(None, None)):
    raise AssertionError("it takes no window_size_left")


def _demanding(q, k, v, *, workspace, **_):
    raise AssertionError("it needs a workspace")


@pytest.mark.parametrize("release", [without_function, with_public_window, with_further_argument, unreadable])
@pytest.mark.parametrize("params", [PLAIN, evolve(PLAIN, window=(3, 0)), evolve(PLAIN, softcap=2.0)], ids=str)
def test_another_release_is_called_by_its_public_function(monkeypatch, journal, library, release, params) -> None:
    release(monkeypatch, library)
    assert not kernels("fa4").fills_output

    out = FILLED["its own"]()
    lse = attend(out, params)

    assert [call.function for call in journal.calls] == [PUBLIC]
    monkeypatch.undo()
    again = FILLED["its own"]()
    torch.testing.assert_close(lse, attend(again, params), rtol=0, atol=0)
    torch.testing.assert_close(out, again, rtol=0, atol=0)


def test_the_adapter_fills_outputs() -> None:
    assert kernels("fa4").fills_output


@pytest.mark.parametrize(
    ("params", "passed"),
    [
        (PLAIN, {"softcap": None, "window_size_left": None, "window_size_right": None, "learnable_sink": None}),
        (evolve(PLAIN, softcap=2.0), {"softcap": 2.0}),
        (evolve(PLAIN, window=(3, 0)), {"window_size_left": 3, "window_size_right": 0}),
        (evolve(PLAIN, window=(0, -1)), {"window_size_left": 0, "window_size_right": None}),
        (evolve(PLAIN, sinks=torch.zeros(HEADS).bfloat16()), {"learnable_sink": (HEADS,)}),
    ],
    ids=str,
)
def test_layer_parameters_are_passed(journal, params, passed) -> None:
    attend(FILLED["its own"](), params)

    arguments = journal.calls[-1].arguments
    assert {name: arguments[name] for name in passed} == passed


def test_an_lse_is_computed_where_it_is_requested(journal) -> None:
    adapter, out = kernels("fa4"), FILLED["its own"]()
    adapter.attend(MIXED.query, *MIXED.pages, out, MIXED.call(adapter), PLAIN, None)

    assert journal.calls[-1].arguments["return_lse"] is False
    attend(out)
    assert journal.calls[-1].arguments["return_lse"] is True


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("out", lambda: torch.empty(ROWS, HEADS, SIZE), "out dtype"),
        ("out", lambda: torch.empty(ROWS - 1, HEADS, SIZE).bfloat16(), "out shape"),
        ("out", lambda: torch.empty(1, HEADS, SIZE).bfloat16().expand(ROWS, -1, -1), "broadcast"),
        ("lse", lambda: torch.empty(ROWS, HEADS), "lse shape"),
        ("lse", lambda: torch.empty(ROWS, HEADS).T, "lse must have aligned strides and a contiguous last dimension"),
        ("lse", lambda: torch.empty(HEADS, ROWS).bfloat16(), "lse dtype"),
    ],
)
def test_the_library_checks_given_tensors(library, name, wrong, match) -> None:
    call = MIXED.call(kernels("fa4"))
    with pytest.raises(AssertionError, match=match):
        library._flash_attn_fwd(
            MIXED.query, *MIXED.pages, cu_seqlens_q=call.cu_seqlens_q, max_seqlen_q=7, max_seqlen_k=300,
            seqused_k=call.seqused_k, page_table=call.block_table, **{name: wrong()},
        )  # fmt: skip


def test_calls_of_threads_do_not_overlap(library, monkeypatch) -> None:
    """The library compiles in the calls, and two threads that compile end the process."""
    inside, forward = Lock(), getattr(library, PRIVATE)

    def alone(q, k, v, **named):
        assert inside.acquire(blocking=False), "another thread is in the library"
        sleep(0.005)  # lets the others run
        result = forward(q, k, v, **named)
        inside.release()
        return result

    alone.__signature__ = signature(forward)
    monkeypatch.setattr(library, PRIVATE, alone)
    outs = [torch.full((ROWS, HEADS, SIZE), torch.nan).bfloat16() for _ in range(4)]
    with ThreadPoolExecutor(len(outs)) as pool:
        sums = list(pool.map(attend, outs))

    for out, lse in zip(outs, sums, strict=True):
        assert_right(out, lse)
