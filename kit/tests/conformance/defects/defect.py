"""What a wrong backend is made of: the built-in backend, or the least one, with one defect in one of these places."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from weakref import WeakSet

import torch
from attrs import define, evolve

from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.builder import TorchBuilder
from attnplug.torch_backend.captured import CapturedPlan
from attnplug.torch_backend.impl import TorchImpl
from attnplug.torch_backend.masks import AlibiMask, apply_alibi
from attnplug.torch_backend.sdpa import TileKernel
from kit.tests.conformance.minimal.least import LeastBackend, LeastImpl

ADVANCED = WeakSet()
"""The plans of advanced steps."""


class Defect:
    """
    A defect: a subclass overrides one of these methods, all of which do what the right backend does.

    Attributes:
        least: Whether the backend is the least one, which declares what the built-in one does not.
        alone: Whether it changes every request, or the kernel: in a backend with others it would hide them.
        test: The test of the kit that names the defect, as a pattern of its id.
        message: What its failure says, as a pattern.
    """

    all: ClassVar[dict[str, type[Defect]]] = {}
    least = False
    alone = False
    test = ""
    message = "output: "

    def __init_subclass__(cls):
        if cls.test:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-z]{3})(?<!float)(?=[0-9])", "_", cls.__name__).lower()
            if name in cls.all:
                raise TypeError(name)
            cls.all[name] = cls

    def run(self, call):
        """Run a layer: the call's rows of the output, and its LSE."""
        call.attend()

    def params(self, params, builder, batch, graph):
        """Return what planning reads; the batch is None where a graph is captured."""
        return params

    def batch(self, batch, builder):
        """Return the batch that planning reads, eagerly and in graphs."""
        return batch

    def next_step(self, metadata, batch, builder):
        """Return the batch that an advanced step is planned from."""
        return batch

    def prepare(self, prepare, builder):
        """Write a step into the plans of its graph."""
        prepare()

    def write(self, write, impl, key, value, cache, slots):
        """Write K/V into the cache."""
        write(key, value, cache, slots)

    def move(self, move, backend, dst):
        """Copy blocks into a cache."""
        move()

    def settle(self, settle, impl):
        """Derive what follows from the layer's scales and sinks."""
        settle()


class Group(Defect):
    """Several defects in one backend: a test that it passes catches none of them."""

    def __init__(self, defects):
        self.defects = defects

    def run(self, call):
        _nested(call, self.defects)

    def params(self, params, *of):
        for each in self.defects:
            params = each.params(params, *of)
        return params

    def batch(self, batch, builder):
        for each in self.defects:
            batch = each.batch(batch, builder)
        return batch

    def next_step(self, metadata, batch, builder):
        for each in self.defects:
            batch = each.next_step(metadata, batch, builder)
        return batch

    def prepare(self, prepare, builder):
        for each in self.defects:
            prepare = partial(each.prepare, prepare, builder)
        prepare()

    def write(self, write, impl, *rows):
        for each in self.defects:
            write = partial(each.write, write, impl)
        write(*rows)

    def move(self, move, backend, dst):
        for each in self.defects:
            move = partial(each.move, move, backend, dst)
        move()

    def settle(self, settle, impl):
        for each in self.defects:
            settle = partial(each.settle, settle, impl)
        settle()


def _nested(call, defects):
    """Run a call with the first defect, which runs it with the others."""
    if not defects:
        call.attend()
        return
    defects[0].run(evolve(call, right=lambda *arguments: _nested(Call(call.impl, *arguments, call.right), defects[1:])))


@define(eq=False)
class Call:
    """A call of `run`, and how the right backend answers it."""

    impl: object
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    kv_cache: object
    metadata: object
    output: torch.Tensor
    lse: torch.Tensor | None
    right: object

    def attend(self, factor=1.0, **changed):
        """Attend, with other arguments and a factor of the scores."""
        names = ("query", "key", "value", "kv_cache", "metadata", "output", "lse")
        arguments = [changed.get(name, getattr(self, name)) for name in names]
        if factor == 1.0:
            self.right(*arguments)
            return
        held = self.impl._score_params
        self.impl._score_params = evolve(held, scale=held.scale * factor)
        self.right(*arguments)
        self.impl._score_params = held

    def attend_over(self, change, **changed):
        """Attend to changed pages, after the right write: `change` returns the pages that are read."""
        cache, slots, impl = self.kv_cache, self.batch.slot_mapping, self.impl
        if impl.forward_writes and self.key is not None and slots is not None:
            impl.update_kv_cache(self.key, self.value, cache, slots)
        batch = evolve(self.batch, slot_mapping=None, slot_mapping_cpu=None)
        read = SimpleNamespace(k=change(cache.k), v=change(cache.v))
        self.attend(kv_cache=read, metadata=evolve(self.metadata, batch=batch), **changed)

    @property
    def agreement(self):
        return self.impl.agreement

    @property
    def requested(self):
        return self.impl.agreement.requirements

    @property
    def batch(self):
        return self.metadata.batch

    @property
    def is_half(self):
        return self.query.dtype != torch.float32

    @property
    def is_long(self):
        """Whether a request has more than a thousand keys."""
        return self.batch.max_seq_len > 1000

    @property
    def in_graph(self):
        return self.metadata.graph is not None

    @property
    def is_hnd(self):
        return self.kv_cache is not None and self.agreement.kv_layout == "HND"

    @property
    def is_advanced(self):
        return not self.impl.agreement.requirements.cascade and self.impl.plan_of(self.metadata) in ADVANCED

    @property
    def default(self):
        """What makes the layer's scale the default one, as a factor."""
        return self.impl.head_size**-0.5 / self.impl.scale

    @property
    def heads(self):
        """The output ``(tokens, num_q_heads, head_size_v)``, a view."""
        return self.output[: self.batch.num_actual_tokens].unflatten(1, (self.impl.num_q_heads, -1))

    @property
    def groups(self):
        """The output ``(tokens, num_kv_heads, ratio, head_size_v)``, a view."""
        return self.heads.unflatten(1, (self.impl.num_kv_heads, -1))

    @property
    def queries(self):
        """The query length of each request."""
        return self.batch.query_start_loc.diff()

    def rows(self, requests):
        """Return the indices of the query rows of some requests, a bool for each."""
        rows = requests.repeat_interleave(self.queries.long())
        return rows.nonzero().flatten()


def with_params(params, **changed):
    """Return changed parameters, those of cascades included."""
    cascade = None if params.cascade is None else evolve(params.cascade, **changed)
    return evolve(params, cascade=cascade, **changed)


def with_kernel(params, weigh):
    """Return parameters with an unfused kernel: `weigh` returns output and LSE of scores and values."""

    def attend(query, key, value, mask, params, *, causal):
        scores = (query.float() * params.scale) @ key.transpose(-1, -2)
        if params.soft_cap is not None:
            scores = params.soft_cap * (scores / params.soft_cap).tanh()
        if isinstance(mask, AlibiMask):
            scores, mask = apply_alibi(scores, params.slopes, mask.distance), mask.mask
        return weigh(scores if mask is None else scores + mask, value)

    kernel = TileKernel(attend, fused=False)
    return with_params(params, kernel=kernel, mask_dtype=torch.float32, tile_scores=2**21, row_strides=None)


def backend_of(defect):
    """Return the class of the backend with a defect."""
    own = {"defect": defect}
    base, impl = (LeastBackend, LeastImpl) if defect.least else (_Backend, _Impl)
    classes = {"impl_class": type("WrongImpl", (_Run, impl), own)}
    if not defect.least:
        classes["builder_class"] = type("WrongBuilder", (_Builder,), own)
    return type("WrongBackend", (base,), classes | own)


class _Run:
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        self.defect.run(Call(self, query, key, value, kv_cache, metadata, output, lse, super().run))


class _Impl(TorchImpl):
    def update_kv_cache(self, key, value, kv_cache, slot_mapping, *, padded=True):
        self.defect.write(super().update_kv_cache, self, key, value, kv_cache, slot_mapping)

    def parameters_changed(self):
        self.defect.settle(super().parameters_changed, self)


class _Builder(TorchBuilder):
    is_fast = is_advancing = False
    plans = ()

    def followed(self, before, now):
        """Whether the last plan was of this kind, "eager" or "graph", and followed one of that kind."""
        return self.plans[-2:] == (before, now)

    def plan_batch(self, batch, split, *, fast, graph):
        self.is_fast = fast and not self.is_advancing
        self.plans = (*self.plans, "eager" if graph is None else "graph")
        return super().plan_batch(batch, split, fast=fast, graph=graph)

    def plan_next_step(self, metadata, batch, split):
        self.is_advancing = True
        fields = super().plan_next_step(metadata, self.defect.next_step(metadata, batch, self), split)
        self.is_advancing = False
        ADVANCED.update(fields["plans"].values())
        return fields

    def prepare_in_graph(self, metadata):
        metadata = evolve(metadata, batch=self.defect.batch(metadata.batch, self))
        self.defect.prepare(lambda: super(_Builder, self).prepare_in_graph(metadata), self)

    def _plan(self, key, params, batch, graph):
        if graph is None:
            params = self.defect.params(params, self, batch, None)
            batch = self.defect.batch(batch, self)
        return super()._plan(key, params, batch, graph)

    def _captured(self, key, graph):
        def make():
            params = self.defect.params(self._params[key], self, None, graph)
            return CapturedPlan(params, graph, self.state.device)

        return self.per_graph(graph, key, make)


class _Backend(TorchBackend):
    builder_class = _Builder

    def move_blocks(self, src, dst, pairs):
        self.defect.move(lambda: super(_Backend, self).move_blocks(src, dst, pairs), self, dst)
