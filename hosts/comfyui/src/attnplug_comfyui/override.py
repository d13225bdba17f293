"""What ComfyUI calls in place of its attention function, for the models that have it in their options."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.dense import attend_like_sdpa
from attnplug.errors import NotNegotiatedError
from attnplug_comfyui.arguments import precision_of, read_call
from attnplug_comfyui.decisions import REFUSALS, Decisions
from attnplug_comfyui.routes import Route, RouteCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug_comfyui.arguments import AttentionCall

OPTION: Final = "optimized_attention_override"
"""The key of a model's `transformer_options` that ComfyUI looks for in each call, since 0.3.59."""

MOST_SEQUENCES: Final = 2**15
"""Sequences that one call has: a grid of CUDA has 65,535 blocks on an axis, and ComfyUI's functions stop here, too."""

_HALVES: Final = (torch.float16, torch.bfloat16)


class AttentionOverride:
    """
    Runs the attention calls of a model through attnplug, and counts them.

    It is the value of `OPTION` in `transformer_options`. The clones of a model that ComfyUI makes have the same object,
    and count together.

    Args:
        backend: The backend that has to serve, ``backend`` or ``backend/variant``; None for the one that a selection
            chooses.
        options: Options by backend, as for `attnplug.select`.
        fallback: Whether ComfyUI's own function runs what no backend serves. Such calls are counted, and logged once.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        options: dict[str, dict[str, Any]] | None = None,
        fallback: bool = False,
    ) -> None:
        self.fallback = fallback
        self._decisions = Decisions(backend, options)
        self._counts = RouteCounts()

    def __repr__(self) -> str:
        return f"AttentionOverride(backend={self.backend!r}, options={self.options!r}, fallback={self.fallback})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionOverride:
        return self  # nodes may copy the options of a model deeply: its calls are counted here all the same

    @property
    def backend(self) -> str | None:
        """The backend that has to serve, or None."""
        return self._decisions.backend

    @property
    def options(self) -> dict[str, dict[str, Any]] | None:
        """Options by backend, or None."""
        return self._decisions.options

    # A graph cannot hold counts, and the decision about ComfyUI's own function: it breaks here, as at an unknown call.
    @torch.compiler.disable  # type: ignore[untyped-decorator] # of torch
    def __call__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """
        Attend, as one of ComfyUI's functions does.

        Args:
            function: ComfyUI's function, without its wrapper: it runs what no backend serves, with `fallback`.
            args: Its arguments by position: ``q, k, v, heads, mask, attn_precision, skip_reshape,
                skip_output_reshape``. q, k and v are ``(batch, tokens, heads * size)``, or with `skip_reshape`
                ``(batch, heads, tokens, size)``.
            kwargs: Those and further ones by name: `scale`, `enable_gqa`, `low_precision_attention`.

        Returns:
            ``(batch, queries, heads * size_v)``, or with `skip_output_reshape` ``(batch, heads, queries, size_v)``.

        Raises:
            TensorError: Tensors do not fit each other.
            NoBackendError: No backend serves the call, and `fallback` is False.
            NotNegotiatedError: Likewise, for what no backend could be asked.
            PluginError: A plugin is damaged.
        """
        replaced = getattr(function, "__name__", type(function).__name__)
        try:
            call = read_call(args, kwargs)
            call = _in_precision(call, precision_of(args, kwargs))
            chosen = self._decisions.backend_of(call).id
            output = _attend(call, chosen, self.options)
        except REFUSALS as error:
            dtype, reason = _dtype(args, kwargs), error.summary
            self._counts.count(Route(replaced, None, dtype, reason, refused=not self.fallback))
            if not self.fallback:
                raise
            return function(*args, **kwargs)
        self._counts.count(Route(replaced, chosen, _name(call.query.dtype)))
        return call.as_comfyui(output)

    def report(self) -> tuple[Route, ...]:
        """Return where calls went since the last `reset`, most calls first."""
        return self._counts.routes()

    def reset(self) -> None:
        """Count from zero."""
        self._counts.reset()


def _attend(call: AttentionCall, backend: str, options: dict[str, dict[str, Any]] | None) -> Tensor:
    """Return ``(batch, queries, heads, size_v)``."""
    batch = call.query.shape[0]
    if batch > MOST_SEQUENCES:
        starts = range(0, batch, MOST_SEQUENCES)
        return torch.cat([_attend(call.part(at, at + MOST_SEQUENCES), backend, options) for at in starts])
    output: Tensor = attend_like_sdpa(
        call.query,
        call.key,
        call.value,
        call.mask,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        tokens_first=True,
        backend=backend,
        options=options,
    )
    return output


def _in_precision(call: AttentionCall, requested: torch.dtype | None) -> AttentionCall:
    """Return the call with its tensors in the precision that the scores are requested in."""
    precision = _attn_precision(requested, call.dtype)
    if precision != torch.float32:
        call = call.in_autocast()
    if precision == torch.float32 and call.dtype in _HALVES:
        call = call.in_float32()
    elif precision is not None and precision.itemsize > call.dtype.itemsize:
        raise NotNegotiatedError(
            f"attn_precision={_name(precision)} is given to ComfyUI's attention function",
            "attn_precision is float32, the dtype of the tensors, or None",
            "permit ComfyUI's own function (fallback), which computes such scores in the dtype of the tensors",
        )
    mask = call.mask
    if mask is not None and mask.is_floating_point() and mask.dtype.itemsize > call.query.dtype.itemsize:
        raise NotNegotiatedError(
            f"an additive mask of {_name(mask.dtype)} is given for a call in {_name(call.query.dtype)}",
            "backends add a mask in the dtype of the call, which has fewer digits",
            f"permit ComfyUI's own function (fallback), or make the mask in {_name(call.query.dtype)}",
        )
    return call


def _attn_precision(requested: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return the precision that ComfyUI's command line makes of the requested one (--force-upcast-attention)."""
    comfyui = sys.modules.get("comfy.ldm.modules.attention")  # whoever calls the override has loaded it
    decide: Callable[..., torch.dtype | None] | None = getattr(comfyui, "get_attn_precision", None)
    return requested if decide is None else decide(requested, dtype)


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the dtype of a call's queries."""
    query = args[0] if args else kwargs.get("q", kwargs.get("query"))
    return _name(query.dtype) if isinstance(query, torch.Tensor) else "an unknown dtype"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
