"""The blocks of the paged KV cache: which requests own each, and which hold a prefix that others can share."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

from attnplug.errors import CacheError, LimitsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A prefix of whole blocks is identified by the number of the prefix one block shorter and the tokens of its last block.
# Numbers are never reused and tokens are compared, not hashed, so no prefix is taken for another. A reset gives the
# empty prefix a new number: what unfinished requests add to the old one is then never matched.
_Prefix = tuple[int, tuple[int, ...]]
_EMPTY = 0


class BlockPool:
    """
    Allocates the blocks of a KV cache, by number. Block 0 is the null block, which is never allocated.

    A block is owned by one or more requests, or free. A free block keeps its cached prefix until it is allocated again:
    blocks released first are reused first, and within one request the end of the sequence before its start.

    Args:
        num_blocks: Blocks of the KV cache, the null block included.
        block_size: Tokens per block.
        prefix_caching: Whether requests share the full blocks of equal prefixes.

    Raises:
        LimitsError: There are fewer than two blocks, or a block holds no token.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        for name, value, least in (("num_blocks", num_blocks, 2), ("block_size", block_size, 1)):
            if type(value) is not int or value < least:
                raise LimitsError(
                    f"{name}={value!r} was given", f"{name} is a whole number from {least} on", f"pass another {name}"
                )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.clear()

    def clear(self) -> None:
        """Free all blocks and remove all prefixes, whatever the state: an exception may have left it inconsistent."""
        self._num_owners = [0] * self.num_blocks
        # Free blocks: without a cached prefix, and with one, least recently released first.
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        # The prefix cache in both directions.
        self._cached: dict[_Prefix, int] = {}
        self._prefixes: dict[int, _Prefix] = {}
        # The number of the prefix that ends with each block, valid while the block is owned or cached.
        self._numbers = [_EMPTY] * self.num_blocks
        self._next_number = count(_EMPTY + 1)
        self._root = _EMPTY
        self._roots = [_EMPTY] * self.num_blocks  # the root at the time of allocation

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free) + len(self._free_cached)

    def num_owners(self, block: int) -> int:
        """Return the number of requests that own a block."""
        return self._num_owners[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `tokens`. They have no new owner until `share`."""
        found: list[int] = []
        number, size = self._root, self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            block = self._cached.get((number, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            number = self._numbers[block]
        return found

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """Return the number of blocks that stay free when these are shared."""
        return self.num_free - sum(block in self._free_cached for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """
        Add an owner to blocks that `match` returned.

        Raises:
            CacheError: A block holds no cached prefix. None is shared then.
        """
        blocks = list(blocks)
        for block in blocks:
            if block not in self._prefixes:
                raise CacheError(
                    f"block {block} was shared", "a shared block holds a cached prefix", "share what match() returned"
                )
        for block in blocks:
            self._free_cached.pop(block, None)
            self._num_owners[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """
        Return free blocks, each with one owner now; prefixes that they held are evicted.

        Raises:
            CacheError: Fewer are free. None is allocated then.
        """
        if num_blocks > self.num_free:
            raise CacheError(
                f"{num_blocks} blocks were requested",
                f"{self.num_free} of {self.num_usable} blocks are free",
                "wait until a request ends, or make the cache larger",
            )
        blocks = [self._free.pop() if self._free else self._evict_oldest() for _ in range(num_blocks)]
        for block in blocks:
            self._num_owners[block] = 1
            self._roots[block] = self._root
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """
        Remove one owner from each block of a request, given in the order of its sequence.

        Raises:
            CacheError: A block has no owner. None is released then.
        """
        for block in blocks:
            if self._num_owners[block] < 1:
                raise CacheError(f"block {block} was released", "it has no owner", "release each block once per owner")
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._prefixes:
                self._free_cached[block] = None
            else:
                self._free.append(block)

    def register(self, blocks: Sequence[int], tokens: Sequence[int], first: int, last: int) -> None:
        """
        Add full, computed blocks to the prefix cache.

        Args:
            blocks: All blocks of a request.
            tokens: All tokens of the request.
            first: Index into `blocks` of the first block to add; those before it were added earlier.
            last: Index behind the last block to add.
        """
        if not self.prefix_caching:
            return
        size = self.block_size
        number = self._numbers[blocks[first - 1]] if first else self._roots[blocks[0]]
        for index in range(first, last):
            number = self._register(blocks[index], (number, tuple(tokens[index * size : (index + 1) * size])))

    def _register(self, block: int, prefix: _Prefix) -> int:
        """Return the number of the prefix. A second block with an equal prefix gets the same number, uncached."""
        cached = self._cached.get(prefix)
        if cached is None:
            self._cached[prefix] = block
            self._prefixes[block] = prefix
            self._numbers[block] = next(self._next_number)
        else:
            self._numbers[block] = self._numbers[cached]
        return self._numbers[block]

    def evict(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache; longer prefixes are no longer matched either. Owners keep them."""
        for block in blocks:
            prefix = self._prefixes.pop(block, None)
            if prefix is not None:
                del self._cached[prefix]
                if block in self._free_cached:
                    del self._free_cached[block]
                    self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Evict all prefixes, those that unfinished requests have begun included."""
        self._root = next(self._next_number)
        self.evict(tuple(self._prefixes))

    def _evict_oldest(self) -> int:
        block, _ = self._free_cached.popitem(last=False)
        del self._cached[self._prefixes.pop(block)]
        return block
