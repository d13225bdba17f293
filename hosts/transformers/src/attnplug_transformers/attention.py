"""The dense attention function that transformers calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from attnplug.dense import use_device
from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.binding import Binding, bind, find_binding, layer_of_module
from attnplug_transformers.call import AttentionCall, check_outputs, module_name, uncompiled
from attnplug_transformers.mask import ELEMENTS_AT_ONCE, DenseMask, LazyMask, default_mask
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
        ``(batch, queries, num_q_heads, head_size_v)``; and None in place of attention weights. Padded queries have the
        rows of eager attention, computed in torch.

    Raises:
        NotNegotiatedError: The call differs from what was negotiated, by its mask too, or attention weights are
            requested.
        NoBackendError: No backend supports the layer.
        TensorError: The tensors have other shapes.
    """
    call = _with_window(_with_causality(AttentionCall.of(*args, **arguments)))
    check_outputs(call.module)
    with use_device(call.query.device):
        binding = _bind(call)
        pattern = Pattern.of(binding.requirements)
        mask = _mask(call, pattern)
        starts = _starts_of_samples(call, mask) if binding.requirements.attn_type != "encoder_decoder" else ()
        packing = pack(mask, pattern, binding.impl.layer.name, call.query.device, starts)
        return _run(binding, packing, call, mask), None


def _with_causality(call: AttentionCall) -> AttentionCall:
    """Return the call with the causality that its mask shows, where neither argument, module nor table has it."""
    by_module = getattr(call.module, "is_causal", None)
    # PaliGemma's modules say False for its prefix, and its text is causal.
    is_open = by_module is None or (by_module is False and isinstance(call.mask, LazyMask) and call.key.shape[2] > 1)
    if call.signature.is_causal is not None or not is_open or layer_of_module(call.module) is not None:
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


def _with_window(call: AttentionCall) -> AttentionCall:
    """Return the call with the window as the contract counts it, the query's own token included."""
    # Encoders of the library pass the distance or one more: the mask shows which, once keys are that far apart.
    width, mask = call.signature.sliding_window, call.mask
    causal = call.signature.is_causal
    if width is None or (getattr(call.module, "is_causal", True) if causal is None else causal):
        return call
    if not isinstance(mask, LazyMask) or layer_of_module(call.module, is_causal=causal) is not None:
        return call
    return attrs.evolve(call, signature=attrs.evolve(call.signature, sliding_window=width + mask.reaches(width)))


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


def _starts_of_samples(call: AttentionCall, mask: Mask) -> tuple[int, ...]:
    """Return where the samples begin that are packed into the only row of the call; empty for a single sample."""
    # As FlashAttention in transformers: positions restart at their least one, and nothing is padded.
    if call.positions is None or not isinstance(mask, LazyMask):
        return ()
    if call.mask is None:  # the mask is shared between calls, and positions may be written in place
        return _restarts(call.positions, None)
    if mask.samples is None or mask.samples[0] is not call.positions:
        mask.samples = call.positions, _restarts(call.positions, mask.padding)
    return mask.samples[1]


def _restarts(positions: Tensor, padding: Tensor | None) -> tuple[int, ...]:
    starts = (positions[0] == positions.min()).nonzero()[:, 0].tolist()
    is_packed = len(starts) > 1 and (padding is None or bool(padding.all()))
    return tuple(sorted({0, *starts})) if is_packed else ()


def _run(binding: Binding, packing: Packing, call: AttentionCall, mask: Mask) -> Tensor:
    batch_size, heads, q_length, _ = call.query.shape
    size = call.value.shape[3]
    padded = call.query.new_empty(batch_size, q_length, heads, size)
    if packing.batch is None or packing.queries is not None:
        _write_padding(padded, packing, call, mask)
    if packing.batch is None:
        return padded
    query, key, value = packing.pack_queries(call.query), packing.pack_keys(call.key), packing.pack_keys(call.value)
    output = query.new_empty(query.shape[0], heads * size)
    binding.impl.forward(query, key, value, None, binding.planner.metadata(packing.batch), output)
    return packing.unpack(output.view(-1, heads, size), padded)


def _write_padding(padded: Tensor, packing: Packing, call: AttentionCall, mask: Mask) -> None:
    """Write what eager attention returns for padded queries into ``(batch, queries, heads, size)``."""
    # generate() reads the last row of each prompt, which is padding where prompts are padded on the right.
    # Without a key the softmax is uniform over all columns, or in the sink alone.
    uniform = torch.zeros_like(call.value[:, :, :1]) if call.sinks is not None else call.value.mean(2, keepdim=True)
    groups = call.query.shape[1] // call.value.shape[1]
    padded.copy_(uniform.repeat_interleave(groups, 1).transpose(1, 2).expand_as(padded))
    if packing.padding is None:
        return
    step = max(1, ELEMENTS_AT_ONCE // (call.query.shape[1] * call.key.shape[2]))
    for start, attends in mask.rows():
        rows = packing.padding[:, start : start + attends.shape[1]]
        for sequence in rows.any(1).nonzero()[:, 0].tolist():
            every = rows[sequence].nonzero()[:, 0]
            for at in range(0, len(every), step):
                queries = every[at : at + step]
                columns, seen = (queries + start).to(padded.device), attends[sequence, queries].to(padded.device)
                padded[sequence, columns] = _attend_in_torch(call, sequence, columns, seen).to(padded.dtype)


def _attend_in_torch(call: AttentionCall, sequence: int, columns: Tensor, seen: Tensor) -> Tensor:
    """Return ``(queries, heads, size)`` of some queries of a sequence under a ``(queries, keys)`` mask."""
    query, key, value = call.query[sequence, :, columns].float(), call.key[sequence].float(), call.value[sequence]
    grouped = query.reshape(len(key), -1, *query.shape[1:])  # query heads that share a key and value head are neighbors
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, key) * (
        query.shape[-1] ** -0.5 if call.scale is None else call.scale
    )
    if call.signature.softcap is not None:
        scores = call.signature.softcap * torch.tanh(scores / call.signature.softcap)
    scores = scores.flatten(0, 1).masked_fill(~seen, -torch.inf)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.float()[:, None, None].expand(-1, len(columns), 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[1]].reshape(*grouped.shape[:3], -1)
    return torch.einsum("hgqk,hkd->qhgd", weights, value.float()).flatten(1, 2)
