"""The plugin's calls fit the signatures of every allowed release, and the fake has them."""

from __future__ import annotations

import inspect
import json
from importlib import import_module

import pytest
from packaging.requirements import Requirement

from attnplug.manifest.reader import read_manifest
from attnplug_flashmla.plugin import CALLS, LIBRARY
from plugins.flashmla.tests.record_signatures import FOLDER, signatures
from tests.backends.fakes import manifest_of

RECORDS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
POSITIONAL = {
    "get_mla_decoding_metadata": ["seqlens_k", "num_q_tokens_per_head_k", "h_k", "h_q"],
    "flash_mla_with_kvcache": [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
    ],
}  # fmt: skip
POSITIONAL["flash_mla_sparse_fwd"] = ["q", "kv", "indices", "sm_scale", "d_v"]
KEYWORDS = {
    "flash_mla_sparse_fwd": {"topk_length", "use_legacy"},
    "get_mla_decoding_metadata": {"is_fp8_kvcache", "use_legacy"},
    "flash_mla_with_kvcache": {"softmax_scale", "causal", "is_fp8_kvcache", "indices", "use_legacy"},
}


@pytest.mark.parametrize("version", sorted(RECORDS))
@pytest.mark.parametrize("name", CALLS)
def test_every_release_accepts_the_calls(version: str, name: str) -> None:
    parameters, given = RECORDS[version][name], POSITIONAL[name]
    required = [parameter[0] for parameter in parameters if len(parameter) == 1]

    assert [parameter[0] for parameter in parameters[: len(given)]] == given
    assert {parameter[0] for parameter in parameters[len(given) :]} >= KEYWORDS[name]
    assert set(required) <= set(given)


def test_the_first_allowed_release_is_recorded() -> None:
    (variant,) = read_manifest(manifest_of("attnplug_flashmla")).variants
    (allowed,) = [Requirement(text).specifier for text in variant.requires if text.startswith(LIBRARY)]

    assert all(allowed.contains(version) for version in RECORDS)
    assert f">={min(RECORDS)}" in str(allowed)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", CALLS)
def test_the_fake_has_the_signatures(name: str) -> None:
    fake = inspect.signature(getattr(import_module("flash_mla.flash_mla_interface"), name)).parameters.values()

    found = [[item.name, *([] if item.default is item.empty else [repr(item.default)])] for item in fake]

    assert found == RECORDS["1.0.0"][name]


def test_signatures_are_read_from_source() -> None:
    source = "def other(a): ...\ndef get_mla_decoding_metadata(lens, h_k: int, topk=None): ...\n"

    assert signatures(source) == {"get_mla_decoding_metadata": [["lens"], ["h_k"], ["topk", "None"]]}
