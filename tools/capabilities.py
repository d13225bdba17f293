"""The capability matrix, from the manifests of the workspace: one section per backend, one column per variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.evidence.store import FOLDER, read_folder
from attnplug.manifest.reader import parse_manifest
from attnplug.request.fields import FIELDS, Field, Flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from attnplug.manifest.schema import Manifest, Option, Rule, Variant

NOTHING = "-"
INTRODUCTION = """\
# Capabilities

Look up what a backend supports: what each declares in its `attnplug.toml`. This page is generated from those files by
`make tables`, and a test fails where it is stale. The [fields](requirements.md) say what each name means.

- *any*: every value is supported. *yes*: may be requested. *only*: must be requested.
- Only a dash: this variant supports the neutral value only; another value is refused with that reason.
- *(emulated)*: works, at the cost that is stated below the table.
- *checked*: what showed the column to be true. The tests run on the CPU in `make test`; a GPU needs a
  [report](evidence/index.md), or a run of the [conformance kit](conformance.md) whose file is in the distribution.
  *unverified* means that neither covers the variant yet.
"""


def manifests(root: Path) -> list[Manifest]:
    """Return every manifest of the workspace: the built-in backend's, then the plugins' by name."""
    embedded = sorted(root.glob("core/src/**/attnplug.toml"))
    plugins = sorted(root.glob("plugins/*/src/**/attnplug.toml"))
    return [parse_manifest(p.read_text("utf-8"), p.relative_to(root).as_posix()) for p in [*embedded, *plugins]]


def reports(root: Path) -> dict[str, str]:
    """Return the text of each evidence report, by file name."""
    folder = root / "docs" / "reference" / "evidence"
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.md")) if path.name != "index.md"}


def _runs_of_kit(root: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Return the devices on which the conformance kit has passed, by candidate, from the files beside the manifest."""
    found: dict[str, list[str]] = {}
    for evidence in read_folder((root / manifest.path).with_name(FOLDER)).evidence:
        if evidence.verifies:
            found.setdefault(evidence.id, []).append(evidence.device.name or evidence.device.type)
    return found


def page(root: Path) -> str:
    """Return the page."""
    evidence = reports(root)
    return "\n".join(
        [INTRODUCTION, *("\n".join(section(found, evidence, _runs_of_kit(root, found))) for found in manifests(root))]
    )


def section(manifest: Manifest, evidence: Mapping[str, str], runs: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the lines about one backend."""
    yield from (f"## {manifest.name}", "", f"{manifest.summary}.", "", f"Declared in `{manifest.path}`.", "")
    yield _row("field", *(f"`{variant.name}`" for variant in manifest.variants))
    yield _row(*("---" for _ in range(len(manifest.variants) + 1)))
    declared = [item for item in FIELDS.values() if any(item.name in v.supports for v in manifest.variants)]
    for item in declared:
        yield _row(f"`{item.name}`", *(cell(item, variant) for variant in manifest.variants))
    yield _row("needs", *(", ".join(f"`{r}`" for r in v.requires) or NOTHING for v in manifest.variants))
    yield _row("compiles with", *(v.jit or NOTHING for v in manifest.variants))
    yield _row("open features", *(", ".join(f"`{name}`" for name in v.features) or NOTHING for v in manifest.variants))
    yield _row("checked", *(_checked(f"{manifest.name}/{v.name}", v, evidence, runs) for v in manifest.variants))
    yield ""
    yield from _paragraph("Served at their neutral value only", _refused(declared))
    yield from _list(
        "Emulated", (f"`{v.name}`, {name}: {why}" for v in manifest.variants for name, why in v.emulates.items())
    )
    hints = (f"`{v.name}`, `{name}`: {how}" for v in manifest.variants for name, how in v.install.items())
    yield from _list("Installed by more than `pip install NAME`", hints)
    yield from _list("Rules", _rules(manifest.variants))
    yield from _list("Options", (_option(option) for option in manifest.options.values()))


def cell(item: Field, variant: Variant) -> str:
    """Return what a variant declares for a field, in a few words."""
    if item.name not in variant.supports:
        return "any" if item.open else NOTHING
    constraint = variant.supports[item.name]
    text = str(constraint)
    if isinstance(item.domain, Flag):
        text = "yes" if constraint.allows(item.neutral) else "only"
    return f"{text} (emulated)" if item.name in variant.emulates else text


def _refused(declared: Iterable[Field]) -> str:
    known = {item.name for item in declared}
    requestable = [item for item in FIELDS.values() if item.kind in {"model", "engine"} and not item.open]
    return ", ".join(f"`{item.name}`" for item in requestable if item.name not in known and item.name != "features")


def _covers(report: str, name: str) -> bool:
    """Whether a report has a test of a variant: one with its name in the id, or in a file called after it."""
    backend, _, variant = name.partition("/")
    own = f"{backend}_backend/test_{variant}_on_gpu.py::"
    # Benchmarks name variants too, and check none of what a manifest declares.
    tests = [line for line in report.splitlines() if line.startswith("| `") and "test_" in line]
    return any(name in test or own in test for test in tests)


def _checked(name: str, variant: Variant, evidence: Mapping[str, str], runs: Mapping[str, list[str]]) -> str:
    links = [f"[{file}](evidence/{file})" for file, text in evidence.items() if _covers(text, name)]
    links += [f"kit ({device})" for device in runs.get(name, ())]
    if "device_type" in variant.supports and variant.supports["device_type"].allows("cpu"):
        links.insert(0, "`make test` (CPU)")
    return ", ".join(links) or "unverified"


def _rules(variants: Iterable[Variant]) -> list[str]:
    """Return each rule once, with the variants that it binds."""
    bound: dict[Rule, list[str]] = {}
    for variant in variants:
        for rule in variant.rules:
            bound.setdefault(rule, []).append(f"`{variant.name}`")
    return [f"{_sentence(rule)} ({', '.join(names)}): {rule.because}" for rule, names in bound.items()]


def _sentence(rule: Rule) -> str:
    when = " and ".join(f"*{condition}*" for condition in rule.when)
    need = " and ".join(f"*{condition}*" for condition in rule.need)
    return f"where {when}, {need} is needed" if need else f"{when} is refused"


def _option(option: Option) -> str:
    return f"`{option.name}` ({option.allowed()}, default `{option.default!r}`): {option.help}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"


def _paragraph(title: str, text: str) -> Iterator[str]:
    if text:
        yield from (f"{title}: {text}.", "")


def _list(title: str, items: Iterable[str]) -> Iterator[str]:
    listed = list(items)
    if listed:
        yield from (f"{title}:", "", *(f"- {item}" for item in listed), "")
