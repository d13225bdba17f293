"""
Which wrappers attend which requests, and which of the library's kernels they run.

The probe needs this before torch is imported, so nothing here imports torch or the library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.errors import SettingsError

if TYPE_CHECKING:
    from attnplug import Agreement, Device

CUDA_CORE_GROUPS: Final = (1, 2, 3, 4, 8)
"""Query heads per KV head for which the library has decode kernels on CUDA cores."""

_MEASURED: Final = (9, 0)
"""The compute capability of the H200, on which the decode kernels were measured."""


@frozen
class Route:
    """
    The requests of a step that one kind of wrapper attends: those at the front, or behind an earlier route.

    Attributes:
        kind: The kind of wrapper, by a name of `attnplug_flashinfer.kinds`.
        shortest: The fewest query rows of such a request. Padded requests have none.
        longest: The most query rows of such a request.
    """

    kind: str
    shortest: int
    longest: int

    def accepts(self, length: int) -> bool:
        """Whether a request of `length` query rows takes this route."""
        return self.shortest <= length <= self.longest


REMAINING: Final = Route("prefill", 0, sys.maxsize)
"""Accepts every request that the routes before it leave."""

LATENTS: Final = Route("latent", 0, sys.maxsize)
"""All requests over latents: one kernel balances the rows of decodes and prefills over the GPU."""


def routes_of(agreement: Agreement) -> tuple[Route, ...]:
    """
    Return the routes of paged steps, in the order of the requests. The last one accepts all remaining requests.

    The library's decode kernels support neither attention sinks nor padded requests between others. Few rows per
    request, ``"short"``, run the Ampere kernels in both variants: these put the rows of all query heads of a group into
    one tile, and split the keys of a request. The Hopper kernels read all keys once per query head.
    """
    required, routes = agreement.requirements, []
    if required.latent:
        return (LATENTS,)
    has_prefill = "prefill" in required.phases
    if not required.sinks:
        routes.append(Route("decode", 1, 1))
    has_short = required.sinks or required.cascade or required.decode_query_len > 1 or not has_prefill
    if agreement.variant != "fa2" and has_short:
        routes.append(Route("short", 0, required.decode_query_len))
        return (*routes, REMAINING) if has_prefill else tuple(routes)
    return (*routes, REMAINING)


def prefix_kind(kind: str, routes: tuple[Route, ...]) -> str:
    """
    Return the kind of wrapper that attends to a shared prefix: one request with the rows of the whole step.

    Args:
        kind: The kind of the step's last requests.
        routes: The routes of the step.
    """
    return next(route.kind for route in routes if route.kind != "decode") if kind == "decode" else kind


def kinds_of_steps(agreement: Agreement) -> tuple[str, ...]:
    """Return the kinds of wrappers that steps use."""
    return tuple(route.kind for route in routes_of(agreement)) if agreement.requirements.paged else ("ragged",)


def kind_of_profile(agreement: Agreement) -> str:
    """Return the kind of wrapper that a profiling run makes. The kernels for sinks and for latents read pages only."""
    required = agreement.requirements
    return routes_of(agreement)[-1].kind if required.sinks or required.latent else "ragged"


def kernels_of(kind: str, agreement: Agreement, device: Device) -> str:
    """
    Return the kernels that a kind of wrapper runs: ``"fa2"``, ``"fa3"`` or ``"cuda_cores"``.

    Args:
        kind: The kind, by its name.
        agreement: The agreement.
        device: The device that they run on.
    """
    if kind == "decode":
        return "fa2" if uses_tensor_cores(agreement, device) else "cuda_cores"
    return "fa2" if kind == "short" else agreement.variant


def uses_tensor_cores(agreement: Agreement, device: Device) -> bool:
    """
    Return whether decodes of one row per request run the prefill kernels, on tensor cores.

    These load keys once for all query heads of a group. ``benchmarks/flashinfer_decode.py`` measured the library's own
    calls on an H200, FlashInfer 0.6.12, queries in bfloat16. With a bfloat16 KV cache and head sizes 64 and 128, tensor
    cores are 1.2 to 1.4 times as fast for groups of 3 and 4, and 1.9 to 2.3 times for groups of 8. For groups of 2 the
    two differ by 3 %, for groups of 1 tensor cores are no faster, and plans for CUDA cores take two thirds of the time
    for 16 requests and an eighth for 256. With an fp8_e4m3 KV cache and head size 128, tensor cores are 1.2 times as
    fast for groups of 2, 1.6 to 1.9 times for 3, 2.2 to 4.8 times for 4 and 8, and slower for 1. Other head sizes and
    KV caches of as many bits follow these. On other devices the library's published threshold decides: more than 4.
    Groups without a kernel on CUDA cores always use tensor cores.

    Args:
        agreement: The agreement. Its option `decode_kernel` decides unless it is ``"auto"``.
        device: The device that they run on.
    """
    required, choice = agreement.requirements, agreement.options["decode_kernel"]
    group = required.num_q_heads // required.num_kv_heads
    if choice != "auto":
        return bool(choice == "tensor_cores")
    capability = device.compute_capability
    if capability is None or capability.number != _MEASURED:
        return group not in CUDA_CORE_GROUPS or group >= 8
    return group not in CUDA_CORE_GROUPS or group >= (3 if agreement.kv_cache_dtype == required.dtype else 2)


def check_decode_kernel(agreement: Agreement) -> None:
    """
    Refuse the option `decode_kernel` where the library has no such kernel.

    Rules of a manifest do not see options, and a probe that refuses makes the variant unavailable to other models too.

    Raises:
        SettingsError: The option is ``"cuda_cores"``, and no kernel on CUDA cores supports the heads, the sinks or the
            latents.
    """
    required = agreement.requirements
    if agreement.options["decode_kernel"] != "cuda_cores" or not required.paged:
        return
    why = "with attention sinks decodes run the prefill kernels" if required.sinks else ""
    if required.gqa_ratio not in CUDA_CORE_GROUPS:
        heads = f"{required.num_q_heads} query heads over {required.num_kv_heads} KV heads"
        why = f"{heads} are groups of {required.gqa_ratio}"
    if required.latent:
        why = "the kernels for latents run on tensor cores"
    if why:
        groups = ", ".join(map(str, CUDA_CORE_GROUPS))
        raise SettingsError(
            f"decode_kernel='cuda_cores' is not available for {agreement.id!r}: {why}",
            f"kernels on CUDA cores support groups of {groups} query heads per KV head, without sinks or latents",
            "set it to 'auto' or 'tensor_cores'",
        )
