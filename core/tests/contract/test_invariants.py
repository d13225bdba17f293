"""What a graph has frozen of metadata is found changed wherever it is, and found again wherever it is the same."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch
from attrs import define, frozen

from attnplug.contract.graphs.invariants import snapshot


@define(eq=False)
class Open:
    inner: object


@frozen(eq=False)
class Closed:
    inner: object


@frozen(eq=False, slots=False)
class Buffer(torch.Tensor):
    """A tensor, and more."""

    inner: object


@frozen(eq=False)
class Items(Mapping):
    """A mapping whose items lie elsewhere."""

    inner: object
    items_of: dict = attrs.field(factory=dict)

    def __getitem__(self, key):
        return self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


def buffer(inner):
    made = torch.zeros(2).as_subclass(Buffer)
    made.__init__(inner)
    return made


def changes(value, found):
    return list(snapshot(value).changes(found, "it"))


@pytest.mark.parametrize(
    "hold",
    [lambda inner: (inner, 1), lambda inner: [1, inner], lambda inner: {"a": inner}, Open, Closed],
    ids=["tuple", "list", "dict", "open", "closed"],
)
def test_what_is_inside_counts(hold):
    memory = torch.zeros(4)

    assert not changes(hold(memory), hold(memory.view(4)))
    for other in (memory[1:], memory.view(2, 2), memory.view(torch.int32), torch.zeros(4), 0, None):
        assert len(changes(hold(memory), hold(other))) == 1


def test_a_value_may_be_a_tensor_and_more():
    one, memory = buffer(1), torch.zeros(4)
    two = one.view(2)
    for value, inner in ((one, memory), (two, memory.view(4))):
        object.__setattr__(value, "inner", inner)

    assert not changes(one, two)
    object.__setattr__(two, "inner", memory[1:])
    assert changes(one, two) == ["it.inner"]
    assert changes(one, buffer(memory)) == ["it"]


def test_of_a_mapping_its_items_count():
    memory = torch.zeros(4)
    one = Items(memory, {"a": memory, "b": 1})

    assert not changes(one, Items(torch.ones(2), {"a": memory.view(4), "b": 1}))
    assert changes(one, Items(memory, {"a": memory[1:], "b": 1})) == ["it['a']"]
    assert changes(one, Items(memory, {"a": memory})) == ["it"]


@frozen(eq=False)
class Doubled(Mapping):
    """Has one field and one item, which is twice the field's last."""

    numbers: tuple

    def __getitem__(self, key):
        return (2 * self.numbers[-1],)

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


def test_items_are_not_mistaken_for_fields():
    assert changes(Doubled((2,)), Doubled((4,))) == ["it['a'][0]"]
    assert not changes(Doubled((2,)), Doubled((3, 2)))
