"""
Whole engines of SGLang on a GPU, in bfloat16: logprobs are as near to float32 as those of SGLang's own Triton backend.

With latent attention in all its forms: absorbed steps, and cached prefixes that are expanded at once and in chunks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hosts.sglang.tests.engine import models
from hosts.sglang.tests.engine.test_engines import run, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    Errors = Callable[[str, int], tuple[torch.Tensor, str]]

pytestmark = pytest.mark.gpu

LENGTHS = ((700,), (5, 40, 1, 77, 300, 700))
ROUNDS = [
    {"prompts": [tokens(length, length) for length in lengths], "max_new_tokens": 24} for lengths in LENGTHS
]  # the longest prompt is cached in the second one
ENVIRONMENT = {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "200", "SGLANG_MAX_KV_CHUNK_CAPACITY": "512"}
OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_running_requests": 8,
    "max_total_tokens": 16384,
    "chunked_prefill_size": 256,
    "disable_cuda_graph": False,
    "sampling_backend": "pytorch",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Return a function that returns the errors of the logprobs of an engine, and its log."""
    folder = tmp_path_factory.mktemp("latent")
    model = models.make(models.WIDE, folder / "model").cuda()

    def of(name: str, page: int) -> tuple[torch.Tensor, str]:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in ENVIRONMENT.items():
                patch.setenv(variable, value)
            found, log = run(folder, folder / "model", ROUNDS, attention_backend=name, page_size=page, **OPTIONS)
        asked = [prompt for each in ROUNDS for prompt in each["prompts"]]
        answers = [one for each in found for one in each]
        return torch.cat([models.errors(model, *pair) for pair in zip(asked, answers, strict=True)]), log

    return of


@pytest.fixture(scope="module")
def own(errors: Errors) -> float:
    """Return the mean error of SGLang's own Triton backend."""
    return float(errors("triton", 1)[0].mean())


@pytest.mark.parametrize(
    ("backend", "page"),
    [
        ("flash_attn/fa3_vllm", 16),  # the smallest that its kernels read
        ("flash_attn/fa3_vllm", 64),
        ("flashinfer/fa3", 1),
        ("flashinfer/fa3", 64),
        ("flashmla/sgl", 64),
        ("torch/sdpa", 1),
        ("triton/unified", 1),
        ("triton/unified", 64),
    ],
)
def test_latents_are_as_near_as_its_own(
    backend: str, page: int, errors: Errors, own: float, record_property: Callable[[str, Any], None]
) -> None:
    error, log = errors(f"attnplug:{backend}", page)
    record_property("mean error", f"{float(error.mean()):.5f}, the largest {float(error.max()):.4f}; own {own:.5f}")
    assert f"chosen: {backend}" in log
    assert set(re.findall(r"the form is (\w+)", log)) == {"MLA", "MHA_ONE_SHOT", "MHA_CHUNKED_KV"}
    assert float(error.mean()) <= 1.2 * own + 1e-3
