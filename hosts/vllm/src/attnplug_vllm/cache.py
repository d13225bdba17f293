"""
vLLM's KV-cache pools as KV caches of the contract: which forms and orders vLLM is told, and the views of a pool.

vLLM 0.32 and later fix the logical shape ``(blocks, heads, tokens, content)`` of a layer's pool and name orders of
memory (`KVCacheLayout`); a backend may change what heads and content are (`customize_spec`). Earlier versions request a
shape and an order of its axes. In both, a key has its value behind it by default: the form that is called packed here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import ref

import torch

from attnplug.contract import split_kv, torch_dtype
from attnplug.errors import CacheError
from attnplug_vllm import facts, int8, pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from attnplug.contract import KVCache, LoadedBackend

Terms = tuple[str, str]
"""A form and a layout, in the words of `attnplug.Requirements`: ``("packed", "NHD")``."""

FORMS: Final = ("packed", "interleaved", "joint")
"""
The forms that a pool of vLLM can have, most preferred first. Another than packed changes vLLM's own shape.

Where a block is more than keys and values of one dtype, blocks are `pages` of bytes, and the form is `pages.FORM`.
"""

ORDERS: Final[Mapping[Terms, tuple[str, ...]]] = {
    ("packed", "NHD"): ("LBNHC", "BLNHC"),
    ("packed", "HND"): ("LBHNC", "BLHNC"),
    ("interleaved", "NHD"): ("LBHNC", "BLHNC"),
    ("interleaved", "HND"): ("LBHNC", "BLHNC"),
    ("joint", "NHD"): ("LHBNC",),
    ("joint", "HND"): ("LHBNC",),
    (pages.FORM, "NHD"): ("LBNHC", "LBHNC", "BLNHC", "BLHNC"),
    (pages.FORM, "HND"): ("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
}
"""vLLM's orders of memory in which a pool has a form and a layout, those that keep a layer's blocks together first."""

_newest: ref[Any] | None = None
"""The compilation configuration of the engine whose layers were made last."""


def enter_engine(config: Any) -> None:
    """
    Take an engine for the one that vLLM is making. Where vLLM asks a backend about pools, it does not always say for
    which engine, but it makes one after the other.

    Args:
        config: The configuration that a layer is made under; None outside of an engine.
    """
    global _newest  # noqa: PLW0603 - vLLM's backends are classes of the process
    _newest = None if config is None else ref(config.compilation_config)


class CacheMembers:
    """
    The members of vLLM's `AttentionBackend` that are about KV caches, in all versions.

    Attributes:
        choice: The identifiers of the candidates that may be chosen; empty where attnplug decides.
    """

    choice: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the orders of memory that all layers of this class can have, most preferred first (0.32 and later)."""
        from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: PLC0415 - earlier versions have none

        return tuple(KVCacheLayout[name] for name in order_names(terms_of(layers_of(cls.choice))))

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return vLLM's description of a layer's pool, with the heads and the content of the form (0.32 and later)."""
        layers = layers_of(cls.choice)
        terms = terms_of(layers)[0]
        if terms[0] == pages.FORM:
            return pages.paged_spec(spec, pages.backend_for(spec, layers, terms[1]))
        return with_form(spec, terms)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """Return the layout that vLLM has to use, where only one is served (before 0.32)."""
        found = [kv_layout for kv_layout in ("NHD", "HND") if facts.serves(cls.choice, kv_layout=kv_layout)]
        return found[0] if len(found) == 1 else None

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the logical shape of a layer's pool (before 0.32)."""
        layers = layers_of(cls.choice)
        form, _ = terms_of(layers)[0]
        if cache_dtype_str == "auto" and any(one.requirements.kv_cache_dtype == "int8" for one in layers):
            int8.warn_of_unused_room(head_size)
        # vLLM's own int8 format has a scale of four bytes behind each key and each value, which pages may use.
        content = head_size + (4 if form == pages.FORM and cache_dtype_str == int8.WIDER else 0)
        return pool_shape(form, num_blocks, block_size, num_kv_heads, content)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:  # noqa: FBT001, FBT002 - vLLM's signature
        """Return the axes of the pool from the slowest to the fastest in memory (before 0.32)."""
        terms = resolved_terms(None, terms_of(layers_of(cls.choice)))
        axes = pool_axes(terms)
        if not include_num_layers_dimension:
            return axes
        moved = tuple(axis + 1 for axis in axes)
        # Layers inside a block: blocks of a layer are then further apart, which every form with blocks first allows.
        return (0, *moved) if terms[0] == "joint" else (1, 0, *moved[1:])


def layers_of(choice: tuple[str, ...], config: Any = None, *, latent: bool = False) -> list[Any]:
    """
    Return the layers of one engine that have a KV cache and were made for a choice.

    Args:
        choice: The identifiers of the candidates that may be chosen.
        config: The engine's configuration; None is the current one, or that of the engine whose layers were made last.
        latent: Whether those with latent attention are meant, or those with keys and values per head.
    """
    config = facts.current_config() if config is None else config
    newest = None if _newest is None else _newest()
    compilation = newest if config is None else config.compilation_config
    layers = {} if compilation is None else compilation.static_forward_context
    impls: list[Any] = [getattr(layer, "impl", None) for layer in layers.values()]
    chosen = [one for one in impls if getattr(one, "choice", None) == choice and one.requirements.paged]
    return [one for one in chosen if one.requirements.latent is latent]


def terms_of(layers: Iterable[Any]) -> tuple[Terms, ...]:
    """
    Return the terms that the backends of all these layers take, most preferred first, of one form.

    Raises:
        CacheError: There are none.
    """
    decided = {(layer.selection.id, layer.requirements): layer.selection for layer in layers}
    preferred = [selection.agreement.kv_layout for selection in decided.values()]
    orders = ("HND", "NHD") if preferred and set(preferred) == {"HND"} else ("NHD", "HND")
    forms = (pages.FORM,) if any(pages.in_pages(one.requirements) for one in decided.values()) else FORMS
    for form in forms:
        found = tuple((form, kv_layout) for kv_layout in orders if _all_take(decided.values(), form, kv_layout))
        if found:
            return found
    ids = ", ".join(sorted({selection.id for selection in decided.values()}))
    raise CacheError(
        f"the layers of {ids} share no form of a KV cache",
        f"a pool of vLLM is one of {', '.join(forms)}, with tokens before heads or heads before tokens, for all layers",
        "name one backend for all layers with --attention-backend",
    )


def _all_take(selections: Iterable[Any], form: str, kv_layout: str) -> bool:
    return all(
        one.requirements.kv_cache_form in (None, form)
        and not facts.reasons(one.requirements.evolve(kv_cache_form=form, kv_layout=kv_layout), (one.id,))
        for one in selections
    )


def order_names(terms: Iterable[Terms]) -> tuple[str, ...]:
    """Return vLLM's names of the orders of memory for terms, those that keep a layer's blocks together first."""
    names = [ORDERS[one] for one in terms]
    return tuple(dict.fromkeys([*(first for first, *_ in names), *(name for _, *rest in names for name in rest)]))


def resolved_terms(order: str | None, terms: tuple[Terms, ...]) -> Terms:
    """
    Return the terms that vLLM has resolved.

    Args:
        order: The name of the order of memory (0.32 and later); None where vLLM names the layout instead.
        terms: Those that it was told.

    Raises:
        CacheError: It resolved none of them.
    """
    if order is None:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout  # noqa: PLC0415 - later versions have none

        kv_layout = get_kv_cache_layout()
        # What is inside a page is the backend's, whatever vLLM's layout is.
        found = next((one for one in terms if one[1] == kv_layout or one[0] == pages.FORM), None)
    else:
        kv_layout = order
        found = next((one for one in terms if order in ORDERS[one]), None)
    if found is None:
        raise CacheError(
            f"vLLM lays its KV cache out as {kv_layout}",
            f"the chosen backends take {' or '.join(f'kv_cache_form={f!r}, kv_layout={n!r}' for f, n in terms)}",
            f"set VLLM_KV_CACHE_LAYOUT={terms[0][1] if order is None else ORDERS[terms[0]][0]}, "
            "or name another backend with --attention-backend",
        )
    return found


def with_form(spec: Any, terms: Terms) -> Any:
    """Return vLLM's description of a layer's pool, so that its shape has the form."""
    form, kv_layout = terms
    if form == "packed":
        return spec
    rows = spec.num_kv_heads if (form, kv_layout) == ("interleaved", "HND") else 1
    content = spec.num_kv_heads // rows * spec.head_size * spec.dtype.itemsize
    return replace(spec, num_head_slots=2 * rows, state_content_bytes=content)


def views_of(pool: Tensor, backend: LoadedBackend) -> dict[str, Tensor]:
    """
    Return the keys and the values in a layer's pool, ``(blocks, tokens, heads, size)`` each.

    Args:
        pool: What vLLM binds to the layer: ``(blocks, heads, tokens, content)``, or the shape of `get_kv_cache_shape`.
        backend: The layer's backend, whose agreement has the form.

    Raises:
        CacheError: The pool has no such axes.
    """
    agreement = backend.agreement
    form, kv_layout = agreement.kv_cache_form or FORMS[0], agreement.kv_layout or "NHD"
    heads, size = agreement.requirements.num_kv_heads, agreement.requirements.head_size
    dtype, heads_first = torch_dtype(agreement.kv_cache_dtype), kv_layout == "HND"
    if pool.dtype != dtype and pool.dtype.itemsize == dtype.itemsize:
        pool = pool.view(dtype)  # vLLM keeps 8-bit floats as bytes
    if agreement.requirements.latent:
        return split_kv(pool, form, kv_layout, size, agreement.requirements.head_size_v)
    if pool.ndim == 5:  # before 0.32
        pool = pool.transpose(2, 3) if heads_first else pool
    elif form == "packed":
        pool = pool if heads_first else pool.transpose(1, 2)
    elif (form, kv_layout) == ("interleaved", "HND"):
        pool = pool.view(pool.shape[0], 2, heads, *pool.shape[2:])
    else:  # the tokens of a block and their content are one run of memory
        blocks, pair, tokens, _ = pool.shape
        pool = pool.view(blocks, pair, *((heads, tokens) if heads_first else (tokens, heads)), size)
        pool = pool.transpose(0, 1) if form == "joint" else pool
    return split_kv(pool, form, kv_layout, size)


def bind_pool(pool: Tensor, backend: LoadedBackend, attn: Any = None) -> KVCache:
    """
    Return a layer's pool as the KV cache of its backend.

    Tensors that the backend keeps besides keys and values are allocated here: vLLM's pools have no room for them.

    Args:
        pool: What vLLM binds to the layer.
        backend: The layer's backend.
        attn: The layer's implementation, which writes what is its own into its KV cache.

    Raises:
        CacheError: The pool is not one of the agreement.
    """
    if backend.agreement.kv_cache_form == pages.FORM:
        return backend.bind_cache(pages.page_views(pool, backend), impl=attn)
    views = views_of(pool, backend)
    further = {
        role: one.allocate(pool.device)
        for role, one in backend.cache_tensors(views["k"].shape[0]).items()
        if role not in views
    }
    return backend.bind_cache({**views, **further}, impl=attn)


def check_pool(spec: Any, order: str | None, backend: LoadedBackend) -> None:
    """
    Check that the pool which vLLM is about to make fits the agreement, before there is memory.

    Args:
        spec: vLLM's description of a layer's pool, with the block size of the kernels.
        order: The name of the order of memory; None before 0.32.
        backend: The layer's backend.

    Raises:
        CacheError: It does not fit.
    """
    agreement = backend.agreement
    terms = (agreement.kv_cache_form or FORMS[0], agreement.kv_layout or "NHD")
    blocks, layers = 2, 2
    if agreement.requirements.latent:
        pool = torch.empty(blocks, spec.block_size, spec.head_size, dtype=spec.dtype, device="meta")
    elif order is None:
        # vLLM's own int8 format has a scale behind each key and each value.
        content = spec.page_size_bytes // (2 * spec.block_size * spec.num_kv_heads * spec.dtype.itemsize)
        size = content if terms[0] == pages.FORM else spec.head_size
        shape, axes = pool_shape(terms[0], blocks, spec.block_size, spec.num_kv_heads, size), pool_axes(terms)
        pool = torch.empty([shape[axis] for axis in axes], dtype=spec.dtype, device="meta")
        pool = pool.permute([axes.index(axis) for axis in range(len(axes))])
    else:
        from vllm.v1.kv_cache_interface import KVCacheLayout, compute_layout_strides  # noqa: PLC0415 - see above

        layout, item = KVCacheLayout[order], spec.dtype.itemsize
        dense = replace(spec, page_size_padded=None)  # padding is between blocks, where any room may be
        strides = compute_layout_strides(dense, blocks, layers, layout)[1:]
        shape = (blocks, spec.num_heads, spec.num_states, spec.state_content_size_bytes // item)
        pool = torch.empty_strided(shape, [*(s // item for s in strides[:3]), 1], dtype=spec.dtype, device="meta")
    bind_pool(pool, backend)


def pool_shape(form: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Return the logical shape of a layer's pool before 0.32."""
    if form in ("packed", pages.FORM):
        return num_blocks, num_kv_heads, block_size, 2 * head_size
    pair = (2, num_blocks) if form == "joint" else (num_blocks, 2)
    return (*pair, block_size, num_kv_heads, head_size)


def pool_axes(terms: Terms) -> tuple[int, ...]:
    """Return the axes of such a pool from the slowest to the fastest in memory."""
    form, kv_layout = terms
    if form in ("packed", pages.FORM):
        return (0, 1, 2, 3) if kv_layout == "HND" else (0, 2, 1, 3)
    return (0, 1, 3, 2, 4) if kv_layout == "HND" else (0, 1, 2, 3, 4)
