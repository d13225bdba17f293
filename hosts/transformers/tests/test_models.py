"""Whole models compute through attnplug what transformers computes alone."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

from attnplug.errors import NoBackendError, NotNegotiatedError
from hosts.transformers.tests.models import CACHE, PAD, generate, model, prompts, sharpen

LENGTHS = (19, 1, 12)
DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt2"]


@pytest.fixture(params=["torch", "mirror"])
def server(request):
    """Run a test on the built-in backend, and on one that supports every dense attention."""
    if request.param == "mirror":
        request.getfixturevalue("mirror")


def both(made, run):
    """Return the results of a function of the model on eager attention and through attnplug."""
    made.set_attn_implementation("eager")
    expected = run()
    made.set_attn_implementation("attnplug")
    return expected, run()


def logits(made, ids, mask, **rest):
    with torch.no_grad():
        return made(input_ids=ids, attention_mask=mask, **rest).logits


def assert_close(found, expected, rows=None):
    rows = torch.ones(found.shape[:2], dtype=torch.bool) if rows is None else rows
    torch.testing.assert_close(found[rows], expected[rows], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padded_prefill(host, name, right):
    made = model(name)
    ids, mask = prompts(*LENGTHS, right=right)

    expected, found = both(made, lambda: logits(made, ids, mask))

    assert_close(found, expected)  # padding included
    assert not torch.equal(found, expected)  # it did run on something else


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation(host, name, cache):
    made = model(name)
    ids, mask = prompts(*LENGTHS)

    (expected, margin), (found, _) = both(made, lambda: generate(made, ids, mask, cache_implementation=cache))

    assert margin > 1e-4
    assert torch.equal(found, expected)
    assert len(set(expected.flatten().tolist())) > 8  # a model that repeats itself would prove little


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_first_token_after_padding_on_the_right(host, name):
    made = model(name, num_hidden_layers=2)
    ids, mask = prompts(*LENGTHS, right=True)

    (expected, margin), (found, _) = both(made, lambda: generate(made, ids, mask, 1))

    assert margin > 1e-4
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_beam_search(host, name):
    made = model(name)
    ids, mask = prompts(7, 12)

    (expected, _), (found, _) = both(made, lambda: generate(made, ids, mask, 8, num_beams=3))

    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_chunked_prefill_through_a_kv_cache(host, name):
    made = model(name)
    ids, mask = prompts(21, 15)

    def in_chunks():
        cache, found = None, []
        for start, end in ((0, 9), (9, 10), (10, 21)):
            with torch.no_grad():
                out = made(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            found.append(out.logits)
        return torch.cat(found, 1)

    expected, found = both(made, in_chunks)

    assert_close(found, expected, mask.bool())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision(host, name):
    made = model(name, dtype=torch.bfloat16, num_hidden_layers=2)
    exact = model(name, num_hidden_layers=2)
    ids, mask = prompts(*LENGTHS)

    expected, found = both(made, lambda: logits(made, ids, mask).float())

    truth = logits(exact, ids, mask)[mask.bool()]
    assert (found[mask.bool()] - truth).abs().mean() < 1.5 * (expected[mask.bool()] - truth).abs().mean()


def test_no_padding_and_no_mask(host):
    made = model("mistral")
    ids, _ = prompts(14, 14)

    expected, found = both(made, lambda: logits(made, ids, None))

    assert_close(found, expected)


def test_a_row_of_nothing_but_padding(host):
    made = model("llama")
    ids, mask = prompts(9, 5)
    mask[1] = 0

    expected, found = both(made, lambda: logits(made, ids, mask))

    assert_close(found, expected)


def test_a_hole_in_the_padding_of_a_full_layer(host):
    made = model("llama")
    ids, mask = prompts(12, 12)
    mask[0, 4:6] = 0

    expected, found = both(made, lambda: logits(made, ids, mask))

    assert_close(found, expected)


@pytest.mark.parametrize("masked", [True, False], ids=["ones", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_samples_packed_by_their_positions(host, name, masked):
    made = model(name, num_hidden_layers=2)
    ids, mask = prompts(18)
    lengths = [9, 1, 8]  # each sample is computed as if it were alone, as by FlashAttention in transformers
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    alone = torch.cat([logits(made, part, torch.ones_like(part)) for part in ids.split(lengths, 1)], 1)
    made.set_attn_implementation("attnplug")
    found = logits(made, ids, mask if masked else None, position_ids=positions, use_cache=masked)

    assert_close(found, alone)


@pytest.mark.parametrize("positions", [[[0, 1, 2, 2, 2, 3]], [[3, 4, 5, 6, 7, 8]], [[0, 0, 0, 1, 2, 3]]])
def test_other_positions_are_those_of_one_sample(host, positions):
    made = model("llama", num_hidden_layers=2)
    ids, mask = prompts(6)
    mask[0, : max(1, positions[0].count(0)) - 1] = 0  # positions of padding are no samples

    expected, found = both(made, lambda: logits(made, ids, mask, position_ids=torch.tensor(positions)))

    assert_close(found, expected)


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_image_tokens_that_attend_in_both_directions_are_named(host, name):
    made = sharpen(multimodal(name))
    ids, mask = prompts(12, 9)
    ids[ids == PAD], text = 1, 0 if name == "gemma3" else 1  # PaliGemma marks its prefix with 0
    types = torch.full_like(ids, text)

    def hidden(types):
        with torch.no_grad():
            return made(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    expected, found = both(made, lambda: hidden(types))
    assert_close(found, expected)
    types[:, 6:9] = 1 - text
    with pytest.raises(NotNegotiatedError, match="query 7 of sequence 0 attends to later keys, up to 8") as refused:
        hidden(types)
    assert "image tokens (token_type_ids)" in refused.value.expected
    assert "attn_implementation='eager'" in refused.value.fix


def multimodal(name):
    """Return a tiny model of images and text on eager attention."""
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    if name == "paligemma":
        text = transformers.GemmaConfig(**sizes)
        config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=32, hidden_size=32)
        return transformers.PaliGemmaModel._from_config(config, attn_implementation="eager")
    text = transformers.Gemma3TextConfig(**sizes, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3Model._from_config(config, attn_implementation="eager")


def test_chunked_attention(host, server):
    made = model("llama4")
    ids, mask = prompts(*LENGTHS)

    expected, found = both(made, lambda: logits(made, ids, mask))
    (tokens, margin), (through, _) = both(made, lambda: generate(made, ids, mask))

    assert_close(found, expected)
    assert margin > 1e-4
    assert torch.equal(through, tokens)


@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoders(host, server, name, right):
    made = model(name)
    ids, mask = prompts(*LENGTHS, right=right)

    def hidden():
        with torch.no_grad():
            return made(input_ids=ids, attention_mask=mask).last_hidden_state

    expected, found = both(made, hidden)

    assert_close(found, expected)
    assert {s.requirements.attn_type for s in host.selections(made).values()} == {"encoder_only"}


def test_encoder_decoder(host, server):
    made = model("bart")
    ids, mask = prompts(*LENGTHS, right=True)

    (expected, margin), (found, _) = both(made, lambda: _continue(made, ids, mask))

    assert margin > 1e-4
    assert torch.equal(found, expected)
    kinds = {name: s.requirements.attn_type for name, s in host.selections(made).items()}
    assert kinds["model.encoder.layers.1.self_attn"] == "encoder"
    assert kinds["model.decoder.layers.0.self_attn"] == "decoder"
    assert kinds["model.decoder.layers.1.encoder_attn"] == "encoder_decoder"


def test_the_decoder_of_an_encoder_decoder_alone(host, server):
    made = sharpen(transformers.BartForCausalLM._from_config(model("bart").config, attn_implementation="eager"))
    ids, mask = prompts(*LENGTHS)

    expected, found = both(made, lambda: logits(made, ids, mask))

    assert_close(found, expected, mask.bool())
    decisions = host.selections(made)
    assert {s.requirements.attn_type for name, s in decisions.items() if "self_attn" in name} == {"decoder"}
    assert not [name for name in decisions if ".encoder." in name]


def _continue(made, ids, mask):
    found = made.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=12,
        max_new_tokens=12,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(found.logits, 1).topk(2).values
    return found.sequences, float((best[..., 0] - best[..., 1]).min())


def test_audio_encoder_decoder(host, server):
    made = model("whisper")
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    ids, _ = prompts(7, 7)

    def hidden():
        with torch.no_grad():
            return made(input_features=features, decoder_input_ids=ids).last_hidden_state

    expected, found = both(made, hidden)

    assert_close(found, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_from_audio(host, server, cache):
    config = model("whisper").config
    made = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
    made.generation_config.eos_token_id = None
    sharpen(made)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))

    def generated():
        found = made.generate(
            input_features=features,
            do_sample=False,
            max_new_tokens=12,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(found.logits, 1).topk(2).values
        return found.sequences, float((best[..., 0] - best[..., 1]).min())

    (expected, margin), (found, _) = both(made, generated)

    assert margin > 1e-4
    assert torch.equal(found, expected)
    assert not torch.equal(expected[0], expected[1])  # it hears
    kinds = {name: s.requirements.attn_type for name, s in host.selections(made).items()}
    assert kinds["model.encoder.layers.1.self_attn"] == "encoder"
    assert kinds["model.decoder.layers.0.self_attn"] == "decoder"
    assert kinds["model.decoder.layers.1.encoder_attn"] == "encoder_decoder"


def test_a_model_that_no_backend_supports(host, plain_only):
    made = model("mistral")
    made.set_attn_implementation("attnplug")
    ids, mask = prompts(4)

    with pytest.raises(NoBackendError, match="does not support sliding_window=6"):
        logits(made, ids, mask)


@pytest.mark.slow
def test_a_compiled_decoding_step(host):
    made = model("mistral")
    ids, mask = prompts(13, 8)
    how = transformers.CompileConfig(backend="eager", mode=None)
    how._compile_all_devices = True

    expected, _ = generate(made, ids, mask, 8, cache_implementation="static")
    made.set_attn_implementation("attnplug")
    found, _ = generate(made, ids, mask, 8, cache_implementation="static", compile_config=how)

    assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_dense_function_compiles_around_itself(host):
    made = model("mistral")
    ids, mask = prompts(13, 8)
    expected, _ = both(made, lambda: logits(made, ids, mask))
    made.set_attn_implementation("attnplug")

    compiled = torch.compile(made, backend="eager")
    found = logits(compiled, ids, mask)

    assert_close(found, expected, mask.bool())


def test_compiling_into_one_graph_is_refused(host):
    made = model("llama")
    made.set_attn_implementation("attnplug")
    ids, mask = prompts(5)

    with pytest.raises(Exception, match=r"(?s)torch.compiler.disable.*(make_mask|attend)") as caught:
        logits(torch.compile(made, backend="eager", fullgraph=True), ids, mask)
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        assert "attnplug does not support torch.compile(fullgraph=True)" in str(caught.value)
        assert "call torch.compile without fullgraph=True" in str(caught.value)


def test_padding_follows_the_mask_and_not_the_token(host):
    made = model("llama")
    ids, mask = prompts(6)
    ids[0, 2] = PAD  # a padding token that the mask counts

    expected, found = both(made, lambda: logits(made, ids, mask.fill_(1)))

    assert_close(found, expected)
