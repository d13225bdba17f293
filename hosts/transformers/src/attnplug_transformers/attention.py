"""The dense attention function that transformers calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.errors import TensorError
from attnplug_transformers.binding import Binding, bind, find_binding, layer_of_module, use_device
from attnplug_transformers.call import CallSignature, check_arguments, check_no_gradients, module_name, uncompiled
from attnplug_transformers.mask import DenseMask, LazyMask, default_mask
from attnplug_transformers.packing import Pattern, pack

if TYPE_CHECKING:
    import torch
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
        dropout: Probability of dropping an attention weight, which has to be 0.
        scaling: Factor of the scores; None is ``head_size ** -0.5``.
        sliding_window: Tokens that a token attends to, itself included.
        softcap: Scores become ``cap * tanh(score / cap)``.
        is_causal: Whether tokens attend to no later ones; None leaves it to the module.
        s_aux: ``(num_q_heads,)`` attention sinks.
        rest: Other arguments of the library: harmless, or refused (see `attnplug_transformers.call`).

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``, zero for padded queries; and None in place of attention weights.

    Raises:
        NotNegotiatedError: The call differs from what was negotiated, by its mask too.
        NoBackendError: No backend supports the layer.
        TensorError: The tensors have other shapes.
    """
    name = module_name(module)
    check_arguments(dropout, rest, name)
    _check_tensors(query, key, value, name)
    signature = CallSignature.of(
        module,
        query,
        key,
        value,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux is not None,
        is_causal=is_causal,
    )
    with use_device(query.device):
        binding = _bind(module, signature, name, scaling, s_aux, query.device)
        pattern = Pattern.of(binding.requirements)
        mask = _mask(attention_mask, module, signature, pattern, query, key)
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
    fix = "call the model under torch.no_grad() or torch.inference_mode(), or train with attn_implementation='sdpa'"
    check_no_gradients(name, (query, key, value), fix)


def _bind(
    module: nn.Module,
    signature: CallSignature,
    name: str,
    scale: float | None,
    sinks: Tensor | None,
    device: torch.device,
) -> Binding:
    # A repeated call has the same requirements, and comparing signatures is cheaper than reading the configuration.
    last = find_binding(module)
    if last is not None and last.signature == signature:
        return bind(module, signature, last.requirements, last.impl.layer.name, scale, sinks, device)
    layer = layer_of_module(module, is_causal=signature.is_causal)
    if layer is None:
        return bind(module, signature, signature.requirements(module), name, scale, sinks, device)
    numbered = getattr(module, "layer_idx", None) is not None
    return bind(module, signature, signature.narrow(layer), layer.name if numbered else name, scale, sinks, device)


def _mask(
    mask: Tensor | LazyMask | None,
    module: nn.Module,
    signature: CallSignature,
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
) -> Mask:
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        causal = signature.is_causal
        causal = getattr(module, "is_causal", pattern.causal) if causal is None else causal
        return default_mask(batch_size, q_length, kv_length, causal=bool(causal), device=query.device)
    if not isinstance(mask, LazyMask):
        return DenseMask.of(mask, batch_size, q_length, kv_length)
    if mask.shape != (batch_size, 1, q_length, kv_length):
        raise TensorError(
            f"a mask of shape {tuple(mask.shape)} was made for a call of shape {(batch_size, 1, q_length, kv_length)}",
            "the mask has one column for each key of the call",
            "use attn_implementation='eager' for a model that gives its attention other keys than its masks",
        )
    return mask
