"""The section `dense`: `attnplug.attention` with everything kept, over `scaled_dot_product_attention`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from attnplug.errors import AttnplugError
from attnplug_kit.bench.processes import measure_in_process
from attnplug_kit.bench.result import Measurement, SectionResult
from attnplug_kit.bench.timing import Contender, host_clock, interleaved

if TYPE_CHECKING:
    from attnplug_kit.bench.rig import Target

NAME: Final = "dense"
BUDGET: Final = 15.0
"""Microseconds a call."""

_SHAPE: Final = (1, 16, 4, 64)
"""So small that the time is that of the calls."""


def measure(repeats: int, target: Target) -> SectionResult:
    """Measure in a fresh process."""
    return measure_in_process("dense", repeats, target)


def measure_here(repeats: int, target: Target) -> SectionResult:
    """
    Measure in this process.

    Raises:
        NoBackendError: Nothing can serve the call.
        AttnplugError: The two compute different results.
    """
    import torch  # noqa: PLC0415 - torch takes a second to import
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415 - likewise

    from attnplug import attention  # noqa: PLC0415 - likewise

    device = target.prepare().type
    query, key, value = (torch.randn(_SHAPE, device=device) for _ in range(3))

    def direct() -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in (query, key, value))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)

    ours = partial(attention, query, key, value, backend=target.backend)
    operator = partial(
        torch.ops.attnplug.attention_forward,
        *(query, key, value, None, None, None, None),
        *(False, None, None, None, False, [target.backend] if target.backend else [], "{}"),
    )
    with torch.no_grad():
        if not torch.allclose(ours(), direct(), atol=1e-4):
            raise AttnplugError("attention computes another result than torch", "", "run the conformance kit")
        contenders = {"direct": direct, "dense": ours, "op": operator}
        calls = {name: Contender(lambda _, call=call: call()) for name, call in contenders.items()}  # type: ignore[misc]
        clock = host_clock(device)
        samples = interleaved(calls, clock, repeats)
    what = f"{_SHAPE[1]} tokens, {_SHAPE[2]} heads of {_SHAPE[3]}, {clock.what}"
    over, op = samples.over("dense", "direct"), samples.over("op", "dense")
    unsteady = () if samples.steady else (f"{NAME}: time ran out before each median was known to 1 %",)
    return SectionResult(
        (
            Measurement(NAME, f"{what}: `scaled_dot_product_attention`", samples.seconds["direct"], "us"),
            Measurement(NAME, f"{what}: `attnplug.attention` again", samples.seconds["dense"], "us"),
            Measurement(NAME, f"{what}: `attention` over torch's", over, "us", BUDGET, paired=True, decides=False),
            Measurement(NAME, f"{what}: the opaque op over `attention`", op, "us", paired=True),
        ),
        {"torch threads": str(torch.get_num_threads())},
        unsteady,
    )
