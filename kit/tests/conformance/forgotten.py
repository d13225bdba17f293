"""
Backends that forget one feature in one situation, and the tests of the kit that catch them, as a table.

    python -m kit.tests.conformance.forgotten            the cells that have no result
    python -m kit.tests.conformance.forgotten NAME...    these cells again; --all for every one
    python -m kit.tests.conformance.forgotten --check NAME...   whether their recorded tests still fail
    python -m kit.tests.conformance.forgotten --write    the page only, from what is recorded

The other wrong backends were written one by one. These are every feature in every situation, so that a test which a
situation has for plain requests alone shows. It goes on where it was stopped. A cell runs the tests that are recorded
for it, or those of its situation, and the whole kit if they pass; "-" is a feature that the built-in backend does not
serve in that situation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path

import torch
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.contract import hookimpl
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.request_spec import FP8_DTYPES
from attnplug_kit.conformance.subject import find_subjects
from kit.tests.conformance.defects import worker
from kit.tests.conformance.defects.defect import Defect, backend_of, with_params

ROOT = Path(__file__).parents[3]
DATA = ROOT / "docs/reference/evidence/forgotten-features.json"
PAGE = DATA.with_suffix(".md")
OUTCOMES = ("basic", "kit", "uncaught", "refused")
INTRODUCTION = """\
# Forgotten features

The built-in backend with one feature forgotten in one situation, and what the conformance kit makes of it on a CPU.
Written by `python -m kit.tests.conformance.forgotten`; not edited by hand. The kit is that of revision {revision}.

Features: {features}. *basic* counts those that the basic tier catches first, *kit* those that another test does;
*uncaught*: the whole kit passes; *refused*: the built-in backend has no such combination. [The
data](forgotten-features.json) has the test of each.
"""


class Situation:
    """
    Where a feature is forgotten.

    Args:
        words: What the page says.
        holds: Whether a step is in it, from agreement, batch (None where a graph is captured), graph, and whether the
            step is advanced or built fast.
        tests: The tests that have it, as patterns: they run first.
        fields: Fields of a request that can be in it.
    """

    def __init__(self, words, holds, *tests, **fields):
        self.words, self.holds, self.tests, self.fields = words, holds, tests, fields


def _requests(name, wanted):
    return lambda agreement, *_: wanted(getattr(agreement.requirements, name))


BASIC, CAPABILITY, PAIRS = "TestBasic::*", "TestCapabilities::test_capability*", "TestCapabilities::test_pairs*"
SITUATIONS = {
    "long": Situation(
        "more than 1,000 keys",
        lambda _, batch, graph, *__: batch is not None and graph is None and batch.max_seq_len > 1000,
        "TestCapabilities::test_long_sequences*",
        "TestCapabilities::test_beyond_cuts*",
    ),
    "wide_prefill": Situation(
        "more than 100 new tokens of a request",
        lambda _, batch, graph, *__: batch is not None and graph is None and batch.max_query_len > 100,
        "TestCapabilities::test_long_sequences*",
        "TestCapabilities::test_long_prompt*",
    ),
    "many": Situation(
        "more than 20 requests",
        lambda _, batch, graph, *__: batch is not None and graph is None and batch.num_reqs > 20,
        "TestCapabilities::test_many_requests*",
    ),
    "first_prefill": Situation(
        "no tokens before those of the step",
        lambda _, batch, graph, *__: batch is not None and graph is None and batch.max_query_len == batch.max_seq_len,
        BASIC,
        CAPABILITY,
    ),
    "graph": Situation(
        "graphs", lambda _, __, graph, *___: graph is not None, "TestGraphs::*", cudagraph="uniform_batch"
    ),
    "advanced": Situation(
        "advanced steps", lambda _, __, graph, advanced, ___: advanced and graph is None, "TestStepping::*"
    ),
    "fast": Situation("fast builds", lambda *each: each[-1], "TestBuilding::*", "TestStepping::*"),
    "cascade": Situation("cascade", _requests("cascade", bool), CAPABILITY, PAIRS, cascade=True),
    "drafts": Situation(
        "decodes of several tokens",
        _requests("decode_query_len", lambda length: (length or 1) > 1),
        "TestCapabilities::test_decodes*",
        PAIRS,
        decode_query_len=2,
    ),
    "lse": Situation("LSE requested", _requests("return_lse", bool), BASIC, PAIRS, return_lse=True),
    "sharing": Situation("shared KV cache", _requests("kv_sharing", bool), CAPABILITY, PAIRS, kv_sharing=True),
    "written": Situation("K/V in the cache", _requests("kv_in_cache", bool), BASIC, PAIRS, kv_in_cache=True),
    "bounds": Situation(
        "lengths as bounds", _requests("seq_lens_cpu_kind", lambda kind: kind != "exact"), BASIC, "TestBatches::*"
    ),
    "dense": Situation("contiguous K/V", _requests("paged", lambda paged: not paged), BASIC, CAPABILITY, paged=False),
    "hnd": Situation("HND", lambda agreement, *_: agreement.kv_layout == "HND", BASIC, PAIRS, kv_layout="HND"),
    "packed": Situation(
        "packed KV cache",
        lambda agreement, *_: agreement.kv_cache_form == "packed",
        BASIC,
        PAIRS,
        kv_cache_form="packed",
    ),
    "fp8": Situation(
        "FP8 KV cache",
        lambda agreement, *_: agreement.kv_cache_dtype in FP8_DTYPES,
        BASIC,
        PAIRS,
        kv_cache_dtype="fp8_e4m3",
    ),
    "wide_blocks": Situation("blocks of more than 16", lambda agreement, *_: (agreement.block_size or 0) > 16, BASIC),
    "half": Situation("bfloat16 and float16", _requests("dtype", lambda dtype: dtype != "float32"), BASIC, PAIRS),
    "one_kv_head": Situation("one KV head", _requests("num_kv_heads", lambda heads: heads == 1), BASIC, PAIRS),
    "groups": Situation(
        "8 query heads per KV head or more",
        lambda agreement, *_: agreement.requirements.num_q_heads >= 8 * agreement.requirements.num_kv_heads,
        BASIC,
        PAIRS,
    ),
    "value_size": Situation(
        "another size of values",
        lambda agreement, *_: agreement.requirements.head_size_v not in (None, agreement.requirements.head_size),
        CAPABILITY,
        PAIRS,
        head_size_v=24,
    ),
    "window": Situation("windows", _requests("sliding_window", bool), BASIC, PAIRS, sliding_window=7),
    "cap": Situation("soft caps", _requests("logits_soft_cap", bool), BASIC, PAIRS, logits_soft_cap=2.0),
    "sinks": Situation("sinks", _requests("sinks", bool), BASIC, PAIRS, sinks=True),
    "alibi": Situation("ALiBi", _requests("alibi", bool), BASIC, PAIRS, alibi="linear"),
}


def _planned(change):
    """Return what forgets a feature that planning applies."""

    def methods(situation):
        def params(self, params, builder, batch, graph):
            there = situation.holds(builder.agreement, batch, graph, builder.is_advancing, builder.is_fast)
            return change(params) if there else params

        return {"params": params}

    return methods


def _run(change):
    """Return what forgets a feature that a call applies."""

    def methods(situation):
        def run(self, call):
            impl, graph = call.impl, call.metadata.graph
            held = (impl._score_params, impl._sinks, impl._codec)
            if situation.holds(call.agreement, call.batch, graph, call.is_advanced, False):
                change(impl, call)
            call.attend()
            impl._score_params, impl._sinks, impl._codec = held

        return {"run": run}

    return methods


def _scores(**changed):
    def change(impl, call):
        del call
        impl._score_params = evolve(impl._score_params, **changed)

    return change


def _scale(impl, call):
    impl._score_params = evolve(impl._score_params, scale=impl._score_params.scale * call.default)


def _alibi(impl, call):
    del call
    if impl._score_params.slopes is not None:
        impl._score_params = evolve(impl._score_params, slopes=torch.zeros_like(impl._score_params.slopes))


def _sinks(impl, call):
    del call
    impl._sinks = None if impl._sinks is None else torch.full_like(impl._sinks, -1e30)


def _k_scale(impl, call):
    del call
    if impl._codec is not None:
        impl._score_params = evolve(impl._score_params, scale=impl.scale)


def _v_scale(impl, call):
    del call
    impl._codec = None if impl._codec is None else evolve(impl._codec, output_factor=None)


# The feature, the fields of a request that has it, and what forgets it.
FEATURES = {
    "scale": ({}, _run(_scale)),
    "window": ({"sliding_window": 7}, _planned(lambda params: with_params(params, window=(-1, params.window[1])))),
    "chunk": ({"attention_chunk": 16}, _planned(lambda params: with_params(params, chunk=None))),
    "cap": ({"logits_soft_cap": 2.0}, _run(_scores(soft_cap=None))),
    "alibi": ({"alibi": "linear"}, _run(_alibi)),
    "sinks": ({"sinks": True}, _run(_sinks)),
    "k_scale": ({"kv_cache_dtype": "fp8_e4m3"}, _run(_k_scale)),
    "v_scale": ({"kv_cache_dtype": "fp8_e4m3"}, _run(_v_scale)),
}
_FP8 = ("k_scale", "v_scale")


def _is_a_cell(feature, situation):
    """Whether the feature is not the situation itself, and not applied by calls, which know no fast builds."""
    if feature in _FP8:
        return situation not in {"fp8", "fast"}
    return feature != situation and (situation != "fast" or feature in {"window", "chunk"})


CELLS = {f"{feature}_in_{situation}": (feature, situation) for feature, situation in product(FEATURES, SITUATIONS)}
CELLS = {name: cell for name, cell in CELLS.items() if _is_a_cell(*cell)}


@hookimpl
def attnplug_backend(agreement):
    """Return the backend that a name of a cell stands for."""
    feature, situation = CELLS[agreement.backend]
    methods = FEATURES[feature][1](SITUATIONS[situation])
    return backend_of(type("Forgets", (Defect,), methods)())


@cache
def _subject():
    return find_subjects("torch/sdpa", Device.cpu())[0]


def is_served(name):
    """Whether the built-in backend serves the feature of a cell in its situation."""
    feature, situation = CELLS[name]
    return field_values_of(_subject()).spec(**{**FEATURES[feature][0], **SITUATIONS[situation].fields}) is not None


def judge(name, folder, recorded="", *, only=False):
    """
    Return the first test of the kit that fails on a cell, or an empty text.

    Args:
        name: The cell.
        folder: Where its manifest is written.
        recorded: The test that failed last time: it runs first.
        only: Whether no other test runs.
    """
    manifest = folder / f"{name}.toml"
    manifest.write_text(worker.BUILT_IN.replace("{}", name, 1), "utf-8")
    attnplug.register("kit.tests.conformance.forgotten", manifest=manifest)
    own = (f"{recorded.partition('[')[0]}*",) if recorded else ()
    for patterns in filter(None, (own, *(() if only else (SITUATIONS[CELLS[name][1]].tests, ("Test*",))))):
        for found in worker.run_kit(name, folder, *patterns):
            for test in found:
                return test.replace(f"[{name}/", "[")
    return ""


def main(arguments=None):
    """Judge cells, record each result as soon as it is known, and write the page; or check what is recorded."""
    parser = argparse.ArgumentParser(
        prog="python -m kit.tests.conformance.forgotten", description="features forgotten in situations"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cells that are judged again")
    parser.add_argument("--all", action="store_true", help="judge every cell again")
    parser.add_argument("--check", action="store_true", help="run the recorded tests of cells, and record nothing")
    parser.add_argument("--write", action="store_true", help="write the page alone")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CELLS):
        parser.error(f"no cell is named {', '.join(sorted(unknown))}")
    data = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {"cells": {}}
    names = [*CELLS] if options.all else options.names or [name for name in CELLS if name not in data["cells"]]
    if options.check:
        return int("" in [test for _, test in _judged(data, names, only=True)])
    if not options.write:
        describe = ("git", "-C", str(ROOT), "describe", "--always")
        data["revision"] = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
        for name, test in _judged(data, names):
            data["cells"][name] = {"test": test}
            DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    return 0


def _judged(data, names, *, only=False):
    """Yield the test that fails on each cell; None where nothing can be forgotten."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(worker.HERE))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names:
            started = time.process_time()
            recorded = (data["cells"].get(name) or {}).get("test") or ""
            test = judge(name, Path(folder), recorded, only=only) if is_served(name) else None
            text = "-" if test is None else test or "uncaught"
            sys.stdout.write(f"{name}: {text} ({time.process_time() - started:.1f} s)\n")
            sys.stdout.flush()
            yield name, test


def page(data):
    """Return the page: for each situation, how many features are caught by what."""
    head = ("situation", *OUTCOMES)
    rows = []
    for name, situation in SITUATIONS.items():
        found = [_outcome(data, feature, name) for feature in FEATURES]
        rows.append((situation.words, *(str(found.count(outcome)) for outcome in OUTCOMES)))
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
    served = [one["test"] for one in data["cells"].values() if one["test"] is not None]
    count = f"{sum(map(bool, served))} of {len(served)} are caught."
    features = ", ".join(name.replace("_", " ") for name in FEATURES)
    return "\n".join((INTRODUCTION.format(revision=data["revision"], features=features), count, "", *lines, ""))


def _outcome(data, feature, situation):
    one = data["cells"].get(f"{feature}_in_{situation}")
    if one is None or one["test"] is None:
        return "refused"
    return "uncaught" if not one["test"] else "basic" if one["test"].startswith("TestBasic") else "kit"


if __name__ == "__main__":
    sys.exit(main())
