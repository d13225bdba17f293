"""
What ``attnplug bench --host transformers`` measures: a small model on Transformers' own `sdpa` and on attnplug, the
module of the entry point `transformers` in the group ``attnplug.benchmarks``.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import attnplug
from attnplug.errors import AttnplugError
from attnplug_transformers import register, selections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISTRIBUTIONS: Final = ("transformers", "attnplug-transformers")

SEQUENCES: Final = 4
TOKENS: Final = 64
LAYERS: Final = 4
NATIVE: Final = "sdpa"
CACHE: Final = next(
    name for name in ("cache", "past_key_values") if name in signature(LlamaForCausalLM.forward).parameters
)
"""The argument of the KV cache, by its name of today or by its former one."""


def parts(device: str, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield the parts of a model's steps: a prefill, its attention in one layer, a decode.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backend: The backend of attnplug; None for the one that is chosen.

    Raises:
        AttnplugError: No backend serves the model, or with another result.
    """
    model = _model(device)
    tokens = torch.randint(0, 255, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.inference_mode(), attnplug.using(backend=backend):

        def prefill(_: Any) -> Any:
            return model(tokens[:, :TOKENS], use_cache=False).logits

        def decode(cache: Any) -> Any:
            return model(tokens[:, TOKENS:], **{CACHE: cache}).logits

        cache = DynamicCache(config=model.config)
        model(tokens[:, :TOKENS], **{CACHE: cache})
        step = f"{SEQUENCES} x {TOKENS} tokens"
        yield f"prefill of {step}, {LAYERS} layers", _calls(model, prefill, lambda: None)
        yield f"decode behind {step}, {LAYERS} layers", _calls(model, decode, lambda: deepcopy(cache))
        yield f"attention of a layer, prefill of {step}", _calls(model, *_layer(model, prefill))


def _model(device: str) -> Any:
    """Return a small model with random weights; on a GPU its heads have the size that kernels like."""
    heads, size, dtype = (4, 16, torch.float32) if device == "cpu" else (16, 128, torch.bfloat16)
    config: Any = LlamaConfig(
        vocab_size=256,
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        attn_implementation=NATIVE,  # type: ignore[call-arg]  # in the arguments of its base
    )
    torch.manual_seed(0)
    register()
    model: Any = LlamaForCausalLM(config)
    return model.eval().to(device, dtype)


def _calls(model: Any, call: Callable[[Any], Any], prepare: Callable[[], Any]) -> dict[str, Any]:
    """Return the call of both, whose results are compared."""

    def prepared(name: str) -> Any:
        model.set_attn_implementation(name)
        return prepare()

    pairs: dict[str, Any] = {name: (call, partial(prepared, name)) for name in (NATIVE, "attnplug")}
    wanted, found = (run(make()).float() for run, make in pairs.values())
    chosen = next(iter(selections(model).values())).id
    if not torch.allclose(found, wanted, atol=3e-2, rtol=3e-2):
        raise AttnplugError(f"{chosen} computes another result than {NATIVE}", "", "run the conformance kit on it")
    return {NATIVE: pairs[NATIVE], f"attnplug on {chosen}": pairs["attnplug"]}


def _layer(model: Any, prefill: Callable[[Any], Any]) -> tuple[Callable[[Any], torch.Tensor], Callable[[], Any]]:
    """Return the call of the first layer's attention, and what returns its arguments in a prefill."""
    attention = model.model.layers[0].self_attn
    given: dict[str, Any] = {}

    def arguments() -> Any:
        name = model.config._attn_implementation  # noqa: SLF001 - it has no public name
        if name not in given:

            def keep(_: Any, *arguments: Any) -> None:
                given[name] = arguments

            hook = attention.register_forward_pre_hook(keep, with_kwargs=True)
            prefill(None)
            hook.remove()
        return given[name]

    return lambda found: attention(*found[0], **found[1])[0], arguments
