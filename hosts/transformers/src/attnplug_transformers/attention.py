"""The dense attention function that transformers calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from attnplug.dense import use_device
from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.binding import Binding, bind, find_binding, layer_of_module
from attnplug_transformers.call import AttentionCall, check_outputs, module_name, uncompiled
from attnplug_transformers.mask import DenseMask, LazyMask, default_mask
from attnplug_transformers.packing import Pattern, pack

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_transformers.packing import Mask, Packing


@uncompiled
def attend(*args: Any, **arguments: Any) -> tuple[Tensor, None]:
    """
    Attend through the backend that was negotiated for the module's layer. Registered under the name ``"attnplug"``.

    Args:
        args: As for `AttentionCall.of`, with cached keys and values included. The mask is what `make_mask` returned; or
            one of the caller, ``(batch or 1, 1, queries or 1, keys)``; or None.
        arguments: As for `AttentionCall.of`.

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``, zero for padded queries; and None in place of attention weights.

    Raises:
        NotNegotiatedError: The call differs from what was negotiated, by its mask too, or attention weights are
            requested.
        NoBackendError: No backend supports the layer.
        TensorError: The tensors have other shapes.
    """
    call = _with_causality(AttentionCall.of(*args, **arguments))
    check_outputs(call.module)
    with use_device(call.query.device):
        binding = _bind(call)
        pattern = Pattern.of(binding.requirements)
        packing = pack(_mask(call, pattern), pattern, binding.impl.layer.name, call.query.device)
        return _run(binding, packing, call), None


def _with_causality(call: AttentionCall) -> AttentionCall:
    """Return the call with the causality that its mask shows, where neither argument, module nor table has it."""
    if call.signature.is_causal is not None or getattr(call.module, "is_causal", None) is not None:
        return call
    if layer_of_module(call.module) is not None:
        return call
    q_length, kv_length = call.query.shape[2], call.key.shape[2]
    if call.mask is None and q_length > 1:
        name = module_name(call.module)
        raise NotNegotiatedError(
            f"{name}: the call has neither is_causal nor a mask, and the module has no is_causal",
            "one of them shows whether tokens attend to later ones",
            "set is_causal on the module, pass an attention_mask, or use attn_implementation='eager' for this model",
        )
    if call.mask is None:
        is_causal = True  # the only query is the last token, which attends to all either way
    elif isinstance(call.mask, LazyMask):
        is_causal = call.mask.is_causal()
    else:
        is_causal = DenseMask.of(call.mask, call.query.shape[0], q_length, kv_length).is_causal()
    return attrs.evolve(call, signature=attrs.evolve(call.signature, is_causal=is_causal))


def _bind(call: AttentionCall) -> Binding:
    # A repeated call has the same requirements, and comparing signatures is cheaper than reading the configuration.
    last = find_binding(call.module)
    if last is not None and last.signature == call.signature:
        return bind(call, last.requirements, last.impl.layer.name)
    layer = layer_of_module(call.module, is_causal=call.signature.is_causal)
    if layer is None:
        return bind(call, call.signature.requirements(call.module), module_name(call.module))
    numbered = getattr(call.module, "layer_idx", None) is not None
    return bind(call, call.signature.narrow(layer), layer.name if numbered else module_name(call.module))


def _mask(call: AttentionCall, pattern: Pattern) -> Mask:
    batch_size, q_length, kv_length = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    if call.mask is None:
        causal = call.signature.is_causal
        causal = getattr(call.module, "is_causal", pattern.causal) if causal is None else causal
        return default_mask(batch_size, q_length, kv_length, causal=bool(causal), device=call.query.device)
    if not isinstance(call.mask, LazyMask):
        return DenseMask.of(call.mask, batch_size, q_length, kv_length)
    shape = (batch_size, 1, q_length, kv_length)
    if call.mask.shape != shape:
        raise TensorError(
            f"a mask of shape {tuple(call.mask.shape)} was made for a call of shape {shape}",
            "the mask has one column for each key of the call",
            "use attn_implementation='eager' for a model that gives its attention other keys than its masks",
        )
    return call.mask


def _run(binding: Binding, packing: Packing, call: AttentionCall) -> Tensor:
    batch_size, heads, q_length, _ = call.query.shape
    size = call.value.shape[3]
    if packing.batch is None:
        return call.query.new_zeros(batch_size, q_length, heads, size)
    query, key, value = packing.pack_queries(call.query), packing.pack_keys(call.key), packing.pack_keys(call.value)
    output = query.new_empty(query.shape[0], heads * size)
    binding.impl.forward(query, key, value, None, binding.planner.metadata(packing.batch), output)
    return packing.unpack(output.view(-1, heads, size), batch_size, q_length)
