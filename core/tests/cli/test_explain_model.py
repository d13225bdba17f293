"""``attnplug explain --config``: every layer of a model, and the plan that they share."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from core.tests.cli.test_plan import GPT_OSS

SMALL = """\
api = "1.0"
backend = { name = "small", summary = "small blocks, windows only" }
[supports]
device_type = "cuda"
compute_capability = "9.0"
dtype = "bfloat16"
head_size = 64
features = ["paged", "sliding_window", "sinks"]
block_size = 16
[variants.windowed]
[[variants.windowed.rules]]
when = { sliding_window = false }
because = "it keeps a window"
"""
LARGE = (
    SMALL.replace("small", "large")
    .replace("block_size = 16", "block_size = 32")
    .replace("sliding_window = false", "sliding_window = true")
)
HOPPER = ["--device", "cuda:9.0"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT_OSS))
    return str(file)


def test_each_group_of_layers_is_explained_once(run, site, config: str) -> None:
    done = run("explain", "--config", config, *HOPPER, "--assume-installed", "--json")

    windowed, full = done.json["explanations"]
    assert done.code == 0
    assert windowed["layers"] == [f"layers.{i}.self_attn" for i in (0, 2, 4)]
    assert full["layers"] == [f"layers.{i}.self_attn" for i in (1, 3, 5)]
    assert windowed["requirements"]["sliding_window"] == 128
    assert "sliding_window" not in full["requirements"]
    assert windowed["chosen"] == full["chosen"] == "flash/new"
    assert all(found["requirements"]["sinks"] for found in (windowed, full))


def test_the_model_of_this_folder_is_explained_where_nothing_is_requested(
    run, site, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = run("explain", "--config", config, *HOPPER)
    monkeypatch.chdir(Path(config).parent)

    done = run("explain", *HOPPER)

    assert done.out == named.out
    assert done.err.splitlines()[0] == (
        "attnplug: note: explaining the model of this folder, as with --config config.json"
    )
    assert run("explain", *HOPPER, "--json").json == run("explain", "--config", config, *HOPPER, "--json").json
    assert run("explain", *HOPPER, "--head-size", "64").code == 2, "a layer is described, and not completely"


@pytest.mark.parametrize("text", ['{"name": "another tool"}', "[]", "{", "[" * 100_000, None])
def test_another_config_is_no_model(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    done = run("explain")

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("attnplug: no requirements were given")
    assert "run `attnplug explain` in a folder with a model's config.json" in done.err


def test_the_plan_says_what_the_layers_share(run, site, config: str) -> None:
    engine = ["--block-size", "32", "--kv-layout", "NHD"]

    done = run("explain", "--config", config, *HOPPER, "--assume-installed", *engine, "--json")

    (plan,) = done.json["plans"]
    assert (plan["block_size"], plan["kv_layout"], plan["cudagraph"]) == (32, "NHD", "never")
    assert [(group["id"], len(group["layers"])) for group in plan["groups"]] == [("flash/new", 3), ("flash/new", 3)]
    assert plan["device"]["compute_capability"] == "9.0"


def test_plain_text_names_layers_and_ends_with_the_plan(run, site, config: str) -> None:
    done = run("explain", "--config", config, *HOPPER, "--assume-installed", "--all")

    assert done.out.startswith("layers.{0..4..2}.self_attn (3 layers)\nrequested: ")
    assert done.out.rstrip().endswith(
        "plan on cuda:9.0: block_size=128 kv_layout=NHD kv_cache_form=joint cudagraph=never\n"
        "    flash/new  layers.{0..4..2}.self_attn (3 layers)\n"
        "    flash/new  layers.{1..5..2}.self_attn (3 layers)"
    )


def test_what_is_permitted_is_listed_for_each_group(run, site, config: str) -> None:
    done = run("explain", "--config", config, *HOPPER, "--assume-installed", "--backend", "flash", "--json")

    assert [found["listed"] for found in done.json["explanations"]] == [["flash"], ["flash"]]
    assert all(found["assumed_installed"] for found in done.json["explanations"])


def test_a_plan_may_choose_otherwise_than_for_a_group_alone(run, empty, config: str) -> None:
    empty.add("small", SMALL)
    empty.add("large", LARGE)
    empty.add("spare", LARGE.replace("large", "spare").replace("block_size = 32", "block_size = 16"))
    listed = ["--backend", "small", "--backend", "large", "--backend", "spare"]

    done = run("explain", "--config", config, *HOPPER, *listed, "--json")

    _, full = done.json["explanations"]
    assert done.code == 0
    assert (full["chosen"], full["decided_by"]) == ("spare/windowed", "common block size and layout")
    assert done.json["plans"][0]["block_size"] == 16


def test_dense_calls_have_no_blocks(run, site, config: str) -> None:
    done = run("explain", "--config", config, *HOPPER, "--no-paged", "--json")

    assert [found["requirements"]["paged"] for found in done.json["explanations"]] == [False, False]
    assert done.json["plans"][0]["block_size"] is None


def test_another_dtype_may_be_requested(run, site, config: str) -> None:
    done = run("explain", "--config", config, "--dtype", "float32", "--device", "cpu", "--json")

    assert {found["requirements"]["dtype"] for found in done.json["explanations"]} == {"float32"}


def test_the_whole_model_is_explained_for_each_device(run, site, config: str) -> None:
    done = run("explain", "--config", config, *HOPPER, "--device", "cpu", "--assume-installed")

    assert len(re.findall(r"^candidate +cuda:9.0 +cpu$", done.out, re.MULTILINE)) == 2
    assert done.out.count("\nplan: block_size=") == 2


def test_backends_that_share_no_block_size_make_no_plan(run, empty, config: str) -> None:
    empty.add("small", SMALL)
    empty.add("large", LARGE)
    chosen = ["--backend", "small", "--backend", "large"]

    done = run("explain", "--config", config, *HOPPER, *chosen, "--json")
    text = run("explain", "--config", config, *HOPPER, *chosen, "--all")
    short = run("explain", "--config", config, *HOPPER, *chosen)

    assert done.code == text.code == 1
    assert [found["chosen"] for found in done.json["explanations"]] == ["small/windowed", "large/windowed"]
    assert "no choice of backends gives them one block size" in done.json["plans"][0]["error"]["expected"]
    assert "plan on cuda:9.0: none\n" in text.out
    assert "layers.0.self_attn (3 layers), small/windowed: blocks of 16; NHD" in text.out
    assert "\nplan: none\n" in short.out, short.out


def test_a_layer_that_nothing_serves_makes_no_plan(run, empty, config: str) -> None:
    empty.add("small", SMALL)

    done = run("explain", "--config", config, *HOPPER, "--backend", "small", "--all")

    assert done.code == 1
    assert done.out.rstrip().endswith(
        "plan on cuda:9.0: none\n"
        "no backend can serve the requirements of layer 'layers.1.self_attn' among 'small' (the call)"
    )


def test_a_lower_graph_level_of_one_group_is_reported(run, empty, config: str) -> None:
    graphs = SMALL.replace("block_size = 16", 'block_size = 16\ncudagraph = { max = "always" }').replace(
        "small", "quick"
    )
    empty.add("quick", graphs)
    empty.add("large", LARGE.replace("block_size = 32", "block_size = 16"))

    done = run("explain", "--config", config, *HOPPER, "--backend", "quick", "--backend", "large")

    assert "cudagraph=never; limited by large/windowed\n" in " ".join(done.out.split(" ")).replace("\n  ", " ")
    full = run("explain", "--config", config, *HOPPER, "--backend", "quick", "--backend", "large", "--all")
    assert "cudagraph=never\n    cudagraph is limited by large/windowed\n" in full.out


def test_the_other_layers_of_a_hybrid_model_are_named(run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    hybrid = {"model_type": "lfm2", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    hybrid |= {"hidden_size": 512, "dtype": "float32", "layer_types": ["conv", "full_attention"]}
    file.write_text(json.dumps(hybrid))

    done = run("explain", "--config", str(file), "--device", "cpu", "--json")

    assert done.code == 0
    assert [found["layers"] for found in done.json["explanations"]] == [["layers.1.self_attn"]]
    assert "other layers: 1 layer: conv: a short convolution" in done.err


def test_attention_that_is_not_expressed_is_not_served(run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "mistral_large4", "index_topk": 2048, "num_hidden_layers": 2, "dtype": "bfloat16"})
    )

    done = run("explain", "--config", str(file), "--json")
    partial = run("explain", "--config", str(file), "--partial")

    assert done.code == partial.code == 1
    assert done.json["error"]["type"] == "NoBackendError"
    assert "a learned indexer chooses the keys" in done.json["error"]["expected"]


def test_latents_have_a_decision_for_each_form(run, site, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "deepseek_v3", "num_hidden_layers": 2, "dtype": "bfloat16"}))
    command = ("explain", "--config", str(file), *HOPPER)

    done, shown, full = run(*command, "--json"), run(*command), run(*command, "--all")

    (absorbed,), (plan,) = done.json["explanations"], done.json["plans"]
    (expanded,) = plan["uncompressed_prefills"]
    assert done.code == shown.code == 0
    assert absorbed["requirements"]["latent"]
    assert absorbed["chosen"] == "torch/sdpa"
    assert absorbed["layers"] == expanded["layers"] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert (expanded["requirements"]["head_size"], expanded["requirements"]["return_lse"]) == (192, True)
    assert f"uncompressed prefill (128 heads of 192, values of 128): {expanded['chosen']}; runner-up: " in shown.out
    assert full.out.count("does not support head_size") > shown.out.count("does not support head_size")
    assert "uncompressed prefill, where the engine expands latents\nlayers.{0,1}.self_attn (2 layers)" in full.out
    contiguous = run(*command, "--no-paged", "--json").json
    assert "uncompressed_prefills" not in contiguous["plans"][0]
    assert contiguous["explanations"][0]["requirements"]["head_size"] == 192


def test_an_uncompressed_prefill_need_not_be_served(run, empty, tmp_path: Path) -> None:
    latents = SMALL.replace("small", "latents").replace("head_size = 64", "head_size = 320").partition("[[")[0]
    empty.add("latents", latents.replace('"sinks"', '"head_size_v", "latent"').replace("windowed", "only"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistral4", "num_hidden_layers": 2, "dtype": "bfloat16"}))

    done = run("explain", "--config", str(file), *HOPPER, "--backend", "latents", "--json")

    assert done.code == 0
    (plan,) = done.json["plans"]
    assert plan["groups"][0]["id"] == "latents/only"
    assert plan["uncompressed_prefills"][0]["chosen"] is None


def test_an_unknown_model_type_is_read_as_another(run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GPT_OSS, "model_type": "mine"}))

    unknown = run("explain", "--config", str(file))
    assumed = run("explain", "--config", str(file), "--assume", "gpt_oss", "--device", "cpu", "--json")

    assert unknown.code == 2
    assert [found["requirements"]["sinks"] for found in assumed.json["explanations"]] == [True, True]


@pytest.mark.parametrize(
    ("change", "assume", "word"),
    [
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, (), "dual chunk attention"),
        ({"model_type": "mine", "num_attention_heads_per_layer": [64, 32]}, ("--assume", "gpt_oss"), "is not read for"),
    ],
)
def test_a_field_that_matters_and_is_not_read_exits_1(run, tmp_path: Path, change, assume, word: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GPT_OSS, **change}))

    done = run("explain", "--config", str(file), *HOPPER, *assume)

    assert done.code == 1
    assert word in done.err


def test_a_kv_cache_that_is_refused_names_a_command_that_works(run, site, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    scheme = {"quant_method": "fp8", "kv_cache_scheme": "dynamic"}
    file.write_text(json.dumps({**GPT_OSS, "quantization_config": scheme}))

    refused = run("explain", "--config", str(file), *HOPPER, "--assume-installed")

    assert refused.code == 2
    option = re.search(r"--kv-cache-dtype \w+", refused.err)
    assert option is not None
    words = option[0].split()
    assert run("explain", "--config", str(file), *HOPPER, "--assume-installed", *words).code == 0


@pytest.mark.parametrize(
    ("command", "options", "is_said"),
    [
        (("explain", "--config"), HOPPER, True),
        (("plan",), HOPPER, True),
        (("explain", "--config"), [*HOPPER, "--dtype", "float32"], False),
        (("explain", "--config"), ["--device", "cpu"], False),
    ],
)
def test_a_float32_model_on_a_gpu_gets_the_dtype_to_pass(run, site, tmp_path: Path, command, options, is_said) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GPT_OSS, "dtype": "float32"}))

    done = run(*command, str(file), *options)

    assert ("pass --dtype bfloat16" in done.err) == is_said


def test_neither_torch_nor_transformers_is_imported(start, site, config: str) -> None:
    code = (
        "import sys; from attnplug.cli.main import main;"
        f"code = main(['explain', '--config', {config!r}, '--device', 'cuda:9.0']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')) or code)"
    )

    assert start("-c", code).code == 0
