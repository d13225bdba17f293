"""The guards of forward: each call has one thing wrong, and writes neither the cache nor the output."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, Batch, KVCache, Layer, Metadata
from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import (
    NUM_BLOCKS,
    at_most,
    calls_of,
    is_clear,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    make_qkv,
    refused,
)


class Call:
    """A paged call of three requests and five tokens, whose parts a test may replace."""

    def __init__(self, cls=ToyBackend, device="cpu", **requested):
        self.backend = make_backend(cls, device=device, **requested)
        self.impl = make_layer(self.backend)
        self.builder = make_builder(self.backend, self.impl)
        query, key, value, output = make_qkv(self.backend, 5)
        self.parts = {
            "query": query.to(device),
            "key": key.to(device),
            "value": value.to(device),
            "kv_cache": self.backend.make_cache(NUM_BLOCKS),
            "metadata": self.builder.build(make_batch([1, 1, 3], [5, 9, 3], device=device)),
            "output": output.to(device),
        }

    def run(self, **change):
        self.parts |= change
        return self.impl.forward(**self.parts)

    def is_untouched(self):
        cache = self.parts["kv_cache"]
        return not isinstance(cache, KVCache) or cache.device.type == "meta" or is_clear(cache)


def test_products_of_a_call_are_not_rounded_by_autocast():
    class Impl(ToyImpl):
        def run(self, query, *_):
            self.product = query[:, 0] @ query[:, 0].T

    call = Call(type("Backend", (ToyBackend,), {"impl_class": Impl}))
    with torch.autocast("cpu", torch.bfloat16):
        call.run()

    assert call.impl.wrapped.product.dtype == torch.float32


def test_a_call_that_fits_runs():
    call = Call()

    assert call.run() is None
    assert call.parts["output"].ne(7).all()
    assert not call.is_untouched()


@pytest.mark.parametrize(
    ("name", "tensor", "allowed"),
    [
        ("query", torch.zeros(5, 2, 8), "(tokens, 4, 8) float32"),
        ("query", torch.zeros(5, 4, 4), "(tokens, 4, 8) float32"),
        ("query", torch.zeros(5, 32), "(tokens, 4, 8) float32"),
        ("query", torch.zeros(5, 4, 8, dtype=torch.float16), "float32"),
        ("query", torch.zeros(5, 4, 16)[..., ::2], "last axis contiguous"),
        ("query", torch.zeros(5, 4, 8, device="meta"), "selected for cpu"),
        ("key", torch.zeros(5, 4, 8), "(tokens, 2, 8) float32"),
        ("key", torch.zeros(5, 2, 8, dtype=torch.bfloat16), "float32"),
        ("key", torch.zeros(5, 2, 8, device="meta"), "on cpu"),
        ("value", torch.zeros(5, 2, 4), "(tokens, 2, 8) float32"),
        ("value", torch.zeros(4, 2, 8), "(5, 2, 8) float32"),
        ("value", torch.zeros(5, 2, 8, device="meta"), "on cpu"),
        ("output", torch.zeros(5, 4, 8), "(5, 32) float32"),
        ("output", torch.zeros(4, 32), "(5, 32) float32"),
        ("output", torch.zeros(5, 32, dtype=torch.float64), "float32"),
        ("output", torch.zeros(5, 64)[:, ::2], "last axis contiguous"),
        ("output", torch.zeros(5, 32, device="meta"), "on cpu"),
    ],
)
def test_tensors_have_one_form(name, tensor, allowed):
    call = Call()
    output = call.parts["output"]

    with refused(TensorError, problem=f"'layers.0' was given {name} of", expected=allowed):
        call.run(**{name: tensor})

    assert call.is_untouched()
    assert output.eq(7).all()


def test_rows_of_a_larger_tensor_fit():
    call = Call()
    fused = torch.randn(5, 4 + 2 + 2, 8)

    call.run(query=fused[:, :4], key=fused[:, 4:6], value=fused[:, 6:])

    assert call.parts["output"].ne(7).all()


@pytest.mark.parametrize(
    ("key", "value", "given"),
    [(None, None, "neither"), (None, "kept", "value without key"), ("kept", None, "key without value")],
)
def test_keys_and_values_come_together(key, value, given):
    call = Call()
    change = {name: None for name, kind in (("key", key), ("value", value)) if kind is None}

    with refused(TensorError, problem=given, expected="KV sharing", fix="kv_sharing_target"):
        call.run(**change)

    assert call.is_untouched()


class Recorder(ToyImpl):
    """Records the calls that pass the guards."""

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        self.seen = ("forward", key is None, kv_cache is None)

    def run_profile(self, query, key, value, output, lse):
        self.seen = ("profile", key is None, None)


class RecordingBackend(ToyBackend):
    impl_class = Recorder


def test_keys_may_be_absent_where_another_layer_cached_them():
    call = Call(RecordingBackend, kv_sharing=True)
    call.impl = make_layer(call.backend, kv_sharing_target="layers.9")

    call.run(key=None, value=None)

    assert call.impl.wrapped.seen == ("forward", True, False)
    assert call.is_untouched()


def test_keys_of_cross_attention_may_be_absent_after_its_first_step():
    call = Call(RecordingBackend)
    call.backend = make_backend(RecordingBackend, attn_type="encoder_decoder")
    call.impl = make_layer(call.backend)
    batch = evolve(
        make_batch([1], [4]),
        causal=False,
        encoder_seq_lens=torch.tensor([3], dtype=torch.int32),
        encoder_seq_lens_cpu=torch.tensor([3], dtype=torch.int32),
        max_encoder_seq_len=3,
    )
    first = make_builder(call.backend, call.impl).build(batch)
    with refused(TensorError, problem="no K/V", expected="slots for 1 rows", fix="first step"):
        call.run(key=None, value=None, metadata=first)
    batch.slot_mapping.fill_(PAD_SLOT_ID)
    metadata = make_builder(call.backend, call.impl).build(batch)

    call.run(key=None, value=None, metadata=metadata)

    assert call.impl.wrapped.seen == ("forward", True, False)


@pytest.mark.parametrize("change", [{"metadata": None}, {"metadata": None, "kv_cache": None}])
def test_a_profiling_run_succeeds_and_touches_nothing(change):
    call = Call()

    call.run(**change)

    assert call.parts["output"].eq(7).all()
    assert call.is_untouched()


def test_a_backend_may_profile_its_own_way():
    call = Call(RecordingBackend)

    call.run(metadata=None)

    assert call.impl.wrapped.seen == ("profile", False, None)


def test_a_profiling_run_checks_its_tensors_too():
    with refused(TensorError, problem="query of"):
        Call().run(metadata=None, query=torch.zeros(5, 4, 4))


@pytest.mark.parametrize("tokens", [5, 8])
def test_lse_is_written_where_it_was_negotiated(tokens):
    call = Call(return_lse=True)
    query, key, value, output = make_qkv(call.backend, tokens)
    lse = torch.full((tokens, 4), 7.0)

    call.run(query=query, key=key, value=value, output=output, lse=lse)

    assert lse[:5].ne(7).all()
    assert lse[5:].eq(7).all()
    assert output[5:].eq(7).all()


def test_lse_was_negotiated():
    call = Call()

    with refused(NotNegotiatedError, problem="an lse tensor", expected="return_lse was not requested", fix="lse=None"):
        call.run(lse=torch.zeros(5, 4))

    assert call.is_untouched()


@pytest.mark.parametrize(
    "lse", [torch.zeros(4, 5), torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 4, device="meta")]
)
def test_lse_has_one_form(lse):
    call = Call(return_lse=True)

    with refused(TensorError, problem="lse of", expected="(5, 4) float32 on cpu"):
        call.run(lse=lse)

    assert call.is_untouched()


def test_a_quantized_output_has_its_dtype():
    backend = make_backend(RecordingBackend, output_quant="fp8_e4m3")
    call = Call(RecordingBackend)
    call.impl = backend.make_impl(Layer(name="layers.0", output_scale=torch.ones(1)))
    metadata = make_builder(backend, call.impl).build(make_batch([1, 1, 3], [5, 9, 3]))

    with refused(TensorError, problem="output of", expected="float8_e4m3fn"):
        call.run(metadata=metadata)
    call.run(output=torch.zeros(5, 32, dtype=torch.float8_e4m3fn))
    assert call.impl.wrapped.seen[0] == "forward"


def test_queries_that_the_host_quantizes_have_the_caches_dtype():
    impl = type("Impl", (Recorder,), {"query_quantization": "host"})
    cls = type("Backend", (ToyBackend,), {"impl_class": impl})
    call = Call(cls, kv_cache_dtype="fp8_e4m3")

    with refused(TensorError, problem="query of", expected="float8_e4m3fn"):
        call.run()
    call.run(query=torch.zeros(5, 4, 8, dtype=torch.float8_e4m3fn))
    assert call.impl.wrapped.seen[0] == "forward"
    assert make_layer(make_backend(cls)).query_dtype == torch.float32


@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
def test_there_is_no_backward_pass(name):
    call = Call()
    tensor = call.parts[name].requires_grad_()

    with refused(TensorError, problem="require a gradient", expected="no backward", fix="torch.inference_mode()"):
        call.run()
    assert call.is_untouched()
    with torch.no_grad():
        call.run(**{name: tensor})


def test_rows_of_the_output_do_not_share_memory():
    call = Call()
    width = call.parts["output"].shape[1]

    with refused(TensorError, problem="output", expected="(5, 32)"):
        call.run(output=torch.zeros(1, width).expand(5, width))
    assert call.is_untouched()


# --- metadata and cache -------------------------------------------------------------------------------------------


def test_metadata_comes_from_a_builder_of_the_same_agreement():
    call = Call()
    foreign = make_builder(make_backend(sliding_window=4)).build(make_batch([1, 1, 3], [5, 9, 3]))
    twin = make_builder(make_backend()).build(make_batch([1, 1, 3], [5, 9, 3]))

    with refused(BatchError, problem="of another builder", fix="this layer's backend"):
        call.run(metadata=foreign)
    assert call.is_untouched()
    call.run(metadata=twin)  # an equal agreement is the same agreement


def test_metadata_is_of_the_backends_class():
    class Own(Metadata):
        pass

    call = Call(type("Backend", (ToyBackend,), {"metadata_class": Own}))
    metadata = call.parts["metadata"]
    plain = make_builder(make_backend()).build(metadata.batch)

    assert type(metadata) is Own
    with refused(BatchError, problem="metadata (Metadata)", expected="a Own"):
        call.run(metadata=plain)


def test_the_batch_is_covered_by_the_tensors():
    call = Call()
    query, key, value, output = make_qkv(call.backend, 4)

    with refused(TensorError, problem="a query of 4 rows", expected="5 actual tokens"):
        call.run(query=query, output=output)
    call = Call()
    with refused(TensorError, problem="K/V of 4 rows", expected="5 key rows"):
        call.run(key=key, value=value)
    assert call.is_untouched()


def test_a_paged_call_has_its_cache():
    with refused(CacheError, problem="no cache", expected="profiling run", fix="make_cache"):
        Call().run(kv_cache=None)


def test_a_dense_call_has_none():
    backend = make_backend(paged=False)
    impl = make_layer(backend)
    metadata = make_builder(backend, impl).build(Batch.from_lengths([2]))
    query, key, value, output = make_qkv(backend, 2)

    with refused(CacheError, problem="was given a cache", expected="paged=False", fix="kv_cache=None"):
        impl.forward(query, key, value, make_backend().make_cache(2), metadata, output)
    assert output.eq(7).all()
    impl.forward(query, key, value, None, metadata, output)
    assert output.ne(7).all()


def test_blocks_that_the_host_cannot_see_are_as_many_as_the_limits_say():
    call = Call(RecordingBackend, device="meta")
    unseen = make_batch([1, 1, 3], [5, 9, 3], device="meta")
    metadata = call.builder.build(evolve(unseen, block_table_cpu=None, slot_mapping_cpu=None))

    with refused(CacheError, problem="a cache of 31 blocks", expected="uses block 31"):
        call.run(metadata=metadata, kv_cache=call.backend.make_cache(NUM_BLOCKS - 1))
    call.run(kv_cache=call.backend.make_cache(NUM_BLOCKS))


def test_a_cache_smaller_than_the_blocks_in_use_is_refused():
    call = Call()
    batch = make_batch([1, 1, 3], [5, 9, 3])  # blocks 1 to 6

    unlimited = make_builder(call.backend, call.impl, num_blocks=None).build(batch)

    with refused(CacheError, problem="a cache of 6 blocks", expected="uses block 6"):
        call.run(metadata=unlimited, kv_cache=call.backend.make_cache(6))
    assert call.is_untouched()
    call.run(kv_cache=call.backend.make_cache(7))


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, 32, 4, 2, 8),
        torch.empty(0),
        {},
        {"k": torch.zeros(32, 4, 2, 8), "v": torch.zeros(32, 4, 2, 8)},
    ],
)
def test_memory_that_nobody_bound_is_no_cache(cache):
    call = Call()
    call.run()

    with refused(CacheError, problem="'layers.0'", expected="when it was bound", fix="bind_cache"):
        call.run(kv_cache=cache)

    assert call.is_untouched()


@pytest.mark.parametrize(
    ("requested", "problem"),
    [
        ({"kv_cache_form": "packed"}, "form='packed'"),
        ({"kv_layout": "HND"}, "kv_layout='HND'"),
        ({"block_size": 8}, "tensors="),
        ({"kv_cache_dtype": "fp8_e4m3"}, "tensors="),
        ({"head_size": 16}, "tensors="),
    ],
)
def test_a_cache_of_another_agreement_is_refused(requested, problem):
    call = Call()

    with refused(CacheError, problem=problem, fix="bind_cache"):
        call.run(kv_cache=make_backend(**requested).make_cache(NUM_BLOCKS))

    assert call.is_untouched()
    assert call.parts["output"].eq(7).all()


def test_layers_of_equal_caches_share_one():
    """Their agreements differ in what has nothing to do with the cache."""
    call = Call()

    call.run(kv_cache=make_backend(logits_soft_cap=30.0, return_lse=True).make_cache(NUM_BLOCKS))

    assert call.parts["output"].ne(7).all()


def test_a_cache_elsewhere_is_refused():
    call = Call()

    with refused(CacheError, problem="on meta", expected="on cpu", fix="swap_blocks"):
        call.run(kv_cache=call.backend.make_cache(NUM_BLOCKS, device="meta"))


def test_guards_read_no_values():
    """Meta tensors have none: a call on them passes every guard, and reaches the implementation."""
    call = Call(RecordingBackend, device="meta")

    call.run()

    assert call.impl.wrapped.seen == ("forward", False, False)


# --- what a call costs --------------------------------------------------------------------------------------------


class NoopImpl(ToyImpl):
    """Computes nothing: what a call costs is the contract's part."""

    def run(self, *_):
        pass


def noop_call(**requested):
    """Return a call that computes nothing, after a first one, which checked the form of its tensors."""
    call = Call(type("Backend", (ToyBackend,), {"impl_class": NoopImpl}), **requested)
    call.run()
    return call


@pytest.mark.parametrize(("change", "most"), [("nothing", 14), ("addresses", 14), ("lse", 20)])
def test_a_layer_costs_two_functions_and_a_few_attributes(change, most):
    call = noop_call(return_lse=change == "lse")
    if change == "addresses":  # of a host that allocates for each layer
        call.parts |= {name: call.parts[name].clone() for name in ("query", "key", "value", "output")}
    if change == "lse":
        call.run(lse=torch.zeros(5, 4))

    python, foreign = calls_of(lambda: call.impl.forward(**call.parts))

    assert python["forward of attnplug.contract.attention"] == 1
    at_most(python, 4 if change != "lse" else 7)  # forward, the guard, run, and the lambda here
    at_most(foreign, most)


def test_layers_of_a_backend_check_the_form_of_a_step_once():
    call = noop_call()
    others = [make_layer(call.backend, name=f"layers.{index}") for index in (1, 2)]
    query, key, value, output = make_qkv(call.backend, 9)
    call.parts |= {"query": query, "key": key, "value": value, "output": output}

    first, *further = [calls_of(lambda impl=impl: impl.forward(**call.parts))[0] for impl in (call.impl, *others)]

    assert first["_check_form of attnplug.contract.guards.call"] == 1
    for python in further:
        at_most(python, 4)


def test_what_one_layer_may_leave_out_another_may_not():
    """They share the forms that were checked, and not what they are bound to."""
    call = Call(RecordingBackend, kv_sharing=True)
    make_layer(call.backend, name="layers.1", kv_sharing_target="layers.0").forward(
        **{**call.parts, "key": None, "value": None}
    )

    with refused(TensorError, problem="neither key nor value"):
        call.run(key=None, value=None)
    assert call.is_untouched()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("query", torch.zeros(5, 4, 8, dtype=torch.float16)),
        ("key", torch.zeros(5, 2, 16)[..., ::2]),
        ("value", torch.zeros(5, 2, 8, device="meta")),
        ("output", torch.zeros(1, 32).expand(5, 32)),
        ("query", torch.zeros(6, 4, 8)),
        ("value", torch.zeros(4, 2, 8)),
    ],
)
def test_a_form_that_was_kept_is_that_of_all_tensors(name, tensor):
    call = noop_call()

    with refused(TensorError, problem=f"{name if tensor.shape[0] != 6 else 'output'} of"):
        call.run(**{name: tensor})
