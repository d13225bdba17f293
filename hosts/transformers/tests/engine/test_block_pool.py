from __future__ import annotations

import pytest

from attnplug.errors import CacheError, LimitsError
from attnplug_transformers.engine.block_pool import BlockPool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate the blocks of a sequence, and register all of it as computed."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    pool.register(blocks, tokens, 0, len(tokens) // pool.block_size)
    return blocks


def test_each_block_but_the_null_block_is_allocated_once() -> None:
    pool = BlockPool(5, 2)

    assert sorted(pool.allocate(3) + pool.allocate(1)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_too_many_blocks_are_refused_and_none_is_allocated() -> None:
    pool = BlockPool(5, 2)
    pool.allocate(1)

    with pytest.raises(CacheError, match=r"4 blocks were requested[\s\S]*3 of 4 blocks are free"):
        pool.allocate(4)

    assert pool.num_free == 3


def test_the_longest_prefix_of_whole_blocks_is_matched() -> None:
    pool = BlockPool(10, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5])

    assert pool.match([1, 2, 3, 4, 5, 6]) == blocks[:2]  # the third one is not full
    assert pool.match([1, 2, 3]) == blocks[:1]
    assert pool.match([1, 2, 9, 9]) == blocks[:1]
    assert pool.match([3, 4]) == []  # the same tokens behind another prefix are another prefix
    assert pool.match([1]) == []


def test_branches_share_their_trunk() -> None:
    pool = BlockPool(10, 1)
    trunk = fill(pool, [1, 2])
    branches = []
    for token in (3, 4):
        pool.share(trunk)
        branches.append(trunk + pool.allocate(1))
        pool.register(branches[-1], [1, 2, token], 2, 3)

    assert [pool.match([1, 2, token]) for token in (3, 4)] == branches
    assert [pool.num_owners(block) for block in trunk] == [3, 3]


def test_released_blocks_are_matched_until_they_are_reused() -> None:
    pool = BlockPool(4, 2)
    pool.release(blocks := fill(pool, [1, 2, 3, 4]))
    assert pool.num_free == 3
    assert pool.match([1, 2, 3, 4]) == blocks

    pool.allocate(2)  # one was blank; the end of a sequence is evicted before its start

    assert pool.match([1, 2, 3, 4]) == blocks[:1]
    pool.allocate(1)
    assert pool.match([1, 2, 3, 4]) == []


def test_the_prefix_that_was_released_first_is_evicted_first() -> None:
    pool = BlockPool(4, 1)
    held = [fill(pool, [token]) for token in (1, 2, 3)]
    for blocks in held:
        pool.release(blocks)
    pool.share(held[0])
    pool.release(held[0])  # used last

    pool.allocate(2)

    assert [pool.match([token]) for token in (1, 2, 3)] == [held[0], [], []]


def test_shared_blocks_are_not_evicted() -> None:
    pool = BlockPool(4, 1)
    pool.release(blocks := fill(pool, [1, 2]))
    assert pool.num_free_without(blocks) == 1

    pool.share(blocks)

    assert pool.num_free == 1
    with pytest.raises(CacheError, match="1 of 3 blocks are free"):
        pool.allocate(2)
    assert pool.num_free_without(blocks) == 1


def test_a_second_copy_of_a_prefix_stays_private() -> None:
    pool = BlockPool(10, 1)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    pool.register(third := [*second, *pool.allocate(1)], [1, 2, 3], 2, 3)

    assert pool.match([1, 2, 3]) == [*first, third[2]]  # whose tail the first one's trunk leads to

    pool.release(second)
    assert pool.match([1, 2]) == first
    with pytest.raises(CacheError, match="a shared block holds a cached prefix"):
        pool.share(second)


def test_an_evicted_trunk_hides_its_branches() -> None:
    pool = BlockPool(5, 1)
    first, second = fill(pool, [1]), fill(pool, [1])
    tail = pool.allocate(1)
    pool.register([*second, *tail], [1, 2], 1, 2)
    pool.release(first)
    pool.allocate(2)  # the blank one, and the trunk that led to the tail
    assert pool.match([1, 2]) == []

    pool.release([*second, *tail])
    pool.register(again := pool.allocate(1), [1], 0, 1)

    assert pool.match([1, 2]) == again
    assert pool.num_free == 1


def test_evicted_blocks_hide_longer_prefixes() -> None:
    pool = BlockPool(6, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    pool.share(blocks[:1])
    pool.evict(blocks[1:2])
    assert pool.match([1, 2, 3, 4, 5, 6]) == blocks[:1]

    pool.release(blocks)
    pool.evict(blocks[2:])
    pool.evict([0])
    assert pool.num_free == 4
    assert sorted(pool.allocate(4) + blocks[:1]) == [1, 2, 3, 4, 5]


def test_prefixes_begun_before_a_reset_are_not_matched() -> None:
    pool = BlockPool(10, 2)
    done = fill(pool, [1, 2, 3, 4])
    half = pool.allocate(2)
    pool.release(fill(pool, [5, 6]))

    pool.reset_prefix_cache()
    assert pool.num_free == 5
    pool.register(half, [7, 8, 9, 9], 0, 1)
    more = done + pool.allocate(1)
    pool.register(more, [1, 2, 3, 4, 5, 6], 2, 3)
    assert [pool.match(tokens) for tokens in ([7, 8], [1, 2, 3, 4, 5, 6], [5, 6])] == [[], [], []]

    anew = fill(pool, [7, 8, 9, 9])
    assert pool.match([7, 8, 9, 9]) == anew
    pool.register(half, [7, 8, 9, 9], 1, 2)
    assert pool.match([7, 8, 9, 9]) == anew


def test_without_prefix_caching_nothing_is_matched() -> None:
    pool = BlockPool(4, 1, prefix_caching=False)
    pool.release(fill(pool, [1, 2]))

    assert pool.match([1, 2]) == []


def test_a_block_without_an_owner_is_not_released() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(2)
    pool.release(blocks[:1])

    with pytest.raises(CacheError, match=rf"block {blocks[0]} was released[\s\S]*it has no owner"):
        pool.release(blocks[::-1])

    assert pool.num_owners(blocks[1]) == 1


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0), (4.0, 4), (4, True)])
def test_impossible_sizes_are_refused(num_blocks: object, block_size: object) -> None:
    with pytest.raises(LimitsError, match="is a whole number from"):
        BlockPool(num_blocks, block_size)
