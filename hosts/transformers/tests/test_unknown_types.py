"""Model types outside the table, through the dense host: what the call and its mask show is what is negotiated."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask

from attnplug.errors import NotNegotiatedError
from attnplug_transformers.attention import attend
from attnplug_transformers.mask import make_mask
from hosts.transformers.tests.models import model, sharpen
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
