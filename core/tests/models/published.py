"""A model like the published code of Phi-3-small, whose attention calls its own functions."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput


class Phi3SmallConfig(PretrainedConfig):
    model_type = "phi3small"

    def __init__(self, **fields):
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        pattern = {"blocksparse_block_size": 16, "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 4}
        for name, value in (sizes | heads | pattern | {"dense_attention_every_n_layers": 2}).items():
            setattr(self, name, fields.pop(name, value))
        super().__init__(**fields)


class Phi3SmallSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden_states):
        query, key, value = self.query_key_value(hidden_states).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Phi3SmallForCausalLM(PreTrainedModel):
    config_class = Phi3SmallConfig
    _tied_weights_keys = None

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Phi3SmallSelfAttention(config, index) for index in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return CausalLMOutput(logits=self.lm_head(hidden))


def model():
    """Return one with random weights."""
    torch.manual_seed(0)
    return Phi3SmallForCausalLM(Phi3SmallConfig(dtype="float32")).eval()
