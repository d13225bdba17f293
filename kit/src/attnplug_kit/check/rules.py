"""Rules that can never fire, that object to nothing, or that leave nothing of a variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.manifest import Exact, Holds, locate
from attnplug_kit.check.finding import Finding
from attnplug_kit.check.possible import contradiction
from attnplug_kit.check.reach import always_holds, can_be_met, can_hold, exhausted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.manifest import Condition, Manifest, Rule, Variant


def check_rules(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield what is wrong with the rules of a manifest that reads."""
    for rule, variants in _rules(manifest):
        yield from _check_rule(rule, variants, manifest.path)
    for variant in manifest.variants:
        line = locate(text, ("variants", variant.name)) or 1
        yield from _check_reach(variant, manifest.path, line)
        yield from _check_capability(variant, manifest.path, line)
        if _is_paged_alone(variant) and not _refuses_contiguous(variant):
            yield _paged_and_contiguous(variant, text, manifest.path)


def cannot_hold(when: Sequence[Condition], variants: Iterable[Variant]) -> str:
    """Say why conditions never hold together for any of these variants; an empty text where they may."""
    listed = tuple(variants)
    if any(all(can_hold(condition, variant) for condition in when) for variant in listed):
        return contradiction(when)
    alone = [c for c in when if not any(can_hold(c, variant) for variant in listed)]
    told = " and ".join(f"`{condition}`" for condition in alone or when)
    return f"no variant serves anything for which {told} holds"


def _rules(manifest: Manifest) -> list[tuple[Rule, list[Variant]]]:
    """Return every rule once, with the variants that have it."""
    found: dict[int, tuple[Rule, list[Variant]]] = {}
    for variant in manifest.variants:
        for rule in variant.rules:
            found.setdefault(id(rule), (rule, []))[1].append(variant)
    return list(found.values())


def _check_rule(rule: Rule, variants: list[Variant], path: str) -> Iterator[Finding]:
    never = cannot_hold(rule.when, variants)
    if never:
        yield Finding(
            f"a rule that never fires: when {_told(rule.when)}",
            never,
            "correct the condition, declare what it is about, or remove the rule",
            path,
            rule.line,
        )
        return
    fires = [v for v in variants if all(can_hold(condition, v) for condition in rule.when)]
    for condition in rule.need:
        if not any(can_be_met(condition, variant) for variant in fires):
            yield Finding(
                f"a rule that needs `{condition}`",
                "no variant serves anything for which that holds, so that the rule refuses whatever it is about",
                "correct the condition, or leave `need` out to refuse",
                path,
                rule.line,
            )
    if rule.need and all(always_holds(c, variant, absent=True) for variant in fires for c in rule.need):
        yield Finding(
            f"a rule that objects to nothing: it needs {_told(rule.need)}",
            "that holds for all that the variants declare",
            "remove the rule, unless it is there for a field that will be declared",
            path,
            rule.line,
            "note",
        )


def _check_reach(variant: Variant, path: str, line: int) -> Iterator[Finding]:
    """Yield that nothing of a variant is left, where its rules see to that."""
    always = [rule for rule in variant.rules if all(always_holds(c, variant) for c in rule.when)]
    refusing = [rule for rule in always if not rule.need]
    name = exhausted([condition for rule in always for condition in rule.need], variant)
    if not refusing and not name:
        return
    guilty = refusing or [rule for rule in always if any(c.field == name for c in rule.need)]
    where = ", ".join(dict.fromkeys(f"line {rule.line}" for rule in guilty))
    does = "always fires, and refuses" if refusing else f"always fires, and leaves no {name}"
    yield Finding(
        f"the variant {variant.name!r} can never be chosen",
        f"of its rules, the one in {where} {does}"
        if len(guilty) == 1
        else f"of its rules, those in {where} always fire, and leave no {name or 'value'}",
        "narrow what the rule is about, or remove the variant",
        path,
        line,
    )


def _check_capability(variant: Variant, path: str, line: int) -> Iterator[Finding]:
    """Yield that a variant names CUDA devices, and serves none: each of them has a compute capability."""
    types = variant.supports.get("device_type")
    if types is not None and types.allows("cuda") and "compute_capability" not in variant.supports:
        yield Finding(
            f"the variant {variant.name!r} names 'cuda' and no compute_capability",
            "every CUDA device has one, and what is not declared is refused: none of them is served",
            'declare those that the kernels are for, such as compute_capability = { min = "8.0" }',
            path,
            line,
        )


def _is_paged_alone(variant: Variant) -> bool:
    """Whether a variant declares ``paged = true``, which reads as if contiguous K/V were refused."""
    declared = variant.supports.get("paged")
    return declared is not None and declared.alternatives == (Exact(value=True),)


def _refuses_contiguous(variant: Variant) -> bool:
    """Whether a rule refuses every request with contiguous K/V."""
    return any(
        all(_holds_without_pages(condition, variant) for condition in rule.when)
        and (not rule.need or any(c.field == "paged" and not _holds_without_pages(c, variant) for c in rule.need))
        for rule in variant.rules
    )


def _holds_without_pages(condition: Condition, variant: Variant) -> bool:
    if condition.field == "paged" and isinstance(condition, Holds):
        return condition.constraint.allows(value=False)
    return always_holds(condition, variant)


def _paged_and_contiguous(variant: Variant, text: str, path: str) -> Finding:
    places = (("variants", variant.name, "supports", "paged"), ("supports", "paged"))
    lines, found = text.splitlines(), [locate(text, place) for place in places]
    return Finding(
        "paged = true",
        "it declares paged K/V besides contiguous K/V: requests with paged=False select the variant too",
        'for both, write features = ["paged"]; for pages only, add [[rules]] with when = { paged = false } and '
        'because = "the kernels read pages"',
        path,
        next((line for line in found if line and "paged" in lines[line - 1]), found[0]),  # its own, or the shared one
        "note",
    )


def _told(conditions: Sequence[Condition]) -> str:
    return " and ".join(f"`{condition}`" for condition in conditions)
