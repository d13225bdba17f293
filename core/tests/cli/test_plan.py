"""``attnplug plan``: the decision for a whole model, its KV cache, and tensor parallelism."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

import attnplug
from attnplug.models import describe_model

if TYPE_CHECKING:
    from pathlib import Path

GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "dtype": "bfloat16",
}
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "dtype": "bfloat16"}
ON_HOPPER = ["--device", "cuda:9.0", "--assume-installed"]
WHISPER = {
    "model_type": "whisper",
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "dtype": "float16",
}


@pytest.fixture
def plan(run, tmp_path: Path):
    """Return what runs the command on a configuration."""

    def call(config: dict, *options: str):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        return run("plan", str(file), *options)

    return call


def test_the_decision_is_that_of_a_plan(plan, site) -> None:
    (found,) = plan(GPT_OSS, *ON_HOPPER, "--json").json["plans"]

    layers = describe_model(GPT_OSS).requirements
    expected = attnplug.plan(layers, attnplug.Device.cuda("9.0"), assume_installed=True)
    assert {name: group["id"] for group in found["groups"] for name in group["layers"]} == {
        name: expected[name].id for name in layers
    }
    assert (found["block_size"], found["kv_layout"]) == (expected.block_size, expected.kv_layout)
    assert found["serves"]


def test_layers_that_request_the_same_are_one_group(plan, site) -> None:
    (found,) = plan(GPT_OSS, *ON_HOPPER, "--json").json["plans"]

    assert [len(group["layers"]) for group in found["groups"]] == [3, 3]
    assert {group["tokens_kept"] for group in found["groups"]} == {128, None}
    assert {group["scale"] for group in found["groups"]} == {0.125}
    assert {group["kv_heads"] for group in found["groups"]} == {"whole"}


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "copies", "bytes_"),
    [
        ("1", (64, 8), "whole", 1, 6 * 8 * 2 * 64 * 2),
        ("2", (32, 4), "split", 1, 6 * 4 * 2 * 64 * 2),
        ("16", (4, 1), "replicated", 2, 6 * 1 * 2 * 64 * 2),
    ],
)
def test_tensor_parallelism(plan, site, size: str, heads, kv_heads: str, copies: int, bytes_: int) -> None:
    (found,) = plan(GPT_OSS, *ON_HOPPER, "--tp", size, "--json").json["plans"]

    assert found["kv_cache_bytes_per_token"] == bytes_
    for group in found["groups"]:
        assert (group["requirements"]["num_q_heads"], group["requirements"]["num_kv_heads"]) == heads
        assert (group["kv_heads"], group["copies"]) == (kv_heads, copies)


def test_a_size_that_does_not_divide_is_refused(plan, site) -> None:
    done = plan(GPT_OSS, *ON_HOPPER, "--tp", "3")

    assert done.code == 2
    assert "over 3 devices was requested for 64 query heads and 8 KV heads" in done.err
    assert "fix: request 1, 2, 4, 8, 16, 32, 64 devices" in done.err


def test_what_a_person_reads(plan, site, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    heads = (
        "    heads: 4 query and 1 KV of size 64 on each device: query heads are split, each KV head is on 2 devices;"
    )

    done = plan(GPT_OSS, *ON_HOPPER, "--tp", "16", "--block-size", "128")

    assert done.code == 0
    assert ", 6 attention layers\n" in done.out
    assert done.out.partition("\n\n")[2] == (
        "device: cuda:9.0, tensor parallelism over 16, kernel libraries assumed installed\n"
        "plan: block_size=128 kv_layout=NHD kv_cache_form=joint cudagraph=never\n"
        "  flash/new  layers.{0..4..2}.self_attn (3 layers)\n"
        f"{heads}\n      sliding_window=128, sinks\n"
        "  flash/new  layers.{1..5..2}.self_attn (3 layers)\n"
        f"{heads} sinks\n"
        "KV cache in bfloat16: 1,536 bytes per token per device\n"
        "  768 of these for the last 128 tokens only, if the engine frees older ones\n"
    )


def test_the_kv_cache_dtype_counts(plan, site) -> None:
    checkpoint = GPT_OSS | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}

    quantized = plan(checkpoint, *ON_HOPPER, "--json")
    own = plan(checkpoint, *ON_HOPPER, "--kv-cache-dtype", "auto", "--json")
    refused = plan(checkpoint, *ON_HOPPER, "--backend", "flash", "--json")

    assert quantized.json["plans"][0]["kv_cache_bytes_per_token"] == 6 * 8 * 2 * 64
    assert refused.code == 1  # this plugin has no FP8 KV cache
    assert "kv_cache_dtype" in json.dumps(refused.json["plans"][0]["error"])
    assert own.json["plans"][0]["kv_cache_bytes_per_token"] == 6 * 8 * 2 * 64 * 2
    assert any("in place of fp8_e4m3" in note for note in own.json["model"]["notes"])


def test_cross_attention_counts_by_tokens_of_the_encoder(plan, no_plugins) -> None:
    done = plan(WHISPER, "--device", "cpu")

    assert done.code == 0
    assert "KV cache in float16: 1,024 bytes per token per device" in done.out
    assert "512 of these per token of the encoder, for cross attention" in done.out
    assert "encoder.layers.0.self_attn (1 layer)" in done.out


def test_encoders_have_no_kv_cache(plan, no_plugins) -> None:
    done = plan({"model_type": "bert", "num_hidden_layers": 1}, "--device", "cpu")

    assert done.code == 0
    assert "KV cache: none, K/V are contiguous" in done.out
    assert "encoder_only" in done.out


def test_an_additive_bias_is_served_with_contiguous_keys(plan, no_plugins) -> None:
    done = plan({"model_type": "t5", "num_layers": 1, "dtype": "float32"}, "--device", "cpu", "--json")

    (found,) = done.json["plans"]
    bias = [group for group in found["groups"] if group["requirements"].get("attn_bias")]
    assert done.code == 0
    assert {group["id"] for group in bias} == {"torch/sdpa"}
    assert all(group["kv_cache_bytes_per_token"] == 0 for group in bias)


def test_other_layers_are_named_and_no_failure(plan, no_plugins) -> None:
    done = plan({"model_type": "jamba", "num_hidden_layers": 8}, "--device", "cpu")

    assert done.code == 0
    assert "other layers: 7 layers: linear_attention: linear attention or a" in done.out


def test_latents_are_on_every_device(plan, no_plugins) -> None:
    done = plan(DEEPSEEK, "--device", "cpu", "--tp", "8", "--json")

    (found,) = done.json["plans"]
    (group,) = found["groups"]
    sizes = {"head_size": 576, "head_size_v": 512, "num_q_heads": 16, "num_kv_heads": 1, "latent": True}
    assert done.code == 0
    assert (group["id"], group["requirements"]) == ("torch/sdpa", sizes | {"dtype": "bfloat16"})
    assert (group["kv_heads"], group["copies"], group["scale"]) == ("replicated", 8, 192**-0.5)
    assert found["kv_cache_form"] == "latent"
    assert found["kv_cache_bytes_per_token"] == 2 * 1152


def test_records_of_latents_have_their_bytes(plan, no_plugins) -> None:
    done = plan(DEEPSEEK, "--device", "cpu", "--kv-cache-dtype", "fp8_ds_mla", "--json")

    (found,) = done.json["plans"]
    assert (found["groups"][0]["id"], found["kv_cache_bytes_per_token"]) == ("torch/sdpa", 2 * 656)
    assert found["uncompressed_prefills"]


def test_an_uncompressed_prefill_has_its_own_decision(plan, no_plugins) -> None:
    done = plan(DEEPSEEK, "--device", "cuda:9.0", "--tp", "8", "--json")

    (prefill,) = done.json["plans"][0]["uncompressed_prefills"]
    sizes = {"head_size": 192, "head_size_v": 128, "num_q_heads": 16, "num_kv_heads": 16, "dtype": "bfloat16"}
    assert prefill["requirements"] == sizes | {"paged": False, "return_lse": True}
    expected = attnplug.select(attnplug.Requirements(**prefill["requirements"]), "cuda:9.0")
    assert (prefill["id"], prefill["layers"]) == (expected.id, ["layers.0.self_attn", "layers.1.self_attn"])


def test_a_person_reads_who_runs_the_uncompressed_prefill(plan, site, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    label = "uncompressed prefill (128 heads of 192, values of 128): "

    served = plan(DEEPSEEK, *ON_HOPPER)
    refused = plan(DEEPSEEK, *ON_HOPPER, "--backend", "flash")

    assert served.code == 0
    (line,) = [line for line in served.out.splitlines() if line.startswith(label)]
    assert re.match(r"torch/\w+; runner-up: torch/\w+: ", line.removeprefix(label))
    assert refused.code == 1
    assert re.search(re.escape(label) + r"none: flash/\w+: does not support head_size", refused.out)
    assert "uncompressed" not in plan(GPT_OSS, *ON_HOPPER).out


def test_sparse_selection_is_served(plan, no_plugins) -> None:
    done = plan({"model_type": "deepseek_v32", "dtype": "bfloat16"}, "--device", "cpu", "--json")

    assert done.code == 0
    assert done.json["plans"][0]["serves"] is True
    assert "uncompressed_prefills" not in done.json["plans"][0]


def test_several_devices(plan, site) -> None:
    done = plan(GPT_OSS, *ON_HOPPER, "--device", "cuda:10.0", "--json")

    assert done.json["schema_version"] >= 1
    assert [found["device"]["compute_capability"] for found in done.json["plans"]] == ["9.0", "10.0"]


def test_nothing_serves_a_model(plan, empty) -> None:
    done = plan(GPT_OSS, "--device", "cuda:9.0", "--backend", "nothing")

    assert done.code == 2
    assert "'nothing'" in done.err


def test_model_fields_are_no_options(plan, site) -> None:
    done = plan(GPT_OSS, "--num-q-heads", "3")

    assert done.code == 2
    assert "'--num-q-heads' is not an option" in done.err


def test_neither_torch_nor_transformers_is_imported(start, site, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    code = (
        "import sys; from attnplug.cli.main import main;"
        f"code = main(['plan', {str(tmp_path)!r}, '--device', 'cuda:9.0', '--assume-installed']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')) or code)"
    )

    assert start("-c", code).code == 0


def test_a_plan_that_fails_names_the_command_with_the_reasons(plan, run, no_plugins) -> None:
    done = plan(GPT_OSS, "--device", "xpu")

    assert done.code == 1
    assert len(done.out.splitlines()) <= 8
    (command,) = (line.removeprefix("more: attnplug ") for line in done.out.splitlines() if line.startswith("more: "))
    told = run(*shlex.split(command))
    assert told.code == 1
    assert "requires device type cpu, cuda; the device is xpu" in told.out


# --- drafts -----------------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
EAGLE = LLAMA | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
SMALL = LLAMA | {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1024, "num_key_value_heads": 2}


@pytest.fixture
def with_draft(plan, tmp_path: Path):
    """Return what runs the command on a configuration and a draft's."""

    def call(config: dict, draft: dict, *options: str):
        file = tmp_path / "draft.json"
        file.write_text(json.dumps(draft))
        return plan(config, "--draft", str(file), *options)

    return call


def test_a_small_model_drafts_on_the_same_kv_cache(with_draft, site, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    del (small := dict(SMALL))["dtype"]  # it is the model's
    options = [*ON_HOPPER, "--tp", "2", "--kv-cache-dtype", "bfloat16"]

    read = with_draft(LLAMA, small, *options)
    (found,) = with_draft(LLAMA, small, *options, "--json").json["plans"]

    groups = {tuple(group["layers"]): group for group in found["groups"]}
    own, draft = (tuple(f"{part}layers.{i}.self_attn" for i in range(n)) for part, n in (("", 4), ("draft.", 2)))
    assert set(groups) == {own, draft}
    assert groups[draft]["requirements"]["dtype"] == "bfloat16"
    assert (groups[draft]["requirements"]["num_q_heads"], groups[draft]["requirements"]["num_kv_heads"]) == (8, 1)
    assert found["kv_cache_bytes_per_token"] == (4 * 4 * 128 + 2 * 1 * 64) * 2 * 2
    assert read.code == 0
    assert re.search(r"\ndraft \S+draft\.json: llama, 2 attention layers\n", read.out)
    assert re.search(r"  flash/\w+  draft\.layers\.\{0,1\}\.self_attn \(2 layers\)\n", read.out)


@pytest.mark.parametrize(
    "config", [EAGLE, {"speculators_model_type": "eagle3", "transformer_layer_config": EAGLE}, {"model": EAGLE}]
)
def test_an_eagle_head_is_a_model_of_one_layer(with_draft, site, config) -> None:
    done = with_draft(LLAMA, config, *ON_HOPPER, "--decode-query-len", "4", "--block-size", "128", "--json")

    (found,) = done.json["plans"]
    assert [group["layers"][0] for group in found["groups"]] == ["layers.0.self_attn", "draft.layers.0.self_attn"]
    assert len({group["id"] for group in found["groups"]}) == 1
    assert done.json["draft"]["model_type"] == "llama"


def test_a_model_drafts_for_itself_with_its_mtp_layers(run, no_plugins, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK | {"num_nextn_predict_layers": 1}))

    done = run("plan", str(file), "--draft", str(tmp_path), "--device", "cpu", "--tp", "8", "--json")

    (found,) = done.json["plans"]
    assert [group["layers"] for group in found["groups"]] == [
        ["layers.0.self_attn", "layers.1.self_attn"],
        ["draft.layers.2.self_attn"],
    ]
    assert found["kv_cache_bytes_per_token"] == 3 * 1152


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ({"model_type": "medusa"}, "is a draft of type 'medusa'"),
        (LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}, "of the draft, tensor parallel"),
        ({"model_type": "unheard_of"}, "is of model type 'unheard_of'"),
    ],
)
def test_drafts_that_are_not_possible_are_refused(with_draft, site, draft, problem) -> None:
    done = with_draft(LLAMA, draft, *ON_HOPPER, "--tp", "2")

    assert done.code == 2
    assert problem in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("config", "problem"), [(LLAMA, "neither 'num_nextn_predict_layers' nor"), (GPT_OSS, "of which kind its MTP")]
)
def test_a_model_without_clear_mtp_layers_is_no_draft(run, no_plugins, tmp_path: Path, config, problem) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | ({"num_nextn_predict_layers": 1} if config is GPT_OSS else {})))

    done = run("plan", str(file), "--draft", str(file), "--device", "cpu")

    assert done.code == 2
    assert problem in " ".join(done.err.split())


def test_a_draft_that_shares_no_form_of_the_kv_cache_has_no_plan(with_draft, no_plugins) -> None:
    done = with_draft(DEEPSEEK, EAGLE, "--device", "cpu")

    assert done.code == 1
    assert "plan: none" in done.out


def test_what_limits_a_plan_and_what_lifts_it(plan, with_draft, site, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    listed = ["--backend", "flash/old", "--backend", "auto"]
    read = with_draft(GPT_OSS, LLAMA, *ON_HOPPER, "--block-size", "256", *listed)
    (found,) = with_draft(GPT_OSS, LLAMA, *ON_HOPPER, "--block-size", "256", *listed, "--json").json["plans"]

    change = {"term": "cudagraph", "layers": [], "value": "never", "without": "uniform_batch"}
    names = [f"layers.{index}.self_attn" for index in (0, 2, 4, 1, 3, 5)]
    assert found["limits"] == [{"layers": names, "changes": [change], "lifts": []}]
    assert (
        "limited by layers.{0..5}.self_attn (6 layers); without: cudagraph=uniform_batch instead of never\n"
        "  no candidate that is known here lifts it\n"
    ) in read.out
    assert "limited" not in plan(GPT_OSS, *ON_HOPPER).out


def test_the_time_of_all_layers_is_shown(plan, site, monkeypatch, tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('[[measured]]\nmicroseconds = { "flash/new" = 250.0, "torch/sdpa" = 900.0 }\n')
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))
    attnplug.refresh()
    note = "measured over all layers: 1,500 us (one call, local profile)"

    assert f"\n{note}\n" in plan(GPT_OSS, *ON_HOPPER).out
    assert plan(GPT_OSS, *ON_HOPPER, "--json").json["plans"][0]["notes"] == [note]
