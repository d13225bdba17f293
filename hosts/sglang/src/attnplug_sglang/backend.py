"""
SGLang's attention backend that is carried out by backends of attnplug.

Extends, decodes and mixed steps have one agreement, in SGLang's order of requests. A step that verifies a tree of
drafts has another one, with a mask. Both read and write the pools of SGLang.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from attrs import evolve
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang.batches import check_decode, check_verify, has_tree, lengths_of
from attnplug_sglang.latent import Sequences, expanded_layers, joined, split
from attnplug_sglang.layers import OWN, HostLayer, check_layer, layers_of
from attnplug_sglang.options import check_options, limits_of, options_of
from attnplug_sglang.pools import pools_of
from attnplug_sglang.steps import Engine, Kind, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug_sglang.batches import Lengths
    from attnplug_sglang.steps import BoundLayer

_EXTEND: Final = "extend"
_VERIFY: Final = "verify"


class AttnplugAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang is not there where types are checked
    """
    Steps of SGLang as batches of attnplug, and its pools as KV caches.

    Where the model has no modules yet, a layer is decided at its first call outside of a capture.

    Args:
        model_runner: SGLang's model runner, with its weights and its pools.
        backend: The candidate that was named, such as ``"flashinfer/fa3"``; None lets attnplug decide.

    Attributes:
        has_latents: Whether the model has multi-head latent attention (MLA).

    Raises:
        NoBackendError: No backend serves a layer of the model.
        NotNegotiatedError: The model, a pool or an option of SGLang has what is not served.
    """

    def __init__(self, model_runner: Any, *, backend: str | None = None) -> None:
        super().__init__()
        check_options(model_runner)
        self.device = torch.device(model_runner.device)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        pools = pools_of(model_runner)
        self.has_latents = pools.latent_sizes is not None
        layers, expanded = split(layers_of(model_runner.model), pools.latent_sizes)
        self._engine = Engine(
            layers=layers,
            pools=pools,
            table=self.req_to_token_pool.req_to_token,
            dtype=model_runner.dtype,
            device=self.device,
            limits=limits_of(model_runner, pools.num_blocks),
            backend=backend,
        )
        self._kinds: dict[tuple[str, int], Kind] = {}
        self._max_batch_size = 0
        options = options_of(model_runner)
        self._batch_invariant = bool(getattr(options, "enable_deterministic_inference", False))
        self._has_trees = getattr(options, "speculative_eagle_topk", None) not in {None, 1}
        self._kv_in_cache = True
        # What builds a step whose latents may be expanded is called by its first call that is absorbed.
        self.forward_metadata: Step | Callable[[], Step] | None = None
        self._is_late = not self._engine.layers
        self._pending: Callable[[], Step] | None = None  # builds the step in which late layers may be called first
        if not self._is_late:
            self._kind(_EXTEND)
        self._expanded = expanded_layers(expanded, self._engine)
        self._sequences: Sequences | None = None  # of a step whose latents may be expanded

    def explain(self) -> str:
        """Return the decisions of the kinds of steps that there were, as text."""
        found = [f"{name}:\n{kind.plan}" for (name, _), kind in self._kinds.items()]
        if self.has_latents:
            chosen = dict.fromkeys(each for layer in self._expanded.values() for each in layer.chosen)
            found.append(f"prefills with keys and values per head: {', '.join(chosen) or 'none, all are absorbed'}")
        return "\n\n".join(found)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether SGLang has to keep sequence lengths on the CPU: a backend reads them, or a tree of drafts does."""
        kinds = self._kinds.values()
        return not kinds or self._has_trees or any(kind.reads_lengths for kind in kinds)

    def _kind(self, name: str, drafts: int = 0) -> Kind:
        """Return what carries out a kind of step. It is decided once, and again when SGLang says that it has graphs."""
        found = self._kinds.get((name, drafts))
        if found is not None:
            return found
        if not self._engine.layers:
            self._refuse_absent()
        requested = _requested(name, drafts, has_graphs=self._max_batch_size > 0)
        self._kinds[name, drafts] = kind = self._decided({**requested, "drafts": drafts})
        return kind

    @staticmethod
    def _refuse_absent() -> NoReturn:
        raise NotNegotiatedError(
            "a graph was requested before any layer of the model was there",
            "attnplug decides for the layers that the model has, or at the first call of a layer outside of a capture",
            "make the backend after the model, or run a step first",
        )

    def _decided(self, requested: dict[str, Any]) -> Kind:
        """Decide, for layers whose K/V may be in the pool before the call; and without them if nothing serves that."""
        if self._batch_invariant:
            requested = {**requested, "batch_invariant": True}
        if self._kv_in_cache:
            try:
                return Kind(self._engine, kv_in_cache=True, **requested)
            except (NoBackendError, NotNegotiatedError) as error:
                try:
                    kind = Kind(self._engine, **requested)
                except (NoBackendError, NotNegotiatedError):
                    raise error from None
                self._kv_in_cache = False
                return kind
        return Kind(self._engine, **requested)

    # The steps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """
        Build a step that runs eagerly.

        Raises:
            NotNegotiatedError: Its mode is not served.
            BatchError: A sequence is longer than SGLang's table of slots has room for.
        """
        self._sequences = None
        if _is_idle(forward_batch):
            self.forward_metadata = self._pending = None
            return
        if forward_batch.forward_mode.is_decode() and not self._is_late:
            check_decode(getattr(forward_batch, "spec_info", None))
            self.forward_metadata = self._kind(_EXTEND).build_decode(forward_batch)
            if self.forward_metadata is not None:
                return
        lengths = lengths_of(forward_batch)
        attends = lengths.queries and not self._is_made_up(forward_batch, lengths)
        build = partial(self._build, forward_batch, lengths)
        self._pending = build if attends and self._is_late else None
        self.forward_metadata = None
        if attends and self._expanded and lengths.custom_mask is None and not lengths.drafts:
            self._sequences, self.forward_metadata = Sequences.of(lengths), build
        elif attends and self._engine.layers:
            self.forward_metadata = build()

    def _build(self, step: Any, lengths: Lengths) -> Step:
        return self._kind_of(lengths).build(step, lengths)

    def _bind_late(self, layer: Any, build: Callable[[], Step], *, has_sinks: bool) -> None:
        """Decide again, with a layer that is called for the first time, and build the step for it too."""
        found = HostLayer(f"layers.{len(self._engine.layers)}", layer, has_sinks, self.has_latents)
        check_layer(found)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._refuse_absent()
        self._release()
        self._engine = evolve(self._engine, layers=(*self._engine.layers, found))
        self.forward_metadata = build()

    def _release(self) -> None:
        for kind in self._kinds.values():
            kind.release()
        self._kinds.clear()
        self.forward_metadata = None

    def _is_made_up(self, forward_batch: Any, lengths: Lengths) -> bool:
        """
        Whether a step is the one that SGLang makes up before it captures prefills, and is longer than any sequence.

        It has as many tokens as the graph, in one request, and no slots: each is 0, which is padding.
        """
        is_too_long = max(lengths.sequences) > self.req_to_token_pool.req_to_token.shape[1]
        return is_too_long and not bool(forward_batch.out_cache_loc.any())

    def _kind_of(self, lengths: Lengths) -> Kind:
        return self._kind(_EXTEND) if lengths.custom_mask is None else self._kind(_VERIFY, lengths.drafts)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,  # noqa: FBT001, FBT002 - likewise
        **kwargs: Any,
    ) -> Any:
        """
        Return the attention of one layer, ``(tokens, num_q_heads * head_size_v)``; rows of padding are 0.

        With keys and values that were expanded from latents: as `ExpandedLayer.attend` returns it.

        Args:
            q: ``(tokens, num_q_heads * head_size)``.
            k: ``(tokens, num_kv_heads, head_size)``; None where it is in the pool.
            v: ``(tokens, num_kv_heads, head_size_v)``; None exactly where `k` is. Of latents it is in `k`.
            layer: SGLang's layer.
            forward_batch: SGLang's step.
            save_kv_cache: Whether K/V are to be written; otherwise they are in the pool.
            kwargs: ``sinks``, ``(num_q_heads,)``; of latents ``q_rope`` and ``k_rope``, the rotary parts of `q` and
                `k`, where these have none. Others are refused.

        Raises:
            NotNegotiatedError: The call has what was not negotiated.
        """
        expanded = self._expanded.get(id(layer))
        if expanded is not None and not save_kv_cache and k is not None and v is not None:
            _check_call(expanded.host, kwargs.pop("sinks", None), kwargs)
            return expanded.attend(q, k, v, forward_batch, self._sequences)
        sinks = kwargs.pop("sinks", None)
        if self._pending is not None and all(known.module is not layer for known in self._engine.layers):
            self._bind_late(layer, self._pending, has_sinks=sinks is not None)
        step = self.forward_metadata
        if callable(step):
            step = self.forward_metadata = step()
        if self.has_latents:
            q, k = joined(q, k, layer, kwargs.pop("q_rope", None), kwargs.pop("k_rope", None))
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        width = layer.tp_q_head_num * layer.v_head_dim
        if step is None:
            return q.new_zeros(len(rows), width)
        bound = _bound(step, layer)
        _check_call(bound.host, sinks, kwargs)
        is_exact = len(rows) == step.num_tokens and not step.is_captured
        output = q.new_empty(len(rows), width) if is_exact else q.new_zeros(len(rows), width)
        metadata, cache = step.metadata[bound.builder], step.kind.cache_of(bound)
        if k is None or not save_kv_cache:
            if not self._kv_in_cache:
                raise NotNegotiatedError(
                    f"the layer {bound.host.name!r} was called with K/V that are in the pool",
                    f"{bound.impl.backend.id} writes K/V itself: it does not serve kv_in_cache",
                    "turn off the fusion that writes K/V ahead of attention, or let another backend serve",
                )
            k = v = None
        elif bound.host.latent:
            v = None
        if k is not None and bound.impl.host_writes:
            _write(bound, k, v, cache, metadata)
        extra = {} if sinks is None else {"sinks": bound.sinks_of(sinks, q.dtype)}
        bound.impl.forward(rows, k, v, cache, metadata, output, **extra)
        return output

    forward_decode = forward_extend
    forward_mixed = forward_extend

    # Graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """
        Decide again, for steps that are captured in graphs.

        Args:
            max_bs: The most requests of a graph.
            max_num_tokens: The most tokens of a graph.
        """
        del max_num_tokens
        self._release()
        self._pending = None
        self._max_batch_size = max_bs
        if self._engine.layers:
            self._kind(_EXTEND)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """
        Write a step into the tensors that a graph reads.

        Args:
            forward_batch: SGLang's step, padded to the shape of the graph.
            in_capture: Whether the graph is about to be captured.

        Raises:
            NotNegotiatedError: SGLang captures a step of other than decodes and drafts.
        """
        spec: Any = getattr(forward_batch, "spec_info", None)
        mode, drafts, name = forward_batch.forward_mode, 0, _EXTEND
        if mode.is_target_verify():
            check_verify(spec)
            drafts = int(spec.draft_token_num)
            name = _VERIFY if has_tree(spec) else _EXTEND
        elif mode.is_decode_or_idle():
            check_decode(spec)
        else:
            raise NotNegotiatedError(
                f"SGLang captures a step of the mode {mode.name} in a graph",
                "attnplug-sglang has graphs of decodes, and of drafts that are verified",
                "start SGLang with --cuda-graph-backend-prefill breakable, or disabled",
            )
        size, capture = forward_batch.seq_lens.shape[0], partial(self._capture, name, drafts, forward_batch)
        self._pending = capture if in_capture and self._is_late else None
        if in_capture and not self._engine.layers:
            self.forward_metadata = None
        elif in_capture:
            self.forward_metadata = self._kind(name, drafts).capture(size, max(self._max_batch_size, size))
        else:
            self.forward_metadata = self._kind(name, drafts).replay(forward_batch, size)

    def _capture(self, name: str, drafts: int, step: Any) -> Step:
        """Return the step of a graph for layers that are called while SGLang warms its shape up."""
        size = step.seq_lens.shape[0]
        captured = self._kind(name, drafts).capture(size, max(self._max_batch_size, size))
        captured.prepare(step)
        return captured

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """
        Record what is computed on the device at each replay.

        Args:
            forward_batch: SGLang's step, whose tensors each replay finds at the same addresses.
        """
        step = self.forward_metadata
        if isinstance(step, Step) and step.is_captured:
            step.prepare(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padded request: 0, which no running request has."""
        return 0

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value  # of ranks that run together on a CPU

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """
        Refuse drafts that come after the step that verifies them was prepared.

        Raises:
            NotNegotiatedError: Always.
        """
        del spec_info, cuda_graph_bs
        raise NotNegotiatedError(
            "SGLang prepares the verification of drafts on a stream beside the draft model",
            "attnplug-sglang prepares it when the drafts are there",
            "unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        )

    def support_triton(self) -> bool:
        """Whether SGLang may use its Triton kernels beside attention."""
        return self.device.type != "cpu"


def _requested(name: str, drafts: int, *, has_graphs: bool) -> dict[str, Any]:
    """Return what a kind of step requires."""
    if name == _EXTEND and not drafts:
        return {"cudagraph": "single_token_decode"} if has_graphs else {}
    masked = {"custom_mask": True} if name == _VERIFY else {}
    if has_graphs:
        return {"cudagraph": "uniform_batch", "decode_query_len": drafts, **masked}
    return {"phases": ("prefill",), **masked}


def _is_idle(forward_batch: Any) -> bool:
    """Whether a step has no request. Beside ranks that extend, SGLang makes one up that has no slots."""
    former = getattr(forward_batch, "_original_forward_mode", None)
    made_up = former is not None and former.is_idle()
    return bool(made_up or forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0)


def _bound(step: Step, layer: Any) -> BoundLayer:
    try:
        return step.kind.layers[id(layer)]
    except KeyError:
        raise NotNegotiatedError(
            f"attention of a layer with layer_id={layer.layer_id} was called, which the model did not have",
            "attnplug decides for the RadixAttention modules that the model has when its backend is made",
            OWN,
        ) from None


def _check_call(host: HostLayer, sinks: Tensor | None, others: dict[str, Any]) -> None:
    """Check that nothing of a call is dropped."""
    unserved = [name for name, value in others.items() if value is not None and value is not False]
    if unserved:
        raise NotNegotiatedError(
            f"the layer {host.name!r} was called with {', '.join(unserved)}",
            "attnplug-sglang serves q, k, v and sinks",
            OWN,
        )
    if (sinks is not None) != host.has_sinks:
        raise NotNegotiatedError(
            f"the layer {host.name!r} was called {'without' if sinks is None else 'with'} sinks",
            "the module around a layer has an attribute `sinks` or `attention_sink_bias` exactly where it passes them",
            OWN,
        )


def _write(bound: BoundLayer, k: Tensor, v: Tensor | None, cache: Any, metadata: Any) -> None:
    """Write the K/V of the phases in which the implementation leaves it to its host."""
    for name, phase in (("decode", metadata.decodes), ("prefill", metadata.prefills)):
        if phase is not None and name in bound.impl.host_writes:
            values = None if v is None else v[phase.rows]
            bound.impl.write_kv(k[phase.rows], values, cache, metadata.batch.slot_mapping[phase.rows])
