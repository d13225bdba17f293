"""The attention function that transformers calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.binding import Binding, bind, bound, layer_of_module
from attnplug_transformers.call import CallSignature, check_arguments, uncompiled
from attnplug_transformers.mask import DenseMask, LazyMask, default_mask
from attnplug_transformers.packing import Pattern, pack

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from attnplug_transformers.packing import Mask, Packing


@uncompiled
def attend(  # noqa: PLR0913, PLR0917 - the library's signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - the library's signature
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """
    Attend through the backend that was negotiated for the module's layer. Registered under the name ``"attnplug"``.

    Args:
        module: The attention module.
        query: ``(batch, num_q_heads, queries, head_size)``.
        key: ``(batch, num_kv_heads, keys, head_size)``, cached ones included.
        value: ``(batch, num_kv_heads, keys, head_size_v)``.
        attention_mask: What `make_mask` returned; or a mask of the caller, ``(batch or 1, 1, queries or 1, keys)``.
        dropout: Probability of dropping a weight; only 0 is served.
        scaling: Factor of the scores; None is ``head_size ** -0.5``.
        sliding_window: Tokens that a token attends, itself included.
        softcap: Scores become ``cap * tanh(score / cap)``.
        is_causal: Whether tokens attend no later ones; None asks the module.
        s_aux: ``(num_q_heads,)`` sinks.
        rest: What else the library hands over: harmless, or refused (see `attnplug_transformers.call`).

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``, zero for padded queries; and None, for no weights are returned.

    Raises:
        NotNegotiatedError: The call brings what was not negotiated, a mask of another pattern included.
        NoBackendError: Nothing can serve the layer.
    """
    name = _name(module)
    check_arguments(dropout, rest, name)
    _check_tensors(query, key, value, name)
    call = CallSignature.of(
        module,
        query,
        key,
        value,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux is not None,
        is_causal=is_causal,
    )
    with _current(query.device):
        binding = _bind(module, call, name, scaling, s_aux, query.device)
        pattern = Pattern.of(binding.requirements)
        mask = _mask(attention_mask, module, call, pattern, query, key)
        packing = pack(mask, pattern, binding.impl.layer.name, query.device)
        return _run(binding, packing, query, key, value), None


def _run(binding: Binding, packing: Packing, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads, size = query.shape[1], value.shape[3]
    if packing.batch is None:
        return query.new_zeros(query.shape[0], query.shape[2], heads, size)
    packed = packing.pack_queries(query)
    output = packed.new_empty(packed.shape[0], heads * size)
    metadata = binding.group.metadata(packing.batch)
    binding.impl.forward(packed, packing.pack_keys(key), packing.pack_keys(value), None, metadata, output)
    return packing.unpack(output.view(-1, heads, size), query.shape[0], query.shape[2])


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: backends know its type, and a model may be spread over several of that type."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _name(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} {index}"


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, name: str) -> None:
    if (
        query.ndim != 4
        or key.ndim != 4
        or value.ndim != 4
        or key.shape[:3] != value.shape[:3]
        or len(query) != len(key)
    ):
        raise TensorError(
            f"{name}: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} were given",
            "they are (batch, heads, tokens, size), with as many keys as values",
            "use attn_implementation='eager' for a model that calls attention otherwise",
        )
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotNegotiatedError(
            f"{name}: gradients are recorded through this call",
            "contract 1.0 has no backward pass",
            "call the model under torch.no_grad() or torch.inference_mode(), or train with attn_implementation='sdpa'",
        )


def _bind(
    module: nn.Module, call: CallSignature, name: str, scale: float | None, sinks: Tensor | None, device: torch.device
) -> Binding:
    """A repeated call asks for what it asked before; comparing its facts is cheaper than reading the configuration."""
    last = bound(module)
    if last is not None and last.call == call:
        return bind(module, call, last.requirements, last.impl.layer.name, scale, sinks, device)
    layer = layer_of_module(module, is_causal=call.is_causal)
    requirements = call.requirements(module) if layer is None else call.agree(layer)
    known = layer is not None and getattr(module, "layer_idx", None) is not None
    return bind(module, call, requirements, layer.name if layer is not None and known else name, scale, sinks, device)


def _mask(
    given: Tensor | LazyMask | None,
    module: nn.Module,
    call: CallSignature,
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
) -> Mask:
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    if given is None:
        causal = call.is_causal if call.is_causal is not None else getattr(module, "is_causal", pattern.causal)
        return default_mask(batch_size, q_length, kv_length, causal=bool(causal), device=query.device)
    if not isinstance(given, LazyMask):
        return DenseMask.of(given, batch_size, q_length, kv_length)
    if given.shape != (batch_size, 1, q_length, kv_length):
        raise TensorError(
            f"a mask of shape {tuple(given.shape)} was made for a call of shape {(batch_size, 1, q_length, kv_length)}",
            "the mask says which keys are given",
            "use attn_implementation='eager' for a model that gives its attention other keys than its masks",
        )
    return given
