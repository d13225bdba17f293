"""
Multi-head latent attention (MLA): layers that attend to latents, and prefills whose keys and values are per head.

SGLang's models project, absorb, and expand latents to keys and values per head. For each step a handler, which SGLang
looks up by the name of its attention backend, chooses the form. Both forms of a layer share a layer id and a KV cache,
and are two modules: ``attn_mqa`` attends with absorbed queries, and its backend writes the new latents; before
``attn_mha`` is called, the model has written them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field
from torch.nn import functional

import attnplug
from attnplug import Requirements
from attnplug.dense import attention_varlen
from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang.layers import OWN, HostLayer, scale_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug_sglang.batches import Lengths
    from attnplug_sglang.steps import Engine

_EXTENDS: Final = tuple({"attn_type": "decoder", "return_lse": lse} for lse in (False, True))
"""Calls among new tokens, or with their prefix, which are causal."""
_PREFIXES: Final = tuple({"attn_type": kind, "return_lse": True} for kind in ("encoder_decoder", "encoder_only"))
"""Calls with a chunk of the prefix, which is merged by its LSE; it may be as long as the queries."""


@define(eq=False)
class Sequences:
    """
    The sequences of a step, as dense calls take them.

    Attributes:
        queries: New tokens of each request.
        keys: Keys of each request, those of this step included.
        num_tokens: All new tokens.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    num_tokens: int
    _starts: dict[object, tuple[Tensor, Tensor]] = field(factory=dict)

    @classmethod
    def of(cls, lengths: Lengths) -> Sequences:
        """Return those of a step."""
        return cls(lengths.queries, lengths.sequences, sum(lengths.queries))

    def starts(self, name: object, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where sequences start, on the device and on the CPU: the same tensors for all layers."""
        if name not in self._starts:
            starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._starts[name] = starts.to(device, non_blocking=True), starts
        return self._starts[name]


@define(eq=False)
class ExpandedLayer:
    """
    The form of a layer that attends with keys and values per head.

    Attributes:
        host: SGLang's module.
        backend: As for `attnplug.select`.
        merges: Whether partial results are served, which SGLang merges by their LSEs.
        chosen: The candidates that serve it.
        quantized: The form that attends to latents, where the pool is of another dtype than the model.
    """

    host: HostLayer
    backend: list[str] | None
    merges: bool
    chosen: tuple[str, ...]
    quantized: HostLayer | None = None

    def serves(self, *, in_parts: bool) -> bool:
        """
        Whether a step may be expanded.

        Args:
            in_parts: Whether partial results are merged.
        """
        if in_parts and not self.merges:
            return False
        # SGLang's models write latents as they are, and a backend divides them by the scale.
        return self.quantized is None or scale_of(self.quantized, "k_scale") in {None, 1.0}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Any, sequences: Sequences | None) -> Any:
        """
        Return ``(tokens, num_heads * head_size_v)``; where SGLang merges, ``(tokens, num_heads, head_size_v)`` and the
        natural LSE ``(tokens, num_heads)`` float32.

        Args:
            q: ``(tokens, num_heads * head_size)``.
            k: ``(key tokens, num_heads, head_size)``: of the new tokens, of a chunk of the prefix, or of both.
            v: ``(key tokens, num_heads, head_size_v)``.
            step: SGLang's `ForwardBatch`, which says whose keys are given.
            sequences: Those of the step; None in a step that is made up.
        """
        module = self.host.module
        heads, size = module.tp_q_head_num, module.v_head_dim
        rows, returns_lse = q.view(-1, heads, module.qk_head_dim), bool(step.mha_return_lse)
        count = 0 if sequences is None else sequences.num_tokens
        if sequences is None or not count:
            output, lse = q.new_zeros(len(rows), heads, size), q.new_zeros(len(rows), heads, dtype=torch.float32)
            return (output, lse) if returns_lse else output.flatten(1)
        name, lengths = _keys_of(step, sequences)
        query_starts = sequences.starts("queries", sequences.queries, q.device)
        key_starts = query_starts if name == "queries" else sequences.starts(name, lengths, q.device)
        found = attention_varlen(
            rows[:count],
            k.view(-1, heads, module.qk_head_dim)[: sum(lengths)],
            v.view(-1, heads, size)[: sum(lengths)],
            query_starts[0],
            key_starts[0],
            query_start_loc_cpu=query_starts[1],
            key_start_loc_cpu=key_starts[1],
            causal=not step.attn_attend_prefix_cache,
            scale=module.scaling,
            return_lse=returns_lse,
            backend=self.backend,
        )
        padding = len(rows) - count
        if returns_lse:
            return tuple(_padded(each, padding) for each in found)
        return _padded(found.flatten(1), padding)


def _padded(rows: Tensor, padding: int) -> Tensor:
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, padding)) if padding else rows


def _keys_of(step: Any, sequences: Sequences) -> tuple[object, Sequence[int]]:
    """Return whose keys SGLang gives in a call, and their number in each request."""
    if step.attn_attend_prefix_cache:
        chunk = step.prefix_chunk_idx
        return chunk, step.prefix_chunk_seq_lens_cpu[chunk].tolist()
    if step.mha_one_shot:
        return "keys", sequences.keys
    return "queries", sequences.queries


def split(
    layers: Sequence[HostLayer], sizes: tuple[int, int] | None
) -> tuple[tuple[HostLayer, ...], tuple[HostLayer, ...]]:
    """
    Return the layers that a backend is negotiated for, and the second form of those that attend to latents.

    Args:
        layers: Of the model.
        sizes: Of a latent and of its rotary part; None where the pool has none.

    Raises:
        NotNegotiatedError: A layer does not fit the pool of latents.
    """
    if sizes is None:
        return tuple(layers), ()
    rank, rope = sizes
    latent = tuple(
        evolve(layer, latent=True)
        for layer in layers
        if (layer.module.tp_k_head_num, layer.module.qk_head_dim, layer.module.v_head_dim) == (1, rank + rope, rank)
    )
    ids, known = {layer.module.layer_id for layer in latent}, {id(layer.module) for layer in latent}
    others = tuple(layer for layer in layers if id(layer.module) not in known)
    for layer in others:
        if layer.module.layer_id not in ids:
            raise NotNegotiatedError(
                f"the layer {layer.name!r} has no latents of {rank} + {rope} elements, as SGLang's pool has them",
                "a pool of latents has nothing else",
                OWN,
            )
    return latent, others


def expanded_layers(layers: Sequence[HostLayer], engine: Engine) -> dict[int, ExpandedLayer]:
    """
    Return the second forms that dense calls serve, by the identity of SGLang's module, and note them for `method_of`.

    A backend that was named is preferred, and others are permitted: FlashMLA has no dense calls, and SGLang's own
    backend for FlashMLA leaves them to FlashInfer.

    Args:
        layers: The second forms.
        engine: What has their first forms.
    """
    names = None if engine.backend is None else [engine.backend, "auto"]
    absorbed = {layer.module.layer_id: layer for layer in engine.layers}
    found = {}
    for layer in layers:
        extends = _chosen(layer, engine, names, _EXTENDS[:1])
        if not extends:
            continue
        parts = _chosen(layer, engine, names, (_EXTENDS[1], *_PREFIXES))
        quantized = absorbed[layer.module.layer_id] if engine.pools.dtype != engine.dtype else None
        made = ExpandedLayer(layer, names, bool(parts), tuple(dict.fromkeys((*extends, *parts))), quantized)
        found[id(layer.module)] = _served[layer.module] = made
    return found


def _chosen(
    layer: HostLayer, engine: Engine, names: list[str] | None, calls: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Return the candidates that serve the kinds of calls of a layer; nothing where one is not served."""
    module = layer.module
    try:
        requests = [
            Requirements(
                head_size=module.qk_head_dim,
                head_size_v=module.v_head_dim,
                num_q_heads=module.tp_q_head_num,
                num_kv_heads=module.tp_k_head_num,
                dtype=engine.dtype,
                paged=False,
                phases=("prefill",),
                **call,
            )
            for call in calls
        ]
        return tuple(attnplug.select(each, engine.device, backend=names).agreement.id for each in requests)
    except NoBackendError:
        return ()


_served: Final[WeakKeyDictionary[Any, ExpandedLayer]] = WeakKeyDictionary()
"""The second forms of layers that dense calls serve, by SGLang's module."""


def register_handler(name: str) -> None:
    """
    Have SGLang's models choose between the forms by `method_of`, for a name of ``--attention-backend``.

    A name without a handler has that of ``triton``, which absorbs every step with a cached prefix, however long.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (  # noqa: PLC0415 - imports kernels
        AttentionBackendRegistry,
    )

    AttentionBackendRegistry.register(name, method_of)


def method_of(attn: Any, forward_batch: Any) -> Any:
    """
    Return how a layer computes a step: a member of SGLang's `AttnForwardMethod`.

    Args:
        attn: SGLang's attention module, with both forms.
        forward_batch: SGLang's step.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers  # noqa: PLC0415 - as above

    methods = handlers.AttnForwardMethod
    # The rule of SGLang for FlashAttention 3, which fits whatever the kernels are. For each pair of a query and a key
    # absorbed attention has (2 L + R) / (P + R + V) times the products, 3.4 times with DeepSeek-V3, but a cached prefix
    # has to be expanded first. So extends without one are expanded, and those whose prefixes have together
    # SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD tokens: with the prefix in one call where that fits, otherwise in chunks.
    # All other steps, deterministic ones and those that graphs capture are absorbed.
    method = handlers.handle_attention_fa3(attn, forward_batch)
    if method not in {methods.MHA_ONE_SHOT, methods.MHA_CHUNKED_KV}:
        return method
    served = _served.get(attn.attn_mha)
    in_parts = method == methods.MHA_CHUNKED_KV and any(forward_batch.extend_prefix_lens_cpu or ())
    if served is None or not served.serves(in_parts=in_parts):
        return handlers._dispatch_mla_subtype(attn, forward_batch)  # noqa: SLF001 - it has no public name
    return method


def joined(
    q: Tensor, k: Tensor | None, layer: Any, q_rope: Tensor | None, k_rope: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """
    Return absorbed queries and latents with their rotary parts, which models pass with them or apart.

    Args:
        q: ``(tokens, num_q_heads * L)``; with `q_rope` None, whole.
        k: ``(tokens, 1, L)``; with `k_rope` None, whole; None where it is in the pool.
        layer: SGLang's layer.
        q_rope: ``(tokens, num_q_heads * R)``.
        k_rope: ``(tokens, 1, R)``.
    """
    heads, rank, rope = layer.tp_q_head_num, layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim
    if q_rope is not None:
        q = torch.cat([q.reshape(-1, heads, rank), q_rope.reshape(-1, heads, rope)], -1)
    if k is not None and k_rope is not None:
        k = torch.cat([k.reshape(-1, 1, rank), k_rope.reshape(-1, 1, rope)], -1)
    return q, k
