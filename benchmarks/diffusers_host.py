"""
Measure models of diffusers bound to attnplug beside diffusers' native attention.

    python benchmarks/diffusers_host.py [--device cpu|cuda] [--backend NAME] [--beside NAME ...] [--only TEXT]
        [--repeats 25] [--out FILE]

A call is one of `dispatch_attention_fn` with the shapes of a model; the first is of next to no work: it has the cost
of a call. A model is a transformer of that width with few layers and random weights, bound and restored outside of what
is measured. All of a row take turns in one process. `host` is the time of the call, which on the CPU includes its work;
`work` is the time on the GPU. The ratio is the median of native time divided by attnplug's, round by round.

Without --backend attnplug selects. --beside names further backends of diffusers, `_native_cudnn` for example. A call
that a backend does not serve is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

import attnplug_diffusers
from attnplug.errors import AttnplugError
from attnplug_diffusers.backend import attention_for
from attnplug_kit.bench import Contender, host_clock, interleaved, work_clock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    from diffusers.models import attention_dispatch as dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NATIVE, OURS = "native", "attnplug"


@frozen
class Call:
    """
    A call of diffusers' dispatch.

    Attributes:
        name: The model, and which of its calls.
        queries: ``(batch, tokens, heads, size)``.
        keys: Tokens of the keys; as many as queries where 0.
        padded: How many of the last keys a mask by key hides; 0 for no mask.
    """

    name: str
    queries: tuple[int, int, int, int]
    keys: int = 0
    padded: int = 0

    def arguments(self, device: str, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments."""
        batch, tokens, heads, size = self.queries
        keys = self.keys or tokens
        made: dict[str, Any] = {"query": torch.randn(self.queries, device=device, dtype=dtype)}
        for name in ("key", "value"):
            made[name] = torch.randn(batch, keys, heads, size, device=device, dtype=dtype)
        if self.padded:
            mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
            mask[..., keys - self.padded :] = False
            made["attn_mask"] = mask
        return made


CALLS = {
    "cpu": (
        Call("one token", (1, 1, 4, 64)),
        Call("Flux, 256 px: joint", (1, 256 + 64, 8, 64)),
        Call("Wan: cross", (1, 512, 8, 64), keys=64),
        Call("HunyuanVideo: joint, padded", (1, 256 + 64, 8, 64), padded=40),
    ),
    "cuda": (
        Call("one token", (1, 1, 4, 64)),
        Call("Flux, 512 px: joint", (1, 1024 + 512, 24, 128)),
        Call("Flux, 1024 px: joint", (1, 4096 + 512, 24, 128)),
        Call("Stable Diffusion 3, 1024 px: joint", (2, 4096 + 333, 24, 64)),
        Call("QwenImage, 1328 px: joint", (1, 6889 + 100, 24, 128)),
        Call("QwenImage, 1328 px: joint, padded", (2, 6889 + 100, 24, 128), padded=60),
        Call("Wan 1.3B, 480p, 81 frames: self", (1, 32760, 12, 128)),
        Call("Wan 1.3B, 480p, 81 frames: cross", (1, 32760, 12, 128), keys=512),
        Call("Wan 14B, 480p, 81 frames: self", (1, 32760, 40, 128)),
        Call("HunyuanVideo, 544p, 33 frames: joint, padded", (1, 18360 + 256, 24, 128), padded=200),
    ),
}
"""Device -> calls: tokens of the image or the video, and of the text."""


def flux(device: str) -> tuple[Any, dict[str, Any]]:
    """Return a Flux of 2 + 2 blocks, as wide as published on a GPU, and inputs for 1024 px."""
    heads, image, text = (24, 4096, 512) if device == "cuda" else (2, 64, 16)
    model = diffusers.FluxTransformer2DModel(
        num_layers=2, num_single_layers=2, num_attention_heads=heads, attention_head_dim=128, joint_attention_dim=4096,
        guidance_embeds=True,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, image, 64),
        "encoder_hidden_states": torch.randn(1, text, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(image, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def wan(device: str) -> tuple[Any, dict[str, Any]]:
    """Return a Wan of 2 blocks, as wide as its 1.3B on a GPU, and inputs for 480p and 81 frames there."""
    heads, shape, width = (12, (21, 60, 104), 8960) if device == "cuda" else (2, (2, 8, 8), 64)
    model = diffusers.WanTransformer3DModel(
        num_layers=2, num_attention_heads=heads, attention_head_dim=128, ffn_dim=width, in_channels=16, out_channels=16
    )
    return model, {
        "hidden_states": torch.randn(1, 16, *shape),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "timestep": torch.tensor([500]),
    }


def sd3(device: str) -> tuple[Any, dict[str, Any]]:
    """Return a Stable Diffusion 3 of 2 blocks, as wide as published on a GPU, and inputs for 1024 px there."""
    heads, side = (24, 128) if device == "cuda" else (2, 16)
    model = diffusers.SD3Transformer2DModel(
        sample_size=side, num_layers=2, num_attention_heads=heads, attention_head_dim=64, joint_attention_dim=4096,
        caption_projection_dim=heads * 64, pooled_projection_dim=2048, pos_embed_max_size=side,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, side, side),
        "encoder_hidden_states": torch.randn(2, 333, 4096),
        "pooled_projections": torch.randn(2, 2048),
        "timestep": torch.tensor([500, 500]),
    }


MODELS: dict[str, Callable[[str], tuple[Any, dict[str, Any]]]] = {"Flux": flux, "Wan": wan, "Stable Diffusion 3": sd3}


@frozen
class Bench:
    """
    What is measured with.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        backend: A backend of attnplug, or None.
        beside: Further backends of diffusers.
        repeats: As for `interleaved`.
    """

    device: str
    backend: str | None
    beside: tuple[str, ...]
    repeats: int

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensors."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def rows(self, only: str) -> Iterator[dict[str, Any]]:
        """Yield the results: calls, then models."""
        for call in CALLS[self.device]:
            if only in call.name:
                arguments = call.arguments(self.device, self.dtype)
                yield from self._row(call.name, self._calls(arguments))
                del arguments
        for name, make in MODELS.items():
            if only in name:
                with torch.device(self.device):
                    model, inputs = make(self.device)
                model = model.to(self.dtype).eval()
                inputs = {key: one.to(self.dtype) if one.is_floating_point() else one for key, one in inputs.items()}
                yield from self._row(f"{name}: a transformer of few layers", self._models(model, inputs))
                del model, inputs

    def _calls(self, arguments: dict[str, Any]) -> dict[str, Contender]:
        ours = attention_for(self.backend, None, native_fallback=False).member
        members = {OURS: ours, **{name: dispatch.AttentionBackendName(name) for name in (NATIVE, *self.beside)}}
        return {
            name: Contender(lambda _, member=member: dispatch.dispatch_attention_fn(**arguments, backend=member))
            for name, member in members.items()
        }

    def _models(self, model: Any, inputs: dict[str, Any]) -> dict[str, Contender]:
        bound: list[attnplug_diffusers.Binding] = []

        def through_attnplug() -> None:
            if not bound:
                bound.append(attnplug_diffusers.bind(model, self.backend))

        def by_itself() -> None:
            if bound:
                bound.pop().restore()

        return {
            OURS: Contender(lambda _: model(**inputs), through_attnplug),
            NATIVE: Contender(lambda _: model(**inputs), by_itself),
        }

    def _row(self, name: str, contenders: dict[str, Contender]) -> Iterator[dict[str, Any]]:
        refused = {each: why for each, one in contenders.items() if (why := _refusal(one))}
        runs = {each: one for each, one in contenders.items() if each not in refused}
        clocks = {"host": host_clock} if self.device == "cpu" else {"host": host_clock, "work": work_clock}
        for part, clock in clocks.items():
            samples = interleaved(runs, clock(self.device), self.repeats)
            times = {each: statistics.median(seconds) * 1e6 for each, seconds in samples.seconds.items()}
            ratios = {
                each: statistics.median(samples.ratio(each, OURS)) for each in runs if each != OURS and OURS in runs
            }
            yield {"work": name, "part": part, "microseconds": times, "over_attnplug": ratios, "refused": refused}


def _refusal(contender: Contender) -> str:
    """Return why a contender does not run, or nothing."""
    try:
        contender.call(contender.prepare())
    except (AttnplugError, RuntimeError, ValueError, TypeError) as error:
        return getattr(error, "problem", str(error)).strip().splitlines()[0]
    return ""


def markdown(row: dict[str, Any], names: list[str]) -> str:
    """Return a row of the table."""
    times = [f"{row['microseconds'][name]:.1f}" if name in row["microseconds"] else "refused" for name in names]
    ratios = [f"{row['over_attnplug'][name]:.2f}" if name in row["over_attnplug"] else "-" for name in names[1:]]
    return f"| {' | '.join([row['work'], row['part'], *times, *ratios])} |"


def main() -> None:
    """Measure, and print a table in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", help="a backend of attnplug; by default the one that it selects")
    parser.add_argument("--beside", nargs="*", default=[], help="further backends of diffusers")
    parser.add_argument("--only", default="", help="measure what has this text in its name")
    parser.add_argument("--repeats", type=int, default=25, help="fifths of a second, at most, for each row")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    found: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "device": name,
        "command": " ".join(sys.argv),
        "rows": [],
    }
    names = [OURS, NATIVE, *options.beside]
    heads = ["work", "part", *(f"{each}, us" for each in names), *(f"{each} / {OURS}" for each in names[1:])]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    bench = Bench(options.device, options.backend, tuple(options.beside), options.repeats)
    with torch.no_grad():
        for row in bench.rows(options.only):
            found["rows"].append(row)
            print(markdown(row, names), flush=True)
    for work, each, why in sorted({(row["work"], *one) for row in found["rows"] for one in row["refused"].items()}):
        print(f"{work}: {each} refuses it: {why}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
