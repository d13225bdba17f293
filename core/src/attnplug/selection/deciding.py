"""From the layers of a model and its draft to a candidate for each kind: by rank, or by measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import NoBackendError, RequirementsError
from attnplug.negotiation.common_cache import TRIES, settle_terms, share_terms
from attnplug.negotiation.matching import Request, build_request
from attnplug.negotiation.ranking import COMMON_TERMS, MODEL_TIMES
from attnplug.selection.select import Evaluations, explain_choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements
    from attnplug.request.settings import Settings
    from attnplug.selection.assignment import Assignment, Choice

DRAFT = "draft."
"""What the names of a draft's layers begin with in a plan."""


@frozen(eq=False)
class Kind:
    """
    Layers that request the same.

    Attributes:
        names: The names of the layers.
        found: The evaluations of all candidates.
        drafted: The tokens that the draft proposes in a step, one after another: each is a decode of its layers.
    """

    names: tuple[str, ...]
    found: Evaluations
    drafted: int = 1

    @property
    def layers(self) -> int:
        """How many they are."""
        return len(self.names)

    @property
    def name(self) -> str:
        """Them in words."""
        return self.names[0] if self.layers == 1 else f"{self.names[0]} ({self.layers} layers)"

    def calls(self, phase: str) -> int:
        """Return the calls of these layers in a step of a phase."""
        drafting = sum(name.startswith(DRAFT) for name in self.names) if self.drafted > 1 and phase == "decode" else 0
        return self.layers + drafting * (self.drafted - 1)


@frozen(eq=False)
class Assigned:
    """
    A candidate for each kind.

    Attributes:
        picks: The evaluations, with the terms that all paged kinds share.
        notes: What the measured times of all layers say, and why they are not compared; sentences.
        because: What decides where the pick is not the kind's best by rank.
    """

    picks: tuple[Evaluation, ...]
    notes: tuple[str, ...] = ()
    because: str = COMMON_TERMS


def with_draft(
    layers: Mapping[str, Requirements], draft: Mapping[str, Requirements] | None
) -> Mapping[str, Requirements]:
    """
    Return the layers of a model and of its draft, which share one KV cache.

    Raises:
        RequirementsError: The model has a layer whose name begins with `DRAFT`, or the dtypes of the KV caches differ.
    """
    if draft is None:
        return layers
    clash = next((name for name in layers if name.startswith(DRAFT)), None)
    if clash is not None:
        raise RequirementsError(
            f"the layer {clash!r} was given, and a draft",
            f"in a plan the names of the draft's layers begin with {DRAFT!r}, and no others do",
            "give the layer another name",
        )
    dtypes = [{each.kv_cache_dtype for each in part.values() if each.paged} for part in (layers, draft)]
    if all(dtypes) and dtypes[0] != dtypes[1]:
        own, other = (", ".join(sorted(map(str, each))) for each in dtypes)
        raise RequirementsError(
            f"the KV cache of the draft is in {other}, and that of the model in {own}",
            "a model and its draft share one KV cache",
            f"request kv_cache_dtype={own.partition(',')[0]} of the draft, or one dtype of both",
        )
    return {**layers, **{f"{DRAFT}{name}": each for name, each in draft.items()}}


def drafted_tokens(layers: Mapping[str, Requirements]) -> int:
    """Return the tokens that a draft proposes in a step: all but one of those that a decode verifies, at least one."""
    return max(1, max(each.decode_query_len for each in layers.values()) - 1)


def by_request(
    layers: Mapping[str, Requirements], device: Device, settings: Settings
) -> dict[Request, tuple[str, ...]]:
    """
    Group the layers whose requests are the same under these settings; the group with most layers first, since its
    preference counts most.
    """
    requests = {each: build_request(each, device, settings) for each in dict.fromkeys(layers.values())}
    # Of equal requests the one whose layout comes from the setting stands for all: its origin is reported.
    first: dict[Requirements, Request] = {}
    for request in sorted(requests.values(), key=lambda request: not request.origins):
        first.setdefault(request.requirements, request)
    found: dict[Request, list[str]] = {}
    for name, each in layers.items():
        found.setdefault(first[requests[each].requirements], []).append(name)
    return {request: tuple(names) for request, names in sorted(found.items(), key=lambda item: -len(item[1]))}


def assign(kinds: Sequence[Kind]) -> Assigned | None:
    """
    Pick a candidate for each kind, or return None where no choice shares the terms of the KV cache.

    By rank, where not all that could be chosen is measured: a measured time is never compared with an unmeasured
    candidate.
    """
    usual = share_terms([kind.found.ranked.evaluations for kind in kinds])
    if usual is None:
        return None
    if not any(kind.found.times.local or kind.found.times.shipped for kind in kinds):
        return Assigned(tuple(usual))
    from attnplug.selection.assignment import choose  # noqa: PLC0415 - a plan without a profile does without
    from attnplug.selection.model_times import Incomparable, options_of  # noqa: PLC0415 - likewise

    compared = options_of(kinds, usual)
    if isinstance(compared, Incomparable):
        return Assigned(tuple(usual), (f"times are not compared over all layers: {compared.reason}",))
    found = choose(compared.kinds, usual)
    if found is None:
        return Assigned(tuple(usual), (f"times are not compared over all layers: {_GRAPHS_DIFFER}",))
    picks = settle_terms([option.evaluation for option in found.chosen.options], found.chosen.shared())
    return Assigned(tuple(picks), tuple(_notes(found, compared.level)), MODEL_TIMES)


_GRAPHS_DIFFER = "some candidates were measured in CUDA graphs and others without, and a step has one or the other"


def _notes(found: Choice, level: str) -> Iterator[str]:
    """Yield the time of the choice, and of what it was compared with where that differs."""
    chosen = found.chosen
    batch = max(chosen.times, key=lambda name: (name.endswith("decode"), chosen.times[name]))
    count = f"; {len(chosen.times)} batches" if len(chosen.times) > 1 else ""
    yield f"measured over all layers: {_us(chosen, batch)} ({batch}{count}, {level} profile)"
    if found.usual is not None and _candidates(found.usual) != _candidates(chosen):
        ids = ", ".join(dict.fromkeys(_candidates(found.usual)))
        yield f"by rank, the larger group first: {_us(found.usual, batch)} ({ids})"
    if found.fastest.cost < chosen.cost and found.fastest.mixing > chosen.mixing:
        ids = " and ".join(dict.fromkeys(_candidates(found.fastest)))
        gain = 1 - found.fastest.cost / chosen.cost
        yield f"mixing {ids} gains {gain:.1%}: not taken, as more candidates in a phase have to gain more than 5 %"


def _candidates(assignment: Assignment) -> list[str]:
    return [option.evaluation.candidate.id for option in assignment.options]


def _us(assignment: Assignment, batch: str) -> str:
    return f"{assignment.times[batch]:,.0f} us"


def nothing_common(kinds: Sequence[Kind]) -> NoBackendError:
    """Return the error for layers that share no terms."""
    lines = [
        f"{kind.names[0]} ({kind.layers} layers), {evaluation.candidate.id}: {_accepted_terms(evaluation)}"
        for kind in kinds
        if kind.found.request.requirements.paged
        for evaluation in kind.found.ranked.evaluations
    ]
    text = "\n    ".join(lines)
    return NoBackendError(
        "the layers of this model were planned together",
        f"no choice of backends gives them one block size, one layout and one form; at most {TRIES:,} evaluations are"
        f" tried\n    {text}",
        "name a backend that serves them all, or plan the layers in separate calls with a cache each",
        explain_choice(kinds[0].found),
    )


def _accepted_terms(evaluation: Evaluation) -> str:
    terms = evaluation.accepted_terms()
    sizes, layouts, forms = ([str(value) for value in dict.fromkeys(values)] for values in zip(*terms, strict=True))
    shown = ", ".join(sizes[:6]) + (", ..." if len(sizes) > 6 else "")
    return f"blocks of {shown}; {', '.join(layouts)}; {', '.join(forms)}"
