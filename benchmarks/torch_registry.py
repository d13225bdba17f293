"""
Measure `scaled_dot_product_attention` and `varlen_attn` through attnplug beside torch's own operators.

    python benchmarks/torch_registry.py [--device cpu|cuda] [--backend NAME] [--repeats 25] [--out FILE]

All calls take turns in one process, attnplug active for its own. The host time is that of the call: on the CPU its
work is included, so that the first shape, of next to no work, has the cost of a call. `native` of `varlen_attn` is
torch's own operator, which it has on CUDA alone. "+ backward" is forward and backward.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
import attnplug_torch
from attnplug_kit.bench import Contender, host_clock, interleaved, work_clock
from attnplug_torch.activation import activate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@frozen
class Work:
    """
    A call, and whether torch has an operator of its own for it.

    Attributes:
        name: Its name.
        call: The call.
        has_own: Whether it runs without attnplug.
    """

    name: str
    call: Callable[[], Any]
    has_own: bool = True


def works(device: str) -> Iterator[Work]:
    """Yield the calls."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = (
        [(1, 4, 8, 64), (2, 8, 256, 64)]
        if device == "cpu"
        else [(1, 4, 8, 64), (4, 16, 2048, 128), (1, 16, 16384, 128)]
    )
    for shape in shapes:
        rows = [
            torch.randn(shape[0], shape[2], shape[1], shape[3], device=device, dtype=dtype).transpose(1, 2)
            for _ in "qkv"
        ]
        text = "x".join(map(str, shape))
        yield Work(f"sdpa causal {text}", lambda rows=rows: sdpa(*rows, is_causal=True))
        leaves = [one.detach().clone().requires_grad_() for one in rows]
        yield Work(
            f"sdpa causal {text} + backward",
            lambda leaves=leaves: torch.autograd.grad(sdpa(*leaves, is_causal=True).sum(), leaves),
        )
        if device == "cpu":
            mask = torch.rand(shape[2], shape[2]) > 0.2
            yield Work(f"sdpa mask {text}", lambda rows=rows, mask=mask: sdpa(*rows, attn_mask=mask))
            yield Work(f"sdpa dropout {text} (math)", lambda rows=rows: sdpa(*rows, dropout_p=0.1))
        tokens = shape[0] * shape[2]
        packed = [one.transpose(1, 2).reshape(tokens, shape[1], shape[3]) for one in rows]
        starts = torch.arange(0, tokens + 1, shape[2], dtype=torch.int32, device=device)
        given = (starts, starts, shape[2], shape[2])
        yield Work(
            f"varlen causal {text}",
            lambda packed=packed, given=given: varlen_attn(*packed, *given, window_size=(-1, 0)),
            has_own=device != "cpu",
        )


def through_attnplug(call: Callable[[], Any], handles: dict[str, Any]) -> Contender:
    """Return a call while attnplug is active; activating is not measured."""

    def prepare() -> None:
        if "active" not in handles:
            handles["active"] = activate()

    return Contender(lambda _: call(), prepare)


def natively(call: Callable[[], Any], handles: dict[str, Any]) -> Contender:
    """Return a call while torch's own operators are in force; restoring them is not measured."""

    def prepare() -> None:
        if "active" in handles:
            handles.pop("active").remove()

    return Contender(lambda _: call(), prepare)


def main() -> None:
    """Measure, and print microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", help="a backend of attnplug; by default the one that it selects")
    parser.add_argument("--repeats", type=int, default=25, help="fifths of a second, at most, for each call")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    handles: dict[str, Any] = {}
    clocks = {"host": host_clock} if options.device == "cpu" else {"host": host_clock, "work": work_clock}
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    found = {"torch": torch.__version__, "device": name, "rows": []}
    scope = attnplug.using(backend=options.backend) if options.backend else nullcontext()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), scope:
        for work in works(options.device):
            attnplug_torch.reset()
            contenders = {"attnplug": through_attnplug(work.call, handles)}
            if work.has_own:
                contenders["native"] = natively(work.call, handles)
            for part, clock in clocks.items():
                seconds = interleaved(contenders, clock(options.device), options.repeats).seconds
                times = {each: round(statistics.median(values) * 1e6, 1) for each, values in seconds.items()}
                ran = sorted({route.backend or "torch's own" for route in attnplug_torch.report()})
                row = {"work": work.name, "part": part, "microseconds": times, "ran": ran}
                found["rows"].append(row)
                print(f"{work.name:42} {part:5} {times} {', '.join(ran)}", flush=True)
    natively(print, handles).prepare()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
