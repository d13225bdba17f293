"""transformers' continuous batching on attnplug, on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

import attnplug_transformers
from attnplug_transformers import continuous
from hosts.transformers.tests.models import PAD, generate, model, prompts
from hosts.transformers.tests.test_continuous import NAMES, NEW, in_batches, tokens_of

pytestmark = pytest.mark.gpu


def on_gpu(name, dtype=torch.float32):
    """Return a model, prompts, and the tokens that transformers generates, all with a wide logit margin."""
    for seed in range(16):
        made = model(name, seed=seed, dtype=dtype).cuda()
        made.set_attn_implementation("eager")
        ids, mask = prompts(19, 1, 12, 33, 7, 22, seed=seed)
        found, margin = generate(made, ids.cuda(), mask.cuda(), NEW)
        if margin > 1e-3:
            break
    rows = [tuple(token for token in row if token != PAD) for row in ids.tolist()]
    return made, dict(zip(rows, found.tolist(), strict=True))


@pytest.mark.parametrize("backend", [["torch/sdpa"], ["auto"]])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_generate(host, name, backend):
    made, wanted = on_gpu(name)

    with attnplug_transformers.continuous_batching(made, backend=backend) as handle:
        found = tokens_of(in_batches(made, [list(one) for one in wanted]))

    assert found == wanted
    assert handle.calls > NEW
    assert made.config._attn_implementation == "eager"


@pytest.mark.parametrize("backend", [["torch/sdpa"], ["auto"]])
def test_decodes_on_pages_have_the_tokens_of_generate(host, backend, monkeypatch):
    made, wanted = on_gpu("llama")
    calls, read = [], continuous.flash_attn_with_kvcache
    monkeypatch.setattr(continuous, "flash_attn_with_kvcache", lambda *a, **b: calls.append(a) or read(*a, **b))

    with attnplug_transformers.continuous_batching(made, backend=backend):
        found = tokens_of(in_batches(made, [list(one) for one in wanted], max_blocks_per_request=4))

    assert found == wanted
    assert calls


def test_requests_in_bfloat16_are_served_by_the_chosen_backend(host):
    made, wanted = on_gpu("llama", torch.bfloat16)

    with attnplug_transformers.continuous_batching(made, backend=["auto"]) as handle:
        found = tokens_of(in_batches(made, [list(one) for one in wanted], use_async_batching=True))

    assert {len(tokens) for tokens in found.values()} == {NEW}
    assert handle.calls > NEW
