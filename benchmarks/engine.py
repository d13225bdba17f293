"""
Compares the paged engine with transformers' own continuous batching: same model, same machine, same run.

    python benchmarks/engine.py [--preset small|1b] [--device cuda] [--backend NAME[/variant]] [--rounds 3] [--json]
    python benchmarks/engine.py --requests 1 4 32 --prompt 64 --new 200 --layers 2 --threads 1

Both generate greedily from the same random prompts, in turns. What is timed is the time from the first request to the
last token; models, caches, graphs and a warm-up generation come before. Shown are the medians, their spread and the
ratio, and how many of the tokens are the same: rounding may decide between two tokens of a model with random weights.
With few requests of a small model it is the host that takes the time.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import transformers
from attrs import asdict, evolve, frozen
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import attnplug
from attnplug.hosts.transformers.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NO_TOKEN = -1


@frozen
class Preset:
    """A model and its requests."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    requests: int
    prompt: int
    new: int
    dtype: str

    def model(self, device: str) -> LlamaForCausalLM:
        """Return the model with random weights."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
            dtype=self.dtype,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return LlamaForCausalLM(config).to(getattr(torch, self.dtype)).eval()

    def prompts(self) -> list[list[int]]:
        """Return random prompts that share nothing."""
        source = torch.Generator().manual_seed(1)
        return torch.randint(0, self.vocabulary, (self.requests, self.prompt), generator=source).tolist()


PRESETS = {
    "small": Preset(256, 512, 4, 8, 2, 32, 1024, 32, 64, 32, "float32"),
    "1b": Preset(2048, 8192, 16, 32, 8, 64, 128256, 64, 512, 128, "bfloat16"),
}


@frozen
class Timed:
    """One of the two, over all rounds."""

    name: str
    seconds: tuple[float, ...]
    tokens_per_second: float
    about: dict[str, Any]


@contextmanager
def theirs(model: Any, preset: Preset, batch_tokens: int) -> Iterator[Callable[[], list[list[int]]]]:
    """Yield a generation through transformers' continuous batching, its manager running already."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: PLC0415 - of some versions

    pages = -(-(preset.prompt + preset.new) // 256) * preset.requests + preset.requests
    config = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=batch_tokens)
    asked = GenerationConfig(max_new_tokens=preset.new, do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=asked, continuous_batching_config=config)
    manager.start()

    def generate() -> list[list[int]]:
        names = manager.add_requests(inputs=preset.prompts(), max_new_tokens=preset.new)
        found: dict[str, list[int]] = {}
        while len(found) < preset.requests:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                message = "transformers' continuous batching ended by itself"
                raise RuntimeError(message)
        names = list(names) if names else sorted(found)
        return [found[name] for name in names]

    try:
        yield generate
    finally:
        manager.stop(block=True)


def main() -> int:
    """Run the comparison for each number of requests."""
    options = _options()
    preset = PRESETS[options.preset]
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = {name: getattr(options, name) or getattr(preset, name) for name in ("layers", "prompt", "new")}
    for requests in options.requests or [preset.requests]:
        _compare(options, evolve(preset, requests=requests, **sizes), device)
    return 0


def _compare(options: Any, preset: Preset, device: str) -> None:
    batch_tokens = max(preset.requests, options.batch_tokens)
    model = preset.model(device)
    engine = Engine(
        model,
        backend=options.backend,
        max_num_reqs=preset.requests,
        max_num_tokens=batch_tokens,
        max_seq_len=preset.prompt + preset.new,
        graphs=options.graphs,
        reuse_prefixes=False,
    )
    runs: dict[str, list[float]] = {"attnplug": [], "transformers": []}
    tokens: dict[str, list[list[int]]] = {}
    with theirs(preset.model(device), preset, batch_tokens) as other:
        ways = {
            "attnplug": lambda: engine.generate(preset.prompts(), max_new_tokens=preset.new, stop_tokens=()),
            "transformers": other,
        }
        for turn in range(options.rounds + 1):
            for name, generate in ways.items():
                seconds, tokens[name] = _time(generate, device)
                if turn:  # the first round warms up
                    runs[name].append(seconds)
    _show(options, preset, device, engine, runs, tokens)
    engine.close()


def _time(generate: Callable[[], list[list[int]]], device: str) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    tokens = generate()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, tokens


def _show(options: Any, preset: Preset, device: str, engine: Engine, runs: Any, tokens: Any) -> None:
    total = preset.requests * preset.new
    ids = sorted({selection.id for selection in engine.selections.values()})
    about = {
        "attnplug": {"backends": ids, "graphs": engine.num_graphs, "why_eager": engine.why_eager},
        "transformers": {"version": transformers.__version__},
    }
    timed = [Timed(name, tuple(times), total / median(times), about[name]) for name, times in runs.items()]
    same = sum(a == b for mine, other in zip(*tokens.values(), strict=True) for a, b in zip(mine, other, strict=True))
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "attnplug": attnplug.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    ratio = timed[0].tokens_per_second / timed[1].tokens_per_second
    if options.json:
        print(
            json.dumps(
                {
                    "preset": asdict(preset),
                    "machine": machine,
                    "ratio": ratio,
                    "same_tokens": same / total,
                    "runs": [asdict(one) for one in timed],
                }
            )
        )
        return
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{options.preset}: {preset.requests} requests of {preset.prompt} + {preset.new} tokens, {preset.dtype}")
    for one in timed:
        spread = f"{min(one.seconds):.2f} to {max(one.seconds):.2f} s"
        print(f"  {one.name:13} {one.tokens_per_second:8.0f} tokens/s  ({spread})  {one.about}")
    print(f"  ratio {ratio:.2f}, {100 * same / total:.1f} % of the tokens are the same")


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--backend", action="append", help="as for attnplug.plan; repeated: in this order")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of one step, on both sides")
    parser.add_argument("--requests", type=int, nargs="+", help="one comparison for each; default: the preset's")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt; default: the preset's")
    parser.add_argument("--new", type=int, help="tokens that each request generates; default: the preset's")
    parser.add_argument("--layers", type=int, help="layers of the model; default: the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="one document for each comparison, a line each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
