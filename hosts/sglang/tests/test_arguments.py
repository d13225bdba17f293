"""SGLang's real arguments: which names it takes, in which of its processes, and the page size that follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WITHOUT_SGLANG = "SGLang is not installed here; `make test-hosts` runs these"
tomllib = pytest.importorskip("tomllib", reason="SGLang and this distribution need Python 3.11")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("sglang") is None, reason=WITHOUT_SGLANG)]

HOST = Path(__file__).parents[1]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
ACME = """
api = "1.0"
backend = { name = "acme", summary = "A backend of a test" }
[supports]
device_type = "cpu"
dtype = ["float32"]
head_size = { max = 256 }
block_size = { min = 1 }
features = ["paged"]
[variants.any]
summary = "Pages of any size"
[variants.sixteens]
summary = "Pages of 16 tokens and multiples"
[variants.sixteens.supports]
block_size = [{ multiple_of = 16 }]
[variants.twelves]
summary = "Pages of twelve tokens"
[variants.twelves.supports]
block_size = 12
"""
ARGUMENTS = {
    "auto": ["--attention-backend", "attnplug"],
    "any": ["--attention-backend", "attnplug:acme/any"],
    "sixteens": ["--attention-backend", "attnplug:acme/sixteens"],
    "passed": ["--attention-backend", "attnplug:acme/sixteens", "--page-size", "8"],
    "twelves": ["--attention-backend", "attnplug:acme/twelves"],
    "split": ["--prefill-attention-backend", "torch_native", "--decode-attention-backend", "attnplug:acme/sixteens"],
    "draft": ["--attention-backend", "torch_native", "--speculative-draft-attention-backend", "attnplug"],
    "deterministic": ["--attention-backend", "attnplug", "--enable-deterministic-inference"],
    "native": ["--attention-backend", "torch_native"],
    "unknown": ["--attention-backend", "attnplug:acme/nope"],
}


def distribution(folder, name, entry_points):
    """Put the metadata of a distribution into a folder: SGLang and attnplug find plugins by it."""
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in each.items()) for group, each in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What SGLang makes of each of the command lines above, and the names in a process that it spawned."""
    folder = tmp_path_factory.mktemp("arguments")
    site = folder / "site"
    declared = tomllib.loads((HOST / "pyproject.toml").read_text())["project"]["entry-points"]
    distribution(site, "attnplug-sglang", declared)
    distribution(site, "acme-plugin", {"attnplug.backends": {"acme": "acme_plugin"}})
    (site / "acme_plugin").mkdir()
    (site / "acme_plugin" / "__init__.py").write_text("raise AssertionError('a decision imports no plugin')\n")
    (site / "acme_plugin" / "attnplug.toml").write_text(ACME)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    fixed = ["--model-path", str(folder), "--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]),
        "ATTNPLUG_ALLOW": "acme",
        "SGLANG_PLUGINS": "attnplug",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HOST / "tests" / "arguments_program.py")],
        input=json.dumps([[*fixed, *each] for each in ARGUMENTS.values()]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {**answers, **dict(zip(ARGUMENTS, answers["answers"], strict=True))}


@pytest.mark.parametrize("process", ["here", "worker"])
def test_every_list_has_each_name_once(found, process):
    expected = {"attnplug", "attnplug:acme/any", "attnplug:acme/sixteens", "attnplug:acme/twelves"}
    lists = found[process]
    assert {"ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "registry"} <= set(lists)
    for listed, names in lists.items():
        assert expected <= set(names), listed
        assert len(set(names)) == len(names), listed


@pytest.mark.parametrize(
    ("case", "size"),
    [("auto", 1), ("any", 1), ("sixteens", 16), ("passed", 8), ("twelves", 1), ("split", 16), ("native", 1)],
)
def test_the_page_size_is_what_the_named_backend_admits(found, case, size):
    assert found[case]["page_size"] == size


def test_prefills_and_decodes_have_backends_apart(found):
    assert found["split"]["prefill_attention_backend"] == "torch_native"
    assert found["split"]["decode_attention_backend"] == "attnplug:acme/sixteens"


def test_drafts_and_deterministic_inference_take_the_names(found):
    assert found["draft"]["speculative_draft_attention_backend"] == "attnplug"
    assert found["deterministic"]["attention_backend"] == "attnplug"
    assert found["deterministic"]["enable_deterministic_inference"]


def test_a_name_without_a_candidate_is_refused_by_the_command_line(found):
    assert "invalid choice: 'attnplug:acme/nope'" in found["unknown"]["error"]
    assert "attnplug:acme/any" in found["unknown"]["error"]
