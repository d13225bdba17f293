"""
Direct library calls: what a host writes by hand for one library and one layout, without the contract.

A backend is compared with those of its library, if a file has some (`--baseline`), and otherwise with torch's.
"""

from __future__ import annotations

from runpy import run_path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from attrs import evolve, frozen

from attnplug import AttnplugError
from attnplug.commands import ForeignCode
from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.bench.rig import Planner, Rig


@runtime_checkable
class Baseline(Protocol):
    """
    Direct library calls that compute the same as a backend's `forward`, on the same inputs.

    ``attnplug bench --baseline FILE`` reads one. A backend without it is compared with torch's calls, and without a
    budget: the difference between two libraries' kernels is no overhead.
    """

    @property
    def backend(self) -> str:
        """The backend whose library it calls."""

    @property
    def what(self) -> str:
        """The calls, in words."""

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """
        Return the calls of one layer in one step: the cache write, and attention.

        What a host prepares once per step (indices, plans, masks) is prepared here and not measured, as a build isn't.
        The calls have their own cache, which holds what `Rig.cached` says.

        Args:
            rig: The step with its tensors.

        Returns:
            A function that returns ``(num_tokens, num_q_heads * head_size)``.
        """

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """
        Return the same calls for a CUDA graph: all that they read keeps its address.

        Args:
            rig: A step in which every request decodes.
        """

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """
        Return what a host calls once per step, by a description; nothing where the library plans nothing.

        Args:
            planner: The step.
            captured: Whether it is planned for a graph.

        Returns:
            The library's own plan first, from arrays that are ready. Further ones may include preparing the arrays.
        """


def baseline_of(backend: str, file: str | None = None) -> tuple[Baseline, str | None]:
    """
    Return the baseline of a backend, and where it is not of the backend's own library, why.

    Args:
        backend: The backend's name.
        file: A Python file with a class that is its `Baseline`, called without arguments; None for torch's calls.

    Raises:
        RequestError: The file has no such class, or does not run.
    """
    torch = TorchBaseline()
    if file is None:
        note = f"{backend} is compared with {torch.what}, without a budget: --baseline names others"
        return torch, None if backend == torch.backend else note
    with ForeignCode(
        f"--baseline {file} was given",
        lambda reason: RequestError(f"--baseline {file} was given", reason, "correct the file, or leave it out"),
        passing=(RequestError,),
    ):
        names = run_path(file)
        found = [one() for one in names.values() if isinstance(one, type) and getattr(one, "backend", None) == backend]
        made = [one for one in found if isinstance(one, Baseline)]
    if len(made) != 1:
        raise RequestError(
            f"--baseline {file} was given",
            f"it needs one attnplug_kit.bench.Baseline with backend = {backend!r}, and has {len(made)}",
            "name the file that is for this backend, or leave it out",
        )
    return made[0], None


def compare(rig: Rig, baseline: Baseline, direct: Callable[[], Tensor], *calls: Callable[[], Tensor]) -> None:
    """
    Compare the results of calls of the backend with the baseline's, before their times are: a wrong one may be fast.

    Args:
        rig: The step.
        baseline: The baseline.
        direct: Its calls.
        calls: Calls that write the rig's output, and return it.

    Raises:
        AttnplugError: A result differs.
    """
    from attnplug_kit.oracle import assert_close  # noqa: PLC0415 - imports torch

    exact, largest = (
        direct().cpu().double(),
        float(max(x.abs().amax() for x in (rig.value, *rig.past[1:]) if x.numel())),
    )
    for call in calls:
        rig.output.fill_(float("nan"))
        try:
            assert_close(call(), exact, dtype=rig.output.dtype, scale=largest)
        except AssertionError as error:
            raise AttnplugError(
                f"{rig.backend.id} and {baseline.what} compute different results, at {rig.step.what}",
                f"the results are equal but for rounding: {error}",
                "correct the one that is wrong: the time of a wrong result is not reported",
            ) from error


@frozen
class TorchBaseline:
    """
    Attention over a paged KV cache by the fastest of torch's public calls.

    Blocks are gathered into memory that is reused. The query heads of a decode are the rows of their KV head, so that
    no key is repeated.
    """

    backend: ClassVar[str] = "torch"
    what: ClassVar[str] = "direct torch calls"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the calls. First prefills read the K/V of the call, decodes read the pages."""
        pages = _pages(rig)
        if rig.step.is_decode:
            return _decode(rig, pages)
        return _mixed(rig, pages) if 1 in rig.step.query_lens else _prefill(rig, pages)

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls: all that they read keeps its address."""
        return self.layer(rig)

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return nothing: torch plans nothing."""
        del planner, captured
        return {}


def _pages(rig: Rig) -> tuple[Tensor, Tensor]:
    """Return pages ``(num_blocks, block_size, num_kv_heads, head_size)`` of keys and of values, with the past."""
    key, value, slots = rig.cached
    shape = (rig.num_blocks, rig.block_size, *rig.key.shape[1:])
    pages = rig.key.new_zeros(shape), rig.key.new_zeros(shape)
    for rows, cache in zip((key, value), pages, strict=True):
        cache.view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)
    return pages


def _mixed(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """Return the calls of a step of decodes and prefills."""
    from torch import cat  # noqa: PLC0415 - it is imported by now

    first = rig.step.query_lens.count(1)
    decode = _decode(_part(rig, slice(first)), pages)
    prefill = _prefill(_part(rig, slice(first, None)), pages)
    return lambda: cat((decode(), prefill()))


def _part(rig: Rig, requests: slice) -> Rig:
    """Return the requests before the first prefill, or those from it on, without their past."""
    full = rig.step
    step = evolve(full, query_lens=full.query_lens[requests], cached_lens=full.cached_lens[requests])
    rows = slice(step.num_tokens) if requests.start is None else slice(full.num_tokens - step.num_tokens, None)
    return rig.for_step(step, rig.blocks[requests], query=rig.query[rows], key=rig.key[rows], value=rig.value[rows])


def _prefill(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: PLC0415 - likewise

    step, slots = rig.step, rig.slots
    shape = (step.num_reqs, step.query_lens[0])
    keys, values = (cache.view(-1, *rig.key.shape[1:]) for cache in pages)
    query, key, value = rig.query, rig.key, rig.value

    def call() -> Tensor:
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape[0], -1)

    return call


def _decode(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    from torch import index_select  # noqa: PLC0415 - likewise
    from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: PLC0415 - likewise

    slots, query, key, value = rig.slots, rig.query, rig.key, rig.value
    folded = (rig.step.num_reqs, rig.step.num_kv_heads, -1, rig.step.head_size)
    keys, values = (cache.view(-1, *key.shape[1:]) for cache in pages)
    blocks, mask = rig.table.reshape(-1), _mask(rig)
    gathered = [cache.new_empty(len(blocks), *cache.shape[1:]) for cache in pages]
    longest = rig.table.shape[1] * rig.block_size if rig.step.is_ragged else rig.step.seq_lens[0]
    k, v = (rows.view(rig.step.num_reqs, -1, *key.shape[1:])[:, :longest].transpose(1, 2) for rows in gathered)

    def call() -> Tensor:
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        for cache, rows in zip(pages, gathered, strict=True):
            index_select(cache, 0, blocks, out=rows)
        out = attend(query.view(folded), k, v, attn_mask=mask)
        return out.reshape(len(out), -1)

    return call


def _mask(rig: Rig) -> Tensor | None:
    """Return an additive mask over the gathered slots, ``(num_reqs, 1, 1, slots)``; None for equal lengths."""
    if not rig.step.is_ragged:
        return None
    mask = rig.query.new_zeros(rig.step.num_reqs, 1, 1, rig.table.shape[1] * rig.block_size)
    for row, length in zip(mask, rig.step.seq_lens, strict=True):
        row[..., length:] = float("-inf")
    return mask
