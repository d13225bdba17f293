"""Captured once, replayed for many batches: the tensors of a slot say all that a replay reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug.testing.kit.menu import menu_of
from attnplug.testing.kit.serving import load_for
from attnplug.testing.kit.tier import Tier, over
from attnplug.testing.replay import check_replays, padded_for
from attnplug.testing.scene import realise

if TYPE_CHECKING:
    from attnplug.testing.kit.ask import Ask
    from attnplug.testing.kit.record import Record
    from attnplug.testing.kit.subject import Subject
    from attnplug.testing.scene import Scene

_FEATURES: Final = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "kv_cache_dtype",
    "kv_layout",
    "return_lse",
)
_STEPS: Final = ((5, 30, 0), (41,), (17, 17, 17, 2))  # context lengths of the requests of each replay
_REQUESTS: Final = 5


def _levels(subject: Subject) -> dict[str, tuple[str, Ask]]:
    """Each level alone, and the highest one with each feature."""
    menu = menu_of(subject)
    found = {str(item): (item.value, ask) for item, ask in menu.asks.items() if item.field == "cudagraph"}
    highest = list(found.values())[-1:]
    for level, _ in highest:
        for item in menu.asks:
            ask = menu.ask(cudagraph=level, **{item.field: item.value}) if item.field in _FEATURES else None
            if ask is not None:
                found[f"{item} cudagraph={level}"] = (level, ask)
    return found


class Graphs(Tier):
    """Graph slots. Without CUDA a replay is the captured call, made again on the same tensors and numbers."""

    @over(_levels)
    def test_replays(self, subject: Subject, record: Record, point: Any) -> None:
        """One capture serves batches of other lengths, in other pages, with fewer requests than its shape has."""
        level, ask = point
        query_len = 1 if level == "single_token_decode" else 3
        scenes = _scenes(ask.and_(decode_query_len=_decodes(subject, query_len)), query_len)
        backend = load_for(subject, ask.and_(decode_query_len=_decodes(subject, query_len)), scenes[0].case)
        longest = max(max(step) for step in _STEPS) + query_len + 7
        try:
            check_replays(backend, scenes, num_reqs=_REQUESTS, max_seq_len=longest)
        except AssertionError as error:
            raise AssertionError(f"{subject} with {ask}: a replay: {error}") from error
        record.exercised("cudagraph", level)


def _decodes(subject: Subject, query_len: int) -> int | None:
    """The decode query length to ask for: the replayed one, where that is declared."""
    declared = subject.supports.get("decode_query_len")
    return query_len if query_len > 1 and declared is not None and declared.allows(query_len) else None


def _scenes(ask: Ask, query_len: int) -> list[Scene]:
    made = []
    for seed, lens in enumerate(_STEPS):
        case = ask.case(91, query_lens=(query_len,) * len(lens), context_lens=lens, num_padding_tokens=0)
        made.append(realise(evolve(padded_for(case, _REQUESTS - len(lens)), seed=seed)))
    return [evolve(scene, sinks=made[0].sinks) for scene in made]
