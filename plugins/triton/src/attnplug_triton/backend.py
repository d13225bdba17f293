"""The backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from attnplug.contract import Backend, dummy_batch_of, torch_dtype, warm_up
from attnplug.ops import split_bytes
from attnplug_triton.builder import TritonBuilder
from attnplug_triton.impl import FP8_DS_MLA, TritonImpl
from attnplug_triton.tiles import (
    DESCRIBED_KEYS,
    MAX_ROWS,
    TileKey,
    architecture,
    decode_tiles,
    has_e4m3,
    latent_residents,
    latent_tiles,
    max_parts,
    measured_tiles,
    page_class,
    prefill_tiles,
    splits,
    width_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug import Agreement, Device
    from attnplug.contract import Batch, CacheTensor, GraphShape, Limits, LoadedBackend

_MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200, for devices that do not report theirs."""

_LATENT_PROGRAMS: Final = 8
"""Tiles of rows of a request whose latents all are read, from the L2 cache, for short queries."""

_FIXED_SPLITS: Final = 16
_FIXED_BYTES: Final = 1 << 28
"""The most splits of each request where they do not depend on the batch, and the most bytes of their outputs."""


class TritonBackend(Backend):
    """
    Attention over pages, in two kernels: one for short queries, with split KV, and one for longer ones.

    Attributes:
        short: The most new tokens of a request that the kernel of short queries computes.
        decode_tiles: Its tile sizes.
        prefill_tiles: The tile sizes of the other kernel.
        prefix_tiles: Those of the first kernel for the rows of all requests, with cascade attention alone.
    """

    impl_class = TritonImpl
    builder_class = TritonBuilder
    supports_max_num_splits = True

    def __init__(self, agreement: Agreement, device: Device) -> None:
        super().__init__(agreement, device)
        requested = agreement.requirements
        self._size_v = requested.head_size_v or requested.head_size
        group, most = requested.gqa_ratio * requested.dcp_size, MAX_ROWS * (_LATENT_PROGRAMS if requested.latent else 1)
        self.short = max(1, min(requested.decode_query_len, most // group)) if requested.topk is None else 1
        self._rows, arch = self.short * group, architecture(self.device_properties)
        sizes, dtype, rows = (requested.head_size, self._size_v), agreement.kv_cache_dtype, self._rows
        if requested.latent:
            of_latent = None if dtype == FP8_DS_MLA else torch_dtype(dtype).itemsize
            sizes = (requested.head_size - self._size_v, self._size_v)
            self.decode_tiles = latent_tiles(*sizes, itemsize=of_latent, rows=rows, arch=arch)
            self.prefill_tiles = latent_tiles(*sizes, itemsize=of_latent, rows=MAX_ROWS, arch=arch)
        else:
            itemsize = torch_dtype(dtype).itemsize
            self.decode_tiles = decode_tiles(*sizes, itemsize=itemsize, rows=rows, arch=arch)
            is_described = dtype == requested.dtype and (agreement.block_size or 1) % DESCRIBED_KEYS == 0
            self.prefill_tiles = prefill_tiles(*sizes, arch=arch, descriptors=is_described)
        measured = measured_tiles().get(self.tile_key("decode"), self.decode_tiles)
        if self.has_plain_rows or not measured.descriptors:  # with pointer loads it would have a stage too few
            self.decode_tiles = measured
        self.prefill_tiles = measured_tiles().get(self.tile_key("prefill"), self.prefill_tiles)
        if requested.cascade:  # rows of all requests, which read a prefix together
            itemsize = torch_dtype(dtype).itemsize
            self.prefix_tiles = decode_tiles(*sizes, itemsize=itemsize, rows=MAX_ROWS, arch=arch)
        self._programs = requested.num_kv_heads * -(-rows // self.decode_tiles.rows)

    @property
    def has_plain_rows(self) -> bool:
        """Whether the rows of short queries attend to all keys before them: tensor descriptors load their tiles."""
        requested = self.agreement.requirements
        is_limited = requested.sliding_window is not None or requested.attention_chunk is not None
        has_ranges = is_limited or requested.mm_prefix or requested.custom_mask
        return bool(requested.paged) and requested.topk is None and requested.dcp_size == 1 and not has_ranges

    def tile_key(self, kernel: str) -> TileKey:
        """Return what measured tile sizes of a kernel, ``"decode"`` or ``"prefill"``, depend on."""
        agreement, requested = self.agreement, self.agreement.requirements
        dtype = agreement.kv_cache_dtype
        return TileKey(
            arch=architecture(self.device_properties),
            phase="selected" if requested.topk is not None else f"latent {kernel}" if requested.latent else kernel,
            size=requested.head_size - (self._size_v if requested.latent else 0),
            size_v=self._size_v,
            dtype="bfloat16" if dtype == "float16" else dtype,
            page=page_class(agreement.block_size or 0),
            request_rows=width_of(min(self._rows, MAX_ROWS)) if kernel == "decode" else 0,
        )

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Describe pages. Records have elements of 1, 2 and 4 bytes, and are loaded 16 bytes at a time."""
        found = super().cache_tensors(num_blocks)
        if self.agreement.kv_cache_dtype == FP8_DS_MLA:
            found = {role: evolve(tensor, alignment=16) for role, tensor in found.items()}
        return found

    @property
    def reads_bits(self) -> bool:
        """Whether the kernels convert an FP8 KV cache by its bits, where Triton does not."""
        is_e4m3 = self.agreement.kv_cache_dtype in ("fp8_e4m3", "fp8_per_token_head", FP8_DS_MLA)
        return is_e4m3 and not has_e4m3(architecture(self.device_properties))

    def splits(self, requests: int, max_seq_len: int, most: int | None, span: int = 0) -> int:
        """
        Return the splits of each request that fill the device. With `topk` each token is a request.

        Args:
            requests: Requests of the step.
            max_seq_len: Keys of the longest request.
            most: The host's split-KV limit; None for no limit.
            span: Tokens of the longest span after its first: a token attends to all of them beside its window or chunk.
        """
        requested = self.agreement.requirements
        keys = max_seq_len
        if requested.sliding_window is not None:
            keys = min(keys, requested.sliding_window + self.short + span)
        if requested.attention_chunk is not None:
            keys = min(keys, requested.attention_chunk + self.short + span)
        keys = -(-keys // requested.dcp_size)
        return splits(
            sequences=requests * self._programs,
            keys=keys,
            tile=self.decode_tiles.keys,
            multiprocessors=self._multiprocessors,
            most=most,
            residents=latent_residents(self.decode_tiles) if requested.latent else None,
        )

    def prefix_splits(self, tokens: int, keys: int, most: int | None) -> int:
        """Return the splits of a shared prefix for all new tokens; 0 where prefill tiles fill the device without."""
        requested = self.agreement.requirements
        rows, heads = tokens * requested.gqa_ratio, requested.num_kv_heads
        if -(-rows // self.prefill_tiles.rows) * heads >= self._multiprocessors:
            return 0
        return splits(
            sequences=-(-rows // self.prefix_tiles.rows) * heads,
            keys=keys,
            tile=self.prefix_tiles.keys,
            multiprocessors=self._multiprocessors,
            most=most,
        )

    @property
    def _multiprocessors(self) -> int:
        return self.device_properties.num_multiprocessors or _MULTIPROCESSORS

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of partial outputs."""
        requested = self.agreement.requirements
        members, fixed = self._members(limits), self.fixed_splits(limits)
        parts = max_parts(members, self._programs, self._multiprocessors) if fixed is None else members * fixed
        rows = parts * self.short
        if requested.cascade:
            group, tile = requested.gqa_ratio, self.prefix_tiles.rows
            tiles = -(-limits.max_num_tokens * group // tile)
            of_prefix = max_parts(tiles, requested.num_kv_heads, self._multiprocessors) * -(-tile // group)
            rows = max(rows, of_prefix)
        return split_bytes(rows, requested.num_q_heads * requested.dcp_size, self._size_v)

    def fixed_splits(self, limits: Limits) -> int | None:
        """
        Return the splits of every request where results may not depend on the batch, by limits alone; None elsewhere.

        The kernel divides the keys of a request by this number and by its own length.
        """
        requested = self.agreement.requirements
        if not (requested.batch_invariant if limits.batch_invariant is None else limits.batch_invariant):
            return None
        heads = requested.num_q_heads * requested.dcp_size
        split = split_bytes(self._members(limits) * self.short, heads, self._size_v)
        most = max(1, min(_FIXED_SPLITS, _FIXED_BYTES // split, limits.max_num_splits or _FIXED_SPLITS))
        return self.splits(1, limits.max_seq_len if requested.topk is None else requested.topk, most)

    def _members(self, limits: Limits) -> int:
        """Return the most requests that may be split. With `topk` each token is a request."""
        return limits.max_num_reqs if self.agreement.requirements.topk is None else limits.max_num_tokens

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Compile the kernels by a tiny step of each kind."""
        if shapes:
            warm_up(loaded, self._batches())

    def _batches(self) -> Iterator[Batch]:
        """Return a short query, one over keys that are split, and a longer one, as far as they were requested."""
        requested, long = self.agreement.requirements, self.short + 1
        if requested.topk is not None:  # with and without splits
            whole = next(bit for bit in range(18) if self.splits(1 << bit, requested.topk, None) == 1)
            yield from (dummy_batch_of(self.agreement, self.device, [1 << bit]) for bit in sorted({0, whole}))
            return
        many = next((keys for keys in (1 << bit for bit in range(18)) if self.splits(1, keys, None) > 1), 1)
        if requested.cascade and self.agreement.block_size:
            lens, size = [1, 1], self.agreement.block_size
            for keys in sorted({size, -(-many // size) * size}):
                dummy = dummy_batch_of(self.agreement, self.device, lens, [keys + 1] * 2)
                yield evolve(dummy, common_prefix_len=keys)
        steps = [(1, 1), (1, many)] if "decode" in requested.phases else []
        if "prefill" in requested.phases or long <= requested.decode_query_len:
            steps.append((long, long))
        for query_len, seq_len in steps:
            yield dummy_batch_of(self.agreement, self.device, [query_len], [seq_len])
