"""`help(attnplug.Requirements)` has every field, with its unit, the permitted values and the default."""

from __future__ import annotations

import inspect
import pydoc
import re

from attnplug.request.device import Device
from attnplug.request.domains import Integer, Name, Number
from attnplug.request.fields import FIELDS, fields_of
from attnplug.request.requirements import Requirements
from attnplug.request.settings import Settings

UNITS = ("elements", "heads", "tokens", "ranks", "scores", "multiprocessors")
REQUESTED = fields_of("model", "engine", "selection")
NAMES = "|".join(item.name for item in REQUESTED)


def test_every_field_is_in_help():
    lines = [line.strip() for line in inspect.getdoc(Requirements).splitlines()]
    starts = [i for i, line in enumerate(lines) if re.match(rf"({NAMES}): ", line)]

    assert len(starts) == len(REQUESTED)
    for item, start, end in zip(REQUESTED, starts, [*starts[1:], len(lines)], strict=True):
        text = " ".join(lines[start:end]).strip()
        assert text.startswith(f"{item.name}: ")
        assert item.help[1:] in text
        assert item.domain.text[1:] in text
        assert text.endswith("Required.") or "Default: " in text
        assert text.endswith("Required.") == item.required


def test_help_prints_the_fields():
    printed = pydoc.render_doc(Requirements, renderer=pydoc.plaintext)

    assert all(f"{item.name}: " in printed for item in REQUESTED)


def test_every_number_has_a_unit():
    numbers = [item for item in FIELDS.values() if isinstance(item.domain, (Integer, Number))]

    assert [item.name for item in numbers if not any(unit in item.help for unit in UNITS)] == []


def test_every_name_of_a_list_is_a_permitted_value():
    listed = [item.domain for item in FIELDS.values() if isinstance(item.domain, Name)]

    assert all(repr(value) in domain.text for domain in listed for value in domain.values)


def test_defaults_in_help_are_the_defaults():
    made = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    text = " ".join(inspect.getdoc(Requirements).split())

    for name in ("sinks", "attn_type", "phases", "cudagraph", "decode_query_len", "dcp_size", "late"):
        after = text.partition(f" {name}: ")[2]
        assert after.partition("Default: ")[2].startswith(f"{getattr(made, name)!r}.")
    for name, said, value in (
        ("head_size_v", "head_size", 64),
        ("causal", "true for decoders", True),
        ("paged", "true, but false for encoders", True),
        ("kv_cache_dtype", "the dtype", "bfloat16"),
    ):
        assert text.partition(f" {name}: ")[2].partition("Default: ")[2].startswith(said)
        assert getattr(made, name) == value


def test_settings_are_shown_without_their_defaults():
    made = Settings(backend=("torch", "auto"), options={"torch": {"x": 1}}, sources={"backend": "the call"})

    assert repr(Settings()) == "Settings()"
    assert repr(made) == (
        "Settings(backend=('torch', 'auto'), options={'torch': {'x': 1}}, sources={'backend': 'the call'})"
    )


def test_representations_are_short_and_can_be_evaluated():
    made = Requirements(
        head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", sinks=True, block_sparse={"block_size": 64}
    )

    assert repr(Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="fp16")) == (
        "Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype='float16')"
    )
    assert eval(repr(made)) == made  # noqa: S307 - a representation of this project
    for device in (Device.cpu(), Device.cuda("9.0", name="H200"), Device("cuda", vendor="amd"), Device("xpu")):
        assert eval(repr(device)) == device  # noqa: S307 - likewise
    assert repr(Device.cuda("9.0")) == "Device('cuda', compute_capability='9.0')"
