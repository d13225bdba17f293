"""What the guides say of the product is what it does: errors, reasons, versions, recommendations, the picture."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

import attnplug
from attnplug import errors
from attnplug.manifest import read_manifest
from attnplug.negotiation.ranking import CRITERIA, why_ahead
from attnplug.negotiation.reason import Code
from attnplug.negotiation.verdict import Status
from tools import api_pages
from tools.toml import read_toml

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md"))
)


def _text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def _section(page: str, heading: str) -> str:
    """Return what is below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", _text(page), re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def _rows(text: str) -> list[list[str]]:
    """Return the cells of the tables in a text, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    rules = {index for index, row in enumerate(rows) if set("".join(row)) <= set("-| ")}
    return [row for index, row in enumerate(rows) if not {index, index + 1} & rules]


@pytest.mark.parametrize("name", errors.__all__)
def test_troubleshooting_has_cause_and_fix_of_each_error(name: str) -> None:
    section = _section("docs/troubleshooting.md", name)

    assert re.search(r"^\*\*Cause\.\*\* \S", section, re.MULTILINE), f"docs/troubleshooting.md has no cause of {name}"
    assert re.search(r"^\*\*Fix\.\*\* \S", section, re.MULTILINE), f"docs/troubleshooting.md has no fix of {name}"


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Why was this backend chosen?", {f"*{name}*" for name in CRITERIA}),
        ("Why was that backend refused?", {f"*{name.replace('_', ' ')}*" for name in get_args(Status)}),
        ("What does each reason mean?", {f"`{name}`" for name in get_args(Code)}),
    ],
)
def test_debugging_explains_what_decisions_say(heading: str, names: set[str]) -> None:
    said = {name for row in _rows(_section("docs/how-to/debug-a-choice.md", heading)) for name in row[0].split(", ")}

    assert names - said == set()


def test_the_words_of_each_criterion_are_those_that_explain_prints() -> None:
    rows = _rows(_section("docs/how-to/debug-a-choice.md", "Why was this backend chosen?"))

    assert {row[0].strip("*"): row[1] for row in rows[1:]} == {name: why_ahead(name) for name in CRITERIA}
    assert all(why_ahead(name) != name for name in CRITERIA)


LLAMA = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")


@pytest.mark.parametrize("row", _rows(_section("docs/install.md", "What your GPU can use")), ids=lambda row: row[0])
def test_what_the_install_page_recommends_can_serve_there(row: list[str]) -> None:
    _, capability, plugin, variant, measured = row
    text = {"-": "cpu"}.get(capability, capability if capability.startswith("gfx") else f"cuda:{capability}")
    device = attnplug.Device.parse(text)

    explanation = attnplug.explain(LLAMA, device, backend=variant.strip("`"), assume_installed=True)

    assert explanation.chosen is not None
    folder = plugin.strip("`").partition("[")[0].removeprefix("./plugins/").replace("_", "-")
    offers = "attnplug" if plugin == "nothing" else f"attnplug-{folder}"
    assert explanation.chosen.distribution.split()[0] == offers
    assert measured == ("no" if explanation.chosen.unverified else "yes")


def test_the_models_page_has_the_backend_of_each_device_first() -> None:
    heads, *rows = [
        line.strip("| ").split(" | ") for line in _text("docs/reference/models.md").splitlines() if line[:1] == "|"
    ]
    llama = next(row for row in rows if row[0] == "meta-llama/Meta-Llama-3.1-8B")
    devices = [head.partition(" ")[0] for head in heads[1 : heads.index("attention")]]
    planned = [
        attnplug.explain(
            LLAMA, attnplug.Device.parse(f"cuda:{name}" if name != "CPU" else "cpu"), assume_installed=True
        )
        for name in devices
    ]

    assert devices == ["8.0", "8.9", "9.0", "10.0", "12.0", "CPU"]
    assert llama[1 : len(devices) + 1] == [f"`{each.chosen.id}`" for each in planned if each.chosen is not None]


_INSTALL = re.compile(r"\./[\w/]+(?:\[[\w,]+\])?")


@pytest.mark.parametrize("page", [page for page in PAGES if _INSTALL.search(_text(page))])
def test_what_a_page_installs_exists_with_its_extras(page: str) -> None:
    for requirement in _INSTALL.findall(_text(page)):
        folder, _, extras = requirement.rstrip("]").partition("[")
        project = ROOT / folder / "pyproject.toml"
        if folder in ("./core", "./kit") or folder.startswith(("./hosts/", "./plugins/")):
            offered = read_toml(project)["project"].get("optional-dependencies", {})
            assert set(filter(None, extras.split(","))) <= set(offered), f"{page}: {requirement}"


def test_the_targets_of_make_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"(?:`|^    )make ([a-z-]+)", _text(page), re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

    assert {"demo", "test", "docs"} <= named
    assert named - targets == set()


def test_readme_has_the_versions_of_every_backend_and_host() -> None:
    backends = {
        row[0].strip("`"): set(re.findall(r"`([^`]+)`", row[2])) for row in _rows(_section("README.md", "Backends"))
    }
    manifests = [
        read_manifest(path)
        for path in (*ROOT.glob("core/src/**/attnplug.toml"), *ROOT.glob("plugins/*/src/*/attnplug.toml"))
    ]
    engines = _rows(_section("README.md", "Engines and programs"))
    hosts = {text for row in engines for text in re.findall(r"`([^`]+)`", row[2])}

    assert set(backends) == {manifest.name for manifest in manifests}
    for manifest in manifests:
        variants = manifest.variants[:1] if manifest.name == "torch" else manifest.variants  # the one that always works
        assert backends[manifest.name] == {str(item) for variant in variants for item in variant.requires}
    assert hosts == set(_host_requirements())


def _host_requirements() -> list[str]:
    page = _text("docs/reference/compatibility.md")
    return [row[3].strip("`") for row in _rows(page.partition("## Engines")[2].partition("## ")[0])]


def test_the_picture_of_the_home_page_shows_a_real_decision() -> None:
    picture = ET.parse(ROOT / "docs/assets/decision.svg").getroot()  # noqa: S314 - a file of this repository
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    request = attnplug.Requirements(head_size=64, num_q_heads=64, num_kv_heads=8, dtype="bfloat16", sinks=True)
    explanation = attnplug.explain(request, attnplug.Device.cuda("9.0"), assume_installed=True)
    verdicts = {verdict.id: verdict for verdict in explanation.verdicts}
    above, why = (texts[: texts.index("Why not the runner-up")], texts[texts.index("Why not the runner-up") :])
    shown = {name: said for name, said in pairwise(above) if name in verdicts}
    refused = {name: [reason.field for reason in verdicts[name].reasons] for name in shown if "refused" in shown[name]}

    assert {"head_size=64", "sinks=True", "cuda:9.0"} <= set(texts)
    assert explanation.chosen is not None
    assert explanation.runner_up is not None
    assert shown == {
        explanation.chosen.id: "chosen",
        explanation.runner_up.id: "runner-up",
        "torch/flex": "eligible, built in",
        "flash_attn/fa2": "refused: no sinks",
    }
    assert verdicts["torch/flex"].status == "eligible"
    assert refused == {"flash_attn/fa2": ["sinks"]}
    # The numbers of the chosen one, then those of the runner-up, as the reason has them.
    assert why[2:4] == [explanation.chosen.variant, explanation.runner_up.id]
    for piece in ("32/8 heads of 128", "on an H200", "64 decodes", *(f"{why[i]} .*{why[i + 1]}" for i in (5, 8))):
        assert re.search(piece, explanation.why_runner_up), piece


def test_the_api_pages_have_every_public_module() -> None:
    public = set(
        re.findall(
            r"`(attnplug[\w.]*)`",
            "\n".join(row[0] for row in _rows(_section("docs/reference/api-policy.md", "What is public"))),
        )
    )

    assert public - {module for page in api_pages.PAGES for module in page.modules} == set()


def test_api_pages_begin_with_the_names_that_readers_use() -> None:
    orders = {module: api_pages.in_order_of_use(module) for page in api_pages.PAGES for module in page.modules}
    listed = re.findall(r"^::: attnplug\.(\w+)$", _text("docs/reference/api/attnplug.md"), re.MULTILINE)

    assert listed[:6] == ["explain", "select", "plan", "load", "Requirements", "Device"]
    assert set(api_pages.LEADING) <= set(orders)
    assert {module: sorted(names) for module, names in orders.items()} == {
        module: sorted(api_pages.public_names(module)) for module in orders
    }
