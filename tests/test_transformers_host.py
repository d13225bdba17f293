"""The host as its user meets it: two calls, and a model of the library runs through attnplug."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import forked

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[1]
MODEL = """\
import torch, transformers
import attnplug_transformers as host
torch.set_num_threads(1)
sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
config = transformers.MistralConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=5, pad_token_id=256)
ids = torch.arange(24).view(2, 12)
mask = torch.ones_like(ids)
mask[0, :4] = 0
"""


def run(code, start=forked.run):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    return start("-W", "error", "-c", code, env=environment)


def test_two_calls_run_a_model_through_attnplug():
    done = run(
        MODEL
        + """
assert host.register() == host.register() == host.KEY == "attnplug"
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attnplug").eval()
with torch.no_grad():
    found = model(ids, attention_mask=mask).logits
    decisions = host.selections(model)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits
torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
assert not torch.equal(found, expected)
assert host.selections(model) == {}
print({name: selection.backend for name, selection in decisions.items()})
"""
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({f"model.layers.{i}.self_attn": "torch" for i in range(2)})


def test_without_register_the_name_is_unknown():
    done = run(MODEL + "transformers.AutoModelForCausalLM.from_config(config, attn_implementation='attnplug')")

    assert "ValueError" in done.stderr
    assert "attnplug" in done.stderr


def test_the_name_is_not_one_of_the_library():
    done = run(
        MODEL
        + """
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.generic import is_flash_attention_requested
key = host.register()
assert not is_flash_attention_requested(requested_attention_implementation=key)
assert "sdpa" not in key and "flex" not in key and "/" not in key and "paged" not in key
assert key in transformers.AttentionInterface._global_mapping
assert key in AttentionMaskInterface._global_mapping  # without it padding would be lost
assert AttentionMaskInterface()[key] is not AttentionMaskInterface()["sdpa"]
"""
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_a_missing_library_is_named_with_its_fix(missing):
    done = run(
        f"""
import sys
sys.modules[{missing!r}] = None
import attnplug_transformers as host
assert len(host.requirements({{
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "dtype": "bfloat16",
}})) == 2
host.register()
""",
        forked.run_fresh,
    )

    assert "attnplug.errors.AttnplugError: the host 'transformers' was requested" in done.stderr
    assert "pip install 'attnplug[transformers]'" in done.stderr


def test_a_setting_of_the_environment_decides():
    done = run(
        "import os; os.environ['ATTNPLUG_BACKEND'] = 'flash_attn'\n"
        + MODEL
        + """
host.register()
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attnplug").eval()
with torch.no_grad():
    model(ids)
"""
    )

    assert "NoBackendError" in done.stderr
    assert "'flash_attn'" in done.stderr  # refused on a CPU, or not installed
    assert "ATTNPLUG_BACKEND" in done.stderr
