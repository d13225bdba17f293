"""The parameters of a pattern of local and vertical blocks, as one tensor-parallel rank sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import LayerError, LimitsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEAST: Final = {"max_seqlen": 1, "block_size": 1, "local_blocks": 0, "vert_stride": 1}
_MOST: Final = {"vert_stride": 2**20}
"""Kernels count in 32 bits. For each KV head there is a table of `vert_stride` numbers."""

_HEADS: Final = ("num_heads", "num_kv_heads")
_MODES: Final = ("homo_head", "homo_head_group")
_TOTAL: Final = "total_kv_heads"


@frozen(kw_only=True)
class BlocksparseParams:
    """
    Which sparse blocks a head attends: block ``i`` of queries attends block ``j <= i`` of keys where ``i - j`` is less
    than `local_blocks`, or where ``(j + slide(head) + 1) % vert_stride == 0``.

    The formula is that of Phi-3-small's attention, with the slide along KV heads computed alike in all phases.

    Attributes:
        max_seqlen: The longest sequence that the pattern covers, in tokens.
        num_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank.
        block_size: Tokens of a sparse block, which is no page of the cache.
        local_blocks: Blocks of local attention, a query's own included; 0 leaves vertical ones alone.
        vert_stride: One vertical block out of so many.
        homo_head: All heads have one pattern.
        homo_head_group: The query heads of a KV head have one pattern; `homo_head` wins over it.
        total_kv_heads: KV heads of the model; None is those of all ranks together. Fewer are repeated: the ranks that
            have one KV head follow each other.
        tp_size: Ranks that share the heads.
        tp_rank: This one.
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
        Read the pattern that requirements carry.

        Args:
            pattern: The parameters by name; `num_heads` and `num_kv_heads` may be left to the layer.
            num_heads: The layer's query heads on this rank.
            num_kv_heads: The layer's KV heads on this rank.
            tp_size: Ranks that share the heads.
            tp_rank: This one.

        Raises:
            LayerError: As `check_pattern`.
            LimitsError: The ranks do not hold the model's KV heads, or leave open which of them they hold.
        """
        check_pattern(pattern, num_heads=num_heads, num_kv_heads=num_kv_heads)
        given = {**pattern, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        found = cls(**given, tp_size=tp_size, tp_rank=tp_rank)
        found._check_ranks()
        return found

    def _check_ranks(self) -> None:
        held, total = self.tp_size * self.num_kv_heads, self.total_kv_heads
        given = f"tp_size={self.tp_size} was given for ranks of {self.num_kv_heads} KV heads"
        if total is None:
            if self.num_kv_heads == 1 < self.tp_size and self.slides_by_kv_head:
                raise LimitsError(
                    given,
                    "homo_head_group counts the model's KV heads, and ranks of one may be repeating them",
                    f"name them in the pattern: total_kv_heads={held}, or fewer where ranks have one in common",
                )
        elif held != total and not (self.num_kv_heads == 1 and self.tp_size % total == 0):
            raise LimitsError(
                given,
                f"the pattern has total_kv_heads={total}: ranks share these, or each has one that others have as well",
                "pass the ranks in Parallel(tp_rank=..., tp_size=...), and the number of the model in the pattern",
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
    def first(self) -> int:
        """The first head of this rank among the model's, in query heads or in KV heads: as the pattern slides."""
        if self.slides_by_kv_head:
            repeats = self.tp_size * self.num_kv_heads // self._model_kv_heads
            return self.tp_rank // repeats * self.num_kv_heads
        return self.tp_rank * self.num_heads

    @property
    def _model_kv_heads(self) -> int:
        return self.total_kv_heads or self.tp_size * self.num_kv_heads

    def residue(self, head: int) -> int:
        """Return the number, modulo `vert_stride`, of the blocks that are vertical for a query head of this rank."""
        own = head // (self.num_heads // self.num_kv_heads) if self.slides_by_kv_head else head
        return -((self.first + own) * abs(self.head_sliding_step) + 1) % self.vert_stride

    def residues(self, kv_head: int) -> tuple[int, ...]:
        """Return those numbers of the query heads of a KV head, each once and rising."""
        group = self.num_heads // self.num_kv_heads
        return tuple(sorted({self.residue(kv_head * group + head) for head in range(group)}))


def check_pattern(pattern: Mapping[str, Any], *, num_heads: int, num_kv_heads: int) -> None:
    """
    Refuse parameters that no rank of a layer can have.

    Args:
        pattern: As `BlocksparseParams.of`.
        num_heads: The layer's query heads on a rank.
        num_kv_heads: The layer's KV heads on a rank.

    Raises:
        LayerError: A parameter is unknown, missing, out of its range, or not the layer's.
    """
    known = (*_LEAST, *_HEADS, *_MODES, _TOTAL)
    for name in pattern:
        if name not in known:
            raise _refused(pattern, f"its parameters are {', '.join(known)}", f"leave {name!r} out")
    for name, least in (_LEAST | {name: 1 for name in (_TOTAL,) if name in pattern}).items():
        value, most = pattern.get(name), _MOST.get(name, 2**31 - 1)
        if type(value) is not int or value < least:
            raise _refused(pattern, f"{name} is a whole number of at least {least}", f"pass {name} in the pattern")
        if value > most:
            raise _refused(pattern, f"{name} is at most {most} here", f"pass {name}={most} or less")
    for name, own in zip(_HEADS, (num_heads, num_kv_heads), strict=True):
        if name in pattern and (type(pattern[name]) is bool or pattern[name] != own):
            raise _refused(pattern, f"the layer has {name}={own} on this rank", f"pass {own}, or leave {name} out")
    for name in _MODES:
        if not isinstance(pattern.get(name, False), bool):
            raise _refused(pattern, f"{name} is True or False", f"pass {name}=True, or leave it out")


def _refused(pattern: Mapping[str, Any], expected: str, fix: str) -> LayerError:
    return LayerError(f"block_sparse={dict(pattern)} was given", expected, fix)
