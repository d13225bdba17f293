"""
Measure models of diffusers bound to attnplug beside diffusers' native attention.

    python benchmarks/diffusers_host.py [--device cpu|cuda] [--backends NAME ...] [--beside NAME ...] [--only TEXT]
        [--compiler NAME] [--repeats 25] [--tiny] [--report FILE] [--out FILE]

A call is one of `dispatch_attention_fn` with the shapes of a model; the first is of next to no work: it has the cost
of a call. A model is a transformer of that width with few layers and random weights, eager and compiled, bound and
restored outside of what is measured. All of a row take turns in one process, and the call before each measured
one is not measured: models repeat their calls. `host` is the time of the call, which on the CPU includes its work;
`work` is the time on the GPU. A ratio is the median of native time divided by a backend's, round by round: above 1 the
backend is faster.

Calls are compared with a softmax in float64 for 64 of their queries, models with themselves in float32. Errors are
fractions of the greatest value; the exit code is 1 where one is too great.

By default all backends of attnplug that a GPU may have run beside each other: one that does not run here is a line with
the reason. --beside names further backends of diffusers, `_native_cudnn` for example.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from beside import CHOSEN, NATIVE, Report, Work, attend_in_float64, sampled

import attnplug_diffusers
from attnplug_diffusers.backend import attention_for
from attnplug_kit.bench import Contender

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    from diffusers.models import attention_dispatch as dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS = {
    "cpu": (CHOSEN, "torch/sdpa"),
    "cuda": (CHOSEN, "flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4", "flash_attn/torch", "torch/sdpa"),
}
"""Device -> backends of attnplug that are measured by default; `CHOSEN` is what users get who name none."""

COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}
"""Device -> the backend of `torch.compile` by default; the CPU's needs no C++ compiler."""


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
        backends: Backends of attnplug.
        beside: Further backends of diffusers.
        compiler: The backend of `torch.compile`; empty for none.
    """

    device: str
    backends: tuple[str, ...]
    beside: tuple[str, ...]
    compiler: str

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensors."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def works(self, only: str, *, is_tiny: bool) -> Iterator[Work]:
        """Yield the calls, then the models, whose names have a text; of calls the first two where it is tiny."""
        calls = CALLS[self.device][: 2 if is_tiny else None]
        for call in [one for one in calls if only in one.name]:
            yield self._call(call)
        for name, make in MODELS.items():
            if only in name:
                yield from self._model(f"{name}: a transformer of few layers", make)

    def _call(self, call: Call) -> Work:
        arguments = call.arguments(self.device, self.dtype)
        members = {name: dispatch.AttentionBackendName(name) for name in (NATIVE, *self.beside)}
        for name in self.backends:
            members[name] = attention_for(_named(name), None, native_fallback=False).member
        contenders = {
            name: Contender(lambda _, member=member: dispatch.dispatch_attention_fn(**arguments, backend=member))
            for name, member in members.items()
        }
        rows = sampled(call.queries[1])
        tensors = [arguments[name].transpose(1, 2) for name in ("query", "key", "value")]
        reference = attend_in_float64(*tensors, rows, mask=arguments.get("attn_mask"))

        def compared(output: torch.Tensor) -> torch.Tensor:
            return output[:, rows.to(output.device)].transpose(1, 2)

        return Work(call.name, contenders, self.dtype, reference, compared)

    def _model(self, name: str, make: Callable[[str], tuple[Any, dict[str, Any]]]) -> Iterator[Work]:
        torch.manual_seed(0)
        with torch.device(self.device):
            model, inputs = make(self.device)
        model = model.to(self.dtype).eval()
        inputs = {key: one.to(self.dtype) if one.is_floating_point() else one for key, one in inputs.items()}
        precise = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
        reference = copy.deepcopy(model).float()(**precise).sample
        yield Work(name, self._bound(model, lambda: model(**inputs).sample), self.dtype, reference)
        if self.compiler:
            for backend in self.backends:  # a new name in diffusers' registry would have graphs traced once more
                attnplug_diffusers.bind(model, _named(backend)).restore()
            torch.compiler.reset()
            compiled = torch.compile(model, fullgraph=True, backend=self.compiler)
            contenders = self._bound(model, lambda: compiled(**inputs).sample)
            yield Work(f"{name}, compiled by {self.compiler}", contenders, self.dtype, reference)

    def _bound(self, model: Any, call: Callable[[], torch.Tensor]) -> dict[str, Contender]:
        """Return the contenders of a model: which one it is bound to changes outside of what is measured."""
        bound: dict[str, attnplug_diffusers.Binding] = {}

        def bind(name: str) -> None:
            if name not in bound:
                for other in list(bound):
                    bound.pop(other).restore()
                if name != NATIVE:
                    bound[name] = attnplug_diffusers.bind(model, _named(name))

        return {name: Contender(lambda _: call(), lambda name=name: bind(name)) for name in (NATIVE, *self.backends)}


def _named(contender: str) -> str | None:
    """Return the backend that a contender names."""
    return None if contender == CHOSEN else contender


def main() -> int:
    """Measure, and print a table in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=tuple(CALLS))
    parser.add_argument("--backends", nargs="+", help="backends of attnplug, measured beside each other")
    parser.add_argument("--beside", nargs="*", default=[], help="further backends of diffusers")
    parser.add_argument("--only", default="", help="measure what has this text in its name")
    parser.add_argument("--compiler", help="backend of torch.compile; '' for eager models alone")
    parser.add_argument("--repeats", type=int, default=25, help="fifths of a second, at most, for each row")
    parser.add_argument("--tiny", action="store_true", help="a few samples of the first calls and of the models")
    parser.add_argument("--report", type=Path, help="file of the report, as Markdown")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - a graph for each backend, and for native
    backends = tuple(options.backends or BACKENDS[options.device])
    compiler = COMPILERS[options.device] if options.compiler is None else options.compiler
    bench = Bench(options.device, backends, tuple(options.beside), compiler)
    report = Report(
        "Models of diffusers through attnplug, beside its native attention",
        "Medians in microseconds of calls in turn, in one process. `host` is the time until a call returns, `work` the "
        "time on the device. Ratios above 1: faster than native. Errors are fractions of the greatest value: of calls "
        "beside float64, of models beside float32.",
        options.device,
        (NATIVE, *options.beside, *backends),
    )
    with torch.no_grad():
        for work in bench.works(options.only, is_tiny=options.tiny):
            report.add(work.measured(options.device, 1 if options.tiny else options.repeats))
    return report.write(options.report, options.out)


if __name__ == "__main__":
    sys.exit(main())
