"""What a debugger, a log or an assertion shows is short: names and counts, no tensors."""

from __future__ import annotations

from attrs import frozen

from attnplug.contract import Metadata
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import limits, make_backend, make_batch, make_layer


@frozen(eq=False, kw_only=True)
class OwnMetadata(Metadata):
    mine: int = 3


class Own(ToyBackend):
    metadata_class = OwnMetadata


def world(count=1):
    backend = make_backend(Own)
    impls = [make_layer(backend, name=f"layers.{index}") for index in range(count)]
    state = backend.make_state(limits())
    return backend, impls, state, backend.make_builder(impls, state)


def test_objects_say_what_they_are_of():
    backend, (impl,), state, builder = world()

    assert repr(backend) == "Own('toy/plain', on cpu)"
    assert repr(impl) == "ToyImpl('layers.0', of toy/plain)"
    assert repr(state) == "State(of toy/plain on cpu, for 16 requests and 64 tokens, 0 graphs)"
    assert repr(builder) == "MetadataBuilder(layer 'layers.0', of toy/plain)"


def test_many_layers_are_counted():
    *_, builder = world(30)

    assert repr(builder) == "MetadataBuilder(30 layers from 'layers.0' to 'layers.29', of toy/plain)"


def test_metadata_shows_no_tensor():
    _, _, state, builder = world()

    shown = repr(builder.build(make_batch([1, 2], [5, 2])))

    assert shown == (
        "OwnMetadata(batch=<2 requests, 3 tokens>, num_decodes=1, num_prefills=1, "
        "num_decode_tokens=1, num_prefill_tokens=2, num_key_rows=3, highest_block=3, agreement='toy/plain', "
        "plans=<0>, graph=None, "
        f"state={state.wrapped!r}, mine=3)"
    )


def test_a_step_names_its_builders():
    _, _, state, builder = world()

    step = state.begin_forward({builder: make_batch([1], [3])})

    assert repr(step) == "Step(graph=None, built by MetadataBuilder(layer 'layers.0', of toy/plain))"
