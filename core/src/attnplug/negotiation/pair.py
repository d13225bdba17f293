"""
A routed pair: pure decodes on one candidate, all other batches on another one, over the same KV cache.

A batch is a pure decode where all of its queries have one length, at most the agreed `decode_query_len`. Each candidate
negotiates for itself: that of pure decodes for the decode phase alone. Then both have to agree on what they share: the
terms of the KV cache, and the dtype that queries are quantized to.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from attnplug.negotiation.agreement import Agreement, Roles
from attnplug.negotiation.candidate import CACHE_TERMS, Candidate
from attnplug.negotiation.evaluation import Evaluation
from attnplug.negotiation.matching import Request, negotiate
from attnplug.negotiation.reason import Fix, Reason
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.request.settings import PAIR, names_of_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.negotiation.matching import CacheTerms
    from attnplug.negotiation.reason import Unverified
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.requirements import Requirements

MARGIN: Final = 0.02
"""A measured pair is chosen where it takes less time than each single candidate by more than this part of it."""

_FIRST: Final = 16  # terms that are tried one by one
_ROLES: Final = ("pure decodes", "all other batches")
_QUERIES: Final = "unquantized_queries"


@frozen(eq=False, slots=False, kw_only=True)
class PairEvaluation(Evaluation):
    """
    What two candidates come to as a routed pair.

    Attributes:
        decode: The evaluation of the candidate of pure decodes, for the decode phase.
        rest: The evaluation of the candidate of all other batches.
    """

    decode: Evaluation
    rest: Evaluation

    @property
    def roles(self) -> tuple[Evaluation, Evaluation]:
        """The evaluations of both."""
        return self.decode, self.rest

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """What refuses the pair, and then what refuses its candidates."""
        of_roles = (
            Reason("pair", reason.field, None, f"{each.candidate.id}, for {role}: {reason}")
            for role, each in zip(_ROLES, self.roles, strict=True)
            for reason in each.reasons
            if not each.serves
        )
        return (*self.objections, *of_roles, *self.candidate.reasons)

    @property
    def emulated(self) -> Mapping[str, str]:
        """The requested features that a candidate of it emulates, each with what that costs."""
        return {**self.decode.emulated, **self.rest.emulated}

    @cached_property
    def agreement(self) -> Agreement | None:
        """What is agreed on, where it can serve."""
        decode, rest = self.decode.agreement, self.rest.agreement
        if not self.serves or decode is None or rest is None:
            return None
        return pair_agreement(Roles(decode, rest), self.request.requirements)

    @cached_property
    def fix(self) -> Fix | None:
        """The fix of a candidate that cannot serve; else the candidate that serves every batch alone."""
        if self.serves:
            return None
        lacking = next((each for each in self.roles if not each.serves), None)
        return Fix(action=f"name {self.rest.candidate.id!r} alone") if lacking is None else lacking.fix

    @cached_property
    def unverified(self) -> tuple[Unverified, ...]:
        """What is requested and no evidence covers on this device, of either candidate, which is named."""
        return tuple(
            evolve(item, because=f"{each.candidate.id}: {item.because}")
            for each in (self.roles if self.serves else ())
            for item in each.unverified
        )

    @cached_property
    def level_cost(self) -> str:
        """Empty: the candidates' own verdicts say it."""
        return ""

    def accepted_terms(self) -> tuple[CacheTerms, ...]:
        """Return the terms of the KV cache that both accept, in the order of the candidate of pure decodes."""
        return _shared_terms(self.decode, self.rest, every=True)

    def accepts(self, terms: CacheTerms) -> bool:
        """Whether both accept terms of the KV cache."""
        return self.decode.accepts(terms) and self.rest.accepts(terms)

    def with_cache_terms(self, terms: CacheTerms, common: tuple[CacheTerms, ...] = ()) -> PairEvaluation:
        """Return it with other terms of the KV cache that both accept."""
        both = [each.with_cache_terms(terms, common) for each in self.roles]
        refusal = both[0].refusal or both[1].refusal
        return evolve(self, terms=_terms_of(*both), refusal=refusal, common=common, decode=both[0], rest=both[1])

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts on both candidates, which are chosen with the pair."""
        return tuple(each.verdict(chosen=True) for each in self.roles)


def routes(requirements: Requirements) -> bool:
    """Whether a request has pure decodes to route; without any, the other candidate of a pair serves all batches."""
    return bool(requirements.paged) and "decode" in requirements.phases


def requests_of(request: Request) -> tuple[Request, Request]:
    """Return what is requested of the candidate of pure decodes, and of that of all other batches."""
    decode = request.requirements.evolve(phases=("decode",))
    return Request(decode, request.device, request.settings, request.origins), request


def evaluate_pairs(request: Request, decodes: Sequence[Evaluation], rests: Sequence[Evaluation]) -> PairEvaluation:
    """
    Return the first pair of candidates that agree, or the first of all, which says why not.

    Args:
        request: What is requested of the pair.
        decodes: Candidates of pure decodes, evaluated and best first: at least one.
        rests: Candidates of all other batches, likewise.
    """
    pairs: Iterator[PairEvaluation] = (_evaluate(request, *both) for both in product(decodes, rests))
    first = next(pairs)
    return first if first.serves else next((each for each in pairs if each.serves), first)


def pair_agreement(roles: Roles, requirements: Requirements) -> Agreement:
    """
    Return the terms of a pair.

    Args:
        roles: The agreements of both, on the same terms of the KV cache.
        requirements: What was requested of the pair.
    """
    decode, rest = roles.decode, roles.rest
    return Agreement(
        backend=f"{decode.backend}{PAIR}{rest.backend}",
        variant=f"{decode.variant}{PAIR}{rest.variant}",
        requirements=requirements,
        block_size=rest.block_size,
        kv_layout=rest.kv_layout,
        kv_cache_form=rest.kv_cache_form,
        kv_cache_dtype=rest.kv_cache_dtype,
        cudagraph=_graph_level(decode.cudagraph, rest.cudagraph, requirements.decode_query_len),
        block_sizes=rest.block_sizes,
        # One batch is made for both: its lengths are on the CPU if either needs them.
        reads_lengths=decode.reads_lengths or rest.reads_lengths,
        roles=roles,
    )


def keeps_terms(agreement: Agreement) -> bool:
    """Whether the terms of a pair are those that follow from the agreements of its candidates."""
    roles, wanted = agreement.roles, agreement.requirements
    if roles is None or not routes(wanted):
        return False
    if (roles.decode.requirements, roles.rest.requirements) != (wanted.evolve(phases=("decode",)), wanted):
        return False
    shared = all(getattr(roles.decode, name) == getattr(roles.rest, name) for name in CACHE_TERMS)
    return shared and pair_agreement(roles, wanted) == agreement


def measured_pairs(times: Mapping[str, float]) -> tuple[str, ...]:
    """
    Return the pairs that a profile names and that win by more than `MARGIN`, fastest first.

    Args:
        times: Microseconds by candidate id: of one table of a profile, whose entries were measured on the same batches.
    """
    single = min((time for name, time in times.items() if names_of_pair(name) is None), default=0.0)
    won = [name for name, time in times.items() if names_of_pair(name) is not None and time < single * (1 - MARGIN)]
    return tuple(sorted(won, key=lambda name: (times[name], name)))


# --- machinery ---


def _evaluate(request: Request, decode: Evaluation, rest: Evaluation) -> PairEvaluation:
    candidate = _candidate(decode.candidate, rest.candidate)
    serving = decode.serves and rest.serves
    is_late = "block_size" in request.requirements.late
    shared = _shared_terms(decode, rest, every=is_late) if serving else ()
    objections = tuple(_objections(request, decode, rest, shared))
    found = PairEvaluation(
        candidate=candidate, request=request, objections=objections, decode=decode, rest=rest, evidence=rest.evidence
    )
    if objections or not serving:
        return found
    return found.with_cache_terms(shared[0], shared if is_late else ())


def _candidate(decode: Candidate, rest: Candidate) -> Candidate:
    """Return the pair as a candidate: nothing is declared for it, and it comes from both distributions."""
    both = (decode, rest)
    assumed = [each.assumed for each in both if each.assumed is not None]
    return Candidate(
        id=f"{decode.id}{PAIR}{rest.id}",
        backend=f"{decode.backend}{PAIR}{rest.backend}",
        availability=next((each.availability for each in both if each.availability != "ready"), "ready"),
        built_in=decode.built_in and rest.built_in,
        distribution=" and ".join(dict.fromkeys(each.distribution for each in both if each.distribution)),
        assumed=Fix(
            install=tuple(dict.fromkeys(text for each in assumed for text in each.install)),
            action="; ".join(dict.fromkeys(each.action for each in assumed if each.action)),
        )
        if assumed
        else None,
        roles=both,
    )


def _objections(
    request: Request, decode: Evaluation, rest: Evaluation, shared: Sequence[CacheTerms]
) -> Iterator[Reason]:
    """Yield why two candidates are no pair, each of which may serve."""
    if request.requirements.batch_invariant:
        yield Reason(
            "pair",
            "batch_invariant",
            None,
            "a request's result would depend on the batch: whether it has pure decodes alone decides which kernel runs",
        )
    if decode.candidate is rest.candidate:
        yield Reason("pair", "backend", None, f"{rest.candidate.id} is named for both roles: name it alone")
    if not (decode.serves and rest.serves):
        return
    if not shared:
        yield from _differing_terms(decode, rest)
    if _quantizes_queries(decode) != _quantizes_queries(rest):
        quantizing, other = (decode, rest) if _quantizes_queries(decode) else (rest, decode)
        yield Reason(
            "pair",
            _QUERIES,
            None,
            f"{quantizing.candidate.id} quantizes queries to the dtype of the KV cache, and {other.candidate.id} keeps "
            "them: a request's result would depend on the batch",
        )


def _differing_terms(decode: Evaluation, rest: Evaluation) -> Iterator[Reason]:
    accepted = decode.accepted_terms(), rest.accepted_terms()
    found = False
    for place, name in enumerate(CACHE_TERMS):
        values = [tuple(dict.fromkeys(terms[place] for terms in each)) for each in accepted]
        if set(values[0]).isdisjoint(values[1]):
            found = True
            texts = (", ".join(map(str, each[:6])) + (", ..." if len(each) > 6 else "") for each in values)
            yield _no_common(name, decode, rest, *texts)
    if not found:
        yield _no_common(" and ".join(CACHE_TERMS), decode, rest, "other combinations", "others")


def _no_common(name: str, decode: Evaluation, rest: Evaluation, one: str, other: str) -> Reason:
    ids = decode.candidate.id, rest.candidate.id
    return Reason("pair", name, None, f"no common {name} of one KV cache: {ids[0]} has {one}; {ids[1]} has {other}")


def _shared_terms(decode: Evaluation, rest: Evaluation, *, every: bool) -> tuple[CacheTerms, ...]:
    """Return the terms that both accept, or the first alone: there may be thousands, and one of the first is enough."""
    accepted = decode.accepted_terms()
    first = () if every else tuple(islice(filter(rest.accepts, accepted[:_FIRST]), 1))
    if first:
        return first
    common = set(rest.accepted_terms())
    return tuple(terms for terms in accepted if terms in common)


def _quantizes_queries(evaluation: Evaluation) -> bool:
    """Whether a candidate quantizes queries of a quantized cache: it refuses requests that they are not."""
    request = evaluation.request
    wanted = request.requirements
    if getattr(wanted, _QUERIES) or wanted.kv_cache_dtype == wanted.dtype:
        return False
    unquantized = Request(wanted.evolve(**{_QUERIES: True}), request.device, request.settings)
    return bool(negotiate(evaluation.candidate, unquantized).objections)


def _terms_of(decode: Evaluation, rest: Evaluation) -> dict[str, Any] | None:
    if decode.terms is None or rest.terms is None:
        return None
    reads = decode.terms["reads_lengths"] or rest.terms["reads_lengths"]
    return {**rest.terms, "reads_lengths": reads}


def _graph_level(decode: str, rest: str, decode_query_len: int) -> str:
    """
    Return the graph level of a pair.

    Graphs of decodes are those of one candidate, graphs of mixed batches those of the other: a pair has the latter
    where it has every graph of decodes too.
    """
    has_decodes = decode in {"uniform_batch", "always"} or (decode != "never" and decode_query_len == 1)
    if rest == "always" and has_decodes:
        return "always"
    return min(decode, "uniform_batch", key=GRAPH_LEVELS.index)
