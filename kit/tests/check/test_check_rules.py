"""Findings about rules, compared with the requests that a variant serves."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import RequirementsError
from attnplug.manifest.reader import parse_manifest
from attnplug.manifest.schema import IsInstalled
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.matching import Request, most_evaluations, negotiate
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from attnplug_kit.check.rules import cannot_hold, check_rules

TEXT = """\
api = "1.0"
backend = {{ name = "acme", summary = "an example" }}
[supports]
device_type = ["cpu", "cuda"]
compute_capability = ["8.0", {{ min = "9.0", max = "10.0" }}]
dtype = ["bfloat16", "float16"]
head_size = {{ multiple_of = 32, max = 128 }}
block_size = [16, {{ multiple_of = 32 }}]
kv_cache_dtype = ["auto", "int8"]
features = ["paged", "sliding_window", "attn_type", "causal", "alibi"]
[variants.only]
requires = ["acme-kernels >=1.5,<3"]
[[variants.only.rules]]
when = {{ {when} }}
{need}
because = "why not"
"""
CONDITIONS = {
    "device_type": ['"cpu"', '["cpu", "cuda"]', '"xpu"'],
    "compute_capability": ['"8.0"', '"8.6"', '{ min = "8.0" }'],
    "dtype": ['"bfloat16"', '"float32"', '["float16", "bfloat16"]'],
    "head_size": ["48", "64", "{ max = 128 }", "{ multiple_of = 32 }", "{ min = 129 }"],
    "head_size_v": ["64", "48"],
    "block_size": ["16", "8", "{ min = 16 }", "true"],
    "kv_cache_dtype": ['"auto"', '"int8"', '"bfloat16"', '"float32"', "true", "false"],
    "sliding_window": ["true", "false", "128", "{ min = 1 }"],
    "alibi": ["true", "false", '"linear"'],
    "sinks": ["true", "false"],
    "attn_type": ['"decoder"', '"encoder"', '["encoder", "encoder_decoder"]', "true"],
    "causal": ["true", "false"],
    "paged": ["true", "false"],
    "installed": ['"acme-kernels <2"', '"acme-kernels <1.5"', '"acme-kernels >=1.5"', '"other"'],
}
TABLES = st.lists(st.sampled_from(sorted(CONDITIONS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.tuples(*(st.sampled_from(CONDITIONS[name]).map(f"{name} = {{}}".format) for name in names))
)
FIELDS = {
    "head_size": [64, 128],
    "dtype": ["bfloat16", "float16"],
    "sliding_window": [None, 128],
    "alibi": [None, "linear"],
    "attn_type": ["decoder", "encoder", "encoder_decoder"],
    "paged": [None, False],
    "kv_cache_dtype": ["auto", "int8"],
}
DEVICES = [Device.cpu(), Device.cuda("8.0"), Device.cuda("9.0")]


def _requests():
    for values in product(*FIELDS.values()):
        try:
            requirements = Requirements(num_q_heads=8, num_kv_heads=8, **dict(zip(FIELDS, values, strict=True)))
        except RequirementsError:
            continue
        yield from (Request(requirements, device) for device in DEVICES)


REQUESTS = tuple(_requests())
VERSIONS = ("1.5", "2.5")


def _read(when, need=""):
    return parse_manifest(TEXT.format(when=", ".join(when), need=need))


def _serving(manifest):
    """Yield (candidate, request, facts) of all served requests, for every version of the library."""
    for version in VERSIONS:
        candidate = make_candidate(manifest, manifest.variants[0], {"acme-kernels": version, "other": "1"}.get)
        for request in REQUESTS:
            outcome = negotiate(candidate, request)
            if not outcome.objections:
                yield candidate, request, {**request.facts, **outcome.terms}


SERVED = tuple(_serving(_read(['dtype = "float32"'])))


def test_something_is_served() -> None:
    assert len(SERVED) > 100


@given(TABLES)
def test_a_rule_reported_as_never_firing_never_fires(when) -> None:
    manifest = _read(when)
    (rule,) = manifest.variants[0].rules
    if cannot_hold(rule.when, manifest.variants):
        for version in VERSIONS:
            installed = make_candidate(
                manifest, manifest.variants[0], {"acme-kernels": version, "other": "1"}.get
            ).installed
            for _, request, facts in SERVED:
                assert not all(c.holds(facts, request.requested_names, installed, absent=False) for c in rule.when)


@given(TABLES, st.one_of(st.just(()), TABLES))
def test_a_variant_reported_as_unreachable_serves_nothing(when, need) -> None:
    manifest = _read(when, f"need = {{ {', '.join(need)} }}" if need else "")
    (rule,) = manifest.variants[0].rules
    if any("can never be chosen" in finding.problem for finding in check_rules(manifest, "")):
        assert not any(isinstance(c, IsInstalled) and c.requirements == ("other",) for c in rule.when)
        assert not list(_serving(manifest))


@pytest.mark.parametrize("when", [['dtype = "float32"'], ["block_size = true"], ["head_size = 48"], ["sinks = true"]])
def test_conditions_that_never_hold_are_found(when) -> None:
    manifest = _read(when)

    assert cannot_hold(manifest.variants[0].rules[0].when, manifest.variants)


@pytest.mark.parametrize(
    "when",
    [
        *("latent = true", "latent = true, head_size_v = 512", "latent = true, dtype = 'float16'"),
        *("topk = true", "topk = true, dtype = 'float16'", "kv_cache_dtype = 'fp8_ds_mla'"),
    ],
)
def test_rules_about_latents_fire(when) -> None:
    text = TEXT.format(when=when, need="").replace('"alibi"]', '"alibi", "latent", "head_size_v", "topk"]')
    text = text.replace("max = 128", "max = 1024").replace('["auto", "int8"]', '["auto", "fp8_ds_mla"]')
    manifest = parse_manifest(text, path="attnplug.toml")

    assert not list(check_rules(manifest, text))


@pytest.mark.parametrize(("device_types", "capability"), [('"cuda"', ""), ('["cpu", "cuda"]', ""), ('"cuda"', '"9.0"')])
def test_cuda_without_a_capability_is_served_nowhere(device_types, capability) -> None:
    listed = f"compute_capability = {capability}" if capability else ""
    text = f"""
api = "1.0"
backend = {{ name = "acme", summary = "an example" }}
[supports]
device_type = {device_types}
{listed}
dtype = "bfloat16"
head_size = 64
[variants.only]
"""
    manifest = parse_manifest(text)
    candidate = make_candidate(manifest, manifest.variants[0], lambda _: None)
    requirements = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", paged=False)

    found = [finding.problem for finding in check_rules(manifest, text)]
    served = not negotiate(candidate, Request(requirements, Device.cuda("9.0"))).objections

    assert found == ([] if served else ["the variant 'only' declares 'cuda' and no compute_capability"])
    assert served is bool(capability)


ALONE = 'paged = true\nfeatures = ["sliding_window"]'
PAGED = """
api = "1.0"
backend = {{ name = "acme", summary = "an example" }}
[supports]
device_type = "cpu"
dtype = "bfloat16"
head_size = 64
block_size = 16
{supports}
{rule}
[variants.only]
"""


@pytest.mark.parametrize(
    ("supports", "rule", "line"),
    [
        (ALONE, "", 9),
        (ALONE, "when = { paged = false, sliding_window = true }", 9),
        (ALONE, "when = { paged = false }\nneed = { sliding_window = false }", 9),
        (ALONE, "when = { paged = true }", 9),
        (ALONE, "when = { paged = false }", None),
        (ALONE, 'when = { dtype = "bfloat16" }\nneed = { paged = true }', None),
        ('features = ["paged"]', "", None),
    ],
)
def test_paged_alone_is_noted_where_contiguous_keys_are_served(supports, rule, line) -> None:
    text = PAGED.format(supports=supports, rule=f'[[rules]]\n{rule}\nbecause = "pages"' if rule else "")
    manifest = parse_manifest(text)
    candidate = make_candidate(manifest, manifest.variants[0], lambda _: None)
    requirements = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", paged=False)
    served = not negotiate(candidate, Request(requirements, Device.cpu())).objections

    found = [finding for finding in check_rules(manifest, text) if finding.problem == "paged = true"]

    assert [finding.line for finding in found] == ([line] if line else [])
    assert served is (line is not None or supports != ALONE)
    for finding in found:
        assert finding.kind == "note"
        assert "when = { paged = false }" in finding.fix


def test_what_the_note_about_pages_says_to_write_is_right() -> None:
    text = PAGED.format(supports=ALONE, rule="")
    (found,) = check_rules(parse_manifest(text), text)
    both, alone = found.fix.split("; ")
    rule = "[[rules]]\n" + alone.partition("with ")[2].replace(" and because", "\nbecause")

    assert both.removeprefix("for both, write ") == 'features = ["paged"]'
    for changed in (PAGED.format(supports='features = ["paged"]', rule=""), PAGED.format(supports=ALONE, rule=rule)):
        assert not list(check_rules(parse_manifest(changed), changed))


@pytest.mark.parametrize(("sizes", "work"), [("[16, 32]", 20), ("{ min = 1 }", 10_240), ("{ min = 1 }", 20_480)])
def test_the_evaluations_of_rules_are_counted(sizes, work) -> None:
    text = TEXT.format(when="head_size = 64", need="").replace("[16, { multiple_of = 32 }]", sizes)
    count = work // (2 if sizes == "[16, 32]" else 1024)
    for number in range(count):
        when = f"block_size = 16, head_size = {{ min = {number + 1} }}"
        text += f'[[variants.only.rules]]\nwhen = {{ {when} }}\nbecause = "no"\n'
    manifest = parse_manifest(text)

    found = [finding.problem for finding in check_rules(manifest, text) if "evaluations" in finding.problem]

    assert most_evaluations(manifest, manifest.variants[0]) == work
    assert found == (
        ["the rules of 'only' about block size, layout and form take 20,480 evaluations"] if work > 20_000 else []
    )
