"""
What the adapters call is what the libraries take: in the first and the last release that is allowed, and as installed.

`CALLS` is what they call. Runs of all features on the fakes show that the list is right; the records in
``signatures/``, by ``record_signatures.py``, and what is installed are compared with it.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from packaging.requirements import Requirement

import attnplug_flash_attn
from attnplug.manifest.reader import read_manifest
from attnplug_flash_attn.op_files import ARGUMENTS, LIBRARIES
from attnplug_kit.oracle import Case, check, materialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIGNATURES = Path(__file__).parent / "signatures"
RECORDS = {path.stem: json.loads(path.read_text()) for path in SIGNATURES.glob("flash-attn-*.json")}
WHEELS = ("vllm-0.24.0", "tokenspeed-fa3-3.0.0.post20260810")
SCHEMAS = {k: v for name in WHEELS for k, v in json.loads((SIGNATURES / f"{name}.json").read_text()).items()}

_COMMON = {"max_seqlen_q", "cu_seqlens_q", "softmax_scale", "causal", "window_size", "softcap"}
_FP8 = {"q_descale", "k_descale", "v_descale"}
_KEYS = {"cu_seqlens_k", "max_seqlen_k"}
_ONLY_FA4 = {"seqused_k", "page_table", "learnable_sink", "num_splits", "return_lse"}
CALLS: dict[tuple[str, str], tuple[int, set[str]]] = {
    ("fa2", "flash_attn_varlen_func"): (
        3, {*_COMMON, *_KEYS, "alibi_slopes", "return_attn_probs", "block_table"},
    ),
    ("fa3", "flash_attn_varlen_func"): (
        3, {*_COMMON, *_KEYS, *_FP8, "seqused_k", "num_splits", "return_attn_probs"},
    ),
    ("fa3", "flash_attn_with_kvcache"): (
        3, {*_COMMON, *_FP8, "cache_seqlens", "cache_leftpad", "page_table", "num_splits", "return_softmax_lse"},
    ),
    ("fa4", "flash_attn_varlen_func"): (3, {*_COMMON, *_KEYS, *_ONLY_FA4}),
    ("fa4", "_flash_attn_fwd"): (
        3, {*_COMMON - {"window_size"}, *_KEYS, *_ONLY_FA4, "window_size_left", "window_size_right", "out"},
    ),
    ("torch", "_flash_attention_forward"): (10, {"scale", "window_size_left", "window_size_right"}),
    ("fa2_vllm", "varlen_fwd"): (22, set()),
    ("fa3_vllm", "fwd"): (37, set()),
    ("fa3_vllm", "get_scheduler_metadata"): (23, set()),
    ("fa3_tokenspeed", "fwd"): (35, set()),
    ("fa3_tokenspeed", "get_scheduler_metadata"): (24, set()),
}  # fmt: skip
"""What the adapters call: how many arguments by position, and the keywords."""

DISTRIBUTIONS = {"fa2": "flash-attn", "fa3": "flash-attn-3", "fa4": "flash-attn-4"}
MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
NEWEST = {"fa2": "flash-attn-2.8.3.post1", "fa3": "flash-attn-3-3.0.0", "fa4": "flash-attn-4-4.0.0b36"}
IN_PYTHON = sorted(key for key in CALLS if key[0] in MODULES)
RECORDED = [
    (record, library, function)
    for library, function in IN_PYTHON
    for record in sorted(RECORDS)
    if re.fullmatch(rf"{DISTRIBUTIONS[library]}-\d[^-]*\.[^-]*", record)
]

MIXED = Case(query_lens=(1, 1, 5, 17), context_lens=(20, 7, 5, 0), head_size=64, dtype="bfloat16")
FP8 = evolve(MIXED, kv_cache_dtype="fp8_e4m3", k_scale=0.3, v_scale=0.7)
STEPS = {
    "fa2": (evolve(MIXED, alibi="linear", block_size=256),),
    "fa2_vllm": (evolve(MIXED, alibi="linear"),),
    "fa3": (MIXED, FP8),
    "fa3_vllm": (MIXED, FP8, evolve(MIXED, sinks=True)),
    "fa3_tokenspeed": (MIXED, FP8, evolve(MIXED, sinks=True)),
    "fa4": (evolve(MIXED, sinks=True),),
    "torch": (MIXED,),
}


def test_the_list_is_what_the_adapters_call(monkeypatch, journal, load_fake):
    for variant, cases in STEPS.items():
        for case in cases:
            check(load_fake(case.requirements(), variant), materialize(case))
        check(load_fake(MIXED.requirements(paged=False), variant), materialize(MIXED))
    monkeypatch.delattr(import_module(MODULES["fa4"]), "_flash_attn_fwd")
    check(load_fake(STEPS["fa4"][0].requirements(), "fa4"), materialize(STEPS["fa4"][0]))
    found: dict[tuple[str, str], tuple[int, set[str]]] = {}
    for call in journal.calls:
        key = call.library, call.function
        positional, keywords = found.get(key, (call.num_positional, set()))
        assert positional == call.num_positional
        found[key] = positional, keywords | set(call.keywords)
    assert found == CALLS


def lacking(parameters: Iterable[inspect.Parameter], positional: int, keywords: Iterable[str]) -> list[str]:
    """Return what a call passes and parameters do not take, and what it does not pass and must."""
    given = list(parameters)
    names = [item.name for item in given]
    known, by_place = set(names[positional:]), names[:positional]
    missing = [f"argument {positional} by position"] if len(by_place) < positional else []
    missing += [f"keyword {name!r}" for name in sorted(keywords) if name not in known]
    needed = {item.name for item in given[positional:] if item.default is item.empty}
    return missing + [f"nothing for {name!r}" for name in sorted(needed - set(keywords))]


def recorded(record: str, function: str) -> list[inspect.Parameter]:
    """The parameters of a release. Defaults are texts."""
    made = []
    for name, kind, *default in RECORDS[record][function]:
        more = {"default": default[0]} if default else {}
        made.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), **more))
    return made


@pytest.mark.parametrize(("record", "library", "function"), RECORDED)
def test_releases_take_the_calls(record, library, function):
    missing = lacking(recorded(record, function), *CALLS[library, function])
    assert not missing, f"{record}: {function} is called with {', '.join(missing)}"


@pytest.mark.parametrize("library", MODULES)
def test_the_first_and_the_last_release_are_recorded(library):
    manifest = read_manifest(Path(attnplug_flash_attn.__file__).with_name("attnplug.toml"))
    (variant,) = (each for each in manifest.variants if each.name == library)
    (text,) = variant.requires
    allowed = Requirement(text).specifier
    versions = {record.removeprefix(f"{DISTRIBUTIONS[library]}-") for record, owner, _ in RECORDED if owner == library}
    assert all(allowed.contains(version, prereleases=True) for version in versions)
    assert any(f">={version}" in str(allowed).split(",") for version in versions)


@pytest.mark.parametrize("library", SCHEMAS)
def test_the_ops_take_what_is_passed_by_position(library):
    for op, schema in SCHEMAS[library].items():
        names = [argument.name for argument in torch._C.parse_schema(f"{library}::{schema}").arguments]
        assert names == ARGUMENTS[library][op].split()
        assert CALLS[{name: variant for variant, name in LIBRARIES.items()}[library], op][0] == len(names)
    assert set(SCHEMAS[library]) == set(ARGUMENTS[library])


def test_the_installed_torch_takes_the_call():
    positional, keywords = CALLS["torch", "_flash_attention_forward"]
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    assert [item.name for item in arguments if not item.kwarg_only] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert sum(not item.kwarg_only for item in arguments) == positional
    assert {*keywords, "seqused_k"} <= {item.name for item in arguments if item.kwarg_only}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("library", "function"), IN_PYTHON)
def test_the_fakes_have_the_signatures_of_their_releases(library, function):
    def shown(parameters: Iterable[inspect.Parameter], show: Callable[[Any], str]) -> list[tuple[str, ...]]:
        return [
            (item.name, item.kind.name, *(() if item.default is item.empty else (show(item.default),)))
            for item in parameters
        ]

    fake = inspect.signature(getattr(import_module(MODULES[library]), function)).parameters.values()
    assert shown(fake, repr) == shown(recorded(NEWEST[library], function), str)


def future(q, k, *, window, softcap=0.0): ...


FUTURE = {
    "known": (2, {"window"}, []),
    "removed": (2, {"window", "softmax_scale"}, ["keyword 'softmax_scale'"]),
    "added": (2, {"softcap"}, ["nothing for 'window'"]),
    "no_more_places": (5, set(), ["argument 5 by position"]),
    "twice": (2, {"q", "window"}, ["keyword 'q'"]),
}


@pytest.mark.parametrize("what", FUTURE)
def test_arguments_that_a_release_does_not_take_are_found(what):
    positional, keywords, missing = FUTURE[what]
    assert lacking(inspect.signature(future).parameters.values(), positional, keywords) == missing


@pytest.mark.gpu
@pytest.mark.parametrize(("library", "function"), IN_PYTHON)
def test_the_installed_library_takes_the_calls(library, function):
    package = pytest.importorskip(MODULES[library])
    if not hasattr(package, function):
        pytest.skip(f"{MODULES[library]} is another distribution's")
    missing = lacking(inspect.signature(getattr(package, function)).parameters.values(), *CALLS[library, function])
    assert not missing, f"{function} of {package.__name__} is called with {', '.join(missing)}"
