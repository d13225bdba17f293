"""
Which of several eligible candidates is chosen.

In this order: the listed order of the host or the user; built-in last; the measured profile for this device and shape;
the profile that core ships for the device; fewest emulated features; the default order for the device; the plugin's own
preference among its variants; the name. A decision by name alone is a tie, and is reported as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.negotiation.matching import all_hold
from attnplug.request.settings import names_of_pair

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attnplug.manifest.schema import Condition
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import Request

AUTO: Final = "auto"
"""The name in a list of backends that permits falling back to any other."""

COMMON_TERMS: Final = "common block size and layout"
"""What decides instead of `CRITERIA` where the layers of a model need common terms."""

MODEL_TIMES: Final = "measured profile, all layers"
"""What decides where the sum of the measured times of a model's layers does, and not the ranking of one request."""

CRITERIA: Final = (
    "listed order",
    "built-in last",
    "measured profile",
    "shipped profile",
    "fewest emulated features",
    "default order",
    "name",
    "the plugin's preference",
    "name",
)
"""
What each part of a sort key compares. A plugin's preference orders its own variants only, so the backend's name comes
before it.
"""


_BEHIND: Final = {
    "listed order": "it is later in the list of backends",
    "built-in last": "it is built in, and plugins come first",
    "measured profile": "it is slower in the measured profile, or not in it",
    "shipped profile": "it is slower in the profile that attnplug ships for this device, or not in it",
    "fewest emulated features": "it has no kernel for {emulated}, and computes it in a slower way",
    "default order": "it is later in the default order for this device ({because})",
    "the plugin's preference": "its plugin prefers {chosen} for this request",
    "name": "a tie: neither is measured on this device, so the order of names decided",
    COMMON_TERMS: "all layers of the model must share a block size and a layout",
    MODEL_TIMES: "the layers of the model would take longer together, or gain too little for another backend",
}
"""Why a candidate is behind the chosen one, by the criterion that decided between the first two."""


_AHEAD: Final = {
    "listed order": "earliest in the list of backends",
    "built-in last": "the only one besides the built-in",  # another plugin would have been the runner-up
    "measured profile": "fastest in the measured profile",
    "shipped profile": "fastest in the profile that attnplug ships for this device",
    "fewest emulated features": "supports the request most directly",
    "default order": "earliest in the default order for this device",
    "the plugin's preference": "the variant that its plugin prefers",
    "name": "a tie, settled by name",
    COMMON_TERMS: "has the block size and layout that all layers share",
    MODEL_TIMES: "least measured time of all layers of the model",
}
"""Why the chosen candidate is the first, by the criterion, in the words of people; programs read the criterion."""


def why_ahead(decided_by: str) -> str:
    """Return why a candidate was chosen; empty where no other could serve."""
    return _AHEAD.get(decided_by, decided_by)


def why_behind(decided_by: str, chosen: str, emulated: Iterable[str], because: str = "") -> str:
    """
    Return why the runner-up is behind the chosen candidate.

    Args:
        decided_by: The criterion: one of `CRITERIA`, `COMMON_TERMS` or `MODEL_TIMES`.
        chosen: The id of the chosen candidate.
        emulated: The features that the runner-up emulates.
        because: The source of the default order.
    """
    return _BEHIND.get(decided_by, decided_by).format(chosen=chosen, emulated=", ".join(emulated), because=because)


@frozen
class DefaultOrder:
    """
    A known order of backends for some devices.

    Attributes:
        when: The conditions on the device or the request.
        order: ``backend`` or ``backend/variant`` names.
        because: The evidence, or whose choice it is where nothing was measured: "not measured on {device}".
    """

    when: tuple[Condition, ...]
    order: tuple[str, ...]
    because: str

    def source(self, request: Request) -> str:
        """Return the evidence, with the compute capability or the device of a request in its place."""
        device = request.device
        return self.because.replace("{device}", str(device.compute_capability or device))


@frozen
class Policy:
    """
    What decides between eligible candidates, besides themselves.

    Attributes:
        listed: Backends in the order of preference; empty, or ending in `AUTO`, lets others in.
        profile: Measured times by candidate id, for this device and shape, from the profile of the settings.
        orders: Default orders; the first whose conditions hold counts.
        shipped: The same as `profile`, from the profile that core ships for this device.
    """

    listed: tuple[str, ...] = ()
    profile: Mapping[str, float] = field(factory=dict, hash=False)
    orders: tuple[DefaultOrder, ...] = ()
    shipped: Mapping[str, float] = field(factory=dict, hash=False)

    def admits(self, candidate: Candidate) -> bool:
        """Whether the list lets the candidate in."""
        return not self.listed or AUTO in self.listed or any(is_named(candidate, name) for name in self.listed)


@frozen
class Ranked:
    """
    Evaluations of eligible candidates, best first.

    Attributes:
        evaluations: The order.
        decided_by: The criterion that put the first before the runner-up; empty with fewer than two.
        runner_up: The best evaluation of another plugin; the second evaluation if no other plugin can serve, so that
            the built-in backend may be the runner-up. None with fewer than two.
        because: The source of the default order that applies.
    """

    evaluations: tuple[Evaluation, ...]
    decided_by: str = ""
    runner_up: Evaluation | None = None
    because: str = ""


def rank(evaluations: Sequence[Evaluation], policy: Policy) -> Ranked:
    """Order the evaluations of one request."""
    if len(evaluations) < 2:
        return Ranked(tuple(evaluations))
    applied = _default_order(evaluations[0].request, policy.orders)
    order, because = ((), "") if applied is None else (applied.order, applied.source(evaluations[0].request))
    # The key ends with the id, so that no two are equal and the place of an evaluation never decides.
    ranked = sorted((_key(each, policy, order), place) for place, each in enumerate(evaluations))
    found = tuple(evaluations[place] for _, place in ranked)
    backend = found[0].candidate.backend
    others = (place for place, each in enumerate(found) if each.candidate.backend != backend)
    second = next((place for place in others if not found[place].candidate.built_in), 1)
    pairs = zip(CRITERIA, ranked[0][0], ranked[second][0], strict=True)
    return Ranked(found, next(name for name, ours, theirs in pairs if ours != theirs), found[second], because)


def is_named(candidate: Candidate, name: str) -> bool:
    """
    Whether a name selects a candidate: its id, its backend, or an alias of the backend, alone or before ``/variant``.
    That of a routed pair has two of these.
    """
    names = names_of_pair(name)
    if candidate.roles or names is not None:
        return names is not None and len(candidate.roles) == len(names) and all(map(is_named, candidate.roles, names))
    backend, _, variant = name.partition("/")
    names_backend = backend == candidate.backend or backend in candidate.aliases
    return names_backend and (not variant or candidate.id == f"{candidate.backend}/{variant}")


def _key(evaluation: Evaluation, policy: Policy, order: Sequence[str]) -> tuple[Any, ...]:
    """Return what evaluations are sorted by: a value for each of `CRITERIA`."""
    candidate = evaluation.candidate
    return (
        *preference_of(candidate, policy.listed),
        policy.profile.get(candidate.id, float("inf")),
        policy.shipped.get(candidate.id, float("inf")),
        len(evaluation.emulated),
        _place(candidate, order) if order else 0,
        candidate.backend,
        _preferred(candidate, evaluation.request),
        candidate.id,
    )


def preference_of(candidate: Candidate, listed: Sequence[str]) -> tuple[int, bool]:
    """Return what comes before every time: the place in the list of permitted backends, and whether it is built in."""
    return (_place(candidate, listed) if listed else 0), candidate.built_in


def _place(candidate: Candidate, names: Sequence[str]) -> int:
    """
    Return the place of the first name that selects the candidate; for one that is not named the place of `AUTO`, or
    after all names.
    """
    for index, name in enumerate(names):
        if is_named(candidate, name):
            return index
    return names.index(AUTO) if AUTO in names else len(names)


def _default_order(request: Request, orders: Sequence[DefaultOrder]) -> DefaultOrder | None:
    return next((item for item in orders if all_hold(item.when, request.facts, request.requested_names)), None)


def _preferred(candidate: Candidate, request: Request) -> int:
    """
    Return the variant's place in the first preference of its manifest that applies. It orders a plugin's own variants
    only.
    """
    for preference in candidate.manifest.prefer if candidate.manifest else ():
        if all_hold(preference.when, request.facts, request.requested_names, candidate.installed):
            variant = candidate.variant.name if candidate.variant else ""
            return preference.order.index(variant) if variant in preference.order else len(preference.order)
    return 0
