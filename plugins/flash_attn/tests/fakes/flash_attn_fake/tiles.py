"""Which pages FlashAttention 3 loads by full tiles, including the unused rest of the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from flash_attn_fake.refusal import check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flash_attn_fake.exact import ScoreParams

Sizes = tuple[int, int, int, int]


@frozen(kw_only=True)
class Build:
    """
    A package's tiles.

    Attributes:
        wide: By the most that a head may have, in 16 bits: rows, and keys of causal kernels, of others, with a window.
        unequal: The same in 16 bits where keys and values differ in size, by both; None if it has no such kernels.
        narrow: The same in 8 bits. A window beside a soft cap has others, which no test needs.
        windows: Whether kernels with a window load full tiles, too.
    """

    wide: Mapping[int, Sizes]
    narrow: Mapping[int, Sizes]
    windows: bool
    unequal: Mapping[tuple[int, int], Sizes] | None = None

    def tile(
        self,
        size: tuple[int, int],
        page_size: int,
        rows: int,
        params: ScoreParams,
        *,
        is_narrow: bool,
        causal: bool,
        padded: bool,
    ) -> int:
        """
        Return the keys of the tiles that pages are loaded by; 0 where each key is loaded by itself.

        Args:
            size: Of a key's head, and of a value's.
            page_size: Slots per page; 0 without pages.
            rows: Of the longest request, for each KV head.
            params: With the window that the kernels run with.
            is_narrow: Whether there are 8 bits.
            causal: Whether the causal kernels run.
            padded: Whether the call has a padding to the left, be it 0.
        """
        is_even = size[0] == size[1]
        check(is_even or self.unequal is not None, "This flash attention build does not support hdim != hdim_v")
        is_local = not causal and max(params.left, params.right) >= 0
        if not page_size or padded or (is_local and not self.windows):
            return 0
        sizes = self.narrow if is_narrow else self.wide
        bound = min(bound for bound in sizes if bound >= size[0])
        of_rows, of_causal, of_others, of_local = sizes[bound]
        if not is_even and not is_narrow:
            of_rows, of_causal, of_others, of_local = self.unequal[bound, size[1]]
        keys = of_causal if causal else of_local if is_local else of_others
        return keys if page_size % keys == 0 and rows > of_rows else 0


OWN = Build(
    wide={64: (192, 128, 192, 128), 96: (192, 144, 144, 128), 128: (128, 128, 176, 128), 192: (128, 112, 112, 96),
          256: (128, 80, 80, 64)},
    narrow={64: (192, 160, 160, 160), 96: (192, 128, 128, 128), 128: (128, 224, 224, 224), 192: (128, 160, 160, 160),
            256: (128, 128, 128, 64)},
    windows=True,
)  # fmt: skip
"""Of the package of FlashAttention's authors."""

VLLM = Build(
    wide={64: (192, 128, 192, 160), 96: (192, 144, 144, 128), 128: (128, 128, 160, 128), 192: (128, 96, 96, 96),
          256: (128, 80, 80, 64)},
    narrow={64: (192, 128, 128, 128), 96: (128, 128, 128, 128), 128: (128, 192, 192, 192), 192: (128, 96, 96, 96),
            256: (128, 128, 128, 64)},
    windows=False,
    unequal={(64, 256): (128, 96, 96, 96), (64, 512): (64, 64, 64, 64), (192, 128): (128, 128, 128, 96)},
)  # fmt: skip
"""Of vLLM's wheel."""
