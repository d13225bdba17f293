r"""
The engine beside transformers' own continuous batching: one model, one process, both warm.

    python benchmarks/continuous_batching.py --requests 32 --prompt 64 --new 96
    python benchmarks/continuous_batching.py --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --head 64 \
        --vocabulary 128256 --requests 64 --prompt 512 --new 128 --step 8192

Each side is timed from the first prompt that it is given to the last token that it returns; sides take turns, and the
best of their rounds counts. Both have to return the same tokens where the dtype is float32.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from attnplug.hosts.transformers.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

Run = tuple[float, list[list[int]]]


def main() -> None:
    """Print new tokens per second of each side."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    model, prompts = _model(asked), _prompts(asked)
    sides: dict[str, Callable[[], Run]] = {
        "engine": lambda: run_engine(model, prompts, asked),
        **{
            f"transformers, {how}": lambda how=how: run_transformers(model, prompts, asked, how) for how in asked.beside
        },
    }
    rounds = {name: [] for name in sides}
    for _ in range(asked.rounds):
        for name, side in sides.items():
            rounds[name].append(side())
    for name, found in rounds.items():
        seconds = min(seconds for seconds, _ in found)
        print(f"{name:24} {len(prompts) * asked.new / seconds:9.0f} new tokens/s  {seconds:.3f} s")
    tokens = {str(sorted(tokens)) for found in rounds.values() for _, tokens in found}
    print("the same tokens" if len(tokens) == 1 else f"tokens differ between runs ({asked.dtype})")


def run_engine(model: Any, prompts: list[list[int]], asked: argparse.Namespace) -> Run:
    """Return the seconds that the engine takes, and its tokens."""
    engine = Engine(
        model,
        backend=asked.backend,
        max_num_reqs=len(prompts),
        max_num_tokens=asked.step,
        max_seq_len=asked.prompt + asked.new,
    )
    engine.generate([prompt[::-1] for prompt in prompts], max_new_tokens=8)
    start = time.perf_counter()
    tokens = engine.generate(prompts, max_new_tokens=asked.new)
    seconds = time.perf_counter() - start
    engine.close()
    return seconds, tokens


def run_transformers(model: Any, prompts: list[list[int]], asked: argparse.Namespace, attention: str) -> Run:
    """Return the seconds that transformers' manager takes once it runs, and its tokens."""
    model.set_attn_implementation(attention)
    blocks = 2 * len(prompts) * -(-(asked.prompt + asked.new) // asked.page) + 4
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # an older name
    sizes = ContinuousBatchingConfig(
        **{page: asked.page},
        num_blocks=blocks,
        max_batch_tokens=asked.step,
        max_requests_per_batch=len(prompts),
    )
    how = transformers.GenerationConfig(max_new_tokens=asked.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(generation_config=how, continuous_batching_config=sizes) as manager,
    ):
        _wait(manager, [prompt[::-1] for prompt in prompts], 8)
        start = time.perf_counter()
        tokens = _wait(manager, prompts, asked.new)
        seconds = time.perf_counter() - start
    return seconds, tokens


def _wait(manager: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    manager.add_requests(inputs=prompts, max_new_tokens=new)
    found: list[list[int]] = []
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found.append(result.generated_tokens)
    return found


def _model(asked: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=asked.vocabulary,
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.hidden // asked.head,
        num_key_value_heads=max(1, asked.hidden // asked.head // 4),
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    maker: Any = transformers.AutoModelForCausalLM
    with torch.device(asked.device):
        return maker.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, asked.dtype)).eval()


def _prompts(asked: argparse.Namespace) -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    return torch.randint(1, asked.vocabulary, (asked.requests, asked.prompt), generator=source).tolist()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"requests": 32, "prompt": 64, "new": 96, "hidden": 256, "layers": 2, "head": 32, "vocabulary": 4096}
    numbers |= {"step": 1024, "page": 256, "threads": torch.get_num_threads(), "rounds": 3}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--beside", nargs="*", default=["sdpa"], help="attention implementations of transformers' side")
    return parser.parse_args()


if __name__ == "__main__":
    main()
