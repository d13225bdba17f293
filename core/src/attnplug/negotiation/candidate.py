"""A candidate: one variant of one backend, prepared for many requests."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import evolve, field, frozen

from attnplug.manifest.installed import VersionOf, find, requirement_name
from attnplug.manifest.memo import remember
from attnplug.manifest.schema import IsInstalled, Manifest, Rule, Variant
from attnplug.negotiation.reason import Fix, Reason
from attnplug.request.domains import GRAPH_LEVELS, LATENT, Names
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from attnplug.manifest.constraint import Constraint
    from attnplug.negotiation.probe_refusals import ProbeRefusals

Availability = Literal["ready", "absent", "missing_dependency", "refused", "broken"]

CACHE_TERMS: Final = ("block_size", "kv_layout", "kv_cache_form")
"""The terms of the KV cache, in the order in which they are tried."""

TERMS: Final = (*CACHE_TERMS, "cudagraph", "reads_lengths")
"""What a negotiation settles. The graph level is at least the requested one."""

LENGTHS: Final = ("seq_lens_cpu_kind", "query_lens_cpu_kind")
"""The fields to which no objection is final: a build can read the lengths that a host lacks from the device."""

_FORM_OF_LATENTS: Final = ("kv_cache_form", LATENT)
"""Follows from `latent`, which is declared or not."""

_SUPPORTED: Final = Reason("unsupported", "", None, "")
"""Stands for "no objection" among the known ones, where None means "not known yet"."""


@frozen(eq=False, slots=False)  # with slots, cached properties would slow down the access to every attribute
class Candidate:
    """
    One variant, with what is true of this installation.

    Attributes:
        id: ``backend/variant``; the backend's name alone where nothing more is known of it.
        backend: The backend's name.
        aliases: Other names that select the backend.
        manifest: The manifest, or None where there is none to read.
        variant: The variant, or None likewise.
        availability: ``ready``, or why no request can be served.
        reasons: The reasons for that.
        install: What to install to make it ready, as pip takes it.
        fix: The fix in words, where ``pip install`` is not it, or not all of it.
        built_in: Whether it is part of the core.
        installed: The ``installed`` conditions of its rules that are true.
        distribution: The distribution that it comes from, with version, for reports.
        refusals: What its probe has refused in this process; None where that is nothing.
        assumed: How to install what is supposed to be there; None where nothing is.
        roles: Of a routed pair the candidate of pure decodes, and that of all other batches; empty for one candidate.
    """

    id: str
    backend: str
    aliases: tuple[str, ...] = ()
    manifest: Manifest | None = None
    variant: Variant | None = None
    availability: Availability = "ready"
    reasons: tuple[Reason, ...] = ()
    install: tuple[str, ...] = ()
    fix: str = ""
    built_in: bool = False
    installed: frozenset[IsInstalled] = frozenset()
    distribution: str = ""
    refusals: ProbeRefusals | None = None
    assumed: Fix | None = None
    roles: tuple[Candidate, ...] = ()
    # Objections by (field, value). Most of a decision is these look-ups: 50 candidates, some ten fields each.
    _known: dict[tuple[str, Any], Reason] = field(factory=dict, init=False, repr=False)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All of its rules."""
        return self.variant.rules if self.variant else ()

    @cached_property
    def fixed_rules(self) -> tuple[Rule, ...]:
        """The rules that are not about block size, layout or form."""
        return tuple(rule for rule in self.rules if not mentions(rule, CACHE_TERMS))

    @cached_property
    def cache_rules(self) -> tuple[Rule, ...]:
        """The rules about block size, layout or form."""
        return tuple(rule for rule in self.rules if mentions(rule, CACHE_TERMS))

    @cached_property
    def graph_rules(self) -> tuple[Rule, ...]:
        """The rules about the graph level."""
        return tuple(rule for rule in self.rules if mentions(rule, {"cudagraph"}))

    @cached_property
    def graph_follows_cache(self) -> bool:
        """Whether one of these is about block size, layout or form too."""
        return any(mentions(rule, CACHE_TERMS) for rule in self.graph_rules)

    @cached_property
    def graph_levels(self) -> tuple[str, ...]:
        """The declared CUDA graph levels, highest first."""
        declared = self.supports("cudagraph")
        return () if declared is None else tuple(filter(declared.allows, reversed(GRAPH_LEVELS)))

    @cached_property
    def first_terms(self) -> Mapping[str, Any]:
        """The preferred terms of the KV cache, None for what is not declared."""
        declared = ((name, self.supports(name)) for name in CACHE_TERMS)
        return {name: None if constraint is None else constraint.first() for name, constraint in declared}

    @cached_property
    def choices(self) -> Mapping[str, tuple[Any, ...]]:
        """All values of the same terms, in declared order; None alone where a term is not declared."""
        declared = ((name, self.supports(name)) for name in CACHE_TERMS)
        return {name: (None,) if constraint is None else constraint.members() for name, constraint in declared}

    @property
    def if_installed(self) -> Candidate:
        """The candidate as it would be with all that it requires installed, in a version that no rule refuses."""
        needed = (c for rule in self.rules for c in rule.need if isinstance(c, IsInstalled))
        assumed = Fix(install=self.install, action=self.fix) if self.reasons else None
        rest: dict[str, Any] = {"install": (), "fix": "", "installed": frozenset(needed), "assumed": assumed}
        return evolve(self, availability="ready", reasons=(), **rest)

    def objections(self, requested: Iterable[tuple[str, Any]]) -> list[Reason]:
        """
        Return why requested (field, value) pairs are not supported; nothing for those that are. The answers are
        remembered: requests repeat the same few values.
        """
        known, found = self._known, []
        for item in requested:
            reason = known.get(item)
            if reason is None:
                reason = remember(known, item, self._object(*item) or _SUPPORTED)
            if reason is not _SUPPORTED:
                found.append(reason)
        return found

    def supports(self, name: str) -> Constraint | None:
        """Return the constraint of a declared field."""
        return self.variant.supports.get(name) if self.variant else None

    def _object(self, name: str, value: Any) -> Reason | None:
        if value is None or (name, value) == _FORM_OF_LATENTS:
            return None  # a term that is left open, or that follows from another field
        if name == "features":
            return self._object_to_features(value)
        constraint, item = self.supports(name), FIELDS[name]
        if constraint is not None:
            allowed = constraint.allows(value)
            return None if allowed else Reason("unsupported", name, item.domain.dump(value), str(constraint))
        if item.open or (name == "vendor" and self._admits_vendor(value)):
            return None
        if isinstance(item.domain, Names) and set(value) <= set(item.neutral):
            return None  # a part of what everyone serves: one phase of the two
        neutral = item.neutral_words or str(item.neutral or "")
        return Reason("undeclared", name, item.domain.dump(value), neutral)

    def _admits_vendor(self, vendor: str) -> bool:
        """Without a declaration cuda means NVIDIA; other device types admit every vendor."""
        types = self.supports("device_type")
        return vendor == "nvidia" or types is None or not types.allows("cuda")

    def _object_to_features(self, names: Iterable[str]) -> Reason | None:
        declared = self.variant.features if self.variant else ()
        lacking = tuple(name for name in names if name not in declared)
        return Reason("undeclared", "features", lacking, ", ".join(declared)) if lacking else None


def make_candidate(
    manifest: Manifest,
    variant: Variant,
    version_of: VersionOf,
    *,
    built_in: bool = False,
    distribution: str = "",
    assume_installed: bool = False,
) -> Candidate:
    """
    Compare a variant with what is installed.

    Args:
        manifest: Its manifest.
        variant: One of the manifest's variants.
        version_of: The installed version of a distribution, or None.
        built_in: Whether it is part of the core.
        distribution: Where it comes from.
        assume_installed: Suppose that everything it requires is there, in a version that no rule is about.
    """
    unmet = tuple(reason for text in variant.requires if (reason := _unmet(text, version_of)))
    instructions = {reason.field: _instruction(reason.field, variant) for reason in unmet}
    conditions = {c for rule in variant.rules for c in (*rule.when, *rule.need) if isinstance(c, IsInstalled)}
    candidate = Candidate(
        id=f"{manifest.name}/{variant.name}",
        backend=manifest.name,
        aliases=manifest.aliases,
        manifest=manifest,
        variant=variant,
        availability="missing_dependency" if unmet else "ready",
        reasons=unmet,
        install=tuple(text for text, instruction in instructions.items() if not instruction),
        fix="; ".join(filter(None, instructions.values())),
        built_in=built_in,
        installed=frozenset(c for c in conditions if any(find(t, version_of)[0] == "met" for t in c.requirements)),
        distribution=distribution,
    )
    return candidate.if_installed if assume_installed else candidate


def _unmet(text: str, version_of: VersionOf) -> Reason | None:
    finding, version = find(text, version_of)
    if finding == "met":
        return None
    if finding == "missing":
        return Reason("missing", text, None, f"{text} is required and not installed")
    return Reason("version", text, version, f"{text} is required and {version} is installed")


def _instruction(text: str, variant: Variant) -> str:
    """
    Return how to get a requirement, in the manifest's words, which may be a command; empty where pip takes it as it is.
    """
    instruction = variant.install.get(requirement_name(text))
    if instruction is None:
        return ""
    from attnplug.negotiation.install import is_command  # noqa: PLC0415 - shlex; few manifests have instructions

    return instruction if is_command(instruction) else f"install {text}: {instruction}"


def mentions(rule: Rule, names: Collection[str]) -> bool:
    """Whether a rule is about one of these fields."""
    for conditions in (rule.when, rule.need):  # for each candidate of a first decision; a generator costs more
        for condition in conditions:
            if condition.field in names:
                return True
    return False
