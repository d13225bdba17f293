"""Whole models on an NVIDIA GPU: masks, packing and plans are on it, and decode steps are compiled."""

from __future__ import annotations

import pytest
import torch

from hosts.transformers.tests.models import generate, model, prompts

pytestmark = pytest.mark.gpu

LENGTHS = (19, 1, 12)


def both(made, run):
    made.set_attn_implementation("eager")
    expected = run()
    made.set_attn_implementation("attnplug")
    return expected, run()


def on_gpu(name, **changes):
    ids, mask = prompts(*LENGTHS)
    return model(name, **changes).cuda(), ids.cuda(), mask.cuda()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_padded_prefill(host, name):
    made, ids, mask = on_gpu(name)

    def logits():
        with torch.no_grad():
            return made(ids, attention_mask=mask).logits[mask.bool()]

    expected, found = both(made, logits)

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert {s.device.type for s in host.selections(made).values()} == {"cuda"}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_greedy_generation(host, name):
    made, ids, mask = on_gpu(name)

    (expected, margin), (found, _) = both(made, lambda: generate(made, ids, mask))

    assert margin > 1e-4
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")  # torch's compiler gives advice, and uses what torch deprecates
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_static_caches_and_the_step_that_the_library_compiles(host, name):
    made, ids, mask = on_gpu(name, num_hidden_layers=2)

    (expected, margin), (found, _) = both(made, lambda: generate(made, ids, mask, 8, cache_implementation="static"))

    assert margin > 1e-4
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision(host, name):
    made, ids, mask = on_gpu(name, num_hidden_layers=2)
    half = model(name, num_hidden_layers=2, dtype=torch.bfloat16).cuda()

    def logits(one):
        with torch.no_grad():
            return one(ids, attention_mask=mask).logits[mask.bool()].float()

    truth = logits(made)
    expected, found = both(half, lambda: logits(half))

    assert (found - truth).abs().mean() < 1.5 * (expected - truth).abs().mean()


def test_a_model_spread_over_two_devices(host):
    from accelerate import dispatch_model  # noqa: PLC0415 - only machines with GPUs need it

    made, ids, mask = on_gpu("mistral")
    other = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else torch.device("cpu")
    first, last = ["embed_tokens", "rotary_emb", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm"]
    places = {f"model.{part}": place for place, parts in ((0, first), (other, last)) for part in parts}
    spread = dispatch_model(made, places | {"lm_head": other}, main_device=0)

    def logits():
        with torch.no_grad():
            return spread(ids, attention_mask=mask).logits.cpu()[mask.bool().cpu()]

    expected, found = both(spread, logits)

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
