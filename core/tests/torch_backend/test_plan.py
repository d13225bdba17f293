from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnplug.torch_backend.plan import Budget, Rectangle, group_segments, segments_of

lens = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=6)
windows = st.sampled_from([(-1, -1), (0, 0), (3, 0), (2, 2), (-1, 1), (100, 0)])
budgets = st.builds(
    Budget,
    keys=st.integers(1, 60),
    scores=st.integers(0, 400),
    slack=st.integers(0, 60),
    ragged_rows=st.integers(0, 8),
    uniform=st.booleans(),
)


chunks = st.sampled_from([1, 3, 4, 50])


def visible_keys(
    row: int, rows: int, keys: int, window: tuple[int, int], *, causal: bool, chunk: int | None = None
) -> list[int]:
    left, right = window
    position = keys - rows + row
    return [
        key
        for key in range(keys)
        if not (causal and key > position)
        and (left < 0 or key >= position - left)
        and (right < 0 or key <= position + right)
        and (chunk is None or key // chunk == position // chunk)
    ]


@given(lens, windows, st.booleans())
def test_segments_hold_the_visible_keys_and_none_before(
    lens: list[tuple[int, int]], window: tuple[int, int], causal: bool
) -> None:
    segments, empty = segments_of([n for n, _ in lens], [m for _, m in lens], window, causal=causal)

    by_request = {segment.request: segment for segment in segments}
    blank = {row for start, end in empty for row in range(start, end)}
    start = 0
    for request, (rows, keys) in enumerate(lens):
        views = [visible_keys(row, rows, keys, window, causal=causal) for row in range(rows)]
        assert {start + row for row in range(rows) if not views[row]} == blank & set(range(start, start + rows))
        assert (request in by_request) == any(views)
        if request in by_request:
            segment = by_request[request]
            assert segment.first_row + segment.rows == start + rows
            assert segment.first_key == min(view[0] for view in views if view)
            assert segment.first_key + segment.keys == keys
            assert segment.from_call == (rows == keys > 1)
        start += rows


@given(lens, windows, st.booleans(), chunks)
def test_each_chunk_with_rows_is_a_sequence_by_itself(
    lens: list[tuple[int, int]], window: tuple[int, int], causal: bool, chunk: int
) -> None:
    segments, empty = segments_of([n for n, _ in lens], [m for _, m in lens], window, causal=causal, chunk=chunk)

    starts = [sum(rows for rows, _ in lens[:request]) for request in range(len(lens))]
    owner = {segment.first_row + row: (segment, row) for segment in segments for row in range(segment.rows)}
    assert sum(segment.rows for segment in segments) == len(owner), "no row is in two segments"
    blank = {row for start, end in empty for row in range(start, end)}
    touched = set()
    for request, (rows, keys) in enumerate(lens):
        for row in range(rows):
            view = visible_keys(row, rows, keys, window, causal=causal, chunk=chunk)
            assert (starts[request] + row in blank) == (not view)
            if view:
                segment, place = owner.pop(starts[request] + row)
                assert segment.request == request
                assert segment.first_key + segment.keys - segment.rows + place == keys - rows + row, (
                    "its position is unchanged"
                )
                assert segment.first_key <= min(view)
                assert max(view) < segment.first_key + segment.keys
                assert (segment.first_key + segment.keys - 1) // chunk == view[0] // chunk == segment.first_key // chunk
                assert not segment.from_call or segment.first_key >= keys - rows
                touched.add((request, view[0] // chunk))
    assert not owner
    assert len(segments) == len(touched)
    for segment in segments:
        views = [
            view
            for row in range(segment.first_row, segment.first_row + segment.rows)
            if (
                view := visible_keys(
                    row - starts[segment.request], *lens[segment.request], window, causal=causal, chunk=chunk
                )
            )
        ]
        assert segment.first_key == min(view[0] for view in views), "no key before the first visible one is read"


@given(lens, windows, budgets)
def test_every_segment_is_in_one_group_of_bounded_size(
    lens: list[tuple[int, int]], window: tuple[int, int], budget: Budget
) -> None:
    segments, _ = segments_of([n for n, _ in lens], [m for _, m in lens], window, causal=False)

    groups = group_segments(segments, budget)

    if not budget.uniform and not budget.divisible:
        assert all(_scores(group) <= budget.scores for group in groups if len(group.segments) > 1)
    assert sorted(segment.request for group in groups for segment in group.segments) == sorted(
        segment.request for segment in segments
    )
    for group in groups:
        requests = [segment.request for segment in group.segments]
        assert requests == sorted(requests)
        assert len({segment.from_call for segment in group.segments}) == 1
        sizes = {(segment.rows, segment.keys) for segment in group.segments}
        assert (group.rows, group.keys) == tuple(map(max, zip(*sizes, strict=True)))
        assert group.uniform == (len(sizes) == 1)
        if len(requests) == 1:
            continue
        wasted = _scores(group) - sum(segment.rows * segment.keys for segment in group.segments)
        assert len(requests) * group.keys <= budget.keys or (budget.divisible and not wasted)
        assert wasted <= budget.slack
        if wasted:
            assert group.rows <= budget.ragged_rows
            assert _scores(group) <= budget.scores


def _scores(group: Rectangle) -> int:
    return len(group.segments) * group.rows * group.keys


def test_requests_of_one_size_share_a_call() -> None:
    segments, _ = segments_of([1] * 8, [50] * 8, (-1, -1), causal=True)

    assert len(group_segments(segments, Budget(keys=400, scores=0, slack=0, ragged_rows=0))) == 1
    assert len(group_segments(segments, Budget(keys=200, scores=0, slack=0, ragged_rows=0))) == 2


def test_the_whole_blocks_of_a_call_fit_into_the_gather_buffers() -> None:
    segments, _ = segments_of([1] * 8, [50] * 8, (-1, -1), causal=True)

    groups = group_segments(segments, Budget(keys=400, scores=0, slack=0, ragged_rows=0, block_size=16))

    assert [len(group.segments) for group in groups] == [6, 2]  # of 64 slots each


def test_a_long_request_does_not_pad_short_ones() -> None:
    segments, _ = segments_of([1] * 5, [10, 12, 5000, 11, 10], (-1, -1), causal=True)

    groups = group_segments(segments, Budget(keys=100_000, scores=100_000, slack=100, ragged_rows=8))

    assert [[segment.request for segment in group.segments] for group in groups] == [[0, 1, 3, 4], [2]]
