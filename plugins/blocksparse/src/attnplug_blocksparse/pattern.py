"""A pattern of local and vertical blocks: its parameters on one tensor-parallel rank, and its tables on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.errors import LayerError, LimitsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIN: Final = {"max_seqlen": 1, "block_size": 1, "local_blocks": 0, "vert_stride": 1}
_MAX: Final = {"vert_stride": 2**20}
"""Kernels index in 32 bits, and each KV head has a table of `vert_stride` numbers."""

_HEADS: Final = ("num_heads", "num_kv_heads")
_MODES: Final = ("homo_head", "homo_head_group")
_TOTAL: Final = "total_kv_heads"


@frozen(kw_only=True)
class BlocksparseParams:
    """
    The parameters of a pattern on one rank.

    Query block ``i`` of a head attends to key block ``j <= i`` where ``i - j < local_blocks`` (local), or where
    ``(j + slide(head) + 1) % vert_stride == 0`` (vertical). The formula is Phi-3-small's; the slide along KV heads
    is the same in prefill and decode.

    Attributes:
        max_seqlen: The longest sequence that the pattern covers, in tokens.
        num_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank.
        block_size: Tokens of a sparse block, which is independent of the block size of the KV cache.
        local_blocks: Blocks of local attention, the query's own included; 0 leaves the vertical blocks only.
        vert_stride: Every `vert_stride`-th block is vertical.
        homo_head: All heads have one pattern.
        homo_head_group: The query heads of a KV head have one pattern; `homo_head` takes precedence.
        total_kv_heads: KV heads of the model; None for the sum over the ranks. Fewer are replicated: consecutive ranks
            have the same KV head.
        tp_size: Tensor-parallel ranks.
        tp_rank: The index of this rank.
    """

    max_seqlen: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    local_blocks: int
    vert_stride: int
    homo_head: bool = False
    homo_head_group: bool = False
    total_kv_heads: int | None = None
    tp_size: int = 1
    tp_rank: int = 0

    @classmethod
    def of(
        cls, pattern: Mapping[str, Any], *, num_heads: int, num_kv_heads: int, tp_size: int = 1, tp_rank: int = 0
    ) -> BlocksparseParams:
        """
        Read the pattern of requirements.

        Args:
            pattern: The parameters by name; `num_heads` and `num_kv_heads` default to the layer's.
            num_heads: The layer's query heads on this rank.
            num_kv_heads: The layer's KV heads on this rank.
            tp_size: Tensor-parallel ranks.
            tp_rank: The index of this rank.

        Raises:
            LayerError: As `check_pattern`.
            LimitsError: The ranks do not hold the model's KV heads, or it is ambiguous which of them they hold.
        """
        check_pattern(pattern, num_heads=num_heads, num_kv_heads=num_kv_heads)
        given = {**pattern, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        found = cls(**given, tp_size=tp_size, tp_rank=tp_rank)
        found._check_ranks()
        return found

    def _check_ranks(self) -> None:
        held, total = self.tp_size * self.num_kv_heads, self.total_kv_heads
        problem = f"tp_size={self.tp_size} is invalid with num_kv_heads={self.num_kv_heads} per rank"
        if total is None:
            # Ranks with one KV head each look the same whether the head is replicated or not.
            if self.num_kv_heads == 1 < self.tp_size and self.slides_by_kv_head:
                raise LimitsError(
                    problem,
                    "homo_head_group counts the model's KV heads, and ranks with one KV head may replicate it",
                    f"add total_kv_heads to the pattern: {held}, or fewer where ranks replicate a KV head",
                )
        elif held != total and not (self.num_kv_heads == 1 and self.tp_size % total == 0):
            raise LimitsError(
                problem,
                f"the ranks hold the pattern's total_kv_heads={total}, or each replicates one of them",
                "pass the ranks in Parallel(tp_rank=..., tp_size=...), and the model's KV heads in the pattern",
            )

    @property
    def head_sliding_step(self) -> int:
        """Blocks by which the pattern slides from head to head; negative slides along the KV heads."""
        if self.homo_head:
            return 0
        if self.homo_head_group:
            return -max(1, int(self.vert_stride / self._model_kv_heads))
        return max(1, int(self.vert_stride / (self.tp_size * self.num_heads)))

    @property
    def active_head_range(self) -> tuple[int, int]:
        """The query heads of this rank among those of all ranks."""
        return self.tp_rank * self.num_heads, (self.tp_rank + 1) * self.num_heads

    @property
    def slides_by_kv_head(self) -> bool:
        """Whether the query heads of a KV head have one pattern."""
        return self.head_sliding_step < 0

    @property
    def first_head(self) -> int:
        """The first head of this rank among the model's: a KV head where the pattern slides along those."""
        if self.slides_by_kv_head:
            replicas = self.tp_size * self.num_kv_heads // self._model_kv_heads
            return self.tp_rank // replicas * self.num_kv_heads
        return self.tp_rank * self.num_heads

    @property
    def _model_kv_heads(self) -> int:
        return self.total_kv_heads or self.tp_size * self.num_kv_heads

    def residue(self, head: int) -> int:
        """Return the block number, modulo `vert_stride`, of the vertical blocks of a query head of this rank."""
        own = head // (self.num_heads // self.num_kv_heads) if self.slides_by_kv_head else head
        return -((self.first_head + own) * abs(self.head_sliding_step) + 1) % self.vert_stride

    def residues(self, kv_head: int) -> tuple[int, ...]:
        """Return the distinct residues of the query heads of a KV head, ascending."""
        group = self.num_heads // self.num_kv_heads
        return tuple(sorted({self.residue(kv_head * group + head) for head in range(group)}))


def check_pattern(pattern: Mapping[str, Any], *, num_heads: int, num_kv_heads: int) -> None:
    """
    Check the parameters that do not depend on the ranks.

    Args:
        pattern: As `BlocksparseParams.of`.
        num_heads: The layer's query heads on a rank.
        num_kv_heads: The layer's KV heads on a rank.

    Raises:
        LayerError: A parameter is unknown, missing, out of its range, or not the layer's.
    """
    known = (*_MIN, *_HEADS, *_MODES, _TOTAL)
    for name in pattern:
        if name not in known:
            raise _refused(pattern, f"the parameters are {', '.join(known)}", f"remove {name!r}")
    for name, least in (_MIN | {name: 1 for name in (_TOTAL,) if name in pattern}).items():
        value, most = pattern.get(name), _MAX.get(name, 2**31 - 1)
        if type(value) is not int or value < least:
            raise _refused(pattern, f"{name} is an integer of at least {least}", f"pass {name} in the pattern")
        if value > most:
            raise _refused(pattern, f"{name} is at most {most}", f"pass {name}={most} or less")
    for name, own in zip(_HEADS, (num_heads, num_kv_heads), strict=True):
        if name in pattern and (type(pattern[name]) is bool or pattern[name] != own):
            raise _refused(pattern, f"the layer has {name}={own} on this rank", f"pass {own}, or omit {name}")
    for name in _MODES:
        if not isinstance(pattern.get(name, False), bool):
            raise _refused(pattern, f"{name} is True or False", f"pass {name}=True, or omit it")


def _refused(pattern: Mapping[str, Any], expected: str, fix: str) -> LayerError:
    return LayerError(f"block_sparse={dict(pattern)} is invalid", expected, fix)


@frozen(eq=False)
class Pattern:
    """
    Parameters with the tables that the kernels read.

    Kernels compute the blocks of a row from these tables and constants: there is no list of blocks and no token mask.
    The tables are made with the builder, since a copy to the device in a forward would synchronize, and graph capture
    forbids it.

    Attributes:
        params: The parameters of this rank.
        device: The device of the tables.
        residues: ``(num_kv_heads, vert_stride)`` int32: the residues of each group's vertical blocks, ascending, then
            zeros.
        residues_below: ``(num_kv_heads, vert_stride + 1)`` int32: how many of these residues are less than 0, 1, ...
    """

    params: BlocksparseParams
    device: torch.device
    residues: Tensor = field(init=False)
    residues_below: Tensor = field(init=False)

    @residues.default
    def _residues(self) -> Tensor:
        found = torch.zeros(self.params.num_kv_heads, self.params.vert_stride, dtype=torch.int32)
        for head, row in enumerate(found):
            residues = self.params.residues(head)
            row[: len(residues)] = torch.tensor(residues, dtype=torch.int32)
        return found.to(self.device)

    @residues_below.default
    def _residues_below(self) -> Tensor:
        found = torch.zeros(self.params.num_kv_heads, self.params.vert_stride + 1, dtype=torch.int32)
        for head, row in enumerate(found):
            row[torch.tensor(self.params.residues(head)) + 1] = 1
        return found.cumsum(1, dtype=torch.int32).to(self.device)

    @property
    def constants(self) -> tuple[int, int, int, bool]:
        """
        Block size, local blocks, vertical stride, and whether the pattern slides by KV heads: compiled in.

        Both sizes are limited to the longest sequence, which changes no result and prevents overflows.
        """
        params = self.params
        block = min(params.block_size, params.max_seqlen)
        local = min(params.local_blocks, -(-params.max_seqlen // block))
        return block, local, params.vert_stride, params.slides_by_kv_head

    @property
    def scalars(self) -> tuple[int, int]:
        """The first head of this rank, and the blocks by which the pattern slides per head: passed at run time."""
        return self.params.first_head, abs(self.params.head_sliding_step)

    def max_blocks(self, length: int) -> int:
        """Return an upper bound of the blocks that the heads of a KV head attend to in a decode at this length."""
        blocks = -(-length // self.params.block_size)
        most = max(len(self.params.residues(head)) for head in range(self.params.num_kv_heads))
        return min(blocks, self.params.local_blocks + -(-blocks // self.params.vert_stride) * most)
