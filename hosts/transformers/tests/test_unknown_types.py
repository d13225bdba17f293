"""Model types outside the table, through the dense host: what the call and its mask show is what is negotiated."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug_transformers.attention import attend
from attnplug_transformers.engine import Engine
from attnplug_transformers.mask import make_mask
from hosts.transformers.tests.models import model, sharpen
from hosts.transformers.tests.test_architectures import tiny
from hosts.transformers.tests.test_attention import Module, expected, tensors

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
TOKENS = 9


def layoutlm():
    box = torch.arange(2 * TOKENS * 4).view(2, TOKENS, 4) % 50
    box = torch.cat([box[..., :2], box[..., :2] + box[..., 2:] % 7], -1)
    return transformers.LayoutLMModel(transformers.LayoutLMConfig(**SIZES)), {"bbox": box}


def markuplm():
    return transformers.MarkupLMModel(transformers.MarkupLMConfig(**SIZES, max_depth=3)), {}


def splinter():
    return transformers.SplinterModel(transformers.SplinterConfig(**SIZES)), {}


def align():
    return transformers.AlignTextModel(transformers.AlignTextConfig(**SIZES)), {}


def clap():
    return transformers.ClapTextModel(transformers.ClapTextConfig(**SIZES)), {}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("create", [layoutlm, markuplm, splinter, align, clap])
def test_modules_that_do_not_report_causality(host, mirror, create, padded):
    torch.manual_seed(0)
    made, rest = create()
    sharpen(made)
    attention = [module for module in made.modules() if type(module).__name__.endswith("SelfAttention")]
    assert attention
    ids = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 5:] = 0

    def run(implementation):
        made.set_attn_implementation(implementation)
        with torch.no_grad():
            return made(input_ids=ids, attention_mask=mask if padded else None, **rest)[0][mask.bool()]

    torch.testing.assert_close(run("attnplug"), run("eager"), rtol=1e-4, atol=1e-4)
    assert {s.requirements.attn_type for s in _selections(host, made).values()} == {"encoder_only"}


def _selections(host, made):
    made.set_attn_implementation("attnplug")
    return host.selections(made)


def t5gemma():
    stack = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
    made = transformers.T5GemmaModel._from_config(transformers.T5GemmaConfig(encoder=stack, decoder=stack))
    return made, {"decoder_input_ids": torch.arange(3, 3 + TOKENS).expand(2, -1)}


def privacy_filter():
    return transformers.AutoModel.from_config(tiny("openai_privacy_filter")), {}


def bidirectional_gemma3():
    config = transformers.Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=6, use_bidirectional_attention=True
    )
    return transformers.AutoModel.from_config(config), {}


class TestWindowsOfEncoders:
    """Windows of layers without causality, which transformers counts with the bound or without it."""

    @pytest.mark.parametrize("right", [False, True])
    @pytest.mark.parametrize(("create", "width"), [(t5gemma, 5), (privacy_filter, 7), (bidirectional_gemma3, 4)])
    def test_the_mask_shows_the_bound(self, host, mirror, create, width, right):
        torch.manual_seed(0)
        made, rest = create()
        sharpen(made)
        ids = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, slice(7, None) if right else slice(2)] = 0

        def run(implementation):
            made.set_attn_implementation(implementation)
            with torch.no_grad():
                return made(input_ids=ids, attention_mask=mask, **rest)[0]

        torch.testing.assert_close(run("attnplug"), run("eager"), rtol=1e-4, atol=1e-4)
        found = {s.requirements for s in _selections(host, made).values()}
        assert {r.sliding_window for r in found if r.attn_type == "encoder_only"} - {None} == {width}


class TestCausality:
    """Of a module that has no `is_causal`."""

    def test_the_mask_shows_it(self):
        query, key, value = tensors()
        ahead = torch.ones(5, 5, dtype=torch.bool)

        for mask, causal in ((make_mask(2, 5, 5), True), (ahead.tril()[None, None], True), (ahead[None, None], False)):
            found, _ = attend(Module(is_causal=None), query, key, value, mask)
            torch.testing.assert_close(found, expected(query, key, value, is_causal=causal))

    def test_so_does_the_mask_of_a_chunk(self):
        query, key, value = tensors(2, keys=5)

        found, _ = attend(Module(is_causal=None), query, key, value, make_mask(2, 2, 5, q_offset=3))

        torch.testing.assert_close(found, expected(query, key, value))

    def test_the_argument_decides(self):
        query, key, value = tensors()

        found, _ = attend(Module(is_causal=None), query, key, value, None, is_causal=False)

        torch.testing.assert_close(found, expected(query, key, value, is_causal=False))

    def test_a_call_that_shows_nothing_is_refused(self):
        with pytest.raises(NotNegotiatedError, match=r"(?s)neither is_causal nor a mask.*set is_causal on the module"):
            attend(Module(is_causal=None), *tensors(), None)

    def test_a_single_query_attends_to_all_keys(self):
        query, key, value = tensors(1, keys=5)

        found, _ = attend(Module(is_causal=None), query, key, value, None)

        torch.testing.assert_close(found, expected(query, key, value))


class TestBlockMasks:
    """Masks of flex attention, which the library passes on as they are."""

    MASK = staticmethod(lambda *_: create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 5, 5, device="cpu"))

    def test_the_dense_function_refuses_them(self):
        with pytest.raises(NotNegotiatedError, match=r"(?s)type BlockMask was given.*two-dimensional padding mask"):
            attend(Module(), *tensors(), self.MASK())

    def test_a_model_refuses_them(self, host):
        made = model("llama")
        made.set_attn_implementation("attnplug")

        with torch.no_grad(), pytest.raises(NotNegotiatedError, match="BlockMask was given"):
            made(input_ids=torch.arange(5)[None], attention_mask=self.MASK())


def latent():
    """Multi-head latent attention: the module expands the latent to keys and values before it attends."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    return transformers.DeepseekV3Config(
        **(SIZES | heads | experts),
        v_head_dim=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )


def linear():
    """Layers of linear attention beside layers of attention."""
    return tiny("qwen3_next")


class TestOtherAttention:
    """What the documentation says of attention that no requirements describe."""

    @pytest.mark.parametrize("create", [latent, linear])
    def test_latent_and_linear_attention_are_served(self, host, create):
        torch.manual_seed(0)
        made = sharpen(transformers.AutoModelForCausalLM.from_config(create(), attn_implementation="eager"))
        ids = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0

        def run(implementation):
            made.set_attn_implementation(implementation)
            with torch.no_grad():
                return made(input_ids=ids, attention_mask=mask).logits[mask.bool()]

        torch.testing.assert_close(run("attnplug"), run("eager"), rtol=1e-3, atol=1e-3)
        assert _selections(host, made)

    def test_expanded_latents_are_decided_before_they_run(self, host):
        made = transformers.AutoModelForCausalLM.from_config(latent(), attn_implementation="attnplug").eval()
        before = _selections(host, made)
        with torch.no_grad():
            made(input_ids=torch.arange(3, 9)[None])

        assert len(before) == made.config.num_hidden_layers
        assert before == _selections(host, made)
        assert {(each.requirements.head_size, each.requirements.head_size_v) for each in before.values()} == {(12, 8)}

    def test_the_engine_refuses_linear_attention(self, host):
        made = transformers.AutoModelForCausalLM.from_config(linear(), attn_implementation="eager").eval()

        with pytest.raises(RequirementsError, match="not attention over keys") as refused:
            Engine(made, max_seq_len=32)
        assert "attn_implementation='attnplug'" in refused.value.fix  # which the test above runs

    def test_relative_positions_are_refused(self, host):
        made = transformers.T5Model(
            transformers.T5Config(vocab_size=100, d_model=16, d_kv=8, num_layers=1, num_heads=2)
        )
        made.eval().set_attn_implementation("attnplug")
        ids = torch.arange(3, 9)[None]

        with torch.no_grad(), pytest.raises(NotNegotiatedError, match="a bias on the scores was not negotiated"):
            made(input_ids=ids, decoder_input_ids=ids)

    @pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "xglm"])
    def test_classes_with_their_own_attention_keep_it(self, host, model_type):
        made = transformers.AutoModelForCausalLM.from_config(tiny(model_type), attn_implementation="eager")

        made.set_attn_implementation("attnplug")

        assert made.config._attn_implementation == "eager"
        assert host.selections(made) == {}
