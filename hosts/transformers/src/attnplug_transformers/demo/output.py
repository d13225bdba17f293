"""The demonstration as text and as JSON: the decisions, then what each architecture ran on and how it compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from attnplug.commands import abbreviated, say, wrapped
from attnplug_transformers.demo.decisions import FIELDS, GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug import Selection
    from attnplug_transformers.demo.decisions import Decision
    from attnplug_transformers.demo.outcome import Outcome, Tokens
    from attnplug_transformers.demo.traffic import Traffic

_NOT_INSTALLED: Final = ("absent", "missing_dependency")
_SHAPE: Final = frozenset({"head_size", "num_q_heads", "num_kv_heads", "dtype", "paged"})
_TOKENS_SHOWN: Final = 12


def show_decisions(decisions: Sequence[Decision], origin: str) -> None:
    """
    Print the decision for each device, the runner-up or a refused candidate in a line each, and what all architectures
    have in common.

    Args:
        decisions: The decisions.
        origin: Where the text is from.
    """
    candidates = [verdict.id for verdict in decisions[0].explanation.verdicts if verdict.status != "absent"]
    backends = {candidate.partition("/")[0] for candidate in candidates}
    _say(
        f"One request, decided between {_count(len(candidates), 'installed candidate')} of"
        f" {_count(len(backends), 'backend')}; for GPUs their kernel libraries are assumed to be installed. A layer of"
        f" gpt-oss: {', '.join(f'{name}={value}' for name, value in FIELDS.items())}"
    )
    width = max(len(decision.label) for decision in decisions)
    for decision in decisions:
        say(f"  {decision.label:<{width}}  {_chosen(decision)}")
        behind = _behind(decision)
        if behind:
            _say(behind, " " * (width + 4))
    say(f"every verdict: {_explain_command()}\n")  # in one line, to be copied
    _say(
        f"Small models on this CPU, with random weights in float32 and a token per byte of {origin}, compared with"
        " transformers' own eager attention."
    )


def _chosen(decision: Decision) -> str:
    chosen = decision.explanation.chosen
    if chosen is None:
        return "no backend supports it"
    return chosen.id if decision.runner_up else f"{chosen.id} (the only one that supports it)"


def _behind(decision: Decision) -> str:
    """Return why the runner-up was not chosen, or why a refused candidate is no runner-up; empty for neither."""
    verdict, chosen = decision.runner_up, decision.explanation.chosen
    if verdict is None or chosen is None:
        refused = decision.least_refused
        if refused is None:
            return ""
        return f"not chosen {refused.id}: {refused.status}, {'; '.join(map(str, refused.reasons))}"
    return f"runner-up {verdict.id}: {decision.explanation.why_runner_up}"


def _explain_command() -> str:
    """Return the command that prints all verdicts of the decisions for GPUs."""
    words = ["attnplug explain"]
    for name, value in FIELDS.items():
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    words += [f"--device cuda:{capability}" for capability in GPUS]
    return " ".join([*words, "--assume-installed"])


def show(outcome: Outcome, before: Sequence[Outcome] = ()) -> None:
    """
    Print what an architecture ran on, which backends served it, and how it compares.

    Args:
        outcome: The architecture.
        before: Those that were printed before: equal counters of the engine are not repeated.
    """
    say(f"\n{outcome.example.name}: {outcome.example.about}")
    like = next((other for other in before if other.traffic == outcome.traffic), None)
    if outcome.traffic is None:
        _say(f"dense calls: {outcome.inputs}", "  ")
    elif like is not None:
        concurrency = f"max concurrency {outcome.traffic.peak_running}"
        _say(f"paged engine: {outcome.inputs}, {concurrency}, step by step as for {like.example.name}", "  ")
    else:
        _say(f"paged engine: {outcome.inputs}", "  ")
        for line in _engine(outcome.traffic):
            _say(line, "    ")
    for names, selection in _groups(outcome.decisions):
        _say(f"{abbreviated(names)} -> {selection.id}{_requires(selection)}", "  ")
    for line in dict.fromkeys(line for selection in outcome.decisions.values() for line in _others(selection)):
        _say(line, "    ")
    verb = "predicts" if outcome.example.kind == "encoder" else "the first continues with"
    say(f"  {verb} {' '.join(map(str, outcome.tokens[0][:_TOKENS_SHOWN]))} ...")
    _say(_result(outcome), "  ")


def summarize(outcomes: Sequence[Outcome]) -> None:
    """Print what is not installed, and how many architectures agree."""
    verdicts = [verdict for outcome in outcomes for one in outcome.decisions.values() for verdict in one.verdicts]
    missing = {verdict.id: verdict for verdict in verdicts if verdict.status in _NOT_INSTALLED}
    if missing:
        say("\nnot installed here:")
        for verdict in missing.values():
            _say(f"{verdict.id}: {verdict.fix}", "  ")
    agreeing = sum(outcome.agrees for outcome in outcomes)
    tokens = sum(outcome.num_equal for outcome in outcomes)
    total = sum(outcome.num_tokens for outcome in outcomes)
    say(f"\n{agreeing} of {len(outcomes)} architectures agree, {tokens} of {total} tokens")


def _say(text: str, indent: str = "") -> None:
    say("\n".join(wrapped(text, indent)))


def _engine(traffic: Traffic) -> Iterator[str]:
    yield (
        f"{_count(traffic.num_steps, 'step')}, the last request arrived after {traffic.last_arrival} of them;"
        f" max concurrency {traffic.peak_running} ({traffic.max_num_reqs} allowed),"
        f" {traffic.num_queued} of {traffic.num_requests} requests were queued"
    )
    yield (
        f"at most {_count(traffic.peak_tokens, 'token')} a step ({traffic.max_num_tokens} allowed): chunked prefill of"
        f" {_count(traffic.num_chunked_prefills, 'prompt')}, {_count(traffic.num_prefill_chunks, 'chunk')} in all;"
        f" {_count(traffic.num_mixed_steps, 'step')} with chunks beside decodes"
    )
    yield (
        f"prefix caching: {_count(traffic.num_prefix_hits, 'request')} found the beginning of their prompt in blocks of"
        f" an earlier one, {_count(traffic.num_cached_tokens, 'token')} in all"
    )
    yield (
        f"at most {traffic.peak_blocks} of {_count(traffic.num_blocks, 'block')} of {traffic.block_size} tokens in use;"
        f" {_count(traffic.num_preemptions, 'preemption')}, recomputed later"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _groups(decisions: Mapping[str, Selection]) -> list[tuple[list[str], Selection]]:
    """Collect the layers that share a decision."""
    found: dict[Any, tuple[list[str], Selection]] = {}
    for name, selection in decisions.items():
        found.setdefault(selection.agreement, ([], selection))[0].append(name)
    return list(found.values())


def _requires(selection: Selection) -> str:
    """Return what the layers require beside their shape, and whether no other candidate supports that."""
    fields = [f"{name}={value}" for name, value in selection.requirements.requested() if name not in _SHAPE]
    words = [f"requires {', '.join(fields)}"] if fields else []
    words += [] if selection.decided_by else ["the only one that supports it"]
    return f"  ({'; '.join(words)})" if words else ""


def _others(selection: Selection) -> Iterator[str]:
    """Yield what the chosen candidate does in a slower way, and why other installed ones were not chosen."""
    elsewhere = 0
    for verdict in selection.verdicts:
        if verdict.id == selection.id:
            yield from (f"{selection.id}: {text} (slower)" for text in verdict.emulated.values())
        elif verdict.status == "eligible":
            yield f"{verdict.id} could serve too"
        elif verdict.id.startswith(f"{selection.backend}/") and verdict.status not in _NOT_INSTALLED:
            yield f"{verdict.id} {verdict.status}: {'; '.join(map(str, verdict.reasons))}"
        else:
            elsewhere += verdict.status not in _NOT_INSTALLED
    if elsewhere:
        yield f"{_count(elsewhere, 'candidate')} of other backends refused"


def _result(outcome: Outcome) -> str:
    if not outcome.agrees:
        return f"WRONG: {'; '.join(_differences(outcome))}"
    where = "eager attention" if outcome.traffic is None else "generate of each prompt alone"
    total = _count(outcome.num_tokens, "token")
    words = [f"all {total} are those of transformers' {where} (smallest logit margin {outcome.margin:.4f})"]
    if outcome.replay is not None:
        captured = _count(outcome.replay.num_captured, "captured step")
        words.append(f"all once more, with decodes replayed from {captured} on graph buffers")
    if outcome.distance is not None:
        far = f"{outcome.distance.largest:.1e} ({outcome.distance.allowed:.0e} allowed)"
        words.append(f"{outcome.distance.what} differ by at most {far}")
    return "; ".join(words)


def _differences(outcome: Outcome) -> Iterator[str]:
    yield from _wrong_tokens(outcome, outcome.tokens, "agree")
    if outcome.replay is not None:
        yield from _wrong_tokens(outcome, outcome.replay.tokens, "agree where decodes are replayed on graph buffers")
    distance = outcome.distance
    if distance is not None and not distance.is_small:
        yield f"{distance.what} differ by {distance.largest:.1e}, {distance.allowed:.0e} allowed"


def _wrong_tokens(outcome: Outcome, tokens: Tokens, agree: str) -> Iterator[str]:
    yield f"{outcome.count_equal(tokens)} of {outcome.num_tokens} tokens {agree}"
    for sequence, (expected, found) in enumerate(zip(outcome.expected, tokens, strict=True)):
        if expected != found:
            yield _first_difference(sequence, expected, found)
            return


def _first_difference(sequence: int, expected: Sequence[int], found: Sequence[int]) -> str:
    place = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    if place is None:
        return f"sequence {sequence} has {_count(len(found), 'token')} instead of {len(expected)}"
    return f"token {place} of sequence {sequence} is {found[place]} instead of {expected[place]}"


def describe(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON values; `engine`, `replay` and `distance` are None where they do not apply."""
    distance = None if outcome.distance is None else attrs.asdict(outcome.distance)
    if distance is not None and not distance["largest"] < float("inf"):
        distance["largest"] = None  # JSON has no NaN and no infinity
    replay = outcome.replay and {
        "num_captured": outcome.replay.num_captured,
        "num_equal": outcome.count_equal(outcome.replay.tokens),
        "tokens": list(map(list, outcome.replay.tokens)),
    }
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
        "replay": replay,
        "distance": distance,
        "layers": {name: selection.to_dict() for name, selection in outcome.decisions.items()},
    }
