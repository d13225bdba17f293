"""Weights that change under an engine: prefixes of the old ones are not matched with the new ones."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import NotNegotiatedError
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.weights import Weights
from hosts.transformers.tests.models import model

PROMPT = list(range(1, 41))


def negate(made):
    with torch.no_grad():
        made.model.layers[0].self_attn.v_proj.weight.neg_()


def replace(made):
    projection = made.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach(), requires_grad=False)


def negate_unseen(made):
    made.model.layers[0].self_attn.v_proj.weight.data.neg_()


def changed(change):
    """Return what follows the prompt after the change, from an engine without a prefix cache."""
    made = model("llama")
    change(made)
    with Engine(made) as engine:
        return engine.generate([PROMPT], max_new_tokens=8)


@pytest.mark.parametrize("change", [negate, replace])
def test_prefixes_of_other_weights_are_recomputed(host, change):
    made = model("llama")
    with Engine(made) as engine:
        before = engine.generate([PROMPT], max_new_tokens=8)
        change(made)

        after = engine.submit(PROMPT, max_new_tokens=8)
        while engine.has_work:
            engine.step()

        assert after.num_cached_tokens == 0
        assert [after.new_tokens] == changed(change) != before
        again = engine.submit(PROMPT, max_new_tokens=1)
        engine.step()
        assert again.num_cached_tokens == 32  # prefixes of the new weights are shared


def test_undetected_changes_require_a_reset(host):
    made = model("llama")
    with Engine(made) as engine:
        engine.generate([PROMPT], max_new_tokens=8)
        negate_unseen(made)
        engine.reset_prefix_cache()

        assert engine.generate([PROMPT], max_new_tokens=8) == changed(negate_unseen)


def test_unfinished_requests_share_nothing_after_a_change(host):
    """The blocks that such a request registers later are not matched either."""
    made = model("llama")
    with Engine(made, max_num_tokens=8, max_num_reqs=4) as engine:
        before = engine.submit(PROMPT, max_new_tokens=8)
        engine.step()  # half of its first block
        negate(made)
        engine.submit([1], max_new_tokens=1)
        while engine.has_work:
            engine.step()
        assert before.finish_reason == "length"

        assert engine.generate([PROMPT], max_new_tokens=8) == changed(negate)


def test_captured_steps_read_the_old_parameters(host):
    made = model("llama")
    with Engine(made, graphs=True, max_num_reqs=2, max_seq_len=64) as engine:
        negate(made)
        assert engine.generate([PROMPT], max_new_tokens=8) == changed(negate)
        replace(made)

        for _ in range(2):
            with pytest.raises(NotNegotiatedError, match="parameters of LlamaForCausalLM were replaced"):
                engine.submit(PROMPT, max_new_tokens=8)


def changes(weights):
    """Return whether there is a change, before and after it is stored; a second look changes nothing."""
    found = [weights.have_changed(), weights.have_changed()]
    weights.store()
    return [*found, weights.have_changed()]


def test_changes_are_detected_until_they_are_stored():
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    with torch.inference_mode():
        made[1].weight = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    weights = Weights(made)
    assert not weights.have_changed()

    with torch.no_grad():
        made[0].bias.add_(1)
    assert changes(weights) == [True, True, False]

    made[0].bias = None
    assert changes(weights) == [True, True, False]
    made[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert changes(weights) == [True, True, False]
    del made[0].weight
    assert changes(weights) == [True, True, False]
