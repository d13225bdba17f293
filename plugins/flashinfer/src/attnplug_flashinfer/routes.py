"""Which kind of wrapper attends which requests. The probe asks too, before torch is imported: nothing here needs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.errors import SettingsError

if TYPE_CHECKING:
    from attnplug import Agreement, Device


@frozen
class Route:
    """
    Which requests at the front of a step, or behind an earlier route, are of a kind of their own.

    Attributes:
        kind: Their kind.
        shortest: Rows that each has at least. Padded requests have none.
        longest: Rows that each has at most.
    """

    kind: str
    shortest: int
    longest: int

    def accepts(self, length: int) -> bool:
        """Whether a request of so many rows is of this kind."""
        return self.shortest <= length <= self.longest


REMAINING: Final = Route("prefill", 0, sys.maxsize)
"""What no other route accepts."""


def routes_of(agreement: Agreement) -> tuple[Route, ...]:
    """
    Return which requests are of which kind, in paged steps. The last route takes every request that others leave.

    No decode of the library's own knows sinks, or a padded request among others. Few rows per request, ``"short"``, run
    the kernels for Ampere in both variants: those put the rows of all query heads of a group into one tile, and split
    the keys of a request. Those for Hopper read all keys once per query head.
    """
    asked, routes = agreement.requirements, []
    prefills = "prefill" in asked.phases
    if not asked.sinks:
        routes.append(Route("decode", 1, 1))
    if agreement.variant != "fa2" and (asked.sinks or asked.cascade or asked.decode_query_len > 1 or not prefills):
        routes.append(Route("short", 0, asked.decode_query_len))
        return (*routes, REMAINING) if prefills else tuple(routes)
    return (*routes, REMAINING)


def prefix_kind(kind: str, routes: tuple[Route, ...]) -> str:
    """Return the kind that attends a shared prefix where a step's last rows are of `kind`: all rows are one request."""
    return next(route.kind for route in routes if route.kind != "decode") if kind == "decode" else kind


def kinds_of_steps(agreement: Agreement) -> tuple[str, ...]:
    """Return the kinds that steps under an agreement may have."""
    return tuple(route.kind for route in routes_of(agreement)) if agreement.requirements.paged else ("ragged",)


def kind_of_profile(agreement: Agreement) -> str:
    """Return the kind that a profiling run makes. The kernels with sinks read pages only."""
    return routes_of(agreement)[-1].kind if agreement.requirements.sinks else "ragged"


CUDA_CORE_GROUPS: Final = (1, 2, 3, 4, 8)
"""Query heads per KV head that the library has kernels on CUDA cores for."""

_MEASURED: Final = (9, 0)
"""The compute capability that has been measured: that of the H200."""


def check_decode_kernel(agreement: Agreement) -> None:
    """
    Refuse kernels on CUDA cores for layers that there are none for.

    No rule of a manifest is about options, and a probe that refuses takes the variant from every other model too.

    Raises:
        SettingsError: The option `decode_kernel` asks for them.
    """
    asked = agreement.requirements
    if agreement.options["decode_kernel"] != "cuda_cores" or not asked.paged:
        return
    here = "with sinks decodes run the kernels of prefills" if asked.sinks else ""
    if asked.gqa_ratio not in CUDA_CORE_GROUPS:
        here = f"{asked.num_q_heads} query heads over {asked.num_kv_heads} KV heads are groups of {asked.gqa_ratio}"
    if here:
        groups = ", ".join(map(str, CUDA_CORE_GROUPS))
        raise SettingsError(
            f"decode_kernel='cuda_cores' was given to {agreement.id!r}",
            f"the kernels on CUDA cores are for groups of {groups} query heads, without sinks; {here}",
            "set it to 'auto' or 'tensor_cores'",
        )


def kernels_of(kind: str, agreement: Agreement, device: Device) -> str:
    """
    Return which kernels run a kind of requests: ``"fa2"``, ``"fa3"`` or ``"cuda_cores"``.

    Args:
        kind: Its name in `attnplug_flashinfer.routes`.
        agreement: What was negotiated.
        device: Where they run.
    """
    if kind == "decode":
        return "fa2" if on_tensor_cores(agreement, device) else "cuda_cores"
    return "fa2" if kind == "short" else agreement.variant


def on_tensor_cores(agreement: Agreement, device: Device) -> bool:
    """
    Whether decodes of one row per request run the kernels of prefills, on tensor cores.

    Those load keys once for all query heads of a group. Measured on an H200 by ``benchmarks/flashinfer_decode.py``, the
    library's own calls, 0.6.12, queries in bfloat16: over a cache in bfloat16, heads of 64 and 128, tensor cores are
    1.2 to 1.4 times as fast in groups of 3 and 4, and 1.9 to 2.3 times in groups of 8. In groups of 2 the two differ by
    3 %, in those of 1 tensor cores are no faster, and CUDA cores are planned in two thirds of the time for 16 requests
    and in an eighth for 256. Over a cache in fp8_e4m3, heads of 128, tensor cores are 1.2 times as fast in groups of 2,
    1.6 to 1.9 times in groups of 3, 2.2 to 4.8 times in groups of 4 and 8, and slower in those of 1. Other heads and
    caches of as many bits go by the same. On other devices the published threshold decides, more than 4. Groups that
    have no kernel on CUDA cores have no choice.

    Args:
        agreement: What was negotiated; its option `decode_kernel` decides unless it is ``"auto"``.
        device: Where it runs.
    """
    asked, choice = agreement.requirements, agreement.options["decode_kernel"]
    group = asked.num_q_heads // asked.num_kv_heads
    if choice != "auto":
        return bool(choice == "tensor_cores")
    capability = device.compute_capability
    if capability is None or capability.number != _MEASURED:
        return group not in CUDA_CORE_GROUPS or group >= 8
    return group not in CUDA_CORE_GROUPS or group >= (3 if agreement.kv_cache_dtype == asked.dtype else 2)
