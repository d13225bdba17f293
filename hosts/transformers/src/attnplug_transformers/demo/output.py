"""The demonstration as text: what ran, on which backend and why, and how it compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from attnplug.commands import abbreviated, say, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug import Selection
    from attnplug_transformers.demo.outcome import Outcome, Tokens
    from attnplug_transformers.demo.traffic import Traffic


_NOT_HERE: Final = ("absent", "missing_dependency")
_SHAPE: Final = frozenset({"head_size", "num_q_heads", "num_kv_heads", "dtype", "paged"})
_SHOWN: Final = 12


def introduce(origin: str) -> None:
    """Say what all architectures have in common."""
    _say(
        f"Random weights in float32, a token per byte of {origin}. What attnplug computes is held against transformers'"
        " own eager attention."
    )


def show(outcome: Outcome, before: Sequence[Outcome] = ()) -> None:
    """
    Say what an architecture was run on, who served it, and how it compares.

    Args:
        outcome: The architecture.
        before: Those that were shown before: what an engine did for one of them is not told again.
    """
    say(f"\n{outcome.example.name}: {outcome.example.about}")
    like = next((other for other in before if other.traffic == outcome.traffic), None)
    if outcome.traffic is None:
        _say(f"dense calls: {outcome.inputs}", "  ")
    elif like is not None:
        flight = f"at most {outcome.traffic.peak_running} in flight"
        _say(f"paged engine: {outcome.inputs}, {flight}, step by step as for {like.example.name}", "  ")
    else:
        _say(f"paged engine: {outcome.inputs}", "  ")
        for line in _engine(outcome.traffic):
            _say(line, "    ")
    for names, selection in _groups(outcome.decisions):
        _say(f"{abbreviated(names)} -> {selection.id}{_asked(selection)}", "  ")
    for line in dict.fromkeys(line for selection in outcome.decisions.values() for line in _others(selection)):
        _say(line, "    ")
    say(f"  {_verb(outcome)} {' '.join(map(str, outcome.tokens[0][:_SHOWN]))} ...")
    _say(_sentence(outcome), "  ")


def conclude(outcomes: Sequence[Outcome]) -> None:
    """Say what is not installed, and how many architectures agree."""
    verdicts = [v for o in outcomes for s in o.decisions.values() for v in s.verdicts if v.status in _NOT_HERE]
    if verdicts:
        say("\nnot installed here:")
        for verdict in {verdict.id: verdict for verdict in verdicts}.values():
            _say(f"{verdict.id}: {verdict.fix}", "  ")
    good = [outcome for outcome in outcomes if outcome.agrees]
    tokens = sum(outcome.num_equal for outcome in outcomes)
    total = sum(outcome.num_tokens for outcome in outcomes)
    say(f"\n{len(good)} of {len(outcomes)} architectures agree, {tokens} of {total} tokens")


def _say(text: str, indent: str = "") -> None:
    say("\n".join(wrapped(text, indent)))


def _engine(traffic: Traffic) -> Iterator[str]:
    yield (
        f"{_count(traffic.num_steps, 'step')}, the last request came after {traffic.last_arrival} of them;"
        f" at most {_count(traffic.peak_running, 'request')} in flight ({traffic.max_num_reqs} allowed),"
        f" {traffic.num_queued} of {traffic.num_requests} had to wait"
    )
    yield (
        f"at most {_count(traffic.peak_tokens, 'token')} a step ({traffic.max_num_tokens} allowed):"
        f" {_count(traffic.num_chunked_prefills, 'prompt')} computed in several pieces,"
        f" {_count(traffic.num_prefill_chunks, 'piece')} in all;"
        f" {_count(traffic.num_mixed_steps, 'step')} with pieces beside the next tokens of others"
    )
    yield (
        f"{_count(traffic.num_prefix_hits, 'request')} found the beginning of their prompt in blocks of an earlier one,"
        f" {_count(traffic.num_cached_tokens, 'token')} in all"
    )
    yield (
        f"at most {traffic.peak_blocks} of {_count(traffic.num_blocks, 'block')} of {traffic.block_size} tokens in use;"
        f" {_times(traffic.num_preemptions)} a request gave its blocks to an older one, and was computed again later"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _groups(decisions: Mapping[str, Selection]) -> list[tuple[list[str], Selection]]:
    """Collect the layers that share a decision."""
    found: dict[Any, tuple[list[str], Selection]] = {}
    for name, selection in decisions.items():
        found.setdefault(selection.agreement, ([], selection))[0].append(name)
    return list(found.values())


def _asked(selection: Selection) -> str:
    """Return what the layers ask for beside their shape, and which criterion decided."""
    asked = [f"{name}={value}" for name, value in selection.requirements.requested() if name not in _SHAPE]
    words = [f"asked for {', '.join(asked)}"] if asked else []
    words.append(f"decided by {selection.decided_by}" if selection.decided_by else "the only one that serves this")
    return f"  ({'; '.join(words)})"


def _others(selection: Selection) -> Iterator[str]:
    """Yield what the choice has to emulate, and why it is not one of the other candidates that are installed."""
    for verdict in selection.verdicts:
        if verdict.id == selection.id:
            yield from (f"{selection.id} emulates {name}: {text}" for name, text in verdict.emulated.items())
        elif verdict.status not in _NOT_HERE:
            reasons = "; ".join(map(str, verdict.reasons))
            yield f"{verdict.id} {verdict.status}" + (f": {reasons}" if reasons else "")


def _verb(outcome: Outcome) -> str:
    return "predicts" if outcome.example.kind == "encoder" else "the first continues with"


def _sentence(outcome: Outcome) -> str:
    if not outcome.agrees:
        return f"WRONG: {'; '.join(_complaints(outcome))}"
    where = "eager attention" if outcome.traffic is None else "generate of each prompt alone"
    total = _count(outcome.num_tokens, "token")
    words = [f"all {total} are those of transformers' {where} (closest choice {outcome.margin:.4f})"]
    if outcome.replay is not None:
        recorded = _count(outcome.replay.num_captured, "recorded step")
        words.append(f"all once more, with decodes replayed from {recorded} on graph slots")
    if outcome.distance is not None:
        far = f"{outcome.distance.largest:.1e} ({outcome.distance.allowed:.0e} allowed)"
        words.append(f"{outcome.distance.what} differ by at most {far}")
    return "; ".join(words)


def _complaints(outcome: Outcome) -> Iterator[str]:
    yield from _wrong_tokens(outcome, outcome.tokens, "agree")
    if outcome.replay is not None:
        yield from _wrong_tokens(outcome, outcome.replay.tokens, "agree where decodes are replayed on graph slots")
    distance = outcome.distance
    if distance is not None and not distance.is_small:
        yield f"{distance.what} differ by {distance.largest:.1e}, {distance.allowed:.0e} allowed"


def _wrong_tokens(outcome: Outcome, tokens: Tokens, agree: str) -> Iterator[str]:
    yield f"{outcome.equal_to(tokens)} of {outcome.num_tokens} tokens {agree}"
    for sequence, (expected, found) in enumerate(zip(outcome.expected, tokens, strict=True)):
        if expected != found:
            yield _first(sequence, expected, found)
            return


def _first(sequence: int, expected: Sequence[int], found: Sequence[int]) -> str:
    """Return the first difference of two sequences that are not the same."""
    place = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    if place is None:
        return f"sequence {sequence} has {_count(len(found), 'token')} instead of {len(expected)}"
    return f"token {place} of sequence {sequence} is {found[place]} instead of {expected[place]}"


def describe(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON values; `engine`, `replay` and `distance` are None where there is none."""
    return {
        "name": outcome.example.name,
        "about": outcome.example.about,
        "kind": outcome.example.kind,
        "inputs": outcome.inputs,
        "agrees": outcome.agrees,
        "num_tokens": outcome.num_tokens,
        "num_equal": outcome.num_equal,
        "margin": outcome.margin,
        "tokens": list(map(list, outcome.tokens)),
        "expected": list(map(list, outcome.expected)),
        "engine": None if outcome.traffic is None else attrs.asdict(outcome.traffic),
        "replay": _replay(outcome),
        "distance": None if outcome.distance is None else _finite(attrs.asdict(outcome.distance)),
        "layers": {name: selection.to_dict() for name, selection in outcome.decisions.items()},
    }


def _replay(outcome: Outcome) -> dict[str, Any] | None:
    replay = outcome.replay
    if replay is None:
        return None
    return {
        "num_captured": replay.num_captured,
        "num_equal": outcome.equal_to(replay.tokens),
        "tokens": list(map(list, replay.tokens)),
    }


def _finite(distance: dict[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is no number: it becomes null."""
    largest = distance["largest"]
    return {**distance, "largest": largest if largest < float("inf") else None}
