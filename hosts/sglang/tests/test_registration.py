"""Names and page sizes, decided without SGLang."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("attnplug_sglang", reason="this distribution needs Python 3.11")

import attnplug
from attnplug.errors import SettingsError
from attnplug_sglang import page_size, registration


def failing():
    raise SettingsError("ATTNPLUG_ALLOW is wrong", "it lists names", "set it anew")


def view(attention=None, prefill=None, decode=None):
    return SimpleNamespace(
        attention_backend=attention, prefill_attention_backend=prefill, decode_attention_backend=decode
    )


def test_each_candidate_has_a_name():
    names = registration.names()
    assert names["attnplug"] is None
    assert names["attnplug:torch/sdpa"] == "torch/sdpa"


def test_wrong_settings_leave_the_one_name_and_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(attnplug, "registry", failing)
    assert registration.names() == {"attnplug": None}
    assert "ATTNPLUG_ALLOW is wrong" in caplog.text


def test_wrong_settings_leave_the_page_size_to_sglang(monkeypatch):
    monkeypatch.setattr(attnplug, "registry", failing)
    assert page_size.smallest_page(["attnplug:torch/sdpa"], 1) == 1


def test_a_name_of_another_plugin_is_not_replaced(caplog):
    assert not registration._is_free({"attnplug": object}, "attnplug")
    assert "does not replace it" in caplog.text


@pytest.mark.parametrize("registered", [{}, {"attnplug": partial(registration.create, backend=None)}])
def test_a_name_that_is_free_or_ours_is_registered(registered):
    assert registration._is_free(registered, "attnplug")


@pytest.mark.parametrize(
    ("declared", "named", "expected"),
    [
        ({}, view("attnplug:torch/sdpa"), {}),
        ({"page_size": 1}, view("triton"), {"page_size": 1}),
        ({"page_size": 1}, view("attnplug"), {"page_size": 1}),
        ({"page_size": 64}, view("attnplug:torch/sdpa"), {"page_size": 64}),
        ({"page_size": 1}, view("attnplug:"), {"page_size": 1}),
    ],
)
def test_a_default_that_the_named_backends_admit_remains(declared, named, expected):
    assert page_size.replace_default(declared, named) == expected


@pytest.mark.parametrize(("smallest", "default", "expected"), [(16, 1, 16), (64, 1, 64), (16, 64, 64), (512, 1, 1)])
def test_the_page_is_the_smallest_that_all_admit(monkeypatch, smallest, default, expected):
    candidate = SimpleNamespace(
        id="acme/host",
        backend="acme",
        objections=lambda asked: [] if dict(asked)["block_size"] >= smallest else ["too small"],
    )
    monkeypatch.setattr(attnplug, "registry", lambda: SimpleNamespace(candidates=lambda: (candidate,)))
    found = page_size.replace_default({"page_size": default}, view("triton", decode="attnplug:acme/host"))
    assert found == {"page_size": expected}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", 1), ("auto", 1), ("wide/a,auto", 1), ("wide/a", 32), ("wide/a+tall/a", 96), ("all+tall", 24)],
)
def test_the_setting_names_backends_too(monkeypatch, setting, expected):
    """Alone; of a routed pair both admit the page."""
    monkeypatch.setattr(page_size, "SIZES", (1, 8, 24, 32, 96))
    candidates = [
        SimpleNamespace(id=f"{name}/a", backend=name, objections=partial(lambda step, asked: asked[0][1] % step, step))
        for name, step in (("wide", 32), ("tall", 24), ("all", 8))
    ]
    monkeypatch.setattr(attnplug, "registry", lambda: SimpleNamespace(candidates=lambda: candidates))
    monkeypatch.setenv("ATTNPLUG_BACKEND", setting)
    assert page_size.replace_default({"page_size": 1}, view("attnplug")) == {"page_size": expected}
