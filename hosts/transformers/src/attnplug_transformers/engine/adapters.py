"""
Attention modules that compute their attention themselves, instead of calling transformers' AttentionInterface.

While an engine owns such a model, one method of each attention module is replaced by a function of this file, which
projects as the module does and leaves the attention to the engine. Each follows the class that it is named for, as of
transformers 5.17 to 5.24.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers.models.falcon import modeling_falcon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeAlias

    Attend: TypeAlias = Callable[..., tuple[Tensor, None]]

KEY: Final = "attnplug_engine_adapted"
"""The name in transformers of what adapted models run on: their own code computes with masks."""


@frozen
class Adapter:
    """
    How a class of attention modules is made to call the engine.

    Attributes:
        method: The method that is replaced.
        function: What takes its place: called with the engine's attention function, the module, and its arguments.
    """

    method: str
    function: Callable[..., Any]


def _attended(attend: Attend, self: Any, parts: Iterable[Tensor], scale: float) -> Tensor:
    """Return ``(batch, tokens, heads, size)`` of query, key and value, each ``(batch, heads, tokens, size)``."""
    output, _ = attend(self, *parts, None, scaling=float(scale), is_causal=True)
    return output


def _gptj(attend: Attend, self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    # CodeGen rotates in float32, whatever the dtype of its weights.
    parts = (query.to(value.dtype), key.to(value.dtype), value)
    return _attended(attend, self, parts, 1 / self.scale_attn).transpose(1, 2), None


def _bloom(attend: Attend, self: Any, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    parts = self._reshape(self.query_key_value(hidden_states))
    return residual + self.dense(_attended(attend, self, parts, self.inv_norm_factor).flatten(2)), None


def _falcon(
    attend: Attend,
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states)
    if self.new_decoder_architecture:
        # The module repeats each key for its group of queries; a KV cache holds it once.
        groups = fused.unflatten(2, (-1, self.num_heads // self.num_kv_heads + 2, self.head_dim))
        parts = (groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1])
    else:
        parts = self._split_heads(fused)
    query, key, value = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        rotate: Any = modeling_falcon.apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    return self.dense(_attended(attend, self, (query, key, value), self.inv_norm_factor).flatten(2)), None


def _mpt(attend: Attend, self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    parts = fused.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
    return self.out_proj(_attended(attend, self, parts, self.softmax_scale).flatten(2)), None


def _xglm(attend: Attend, self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    rows = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    parts = (row.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for row in rows)
    return self.out_proj(_attended(attend, self, parts, self.scaling).flatten(2)), None


ADAPTERS: Final[dict[str, Adapter]] = {
    "GPTJAttention": Adapter("_attn", _gptj),
    "CodeGenAttention": Adapter("_attn", _gptj),
    "BloomAttention": Adapter("forward", _bloom),
    "FalconAttention": Adapter("forward", _falcon),
    "MptAttention": Adapter("forward", _mpt),
    "XGLMAttention": Adapter("forward", _xglm),
}
"""Class of transformers -> how it is adapted."""


_replaced: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Module -> the method that it had before, where that was not its class's."""


def is_adapted(model: nn.Module) -> bool:
    """Return whether the attention modules of a model have an adapter."""
    return next(_adapted_modules(model), None) is not None


def install(model: nn.Module, attend: Attend) -> None:
    """Let the attention modules of a model call an attention function."""
    for module, adapter in _adapted_modules(model):
        if module not in _replaced:  # a second engine finds it installed
            _replaced[module] = vars(module).get(adapter.method)  # a library may have one in front of the class's
            setattr(module, adapter.method, partial(adapter.function, attend, module))


def restore(model: nn.Module) -> None:
    """Give the attention modules of a model their own methods back."""
    for module, adapter in _adapted_modules(model):
        own = _replaced.pop(module, None)
        if own is None:
            vars(module).pop(adapter.method, None)
        else:
            setattr(module, adapter.method, own)


def _adapted_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Adapter]]:
    for module in model.modules():
        cls = type(module)
        if cls.__module__.startswith("transformers.models.") and cls.__name__ in ADAPTERS:
            adapter = ADAPTERS[cls.__name__]
            if hasattr(cls, adapter.method):  # GPT-J and CodeGen call the AttentionInterface since 5.24
                yield module, adapter


def make_mask(*_: Any, device: torch.device | str = "cpu", **__: Any) -> Tensor:
    """Return a mask that adapted modules ignore. Registered under `KEY`."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def alibi_slopes(model: Any) -> Tensor | None:
    """
    Return the ALiBi slopes of an adapted model, ``(num_heads,)`` float32; None of models without ALiBi.

    Sources: Press et al. 2022, https://arxiv.org/abs/2108.12409, section 3, and its code for numbers of heads that are
    no power of two; MPT's code has another order of these; Falcon scales the bias like the scores. Of Falcon,
    transformers rounds the bias to bfloat16, inexact beyond position 256, and adds it twice in eager attention; its
    SDPA attention, the default, adds it once, as the published code does.
    """
    config = model.config
    if config.model_type == "bloom":
        slopes = _slopes(config.n_head)
    elif config.model_type == "falcon" and config.alibi:
        size = config.hidden_size // config.num_attention_heads
        slopes = [slope / math.sqrt(size) for slope in _slopes(config.num_attention_heads)]
    elif config.model_type == "mpt":
        slopes = _mpt_slopes(config.n_heads)
    else:
        return None
    return torch.tensor(slopes, dtype=torch.float32, device=model.device)


def _slopes(heads: int) -> list[float]:
    power = 1 << (heads.bit_length() - 1)
    rest = [2 ** (-8 * step / (2 * power)) for step in range(1, 2 * (heads - power), 2)]
    return [2 ** (-8 * step / power) for step in range(1, power + 1)] + rest


def _mpt_slopes(heads: int) -> list[float]:
    power = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-8 * step / power) for step in range(1, power + 1)]
    return slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads]
