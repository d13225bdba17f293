"""A model in training mode is refused: dropout would change its tokens at random."""

from __future__ import annotations

import pytest

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.models import model

PROMPT = list(range(1, 30))


@pytest.fixture
def made(host):
    return model("llama", attention_dropout=0.5)


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp"])
def test_training_mode_is_refused_at_the_next_step(made, part):
    with Engine(made) as engine:
        expected = engine.generate([PROMPT], max_new_tokens=6)
        request = engine.submit(PROMPT, max_new_tokens=6)
        engine.step()

        made.get_submodule(part).train()
        for _ in range(2):
            with pytest.raises(NotNegotiatedError, match=part or "the model of LlamaForCausalLM") as refused:
                engine.step()
            assert "call model.eval()" in refused.value.fix
        made.eval()
        while engine.has_work:
            engine.step()

        assert [request.new_tokens] == expected


def test_a_part_in_training_mode_gets_no_engine(made):
    made.model.layers[1].mlp.train()

    with pytest.raises(RequirementsError, match=r"model\.layers\.1\.mlp is in training mode"):
        Engine(made)
