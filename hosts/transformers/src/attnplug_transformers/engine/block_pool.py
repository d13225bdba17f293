"""Who owns which block of the paged cache, and which blocks hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

from attnplug.errors import CacheError, LimitsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A prefix of whole blocks: the number of the prefix one block shorter, and the tokens of its last block. Numbers are
# never used twice and tokens are compared, so that no prefix is ever mistaken for another. Forgetting all gives the
# empty prefix another number: what requests that are under way add to the old one is found by nobody.
_Prefix = tuple[int, tuple[int, ...]]
_EMPTY = 0


class BlockPool:
    """
    The blocks of a cache, by number. Block 0 is the null block, which nobody gets.

    A block is owned by one or more requests, or free. A free block that holds a known prefix keeps it until the block
    is needed: those that were released first go first, and of one request the end of its sequence before the start.

    Args:
        num_blocks: Blocks of the cache, the null block included.
        block_size: Tokens per block.
        reuse: Whether a prefix that was computed once is found again.

    Raises:
        LimitsError: There is no block to give, or a block holds nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        _check_count("num_blocks", num_blocks, 2)
        _check_count("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[_Prefix, int] = {}
        self._prefixes: dict[int, _Prefix] = {}
        self._numbers = [_EMPTY] * num_blocks
        self._counter = count(_EMPTY + 1)
        self._root = _EMPTY
        self._roots = [_EMPTY] * num_blocks  # what the root was when the block was given

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free) + len(self._free_cached)

    def num_owners(self, block: int) -> int:
        """Return how many requests own a block."""
        return self._owners[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks that many tokens take."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest known prefix of whole blocks. They are not owned until shared."""
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
        """Return how many blocks stay free when these are shared."""
        return self.num_free - sum(block in self._free_cached for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """
        Own blocks that `match` returned, beside whoever owns them already.

        Raises:
            CacheError: A block holds no known prefix.
        """
        blocks = list(blocks)
        for block in blocks:
            if block not in self._prefixes:
                raise CacheError(
                    f"block {block} was shared", "a shared block holds a known prefix", "share what match() returned"
                )
        for block in blocks:
            self._free_cached.pop(block, None)
            self._owners[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """
        Own blocks that nobody else owns; what they held is forgotten.

        Raises:
            CacheError: Fewer are free. None is taken.
        """
        if num_blocks > self.num_free:
            raise CacheError(
                f"{num_blocks} blocks were asked for",
                f"{self.num_free} of {self.num_usable} blocks are free",
                "wait until a request ends, or make the cache larger",
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._owners[block] = 1
            self._roots[block] = self._root
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """
        Give up one ownership of each of a request's blocks, in the order of its sequence.

        Raises:
            CacheError: A block is not owned. None is released.
        """
        for block in blocks:
            if self._owners[block] < 1:
                raise CacheError(f"block {block} was released", "nobody owns it", "release each block once per owner")
        for block in reversed(blocks):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._set_free(block)

    def register(self, blocks: Sequence[int], tokens: Sequence[int], first: int, last: int) -> None:
        """
        Make blocks that are full and computed known, so that others may share them.

        Args:
            blocks: All blocks of a request.
            tokens: All tokens of the request.
            first: Index into `blocks` of the first one that is not known yet; those before it are.
            last: Index behind the last one.
        """
        if not self.reuse:
            return
        size = self.block_size
        number = self._numbers[blocks[first - 1]] if first else self._roots[blocks[0]]
        for place in range(first, last):
            number = self._learn(blocks[place], (number, tuple(tokens[place * size : (place + 1) * size])))

    def forget(self, blocks: Iterable[int]) -> None:
        """Find these blocks no more, nor those that continue them. Whoever owns them keeps them."""
        for block in blocks:
            key = self._prefixes.pop(block, None)
            if key is not None:
                del self._cached[key]
                if block in self._free_cached:
                    del self._free_cached[block]
                    self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Find nothing more that was computed, or begun, before now."""
        self._root = next(self._counter)
        self.forget(tuple(self._prefixes))

    def _learn(self, block: int, key: _Prefix) -> int:
        """Return the number of the prefix. A second block of one prefix gets its number, and stays private."""
        known = self._cached.get(key)
        if known is None:
            self._cached[key] = block
            self._prefixes[block] = key
            self._numbers[block] = next(self._counter)
        else:
            self._numbers[block] = self._numbers[known]
        return self._numbers[block]

    def _set_free(self, block: int) -> None:
        if block in self._prefixes:
            self._free_cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._free_cached.popitem(last=False)
        del self._cached[self._prefixes.pop(block)]
        return block


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise LimitsError(
            f"{name}={value!r} was given", f"{name} is a whole number from {least} on", f"pass another {name}"
        )
