"""
transformers' continuous batching on attnplug: the attention of one model's `generate_batch`.

The manager keeps its own KV cache, which is updated by `PagedAttentionCache.update`: by the model's layer before it
attends (since 5.24), or by the attention function, as the library's own flash functions do (before). Calls attend by
`attnplug.dense.flash_attn_varlen_func` to the keys that this returns. Steps of decodes may have a block table instead:
nothing is updated then, and `attnplug.dense.flash_attn_with_kvcache` writes and reads the pages.
"""

from __future__ import annotations

import inspect
import logging
import threading
from contextvars import copy_context
from copy import copy
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, PreTrainedModel, __version__
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from attnplug.dense import flash_attn_varlen_func, flash_attn_with_kvcache
from attnplug.errors import AttnplugError, NotNegotiatedError
from attnplug_transformers.call import check_arguments, check_outputs, module_name, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context
    from types import TracebackType

    from torch import Tensor, nn
    from transformers import PretrainedConfig
    from typing_extensions import Self

    from attnplug.request import BackendNames, Options

_UPDATE: Final = tuple(inspect.signature(PagedAttentionCache.update).parameters)
_BY_INDICES: Final = ("self", "key_states", "value_states", "layer_idx", "read_index", "write_index")
_BY_KEYWORDS: Final = ("self", "key_states", "value_states", "layer_idx", "kwargs")

if _UPDATE == _BY_KEYWORDS:
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type

NAME: Final = "attnplug_flash" if _UPDATE == _BY_KEYWORDS else "paged|attnplug_flash"
"""The attention implementation's name: the manager makes no masks for one with "flash" (5.23) or "paged|" (5.17)."""

_STEP: Final = (
    *("read_index", "write_index", "logits_indices", "logits_processor_args", "input_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "block_table", "k_cache", "v_cache"),
)
"""Arguments of a step, which the KV cache, the model and `attend` use."""


class _Thread(threading.local):
    """What a thread has of one handle: a copy of its context, and the lengths of the step."""

    def __init__(self, context: Context) -> None:
        self.context = context.copy()  # one context cannot be entered by two threads at once
        self.first: Callable[[], nn.Module | None] = lambda: None
        self.starts: list[tuple[Tensor, Tensor]] = []


class ContinuousBatching:
    """
    A model whose continuous batching runs on attnplug, from entering to leaving it as a context manager.

    Backends are chosen in the scope in which it was entered (`attnplug.using`), whichever thread runs the model.

    Attributes:
        model: The model.
        name: The name of its attention implementation meanwhile.
        calls: How many calls of attention it has served.
        pages_per_block: Pages of a layer's keys or values in a block of its managers; 0 where it has no block tables.
    """

    def __init__(
        self, model: PreTrainedModel, *, backend: BackendNames | None = None, options: Options | None = None
    ) -> None:
        # What torch.compile returns is no model of the library: its `generate_batch` is that of the model inside. The
        # continuous batching of models comes from a mixin that types do not show.
        self.model: Any = getattr(model, "_orig_mod", model)
        self.name = NAME
        self.calls = 0
        self.pages_per_block = 0
        self._keywords: dict[str, Any] = {"backend": backend, "options": options}
        self._before: list[tuple[PretrainedConfig, str | None]] = []
        self._managers: WeakSet[Any] = WeakSet()
        self._thread: _Thread | None = None

    def __enter__(self) -> Self:
        """
        Let the model's continuous batching run on attnplug.

        Raises:
            AttnplugError: The model, or this version of transformers, does not let it.
        """
        check_model(self.model)
        with _lock:
            if any(module in _handles for module in self.model.modules()):
                raise AttnplugError(
                    f"continuous batching of {type(self.model).__name__} runs on attnplug already",
                    "a model has one backend choice at a time",
                    "leave the other context first",
                )
            self.model.destroy_cached_continuous_batching_manager()  # its settings are those of another attention
            AttentionInterface.register(NAME, attend)
            self._thread = _Thread(copy_context())
            _handles.update(dict.fromkeys(self.model.modules(), self))
            self._before = [(one, one._attn_implementation) for one in _configs(self.model)]  # noqa: SLF001 - its name
            for config, _ in self._before:
                # `set_attn_implementation` would import FlashAttention for any name with "flash".
                config._attn_implementation_internal = NAME  # noqa: SLF001 - the public setter sets sub-configurations too
            # The name on the instance hides the method of its class, for this model alone.
            self.model.init_continuous_batching = self._init_continuous_batching
        try:
            copy_context().run(_check_layers, self.model)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """
        Stop the managers that were made inside, and restore the model's own attention.

        None of them makes the masks that another attention reads. They finish their requests first, unless an error
        leaves the context: then these fail. One that the model has kept is destroyed.
        """
        try:
            self._stop_managers(**(_AT_ONCE if error is not None else {}))
            self.model.destroy_cached_continuous_batching_manager()
        finally:
            self._restore()

    def _stop_managers(self, **more: bool) -> None:
        for manager in list(self._managers):
            if manager.is_running():
                manager.stop(block=True, **more)
            manager.start = _refuse_start  # the name on the instance hides the method of its class

    def _restore(self) -> None:
        with _lock:
            for config, name in self._before:
                config._attn_implementation_internal = name  # noqa: SLF001 - as above
            for module in self.model.modules():
                _handles.pop(module, None)
            vars(self.model).pop("init_continuous_batching", None)
            self._before, self._thread = [], None

    def _init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, *rest: Any, **more: Any
    ) -> Any:
        """Make the model's manager, without CUDA graphs: left to itself it captures with any flash implementation."""
        config = continuous_batching_config
        if config is None:
            config = getattr(generation_config or self.model.generation_config, "continuous_batching_config", None)
        config = ContinuousBatchingConfig() if config is None else copy(config)
        graphs = getattr(config, "use_cuda_graph", None)
        if graphs is True or (isinstance(graphs, tuple) and any(graphs)):
            raise NotNegotiatedError(
                f"use_cuda_graph={graphs} was given",
                "attention of continuous batching is planned on the CPU for each step, which a graph does not replay",
                "pass ContinuousBatchingConfig(use_cuda_graph=False), or use the engine of attnplug, which has graphs",
            )
        config.use_cuda_graph = False
        self.pages_per_block = _pages_of_block(self.model)
        blocks = (config.max_blocks_per_request or 0) if self.pages_per_block else 0
        if blocks:
            config.max_blocks_per_request = 0  # the manager would look among its flash implementations
        made = type(self.model).init_continuous_batching
        manager = made(self.model, generation_config, config, *rest, **more)
        if blocks:  # read when it makes its KV cache, as it starts
            manager.continuous_batching_config.max_blocks_per_request = blocks
        self._managers.add(manager)
        return manager

    def run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``call(*args, **kwargs)``, run in the scope in which this was entered."""
        self.calls += 1
        thread = self._entered()
        return thread.context.run(call, *args, **kwargs, **self._keywords)

    def begin(self, module: nn.Module) -> None:
        """Take note of a layer's call. A step begins with the layer that the one before began with."""
        thread = self._entered()
        if thread.first() in {None, module}:
            thread.first = ref(module)
            thread.starts.clear()

    def on_cpu(self, starts: Tensor) -> Tensor:
        """Return the CPU copy of cumulative lengths, read once for each step: all layers are given the same tensors."""
        if starts.is_cpu:
            return starts
        thread = self._entered()
        for known, on_cpu in thread.starts:
            if known is starts:
                return on_cpu
        thread.starts.append((starts, starts.cpu()))
        return thread.starts[-1][1]

    def _entered(self) -> _Thread:
        if self._thread is None:
            raise NotNegotiatedError("the context was left", "attention runs inside of it", "enter it again")
        return self._thread


def _pages_of_block(model: Any) -> int:
    """
    Return how many pages a block of the manager has, each of a layer's keys or values: its block tables count these.

    It is 0 where there are no block tables: with sliding layers, and in transformers 5.17.
    """
    if _UPDATE != _BY_KEYWORDS:
        return 0
    layers = group_layers_by_attn_type(model.config.get_text_config())
    allocators = [ATTN_TYPE_TO_ALLOCATOR[kind] for kind in layers]
    if len(allocators) != 1 or not allocators[0].supports_block_table:
        return 0
    return int(allocators[0].rows_per_token) * sum(map(len, layers.values()))


_AT_ONCE: Final = (
    {"hard_stop": True} if "hard_stop" in inspect.signature(ContinuousBatchingManager.stop).parameters else {}
)
"""How a manager is stopped with requests that it has not finished, where this version of the library can."""


def _refuse_start() -> NoReturn:
    """Refuse to start a manager after its context was left."""
    raise NotNegotiatedError(
        "a manager of continuous batching was started after continuous_batching(model) was left",
        "its steps have no masks, which the model's own attention reads",
        "make another one with model.init_continuous_batching",
    )


_handles: Final[WeakKeyDictionary[nn.Module, ContinuousBatching]] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def check_model(model: Any) -> None:
    """
    Check that a model's continuous batching can run on attnplug.

    Raises:
        AttnplugError: It cannot, or this version of transformers is another one.
    """
    if _UPDATE not in (_BY_INDICES, _BY_KEYWORDS):
        raise AttnplugError(
            f"transformers {__version__} was found, whose PagedAttentionCache.update takes {_UPDATE[1:]}",
            "continuous batching is known for transformers 5.17, 5.23 and 5.24",
            "install one of these, or use attnplug_transformers.engine",
        )
    kind = type(model).__name__
    if not hasattr(model, "generate_batch") or not hasattr(model, "config"):
        raise AttnplugError(
            f"{kind} has no generate_batch",
            "continuous batching generates with models of transformers",
            "pass a model such as those of AutoModelForCausalLM",
        )
    if not model._can_set_attn_implementation():  # noqa: SLF001 - the library has no public name for it
        raise AttnplugError(
            f"{kind} computes attention itself",
            "its attention can be replaced if it uses the AttentionInterface of transformers",
            "use generate() of this model",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise AttnplugError(
            f"{kind} is an encoder-decoder", "continuous batching generates with decoders", "use generate()"
        )
    parts = (type(module) for module in model.modules() if isinstance(module, PreTrainedModel))
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        raise AttnplugError(
            f"{kind}: its forward takes no position_ids",
            "requests of one step are at different positions",
            "use generate() of this model",
        )


class _FirstCall(Exception):  # noqa: N818 - it ends a run that went well
    """The first layer called its attention function with the arguments of a step."""


class _NoCache(PagedAttentionCache):
    """A KV cache without memory, for `_check_layers`."""

    def __init__(self) -> None:
        """Allocate nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Any = ()) -> Any:
        """Return the keys and values as they are, to a layer that has the arguments of a step."""
        if "write_index" not in kwargs:
            raise NotNegotiatedError(
                f"layer {layer_idx} updates the KV cache without write_index",
                "the arguments of a step say where to write",
                "pass kwargs of the layer to update",
            )
        return key_states, value_states


_log = logging.getLogger(__name__)

_CHECK: Final[list[Tensor]] = []
"""The write_index of `_check_layers`, which is known by its identity."""


@torch.no_grad()
def _check_layers(model: Any) -> None:
    """
    Run a model up to its first attention, with the arguments of a step.

    Raises:
        AttnplugError: They do not arrive there.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    devices = [token.device] if token.is_cuda else []
    # In training mode there may be dropout before the first attention.
    with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
        try:
            model(input_ids=token, position_ids=token, cache=_NoCache(), write_index=_CHECK, use_cache=False)
        except NotNegotiatedError:
            raise AttnplugError(
                f"{type(model).__name__} of transformers {__version__} does not pass the arguments of a step through"
                " its layers",
                "their attention needs the lengths and the KV cache of the step",
                "use generate() of this model, or attnplug_transformers.engine",
            ) from None
        except _FirstCall:
            return
        except Exception:  # noqa: BLE001 - the steps meet it again, and report it
            _log.debug("%s does not run up to its first attention", type(model).__name__, exc_info=True)


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the configurations that the model's attention modules read, each once."""
    found: dict[int, Any] = {}
    for module in (model, *model.modules()):
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@uncompiled
def attend(  # noqa: PLR0913 - the library's signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cache: PagedAttentionCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **step: Any,
) -> tuple[Tensor, None]:
    """
    Attend to the requests of a step. Registered under `NAME`.

    Args:
        module: The attention module.
        query: ``(1, num_q_heads, tokens, head_size)``, the requests' new tokens one after another.
        key: ``(1, num_kv_heads, tokens, head_size)``; or packed, all to attend to, where the layer wrote them.
        value: ``(1, num_kv_heads, tokens, head_size_v)``, as the keys.
        attention_mask: None: a request's new tokens attend to its own tokens, causally.
        scaling: Factor of the scores.
        dropout: 0.
        cache: The manager's KV cache; None where the layer wrote it.
        sliding_window: Tokens that a token attends to, itself included; None for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``(num_q_heads,)``, sinks.
        is_causal: None or True.
        step: The arguments of the step.

    Returns:
        ``(1, tokens, num_q_heads, head_size_v)``; and None in place of attention weights.

    Raises:
        NotNegotiatedError: It is no call of continuous batching inside of the context, or has an unknown argument.
        NoBackendError: Nothing can serve the layer.
    """
    layer, handle = module_name(module), _handles.get(module)
    if handle is not None and step.get("write_index") is _CHECK:
        raise _FirstCall
    written = cache is None and "write_index" in step and isinstance(step.get("cu_seq_lens_k"), torch.Tensor)
    is_step = written or isinstance(cache, PagedAttentionCache)
    handle = _checked(handle, layer, step, attention_mask, is_causal=is_causal, is_step=is_step)
    check_outputs(module)
    bounds = [name for name in step if name.startswith(("max_length_", "max_seqlen_"))]
    kwargs = {name: step.pop(name) for name in (*_STEP, *bounds) if name in step}
    check_arguments(dropout, step, layer)
    common = {
        "softmax_scale": scaling,
        "causal": True,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap or 0.0,
        "s_aux": None if s_aux is None else s_aux.to(query.dtype),
    }
    rows = query[0].transpose(0, 1)
    if written:
        keys, values, key_starts = key[0].transpose(0, 1), value[0].transpose(0, 1), kwargs["cu_seq_lens_k"]
    else:
        keys, values, key_starts = _updated(module, cache, key, value, kwargs, sliding_window)
    starts = kwargs["cu_seq_lens_q"]
    handle.begin(module)
    starts_cpu, key_starts_cpu = handle.on_cpu(starts), handle.on_cpu(key_starts)
    tokens, used = int(starts_cpu[-1]), int(key_starts_cpu[-1])  # the rest is padding of a compiled model
    if kwargs.get("block_table") is not None:  # one token of each request
        output = handle.run(
            flash_attn_with_kvcache,
            rows[:tokens, None],
            kwargs["k_cache"][:: handle.pages_per_block],
            kwargs["v_cache"][:: handle.pages_per_block],
            keys[:tokens, None],
            values[:tokens, None],
            cache_seqlens=key_starts.diff()[:tokens] - 1,
            block_table=kwargs["block_table"][:tokens] // handle.pages_per_block,
            max_seqlen_k=int(key_starts_cpu.diff().max()),
            **common,
        )[:, 0]
    else:
        output = handle.run(
            flash_attn_varlen_func,
            rows[:tokens],
            keys[:used],
            values[:used],
            starts,
            key_starts,
            cu_seqlens_q_cpu=starts_cpu,
            cu_seqlens_k_cpu=key_starts_cpu,
            **common,
        )
    if tokens < rows.shape[0]:
        output = torch.cat([output, output.new_zeros(rows.shape[0] - tokens, *output.shape[1:])])
    return output.unsqueeze(0), None


def _checked(
    handle: ContinuousBatching | None,
    layer: str,
    step: dict[str, Any],
    mask: Tensor | None,
    *,
    is_causal: bool | None,
    is_step: bool,
) -> ContinuousBatching:
    """Return the handle of a call of continuous batching, or refuse the call."""
    if handle is None or not is_step:
        raise NotNegotiatedError(
            f"{layer} was called with attn_implementation={NAME!r}, and not by continuous batching on attnplug",
            "inside of continuous_batching(model) that model generates by generate_batch",
            "call the model after the context was left",
        )
    if mask is not None or is_causal is False:
        raise NotNegotiatedError(
            f"{layer}: a mask or is_causal=False was given",
            "in continuous batching a token attends to the earlier ones of its request",
            "leave the mask out",
        )
    if step.get("block_table") is not None and not handle.pages_per_block:
        raise NotNegotiatedError(
            f"{layer}: a block_table was given",
            "it is known of transformers 5.23 and 5.24, for models without sliding windows",
            "pass ContinuousBatchingConfig(max_blocks_per_request=0)",
        )
    return handle


def _updated(
    module: nn.Module, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any], window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Write the step's keys and values; return all that the requests attend to, packed, and their start locations.

    In a step with a block table nothing is written; then the arguments get the pages, and the new keys are returned.
    """
    index: Any = module.layer_idx
    if _UPDATE == _BY_KEYWORDS:
        keys, values = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1), kwargs["cu_seq_lens_k"]
    starts = kwargs["cu_seq_lens_k"]
    if isinstance(starts, dict):
        starts = starts["full_attention" if window is None else "sliding_attention"]
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=index,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    return keys, values, starts
