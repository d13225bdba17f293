"""Every field has a row in the kit, with what its kind of value needs."""

from __future__ import annotations

from attrs import fields

from attnplug.request import FIELDS, Integer, Number, fields_of
from attnplug_kit.fields import ROWS, WORDS
from attnplug_kit.oracle import Case


def test_every_field_has_a_row() -> None:
    assert set(ROWS) == {item.name for item in fields_of("model", "engine", "derived")}


def test_every_word_has_a_field() -> None:
    assert {word for row in ROWS.values() for word in row.tests} == set(WORDS)


def test_numbers_have_samples_and_odd_values() -> None:
    numbers = {name for name, item in FIELDS.items() if isinstance(item.domain, (Integer, Number)) and not item.open}
    optional = {name for name in numbers if not (FIELDS[name].required or FIELDS[name].free)}

    assert {name for name in numbers if not (ROWS[name].samples or ROWS[name].unreachable)} == set()
    assert {name for name in optional if not ROWS[name].odd} == set()


def test_what_a_layer_may_override_has_odd_values() -> None:
    in_layer = {item.name for item in FIELDS.values() if item.in_layer}

    assert {name for name in in_layer if not ROWS[name].odd} == {"num_kv_heads"}  # refused as num_q_heads is


def test_every_field_of_the_model_is_in_cases() -> None:
    assert {item.name for item in fields_of("model")} <= {item.name for item in fields(Case)}


def test_fields_of_the_model_change_the_output() -> None:
    optional = {item.name for item in fields_of("model") if not item.required}

    # These have no other output for the same tensors: the oracle's shows them.
    assert {name for name in optional if "effect" not in ROWS[name].tests} == {
        *("head_size_v", "attn_type", "latent", "kv_sharing")
    }
