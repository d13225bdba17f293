"""
The plugin's library calls fit the signatures of every allowed release, and of the installed one.

`CALLS` lists the calls, and `NEWER` those of 0.7 and later, where they differ. A run of all features on the fake shows
that the list is complete. It is compared with the records in ``signatures/``, which ``record_signatures.py`` writes,
and with the installed library.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from packaging.requirements import Requirement
from packaging.version import Version

import attnplug_flashinfer
from attnplug.contract import GraphShape
from attnplug.manifest.reader import read_manifest
from attnplug_kit.oracle import Case, check, check_replays, materialize, padded_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECORDS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "signatures").glob("*.json")}
FAKE_VERSION, NEWEST = "0.6.12", "0.7.2"

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
SINK = "BatchAttentionWithAttentionSinkWrapper"
LATENT = "BatchMLAPagedAttentionWrapper"

_PARAMS = {"num_qo_heads", "num_kv_heads", "window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type"}
_SIZES = {"head_dim_qk", "head_dim_vo"}
_RESULTS = {"out", "lse", "return_lse"}
_PREFILLS = {*_PARAMS, *_SIZES, "o_data_type", "page_size", "causal", "max_token_per_sequence"}
_PAGES = {"paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"}
_BUFFERS = {"use_cuda_graph", "qo_indptr_buf", *_PAGES}
_CSR = {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"}
_LATENTS = {
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "causal",
}
CALLS: dict[str, tuple[int, set[str]]] = {
    f"{DECODE}.__init__": (2, {"backend", "use_tensor_cores", "use_cuda_graph", *(f"{name}fer" for name in _PAGES)}),
    f"{DECODE}.plan": (3, {*_PARAMS, "o_data_type", "page_size", "head_dim"}),
    f"{DECODE}.run": (2, {*_RESULTS, "k_scale", "v_scale"}),
    f"{PREFILL}.__init__": (2, {"backend", *_BUFFERS}),
    f"{PREFILL}.plan": (4, _PREFILLS),
    f"{PREFILL}.run": (2, {*_RESULTS, "k_scale", "v_scale"}),
    f"{RAGGED}.__init__": (2, {"backend"}),
    f"{RAGGED}.plan": (2, {*_PARAMS, *_SIZES, "o_data_type", "causal"}),
    f"{RAGGED}.run": (3, _RESULTS),
    f"{SINK}.__init__": (
        2, {"backend", *_BUFFERS, *_SIZES, "q_data_type", "kv_data_type", "window_left"},
    ),
    f"{SINK}.plan": (4, _PREFILLS),
    f"{SINK}.run": (4, _RESULTS),
    f"{LATENT}.__init__": (1, {"backend", "use_cuda_graph", *_CSR}),
    f"{LATENT}.plan": (0, {*_CSR, *_LATENTS}),
    f"{LATENT}.run": (4, _RESULTS),
    "decode.fast_decode_plan": (4, {*_PARAMS, "page_size", "head_dim", "global_override_indptr_cpu"}),
    "merge_state_in_place": (4, set()),
}  # fmt: skip
"""The plugin's calls: the number of positional arguments, and all keywords that any call passes."""

NEWER = {
    f"{LATENT}.plan": (0, {"metadata", "query_layout", "kv_cache_layout", "lse_mode", *_LATENTS}),
    f"{LATENT}.run": (0, {"query", "kv_cache", *_RESULTS}),
}

MIXED = Case(query_lens=(1, 1, 5, 17), context_lens=(20, 7, 5, 0), head_size=64, dtype="bfloat16")
DECODES = Case(query_lens=(1, 1), context_lens=(20, 7), head_size=64, dtype="bfloat16")
FP8 = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.3, "v_scale": 0.7}
OF_LATENTS = {"latent": True, "head_size": 192, "head_size_v": 128, "num_q_heads": 4, "num_kv_heads": 1, "scale": 0.1}
STEPS = {
    "plain": (MIXED, {}),
    "hnd": (MIXED, {"kv_layout": "HND", "return_lse": True}),
    "window": (evolve(MIXED, sliding_window=5), {}),
    "soft_cap": (evolve(MIXED, logits_soft_cap=3.0), {}),
    "fp8": (evolve(MIXED, **FP8), {}),
    "sinks": (evolve(MIXED, sinks=True), {"return_lse": True}),
    "shared": (evolve(MIXED, kv_sharing=True), {}),
    "not_causal": (evolve(MIXED, causal=False), {}),
    "dense": (MIXED, {"paged": False, "return_lse": True}),
    "latents": (evolve(MIXED, **OF_LATENTS), {"return_lse": True}),
    "cascade": (MIXED.with_shared_prefix(2), {}),
}
GRAPHS = {
    "decodes": DECODES,
    "fp8": evolve(DECODES, **FP8),
    "queries": evolve(DECODES, query_lens=(3, 3), decode_query_len=3),
    "sinks": evolve(DECODES, sinks=True),
    "latents": evolve(DECODES, **OF_LATENTS),
}


def run_all_features(load: Callable[..., Any]) -> None:
    """Make every call of the plugin."""
    kernels = [{"flashinfer_fake": {"decode_kernel": kernel}} for kernel in ("tensor_cores", "cuda_cores")]
    for case, engine in STEPS.values():
        for options in kernels[: 1 if case.sinks or case.latent or not engine.get("paged", True) else 2]:
            check(load(case.requirements(**engine), options=options), materialize(case))
    for case in GRAPHS.values():
        for options in kernels[: 1 if case.sinks or case.latent else 2]:
            scenes = [materialize(padded_for(evolve(case, seed=seed), spare=1)) for seed in (1, 2)]
            scenes = [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]
            backend = load(case.requirements(cudagraph="uniform_batch", return_lse=True), options=options)
            check_replays(backend, scenes, num_reqs=3, max_seq_len=64)
    check(load(MIXED.requirements(), "fa3"), materialize(MIXED))
    load(MIXED.with_shared_prefix(2).requirements()).warmup([GraphShape(1, 1, 1, 64)])


def test_calls_are_the_plugins_calls(journal, load_fake):
    run_all_features(load_fake)
    assert calls_in(journal) == CALLS


def test_newer_calls_are_the_plugins_calls(load_fake, library_at):
    with library_at(NEWEST):
        journal = import_module("flashinfer.journal").journal
        journal.clear()
        case, engine = STEPS["latents"]
        check(load_fake(case.requirements(**engine)), materialize(case))
        found = calls_in(journal)
    assert {name: found[name] for name in NEWER} == NEWER


def calls_in(journal: Any) -> dict[str, tuple[int, set[str]]]:
    """Return the calls of the journal, as in `CALLS`."""
    found: dict[str, tuple[int, set[str]]] = {}
    for call in journal.calls:
        positional, keywords = found.get(call.callable, (call.num_positional, set()))
        assert positional == call.num_positional
        found[call.callable] = positional, keywords | set(call.keywords)
    return found


def calls_of(version: str) -> dict[str, tuple[int, set[str]]]:
    """Return the calls of the plugin to a release."""
    return CALLS if Version(version) < Version("0.7") else CALLS | NEWER


def missing_parameters(parameters: Iterable[inspect.Parameter], positional: int, keywords: Iterable[str]) -> list[str]:
    """
    Return the arguments of a call that a signature does not accept.

    Positional arguments may go into ``*args``, as those of custom kernels do, but not into another ``*name``: releases
    use such a parameter to deprecate positional arguments.
    """
    accepted = list(parameters)
    by_position = [item for item in accepted if item.kind.name.startswith("POSITIONAL")]
    by_name = {item.name for item in accepted if item.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")}
    takes_more = any(item.kind.name == "VAR_POSITIONAL" and item.name == "args" for item in accepted)
    missing = [] if positional <= len(by_position) or takes_more else [f"argument {positional} by position"]
    occupied = {item.name for item in by_position[:positional]}
    return missing + [f"keyword {name!r}" for name in sorted(keywords) if name not in by_name or name in occupied]


def recorded(version: str, name: str) -> list[inspect.Parameter]:
    """Return the recorded parameters of a release. Defaults are texts."""
    made = []
    for parameter, kind, *default in RECORDS[version][name]:
        more = {"default": default[0]} if default else {}
        made.append(inspect.Parameter(parameter, getattr(inspect.Parameter, kind), **more))
    return made


def failure(version: str, name: str, missing: Iterable[str]) -> str:
    return f"flashinfer-python {version}: {name} no longer accepts {', '.join(missing)}, which the plugin passes"


@pytest.mark.parametrize("version", sorted(RECORDS, key=Version))
@pytest.mark.parametrize("name", CALLS)
def test_every_release_accepts_the_calls(version, name):
    missing = missing_parameters(recorded(version, name), *calls_of(version)[name])
    assert not missing, failure(version, name, missing)


def test_the_first_and_the_last_release_are_recorded():
    manifest = read_manifest(Path(attnplug_flashinfer.__file__).with_name("attnplug.toml"))
    for variant in manifest.variants:
        (text,) = variant.requires
        allowed = Requirement(text).specifier
        assert all(allowed.contains(version) for version in RECORDS)
        oldest = min(RECORDS, key=Version)
        assert f">={oldest}" in str(allowed)
        newest = Version(max(RECORDS, key=Version)).release
        assert f"<{newest[0]}.{newest[1]}.{newest[2] + 1}" in str(allowed)


def found_in(package: Any, name: str) -> Any:
    """Return the function of a dotted name."""
    found = package
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters_of(package: Any, name: str) -> list[inspect.Parameter]:
    """
    Return the parameters of a function, without `self`.

    A method with ``**kwargs`` passes them to the method of the same name with the suffix ``_impl``.
    """
    owner, _, method = name.rpartition(".")
    parameters = list(inspect.signature(found_in(package, name)).parameters.values())
    if inspect.isclass(owner and found_in(package, owner)):
        parameters = parameters[1:]
    if any(item.kind.name == "VAR_KEYWORD" for item in parameters):
        known = {item.name for item in parameters}
        inner = inspect.signature(found_in(package, f"{owner}._{method}_impl")).parameters.values()
        parameters += [item.replace(kind=item.KEYWORD_ONLY) for item in inner if item.name not in known]
    return parameters


@pytest.mark.parametrize(
    ("version", "name"), [*((FAKE_VERSION, name) for name in CALLS), *((NEWEST, name) for name in NEWER)]
)
def test_the_fake_has_the_release_signatures(library_at, version, name):
    def described(parameters: Iterable[inspect.Parameter], show: Callable[[Any], str]) -> list[tuple[str, ...]]:
        return [
            (item.name, item.kind.name, *(() if item.default is item.empty else (show(item.default),)))
            for item in parameters
        ]

    with library_at(version):
        fake = parameters_of(import_module("flashinfer"), name)

    assert described(fake, repr) == described(recorded(version, name), str)


class Future:
    """A future release."""

    class Wrapper:
        def plan(self, indptr, *deprecated_positional_args, window=-1, **kwargs):
            pass

        def _plan_impl(self, indptr, *, sm_scale=None):
            pass

        def run(self, q, *args, lse=None):
            pass


FUTURE = {
    "accepted": ("Wrapper.plan", 1, {"window", "sm_scale"}, []),
    "renamed": ("Wrapper.plan", 1, {"window_left", "sm_scale"}, ["keyword 'window_left'"]),
    "deprecated_position": ("Wrapper.plan", 2, set(), ["argument 2 by position"]),
    "custom_kernel": ("Wrapper.run", 3, {"lse"}, []),
    "twice": ("Wrapper.run", 1, {"q"}, ["keyword 'q'"]),
}


@pytest.mark.parametrize("what", FUTURE)
def test_arguments_that_a_release_rejects_are_found(what):
    name, positional, keywords, missing = FUTURE[what]
    assert missing_parameters(parameters_of(Future, name), positional, keywords) == missing


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_installed_library_accepts_the_calls(name):
    package = pytest.importorskip("flashinfer")
    if "." in name and name.partition(".")[0].islower():
        import_module(f"flashinfer.{name.partition('.')[0]}")
    missing = missing_parameters(parameters_of(package, name), *calls_of(package.__version__)[name])
    assert not missing, failure(package.__version__, name, missing)
