"""A candidate: one variant of one backend, prepared for being asked often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import field, frozen

from attnplug.manifest.installed import VersionOf, find, requirement_name
from attnplug.manifest.schema import IsInstalled, Manifest, Rule, Variant
from attnplug.negotiation.verdict import Reason
from attnplug.request.fields import FIELDS, GRAPH_LEVELS, Names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnplug.manifest.constraint import Constraint

Availability = Literal["ready", "absent", "missing_dependency", "refused", "broken"]

_SERVES: Final = Reason(
    "unsupported", "", None, ""
)  # marks "no objection" in the memo, where None means "not asked yet"
FREE: Final = frozenset({"block_size", "kv_layout"})
"""The fields that a negotiation settles where they are left open."""


@frozen(eq=False)
class Candidate:
    """
    One variant, with what is true of this installation.

    Attributes:
        id: ``backend/variant``; the backend's name alone where nothing more is known of it.
        backend: The backend's name.
        aliases: Other names that select the backend.
        manifest: The manifest, or None where there is none to read.
        variant: The variant, or None likewise.
        availability: ``ready``, or what stands in the way before anything is asked.
        reasons: The reasons for that.
        install: What to install to make it ready, as pip takes it.
        fix: The fix in words, where ``pip install`` is not it, or not all of it.
        built_in: Whether it is part of the core.
        installed: The truth of every ``installed`` condition of its rules.
        distribution: The distribution that it comes from, with version, for reports.
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
    _memo: dict[tuple[str, Any], Reason] = field(factory=dict, init=False, repr=False)
    _fixed_rules: tuple[Rule, ...] = field(init=False, repr=False)
    _free_rules: tuple[Rule, ...] = field(init=False, repr=False)
    _choices: dict[str, tuple[Any, ...]] = field(factory=dict, init=False, repr=False)
    _graph_levels: tuple[str, ...] = field(init=False, repr=False)
    _rules_graphs: bool = field(init=False, repr=False)

    @_fixed_rules.default
    def _rules_of_asked_fields(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self._rules() if not _mentions(rule, FREE))

    @_free_rules.default
    def _rules_of_free_fields(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self._rules() if _mentions(rule, FREE))

    @_graph_levels.default
    def _declared_graph_levels(self) -> tuple[str, ...]:
        declared = self.supports("cudagraph")
        return () if declared is None else tuple(filter(declared.allows, reversed(GRAPH_LEVELS)))

    @_rules_graphs.default
    def _has_rules_of_graphs(self) -> bool:
        return any(_mentions(rule, frozenset({"cudagraph"})) for rule in self._rules())

    def _rules(self) -> tuple[Rule, ...]:
        return self.variant.rules if self.variant else ()

    @property
    def fixed_rules(self) -> tuple[Rule, ...]:
        """The rules that do not depend on what the negotiation settles."""
        return self._fixed_rules

    @property
    def free_rules(self) -> tuple[Rule, ...]:
        """The rules about block size or layout."""
        return self._free_rules

    @property
    def graph_levels(self) -> tuple[str, ...]:
        """The declared CUDA graph levels, highest first."""
        return self._graph_levels

    @property
    def rules_graphs(self) -> bool:
        """Whether a rule is about the graph level."""
        return self._rules_graphs

    def objections(self, asked: Iterable[tuple[str, Any]]) -> list[Reason]:
        """
        Return why asked (field, value) pairs are not served; nothing for those that are. Remembered: the same few
        values are asked again and again.
        """
        known, found = self._memo, []
        for item in asked:
            reason = known.get(item)
            if reason is None:
                reason = known[item] = self._object(*item) or _SERVES
            if reason is not _SERVES:
                found.append(reason)
        return found

    def choices(self, name: str) -> tuple[Any, ...]:
        """
        Return the values of a free field to try, in declared order; remembered.

        Values beyond the first of each alternative matter only where rules judge them.
        """
        known = self._choices.get(name)
        if known is None:
            declared = self.supports(name)
            values = () if declared is None else declared.members() if self._free_rules else declared.choices()
            known = self._choices[name] = values
        return known

    def supports(self, name: str) -> Constraint | None:
        """Return the constraint of a declared field."""
        return self.variant.supports.get(name) if self.variant else None

    def _object(self, name: str, value: Any) -> Reason | None:
        if name == "features":
            return self._object_to_features(value)
        constraint = self.supports(name)
        item = FIELDS[name]
        if constraint is None:
            if item.open or (name == "vendor" and self._admits_vendor(value)):
                return None
            if isinstance(item.domain, Names) and set(value) <= set(item.neutral):
                return None  # a part of what everyone serves: one phase of the two
            return Reason("undeclared", name, item.domain.dump(value), f"only {_neutral_text(name)}")
        return (
            None if constraint.allows(value) else Reason("unsupported", name, item.domain.dump(value), str(constraint))
        )

    def _admits_vendor(self, vendor: str) -> bool:
        """Without a declaration cuda means NVIDIA; other device types are as good as their name."""
        types = self.supports("device_type")
        return vendor == "nvidia" or types is None or not types.allows("cuda")

    def _object_to_features(self, names: Iterable[str]) -> Reason | None:
        declared = self.variant.features if self.variant else ()
        lacking = tuple(name for name in names if name not in declared)
        return Reason("undeclared", "features", lacking, ", ".join(declared) or "no open feature") if lacking else None


def examine(
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
    unmet = (
        () if assume_installed else tuple(reason for text in variant.requires if (reason := _unmet(text, version_of)))
    )
    conditions = {c for rule in variant.rules for c in (*rule.when, *rule.need) if isinstance(c, IsInstalled)}
    needed = {c for rule in variant.rules for c in rule.need if isinstance(c, IsInstalled)}
    true = (
        needed
        if assume_installed
        else {c for c in conditions if any(find(text, version_of)[0] == "met" for text in c.requirements)}
    )
    return Candidate(
        id=f"{manifest.name}/{variant.name}",
        backend=manifest.name,
        aliases=manifest.aliases,
        manifest=manifest,
        variant=variant,
        availability="missing_dependency" if unmet else "ready",
        reasons=unmet,
        install=tuple(reason.field for reason in unmet if _way_to(reason.field, variant) is None),
        fix="; ".join(way for reason in unmet if (way := _way_to(reason.field, variant)) is not None),
        built_in=built_in,
        installed=frozenset(true),
        distribution=distribution,
    )


def _unmet(text: str, version_of: VersionOf) -> Reason | None:
    finding, version = find(text, version_of)
    if finding == "met":
        return None
    if finding == "missing":
        return Reason("missing", text, None, f"{text} is required and not installed")
    return Reason("version", text, version, f"{text} is required and {version} is installed")


def _way_to(text: str, variant: Variant) -> str | None:
    """Say how to get a requirement; None where pip takes it as it is."""
    told = variant.install.get(requirement_name(text))
    return None if told is None else f"install {text}: {told}"


def _mentions(rule: Rule, names: frozenset[str]) -> bool:
    return any(condition.field in names for condition in (*rule.when, *rule.need))


def _neutral_text(name: str) -> str:
    followed = {
        "head_size_v": "head_size_v = head_size",
        "kv_cache_dtype": "the dtype",
        "causal": "the attention type's own mask",
        "vendor": "nvidia",
    }
    item = FIELDS[name]
    return followed.get(name) or ("none" if item.neutral is None else str(item.neutral))
