"""Rules that never fire, that object to nothing, or that leave nothing of a variant; and orders that never apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.manifest import Exact, Holds, locate
from attnplug.negotiation import EVALUATIONS, most_evaluations
from attnplug_kit.check.reach import always_holds, can_be_met, can_hold, contradiction, exhausted
from attnplug_kit.check.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.manifest import Condition, Manifest, Preference, Rule, Variant


def check_rules(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield what is wrong with the rules of a manifest that can be read."""
    for rule, variants in _rules(manifest):
        yield from _check_rule(rule, variants, manifest.path)
    for variant in manifest.variants:
        line = locate(text, ("variants", variant.name)) or 1
        yield from _check_reach(variant, manifest.path, line)
        yield from _check_capability(variant, manifest.path, line)
        yield from _check_work(manifest, variant, line)
        if _is_paged_alone(variant) and not _refuses_contiguous(variant):
            yield _paged_and_contiguous(variant, text, manifest.path)


def _check_work(manifest: Manifest, variant: Variant, line: int) -> Iterator[Finding]:
    """Yield that a request which leaves the terms of the KV cache open is refused, since too much would be tried."""
    work = most_evaluations(manifest, variant)
    if work > EVALUATIONS:
        yield Finding(
            f"the rules of {variant.name!r} about block size, layout and form take {work:,} evaluations",
            f"at most {EVALUATIONS:,}: the declared choices of these fields times the rules about them",
            "declare fewer choices, such as block_size = [16, 32, 64], or write fewer rules about them",
            manifest.path,
            line,
        )


def cannot_hold(when: Sequence[Condition], variants: Iterable[Variant]) -> str:
    """Return what is expected of conditions that no request to these variants meets; an empty text if one does."""
    listed = tuple(variants)
    if any(all(can_hold(condition, variant) for condition in when) for variant in listed):
        why = contradiction(when)
        return why and f"some request meets all conditions; {why}"
    alone = [c for c in when if not any(can_hold(c, variant) for variant in listed)]
    return f"some variant serves a request for which {_joined(alone or when)} holds"


def _rules(manifest: Manifest) -> list[tuple[Rule, list[Variant]]]:
    """Return every rule once, with the variants that have it."""
    found: dict[int, tuple[Rule, list[Variant]]] = {}
    for variant in manifest.variants:
        for rule in variant.rules:
            found.setdefault(id(rule), (rule, []))[1].append(variant)
    return list(found.values())


def _check_rule(rule: Rule, variants: list[Variant], path: str) -> Iterator[Finding]:
    expected = cannot_hold(rule.when, variants)
    if expected:
        problem = f"a rule that never fires: when {_joined(rule.when)}"
        fix = "correct the condition, declare the values that it is about, or remove the rule"
        yield Finding(problem, expected, fix, path, rule.line)
        return
    fires = [v for v in variants if all(can_hold(condition, v) for condition in rule.when)]
    for condition in rule.need:
        if not any(can_be_met(condition, variant) for variant in fires):
            yield Finding(
                f"a rule that needs `{condition}`",
                "some variant serves a request for which that holds; otherwise the rule always refuses",
                "correct the condition, or leave `need` out to refuse",
                path,
                rule.line,
            )
    if rule.need and all(always_holds(c, variant, absent=True) for variant in fires for c in rule.need):
        yield Finding(
            f"a rule that objects to nothing: it needs {_joined(rule.need)}",
            "some variant serves a request for which that does not hold",
            "remove the rule, unless it is there for a field that will be declared",
            path,
            rule.line,
            "note",
        )


def _check_reach(variant: Variant, path: str, line: int) -> Iterator[Finding]:
    """Yield that the rules of a variant refuse every request."""
    always = [rule for rule in variant.rules if all(always_holds(c, variant) for c in rule.when)]
    refusing = [rule for rule in always if not rule.need]
    name = exhausted([condition for rule in always for condition in rule.need], variant)
    if not refusing and not name:
        return
    guilty = refusing or [rule for rule in always if any(c.field == name for c in rule.need)]
    lines = ", ".join(dict.fromkeys(f"line {rule.line}" for rule in guilty))
    yield Finding(
        f"the variant {variant.name!r} can never be chosen",
        f"its rules leave some request; always firing, {lines} {'refuse all' if refusing else f'leave no {name}'}",
        "narrow the rule, or remove the variant",
        path,
        line,
    )


def _check_capability(variant: Variant, path: str, line: int) -> Iterator[Finding]:
    """Yield that a variant declares CUDA devices without a compute capability, and so serves none."""
    types = variant.supports.get("device_type")
    if types is not None and types.allows("cuda") and "compute_capability" not in variant.supports:
        yield Finding(
            f"the variant {variant.name!r} declares 'cuda' and no compute_capability",
            "it declares those that it serves: every CUDA device has one, and what is not declared is refused",
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
        "a variant declares paged K/V besides contiguous K/V: requests with paged=False select this one too",
        'for both, write features = ["paged"]; for pages only, add [[rules]] with when = { paged = false } and '
        'because = "the kernels read pages"',
        path,
        next((line for line in found if line and "paged" in lines[line - 1]), found[0]),  # its own, or the shared one
        "note",
    )


def check_preferences(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield what is wrong with the preferences of a manifest that can be read."""
    for index, preference in enumerate(manifest.prefer):
        expected, line = _never_applies(manifest, index), locate(text, ("prefer", index))
        order = list(preference.order)
        if expected:
            fix = "correct its condition, move it up, or remove it"
            yield Finding(f"an order that never applies: {order}", expected, fix, manifest.path, line)
        elif len(manifest.variants) == 1:
            expected = "an order is of several variants; there is no other one"
            yield Finding(f"an order of one variant: {order}", expected, "remove it", manifest.path, line, "note")


def _never_applies(manifest: Manifest, index: int) -> str:
    preference = manifest.prefer[index]
    hidden = next((i for i, earlier in enumerate(manifest.prefer[:index]) if _hides(earlier, preference, manifest)), -1)
    if hidden >= 0:
        return f"the first order whose conditions hold applies; those of number {hidden + 1} hold whenever these do"
    return cannot_hold(preference.when, manifest.variants) if preference.when else ""


def _hides(earlier: Preference, later: Preference, manifest: Manifest) -> bool:
    return all(
        condition in later.when or all(always_holds(condition, variant) for variant in manifest.variants)
        for condition in earlier.when
    )


def _joined(conditions: Sequence[Condition]) -> str:
    return " and ".join(f"`{condition}`" for condition in conditions)
