"""
Multi-head latent attention (MLA): the latents that a model stores, and its queries and outputs in their space.

Modules of transformers pass their latents, normalized, and the rotated part of the key to ``update`` of the KV cache
before they expand them. `LatentCache` takes them there. The engine stores them in its own KV cache, and attends to them
with absorbed projections, instead of the keys and values that the module expands. Long prefills attend to keys and
values per head: see `attnplug_transformers.engine.prefills`.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from attnplug.errors import RequirementsError
from attnplug_transformers.call import module_name
from attnplug_transformers.engine.indexer import IndexKey

if TYPE_CHECKING:
    from attnplug_transformers.call import AttentionCall
    from attnplug_transformers.engine.indexer import IndexStep
    from attnplug_transformers.engine.prefills import PrefillStep

_ARGUMENT: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""The argument of a model that is its KV cache: another name since transformers 5.24."""

_TOLERANCE: Final = 0.05
"""How far rows of a 16-bit dtype may differ by rounding, relative to the largest."""

_OWN: Final = (
    "generate with transformers and attn_implementation='attnplug' (attnplug_transformers.register()), where the module"
    " expands its latents"
)


class LatentCache(DynamicCache):
    """
    The KV cache that a model gets for one forward pass: it passes latents on, and keeps no tokens.

    Args:
        compares: Whether the up-projections are compared with the keys and values that modules expand, which waits for
            the device.
        prefill: The long prefills of the step, which are its last tokens; None absorbs all tokens.
        index: The keys that indexers score; None without, and where the keys of new tokens are all there are.

    Attributes:
        index_keys: The key of each indexer that was called, by the number of its layer.
    """

    def __init__(
        self, *, compares: bool = False, prefill: PrefillStep | None = None, index: IndexStep | None = None
    ) -> None:
        super().__init__()
        self.index_keys: dict[int, IndexKey] = {}
        self._compares = compares
        self._prefill = prefill
        self._index = index
        self._latents: dict[int | None, tuple[Tensor, Tensor]] = {}

    @property
    def argument(self) -> dict[str, LatentCache]:
        """The argument with which a model is called."""
        return {_ARGUMENT: self}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """
        Keep the step's latents for the attention call that follows, and return those of its first token.

        Args:
            key_states: ``(1, 1, tokens, kv_lora_rank)`` normalized latents.
            value_states: ``(1, 1, tokens, qk_rope_head_dim)`` rotated parts of the keys.
            layer_idx: The module's number.
        """
        self._latents[layer_idx] = (key_states, value_states)
        # The engine reads no keys that the module expands: it expands as few as it can.
        return key_states[:, :, :1], value_states[:, :, :1]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """
        Store the step's keys of an indexer, and return those of all of its requests.

        Args:
            indexer_key_states: ``(1, tokens, index_head_dim)``.
            layer_idx: The module's number.
        """
        self.index_keys[layer_idx] = IndexKey(layer_idx, indexer_key_states.shape[-1], indexer_key_states.dtype)
        return indexer_key_states if self._index is None else self._index.update(indexer_key_states, layer_idx)

    def absorb(self, call: AttentionCall, chosen: Tensor | None = None) -> AttentionCall:
        """
        Return a call in the space of latents: one KV head, whose values are the first part of its keys.

        Args:
            call: The call of a module with latents, with queries ``(1, num_heads, tokens, nope + rope)``.
            chosen: ``(1, tokens, at most topk)``, the tokens that an indexer has selected; None without.

        Returns:
            Its call with queries ``(1, num_heads, absorbed tokens, kv_lora_rank + rope)``, keys of that size of all
            tokens, and values of ``kv_lora_rank``.

        Raises:
            RequirementsError: The module stores no latents, or its up-projection is not a plain weight.
        """
        module: Any = call.module
        latents = self._latents.pop(getattr(module, "layer_idx", None), None)
        if latents is None or latents[0].shape[-1] != getattr(module, "kv_lora_rank", None):
            raise RequirementsError(
                f"{module_name(module)} does not store latents in its KV cache",
                "the engine takes them from cache.update(), where modules of transformers pass them since release 5.15;"
                f" this is {transformers.__version__}",
                f"run the model from the classes of transformers, or {_OWN}",
            )
        if self._compares:
            _compare(call, *latents)
        key_up = up_projection(module)[:, : module.qk_nope_head_dim]
        stop = None if self._prefill is None else self._prefill.first_token
        sizes = [module.qk_nope_head_dim, module.qk_rope_head_dim]
        nope, rope = torch.split(call.query[0, :, :stop], sizes, -1)
        query = torch.cat([torch.einsum("ntp,npl->tnl", nope, key_up), rope.transpose(0, 1)], -1)
        key = torch.cat(latents, -1)
        value = key[..., : module.kv_lora_rank]
        signature = attrs.evolve(
            call.signature,
            num_kv_heads=1,
            head_size=key.shape[-1],
            head_size_v=value.shape[-1],
            is_cross=False,  # there are as many keys as queries
        )
        if chosen is not None:
            chosen = chosen[0] if self._index is None else self._index.select(chosen)
        query = query.transpose(0, 1)[None]
        return attrs.evolve(call, query=query, key=key, value=value, signature=signature, indices=chosen)

    def finish(self, call: AttentionCall, absorbed: AttentionCall, output: Tensor) -> Tensor:
        """
        Return the output in the space of the module's values, that of the long prefills included.

        Args:
            call: The call of the module.
            absorbed: What `absorb` returned for it.
            output: ``(1, absorbed tokens, num_heads, kv_lora_rank)``, the output of absorbed attention.

        Returns:
            ``(1, tokens, num_heads, v_head_dim)``.
        """
        module: Any = call.module
        value_up = up_projection(module)[:, module.qk_nope_head_dim :]
        expanded = torch.einsum("btnl,nvl->btnv", output, value_up)
        if self._prefill is None:
            return expanded
        rows = slice(self._prefill.first_token, None)
        query, latents = (part[0, :, rows].transpose(0, 1) for part in (call.query, absorbed.key))
        return torch.cat([expanded, self._prefill.attend(module, query, latents)[None]], 1)


def up_projection(module: Any) -> Tensor:
    """
    Return the up-projections of each head's keys, then of its values, as a view of the module's weight.

    Returns:
        ``(num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)``.

    Raises:
        RequirementsError: `kv_b_proj` is not a linear layer with a plain weight.
    """
    projection, size = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
    shape = (module.num_heads * size, module.kv_lora_rank)
    weight: Any = getattr(projection, "weight", None)
    if (
        type(projection) is not nn.Linear
        or type(weight) not in {Tensor, nn.Parameter}
        or weight.shape != shape
        or weight.dtype not in {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        or projection.bias is not None
    ):
        found = "no weight" if weight is None else f"a {type(weight).__name__} of {weight.dtype}, {tuple(weight.shape)}"
        raise RequirementsError(
            f"{module_name(module)}.kv_b_proj is a {type(projection).__name__} with {found}",
            f"absorbed attention multiplies by the weight of a Linear without bias, {shape}, that is not quantized",
            f"leave kv_b_proj out of the quantization, or {_OWN}",
        )
    heads: Tensor = weight.view(module.num_heads, size, -1)
    return heads


def expand(module: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return keys and values per head.

    Args:
        module: The attention module.
        latents: ``(rows, kv_lora_rank + qk_rope_head_dim)``.

    Returns:
        ``(rows, num_heads, qk_nope_head_dim + qk_rope_head_dim)`` and ``(rows, num_heads, v_head_dim)``.
    """
    weight = up_projection(module)
    compressed, rotated = torch.split(latents, [module.kv_lora_rank, module.qk_rope_head_dim], -1)
    heads = nn.functional.linear(compressed, weight.flatten(0, 1)).view(len(latents), *weight.shape[:2])
    nope, value = torch.split(heads, [module.qk_nope_head_dim, module.v_head_dim], -1)
    return torch.cat([nope, rotated[:, None].expand(-1, module.num_heads, -1)], -1), value


def _compare(call: AttentionCall, compressed: Tensor, rotated: Tensor) -> None:
    """Compare the first token's keys and values, as the module has expanded them, with those by its weight."""
    latents = torch.cat([compressed[0, 0, :1], rotated[0, 0, :1]], -1)
    key, value = (part.transpose(0, 1) for part in expand(call.module, latents))
    for found, expected in ((key, call.key[0]), (value, call.value[0])):
        is_near = found.shape == expected.shape and bool(
            (found - expected).abs().amax() <= _TOLERANCE * expected.abs().amax()
        )
        if not is_near:
            raise RequirementsError(
                f"{module_name(call.module)} expands its latents to other keys or values than its kv_b_proj",
                "its weight is [keys; values] of each head, and the rotated part is appended to each key",
                _OWN,
            )
