"""How much memory the library's kernels need for partial results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Limits

_MOST_MULTIPROCESSORS: Final = 160
_FLOAT: Final = 4  # bytes
_ALIGNMENT: Final = 64  # bytes that are lost where two buffers meet, and more


def workspace_bytes(agreement: Agreement, device: Device, limits: Limits) -> int:
    """
    Return the size of the float workspace: as many MiB as the options say, or more where the kernels need it.

    The kernels for Ampere split the keys of a request over blocks, two of them per multiprocessor, and keep a partial
    output and LSE of each. With few KV heads, or where graphs of large batches fix the number of blocks by the number
    of requests, that is more than the library recommends, and its plans fail.

    Args:
        agreement: What was negotiated.
        device: Where the kernels run.
        limits: How large batches become.
    """
    pieces = _pieces(agreement, device)
    width = agreement.requirements.head_size
    needed = _partial_results(agreement, pieces, 128 if width < 256 else 64)
    if agreement.requirements.paged and agreement.cudagraph != "never":
        needed = max(needed, _captured(agreement, pieces, limits))
    wanted: int = agreement.options["workspace_mib"] << 20
    return max(wanted, needed)


def _pieces(agreement: Agreement, device: Device) -> int:
    """Return how many pieces all requests are split into, for each KV head."""
    return 2 * (device.num_multiprocessors or _MOST_MULTIPROCESSORS) // agreement.requirements.num_kv_heads


def _captured(agreement: Agreement, pieces: int, limits: Limits) -> int:
    """A graph has blocks for every tile of rows that its batch may have, and always splits."""
    asked = agreement.requirements
    longest = asked.decode_query_len
    tokens = max(limits.capture_sizes, default=limits.max_num_reqs * longest)
    group = asked.num_q_heads // asked.num_kv_heads
    needed = 0
    for query_len in range(1, longest + 1):
        reqs = min(limits.max_num_reqs, -(-tokens // query_len))
        tile = _tile((reqs * (query_len - 1) + 1) * group, asked.head_size)
        tiles = -(-reqs * query_len * group // tile) + reqs - 1
        needed = max(needed, _partial_results(agreement, max(pieces, tiles), tile))
    return needed


def _tile(rows: int, head_size: int) -> int:
    """Return the rows of a tile, query heads of a group counted one by one."""
    if rows > 64 and head_size < 256:
        return 128
    return 64 if rows > 16 else 16


def _partial_results(agreement: Agreement, pieces: int, tile: int) -> int:
    asked = agreement.requirements
    return asked.num_q_heads * pieces * tile * (asked.head_size + 1) * _FLOAT + _ALIGNMENT
