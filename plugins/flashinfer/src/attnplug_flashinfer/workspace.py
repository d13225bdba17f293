"""The size of the library's float workspace, in which its kernels keep partial results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Limits

_MOST_MULTIPROCESSORS: Final = 160  # where the device does not report them
_FLOAT: Final = 4  # bytes
_ALIGNMENT: Final = 64  # bytes lost between two buffers, and more


def workspace_bytes(agreement: Agreement, device: Device, limits: Limits) -> int:
    """
    Return the size of the float workspace in bytes: the option `workspace_mib`, or more where the kernels need more.

    The Ampere kernels split the keys of a request over thread blocks, two per multiprocessor, and keep a partial output
    and LSE for each. With few KV heads, or where graphs of large batches bound the number of thread blocks by the
    number of requests, that is more than the library recommends, and its plans fail.

    Args:
        agreement: The agreement.
        device: The device that the kernels run on.
        limits: The limits of batches.
    """
    configured: int = agreement.options["workspace_mib"] << 20
    if agreement.requirements.latent:
        return max(configured, _of_latents(agreement, device))
    splits = _num_splits(agreement, device)
    needed = _partial_results(agreement, splits, 128 if agreement.requirements.head_size < 256 else 64)
    if agreement.requirements.paged and agreement.cudagraph != "never":
        needed = max(needed, _in_graphs(agreement, splits, limits))
    return max(configured, needed)


def _of_latents(agreement: Agreement, device: Device) -> int:
    """Two tiles of 64 rows per multiprocessor, whatever the batch: partial outputs in the dtype, and LSE."""
    rows = 2 * 64 * (device.num_multiprocessors or _MOST_MULTIPROCESSORS)
    return rows * ((agreement.requirements.head_size_v or 0) * _FLOAT // 2 + _FLOAT) + _ALIGNMENT


def _num_splits(agreement: Agreement, device: Device) -> int:
    """Return the number of KV splits of all requests together, for each KV head."""
    return 2 * (device.num_multiprocessors or _MOST_MULTIPROCESSORS) // agreement.requirements.num_kv_heads


def _in_graphs(agreement: Agreement, splits: int, limits: Limits) -> int:
    """A graph has a thread block for every tile of rows that its batch may have, and always splits."""
    required = agreement.requirements
    longest = required.decode_query_len
    tokens = max(limits.capture_sizes, default=limits.max_num_reqs * longest)
    group = required.num_q_heads // required.num_kv_heads
    needed = 0
    for query_len in range(1, longest + 1):
        reqs = min(limits.max_num_reqs, -(-tokens // query_len))
        tile = _tile((reqs * (query_len - 1) + 1) * group, required.head_size)
        tiles = -(-reqs * query_len * group // tile) + reqs - 1
        needed = max(needed, _partial_results(agreement, max(splits, tiles), tile))
    return needed


def _tile(rows: int, head_size: int) -> int:
    """Return the rows of a tile, in which each query head of a group has rows."""
    if rows > 64 and head_size < 256:
        return 128
    return 64 if rows > 16 else 16


def _partial_results(agreement: Agreement, splits: int, tile: int) -> int:
    required = agreement.requirements
    return required.num_q_heads * splits * tile * (required.head_size + 1) * _FLOAT + _ALIGNMENT
