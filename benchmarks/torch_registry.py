"""
Measure `scaled_dot_product_attention` and `varlen_attn` through attnplug beside torch's own operators.

    python benchmarks/torch_registry.py [--device cpu|cuda] [--backends NAME ...] [--only TEXT] [--compiler NAME]
        [--repeats 25] [--tiny] [--report FILE] [--out FILE]

All calls of a row take turns in one process, attnplug active for its own: that is changed outside of what is measured,
and the first call after it is not measured: models repeat their calls.
The host time is that of the call: on the CPU its work is included, so that the first shape, of next to no work, has the
cost of a call. A ratio is the median of native time divided by a backend's, round by round: above 1 the backend is
faster. `varlen_attn` has an operator of torch's own on CUDA alone. "+ backward" is forward and backward.

Outputs are compared with a softmax in float64 for 64 queries of every head, gradients with those of float64 for one
head. Errors are fractions of the greatest value; the exit code is 1 where one is too great.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from beside import CHOSEN, NATIVE, Report, Work, attend_in_float64, sampled
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug_torch
from attnplug_kit.bench import Contender
from attnplug_torch.bench import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

BACKENDS = {
    "cpu": (CHOSEN, "torch/sdpa"),
    "cuda": (CHOSEN, "flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4", "torch/sdpa"),
}
"""Device -> backends of attnplug that are measured by default; `CHOSEN` is what users get who name none."""

COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}
"""Device -> the backend of `torch.compile` by default; the CPU's needs no C++ compiler."""

SHAPES = {
    "cpu": ((1, 4, 8, 64), (2, 8, 256, 64)),
    "cuda": ((1, 4, 8, 64), (1, 24, 4608, 128), (4, 16, 2048, 128), (1, 16, 16384, 128)),
}
"""Device -> ``(batch, heads, tokens, size)``; the second of CUDA is that of Flux for 1024 px."""


@frozen
class Bench:
    """
    What is measured with.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        backends: Backends of attnplug.
        compiler: The backend of `torch.compile`; empty for none.
        switch: What makes them active.
    """

    device: str
    backends: tuple[str, ...]
    compiler: str
    switch: Switch

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensors."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def works(self, *, is_tiny: bool) -> Iterator[Work]:
        """Yield the calls; those of the first shape where it is tiny."""
        for shape in SHAPES[self.device][: 1 if is_tiny else None]:
            yield from self._works("x".join(map(str, shape)), self._rows(shape))

    def _rows(self, shape: tuple[int, int, int, int]) -> list[Tensor]:
        """Return queries, keys and values, whose memory has the tokens before the heads."""
        batch, heads, tokens, size = shape
        made = torch.randn(3, batch, tokens, heads, size, device=self.device, dtype=self.dtype)
        return list(made.transpose(2, 3))

    def _works(self, text: str, rows: list[Tensor]) -> Iterator[Work]:
        batch, heads, tokens, size = rows[0].shape
        some = sampled(tokens).to(self.device)
        causal = attend_in_float64(*rows, some, is_causal=True)

        def of_queries(output: Tensor) -> Tensor:
            return output[:, :, some]

        def of_packed(output: Tensor) -> Tensor:
            return output.view(batch, tokens, heads, size).transpose(1, 2)[:, :, some]

        yield self._work(f"sdpa causal {text}", lambda: sdpa(*rows, is_causal=True), causal, of_queries)
        if self.compiler:
            torch.compiler.reset()
            compiled = torch.compile(lambda *given: sdpa(*given, is_causal=True), backend=self.compiler, fullgraph=True)
            yield self._work(f"sdpa causal {text}, compiled", lambda: compiled(*rows), causal, of_queries)
        yield self._backward(text, rows)
        if self.device == "cpu":
            mask = torch.rand(tokens, tokens) > 0.2
            mask[:, 0] = True
            masked = attend_in_float64(*rows, some, mask=mask)
            yield self._work(f"sdpa mask {text}", lambda: sdpa(*rows, attn_mask=mask), masked, of_queries)
            # torch gives dropout to its math operator, whichever flash operator is active.
            dropped = self._contenders(lambda: sdpa(*rows, dropout_p=0.1))
            yield Work(f"sdpa dropout {text} (math)", dropped, self.dtype, None)
        packed = [one.transpose(1, 2).reshape(batch * tokens, heads, size) for one in rows]
        starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=self.device)
        given = (starts, starts, tokens, tokens)
        yield self._work(
            f"varlen causal {text}", lambda: varlen_attn(*packed, *given, window_size=(-1, 0)), causal, of_packed
        )

    def _backward(self, text: str, rows: list[Tensor]) -> Work:
        leaves = [one.detach().clone().requires_grad_() for one in rows]
        grad = torch.randn_like(rows[0])
        precise = [one[0, 0].detach().double().requires_grad_() for one in rows]
        scores = precise[0] @ precise[1].T * rows[0].shape[3] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        output = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ precise[2]
        wanted = torch.stack(torch.autograd.grad(output, precise, grad[0, 0].double()))

        def of_head(grads: tuple[Tensor, ...]) -> Tensor:
            return torch.stack([one[0, 0] for one in grads])

        return self._work(
            f"sdpa causal {text} + backward",
            lambda: torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, grad),
            wanted,
            of_head,
        )

    def _work(self, name: str, call: Callable[[], Any], reference: Tensor, rows: Callable[[Any], Tensor]) -> Work:
        return Work(name, self._contenders(call), self.dtype, reference, rows, _obstacle)

    def _contenders(self, call: Callable[[], Any]) -> dict[str, Contender]:
        def prepare(name: str) -> None:
            self.switch.use(active=name != NATIVE, backend=None if name in {NATIVE, CHOSEN} else name)

        attnplug_torch.reset()
        return {name: Contender(lambda _: call(), lambda name=name: prepare(name)) for name in (NATIVE, *self.backends)}


def _obstacle(name: str) -> str:
    """Return why the calls since the last report did not run on a backend, or nothing."""
    routes = attnplug_torch.report()
    attnplug_torch.reset()
    if name in {NATIVE, CHOSEN} or any(route.backend == name for route in routes):
        return ""
    return "; ".join(map(str, routes)) or "no operator of attnplug was called"


def main() -> int:
    """Measure, and print a table in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=tuple(SHAPES))
    parser.add_argument("--backends", nargs="+", help="backends of attnplug, measured beside each other")
    parser.add_argument("--only", default="", help="measure what has this text in its name")
    parser.add_argument("--compiler", help="backend of torch.compile; '' for eager calls alone")
    parser.add_argument("--repeats", type=int, default=25, help="fifths of a second, at most, for each row")
    parser.add_argument("--tiny", action="store_true", help="a few samples of the first shape")
    parser.add_argument("--report", type=Path, help="file of the report, as Markdown")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends = tuple(options.backends or BACKENDS[options.device])
    compiler = COMPILERS[options.device] if options.compiler is None else options.compiler
    switch = Switch()
    bench = Bench(options.device, backends, compiler, switch)
    report = Report(
        "torch's attention through attnplug, beside torch's own operators",
        "Medians in microseconds of calls in turn, in one process. `host` is the time until a call returns, `work` the "
        "time on the device. Ratios above 1: faster than native. Errors beside float64 are fractions of the greatest "
        "value.",
        options.device,
        (NATIVE, *backends),
    )
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for work in bench.works(is_tiny=options.tiny):
            if options.only in work.name:
                report.add(work.measured(options.device, 1 if options.tiny else options.repeats))
    switch.use(active=False)
    return report.write(options.report, options.out)


if __name__ == "__main__":
    sys.exit(main())
