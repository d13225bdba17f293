"""Stop strings end a request with the token at which `generate` of transformers ends, and the text before them."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import AttnplugError, RequirementsError
from attnplug_transformers.engine import Engine, SamplingParams
from hosts.transformers.tests.models import model
from hosts.transformers.tests.tokenizers import END, KINDS, SIZE, letters

pytestmark = pytest.mark.unmeasured

NEW = 20


class Setup:
    """A model that writes letters, with its tokenizer and what it writes without stop strings."""

    def __init__(self, kind):
        self.tokenizer = KINDS[kind]()
        self.made = model("llama", seed=3, vocab_size=SIZE, pad_token_id=None)
        allowed = set(letters(self.tokenizer))
        self.made.generation_config.suppress_tokens = [token for token in range(SIZE) if token not in allowed]
        self.prompts = [self.tokenizer(text).input_ids for text in ("the first", "a token", "go on: one")]
        self.free = [self.generated(prompt) for prompt in self.prompts]
        self.texts = [self.decode(tokens) for tokens in self.free]

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def generated(self, prompt, **how):
        ids = torch.tensor([prompt])
        found = self.made.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how
        )
        return found[0, len(prompt) :].tolist()

    def stops(self):
        """Return stop strings of each text: over the borders of tokens, in a token, and at its end."""
        return [[text[9:14]] for text in self.texts] + [
            [self.texts[0][-3:]],
            ["\n", self.texts[1][4:6], self.texts[1][5:9]],
        ]


@pytest.fixture(scope="module", params=sorted(KINDS))
def setup(request):
    return Setup(request.param)


def test_tokens_are_those_of_generate(host, setup):
    """In chunks, with preemptions, together."""
    stops = setup.stops()
    expected = [
        [setup.generated(prompt, stop_strings=stop, tokenizer=setup.tokenizer) for prompt in setup.prompts]
        for stop in stops
    ]
    assert sum(len(tokens) < NEW for one in expected for tokens in one) >= 4
    limits = {"block_size": 4, "num_blocks": 24, "max_num_tokens": 8, "max_num_reqs": 3}
    with Engine(setup.made, tokenizer=setup.tokenizer, **limits) as engine:
        for stop, tokens in zip(stops, expected, strict=True):
            sampling = SamplingParams(stop=stop)
            found = engine.generate(setup.prompts, max_new_tokens=NEW, sampling=sampling, return_requests=True)

            assert [request.new_tokens for request in found] == tokens
            for request, text in zip(found, setup.texts, strict=True):
                places = [text.index(one) for one in stop if one in text]
                assert request.text == text[: min(places, default=len(text))]
                assert request.finish_reason == ("stop" if places else "length")
                assert (request.stop_reason in stop) if places else (request.stop_reason is None)
        assert engine.stats.blocks_in_use == 0


def test_each_request_of_a_batch_has_its_own(host, setup):
    stop = setup.texts[0][3:6]
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        samplings = [SamplingParams(stop=stop), SamplingParams(), SamplingParams(stop_token_ids=[setup.free[2][2]])]
        found = engine.generate(setup.prompts, max_new_tokens=NEW, sampling=samplings, return_requests=True)

    assert found[0].text == setup.texts[0][: setup.texts[0].index(stop)]
    assert found[1].new_tokens == setup.free[1]
    assert found[2].new_tokens == setup.free[2][: 1 + setup.free[2].index(setup.free[2][2])]
    assert [request.finish_reason for request in found] == ["stop", "length", "stop"]
    assert [request.stop_reason for request in found] == [stop, None, setup.free[2][2]]


def test_those_of_the_generation_config_are_the_default(host, setup, monkeypatch):
    stop = setup.texts[0][3:6]
    monkeypatch.setattr(setup.made.generation_config, "stop_strings", [stop])
    expected = setup.generated(setup.prompts[0], tokenizer=setup.tokenizer)
    assert len(expected) < NEW
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        assert engine.generate(setup.prompts[:1], max_new_tokens=NEW) == [expected]
        assert engine.generate(setup.prompts[:1], max_new_tokens=NEW, sampling=SamplingParams()) == [expected]
        assert (
            engine.generate(setup.prompts[:1], max_new_tokens=NEW, sampling=SamplingParams(stop=())) == setup.free[:1]
        )
    with Engine(setup.made) as engine:
        with pytest.raises(RequirementsError, match="the engine has none"):
            engine.submit([1], max_new_tokens=1)
        assert not engine.has_work


def test_they_need_a_tokenizer(host, setup):
    with Engine(setup.made) as engine:
        with pytest.raises(RequirementsError, match="they need a tokenizer") as caught:
            engine.submit([1], max_new_tokens=1, sampling=SamplingParams(stop="a"))
        assert "tokenizer=..." in caught.value.fix
        request = engine.submit([1], max_new_tokens=1)
        with pytest.raises(AttnplugError, match="has no tokenizer"):
            _ = request.text


def test_special_tokens_end_no_text(host, setup):
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        with pytest.raises(RequirementsError, match="special token '<end>'") as caught:
            engine.submit([1], max_new_tokens=1, sampling=SamplingParams(stop=f"a{END}"))
        assert "stop_token_ids=[0]" in caught.value.fix
        setup.made.generation_config.suppress_tokens, before = None, setup.made.generation_config.suppress_tokens
        sampling = SamplingParams(stop=END, skip_special_tokens=False, logit_bias={0: 100.0})
        (request,) = engine.generate([[5]], max_new_tokens=3, sampling=sampling, stop_tokens=(), return_requests=True)
        setup.made.generation_config.suppress_tokens = before

    assert (request.text, request.new_tokens, request.stop_reason) == ("", [0], END)


class Broken:
    """A tokenizer that cannot decode one token."""

    all_special_tokens = ()

    def __init__(self, tokenizer, bad):
        self.tokenizer, self.bad = tokenizer, bad

    def __call__(self, text):
        return self.tokenizer(text)

    def decode(self, tokens, **how):
        if self.bad in tokens:
            message = "no such token"
            raise KeyError(message)
        return self.tokenizer.decode(tokens, **how)


def test_what_the_tokenizer_raises_fails_one_request(host, setup, caplog):
    bad = next(token for token in setup.free[0] if token not in setup.free[1])
    with Engine(setup.made, tokenizer=Broken(setup.tokenizer, bad)) as engine:
        sampling = SamplingParams(stop="\n")
        first, second = (engine.submit(one, max_new_tokens=NEW, sampling=sampling) for one in setup.prompts[:2])
        while engine.has_work:
            engine.step()
        assert (first.finish_reason, first.status, first.blocks) == ("failed", "finished", [])
        assert isinstance(first.error, KeyError)
        assert second.new_tokens == setup.free[1]
        assert f"requests [{first.id}] have failed: the tokenizer" in caplog.text
        assert engine.stats.blocks_in_use == 0
        with pytest.raises(AttnplugError, match=r"cannot decode the tokens of prompts \[1\]"):
            engine.generate(setup.prompts[1::-1], max_new_tokens=NEW, sampling=sampling)
        assert engine.stats.blocks_in_use == 0
        ended = list(engine.stream(setup.prompts[:2], max_new_tokens=NEW))[-1]
        assert ended.finish_reason == "length"


@pytest.mark.parametrize("tokenizer", [5, "gpt2", lambda text: text])
def test_objects_that_are_not_tokenizers(host, setup, tokenizer):
    with pytest.raises(RequirementsError, match=r"AutoTokenizer\.from_pretrained"):
        Engine(setup.made, tokenizer=tokenizer)


def test_prompts_as_text(host, setup):
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        assert engine.generate(["the first", setup.prompts[1]], max_new_tokens=NEW) == setup.free[:2]
        request = engine.submit("a token", max_new_tokens=NEW)
        while engine.has_work:
            engine.step()
        assert request.text == setup.texts[1]
        with pytest.raises(AttnplugError, match="pass \\[ids\\] for one prompt"):
            engine.generate("the first", max_new_tokens=1)


def test_no_stop_string_ends_the_least_tokens(host, setup):
    text = setup.texts[0]
    stops = [text[:1], text[-1]]
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        early, late = engine.generate(
            setup.prompts[:1] * 2,
            max_new_tokens=NEW,
            sampling=[SamplingParams(stop=stops), SamplingParams(stop=stops, min_tokens=4)],
            return_requests=True,
        )

    assert len(early.new_tokens) == 1
    assert len(late.new_tokens) > 4
    assert late.text == text[: len(late.text)]


@pytest.mark.parametrize("setup", ["byte_level"], indirect=True)  # whose tokens have no other form mid-text
def test_bad_words_as_text(host, setup):
    word = setup.decode(setup.free[0][:2])
    with Engine(setup.made, tokenizer=setup.tokenizer) as engine:
        found = engine.generate(
            setup.prompts[:1], max_new_tokens=NEW, sampling=SamplingParams(bad_words=[word, word[:1], word[-1]])
        )

    assert found[0] != setup.free[0]
    assert word not in setup.decode(found[0])
