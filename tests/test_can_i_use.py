"""The report and the matrix of the documentation, as a real browser shows them, with texts that nobody can trust."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from html import unescape
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from attnplug import Device, Requirements
from attnplug.evidence import MeasuredTime, ProfileEntry, content_hash, dump_entries
from attnplug_kit import report
from attnplug_kit.report.page import matrix_fragment, report_page
from attnplug_kit.report.times import Timed, charts, times_of_profile
from tests.browser import CELLS, DESKTOP, OVERFLOW, PHONE, Browser, in_browser
from tools import capabilities
from tools.capabilities import only

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><script>window.harm = 1</script><img src=x onerror='window.harm = 1'>"
MANIFEST = f"""\
api = "1.0"
backend = {{ name = "acme", summary = "{HOSTILE}" }}
[supports]
device_type = "cuda"
compute_capability = {{ min = "8.0" }}
dtype = ["bfloat16", "float16"]
head_size = {{ multiple_of = 8, max = 256 }}
block_size = 16
features = ["paged", "sliding_window"]
[[rules]]
when = {{ sliding_window = true }}
need = {{ dtype = "float32" }}
because = "{HOSTILE}"
[variants.fast]
supports = {{ sinks = true }}
[variants.slow]
"""
RUN = {
    "format": 1,
    "backend": "acme/fast",
    "distribution": "attnplug-acme 0",
    "device": {"type": "cuda", "vendor": "nvidia", "name": "NVIDIA B200", "compute_capability": "10.0"},
    "versions": {"acme-kernels": HOSTILE},
    "command": f"pytest {HOSTILE}",
    "passed": True,
    "served": [{"field": "sinks", "value": True}],
    "unreached": [],
    "errors": [
        *({"what": "output", "max": wrong, "dtype": "float16"} for wrong in (10**400, True, -1, "1", None)),
        {"what": "output", "max": 0.25, "dtype": HOSTILE},
    ],
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    package = root / "plugins" / "acme" / "src" / "attnplug_acme"
    (package / "evidence").mkdir(parents=True)
    (package / "attnplug.toml").write_text(MANIFEST, encoding="utf-8")
    (package / "evidence" / "fast-b200.json").write_text(json.dumps(RUN), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def page(workspace: Path) -> str:
    with only(workspace):
        return report_page(report.make_report(["a100", "b200"]))


@pytest.fixture
def browser(tmp_path: Path, page: str) -> Browser:
    return _open(tmp_path, page)


def _open(folder: Path, page: str) -> Browser:
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    return Browser(file)


def test_the_same_installation_gives_the_same_bytes(workspace: Path, page: str) -> None:
    with only(workspace):
        assert report_page(report.make_report(["a100", "b200"])) == page


class Loads(HTMLParser):
    """What a page would load or leave for, but for its own anchors."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]
        self.found += [f"{tag} {value}" for value in values if not value.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.found += re.findall(r"url\(|@import", data) if self.cdata_elem == "style" else []


def test_a_page_names_no_folder_and_loads_nothing(workspace: Path, page: str) -> None:
    assert str(workspace) not in page
    assert str(workspace.parent) not in page
    assert Loads(page).found == []
    assert Loads(page.replace("</style>", "@import 'x'</style><img src=x>", 1)).found == ["@import", "img x"]


def test_texts_of_others_are_no_html(page: str) -> None:
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;script&gt;window.harm" in page  # the summary, as a text
    assert "largest errors of outputs: 0.25 (&lt;/script&gt;" in page
    assert r"\u003c/script\u003e" in page  # and in the data


def test_a_reader_sees_the_status_in_words(page: str) -> None:
    for words in ("✓ run", "○ not run", "✗ refused"):
        assert words in unescape(page)
    assert "acme/fast" in page


def test_without_measured_times_nothing_is_drawn(workspace: Path, page: str) -> None:
    assert "Nothing is measured" in page
    assert "<svg" not in page
    with only(workspace):
        found = report.make_report(["b200"])
    timed = [Timed("decodes", "acme/slow", 400.0, HOSTILE), Timed("decodes", "acme/fast", 100.0, HOSTILE)]
    drawn = report_page(report.Report(**{**{n: getattr(found, n) for n in SLOTS}, "times": tuple(timed)}))

    bars = re.findall(r'<text[^>]*>([^<]*)</text><rect[^>]* width="([\d.]+)%"', drawn)
    assert bars == [("acme/fast: 100 us (fastest)", "25.00"), ("acme/slow: 400 us", "100.00")]
    assert HOSTILE not in drawn


SLOTS = ("facts", "device", "own", "candidates", "matrix", "decisions", "times")


def _entry(num_seqs: int, **microseconds: float) -> ProfileEntry:
    layer = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    times = {f"acme/{name}": MeasuredTime(each, libraries={"acme": "1.2"}) for name, each in microseconds.items()}
    device = Device("cuda", compute_capability="10.0", name="NVIDIA B200", num_multiprocessors=148)
    return ProfileEntry("2026-11-28", device, {}, layer, "decode", num_seqs, 4096, 1, "acme/fast", times)


def test_the_profile_that_tune_wrote_is_drawn(tmp_path: Path) -> None:
    entries = (_entry(64, fast=200.0, slow=300.0), _entry(8, slow=40.0))
    whole = tmp_path / "whole.json"
    whole.write_text(dump_entries((*entries, entries[0])), "utf-8")
    folder = tmp_path / "profiles"
    folder.mkdir()
    for entry in entries:
        (folder / entry.name).write_text(dump_entries([entry]), "utf-8")
    (folder / "torn.json").write_text("{", "utf-8")
    layer = "head_size=64, num_q_heads=8, num_kv_heads=8, dtype=bfloat16, paged=True"

    found = times_of_profile(str(folder))

    assert charts(found)[f"64 x 4k decode on NVIDIA B200: {layer}"] == [
        Timed(f"64 x 4k decode on NVIDIA B200: {layer}", "acme/fast", 200.0, "2026-11-28, acme 1.2"),
        Timed(f"64 x 4k decode on NVIDIA B200: {layer}", "acme/slow", 300.0, "2026-11-28, acme 1.2"),
    ]
    assert sorted(times_of_profile(f"{whole}#sha256={content_hash(entries)}"), key=str) == sorted(found, key=str)
    assert times_of_profile("off") == times_of_profile(None) == ()


def test_the_profile_that_is_set_is_drawn(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "times.toml"
    profile.write_text('[[measured]]\nwhen = { head_size = 64 }\nmicroseconds = { "acme/fast" = 12.5 }\n', "utf-8")
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))
    with only(workspace):
        found = report.make_report(["b200"])

    assert found.times == (Timed("head_size=64", "acme/fast", 12.5, "times.toml"),)


def test_the_command_writes_the_page(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    report.add_arguments(parser)
    file = tmp_path / "here.html"
    model = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    words = ["--output", str(file), "--device", "b200", "--config", str(tmp_path / "tiny")]
    with only(workspace):
        code = report.run(parser.parse_args(words))
        nowhere = parser.parse_args(["--output", str(tmp_path / "none" / "x.html"), "--device", "b200"])
        with pytest.raises(report.RequestError, match="cannot be written"):
            report.run(nowhere)
        printed = capsys.readouterr().out
        report.run(parser.parse_args(["--device", "b200", "--json"]))

    assert code == 0
    assert printed == f"written: {file}\n"
    assert re.search(r"<th[^>]*>tiny</th>.*acme/", file.read_text("utf-8"))
    data = json.loads(capsys.readouterr().out)
    assert {"facts", "matrix", "decisions", "times"} < set(data)
    chosen = {each["model"]: each["ids"] for each in data["decisions"] if each["device"] == "10.0 (b200)"}
    assert chosen["Qwen2-0.5B"] == ["acme/fast"]
    assert chosen["gpt-oss-20b"] == []  # its rule refuses a window


@in_browser
def test_the_address_sets_the_filters(browser: Browser) -> None:
    everything = browser.found(f"{CELLS}.length")
    sinks = browser.found(f"{CELLS}.map((each) => each.ariaLabel).join(';')", device="10.0 (b200)", feature="sinks")
    variant = browser.found(f"{CELLS}.map((each) => each.ariaLabel).join(';')", backend="acme/fast", feature="sinks")
    ran = browser.found(f"{CELLS}.map((each) => each.ariaLabel).join(';')", status="run")
    unknown = browser.found(f"{CELLS}.length", backend="nobody")

    assert sinks == "sinks on acme/fast: run;sinks on acme/slow: refused"
    assert variant == "sinks on this machine: refused;sinks on 8.0 (a100): not run;sinks on 10.0 (b200): run"
    assert ran == "sinks on acme/fast: run"
    assert int(everything) > 20
    assert unknown == everything


@in_browser
def test_a_filter_box_filters_and_changes_the_address(browser: Browser) -> None:
    script = """(() => {
        const box = document.querySelector("select[name=status]");
        box.value = "run";
        box.dispatchEvent(new Event("change", { bubbles: true }));
        return location.hash + " " + document.querySelectorAll(".attnplug-matrix tbody tr").length;
    })()"""

    assert browser.found(script) == "#status=run 1"


@in_browser
def test_a_cell_opens_with_its_runs_and_reasons(browser: Browser) -> None:
    opened = f"""(() => {{
        const cell = {CELLS}[0];
        cell.focus();
        cell.click();
        const detail = document.querySelector(".detail");
        const link = detail.querySelector("a");
        const found = [detail.textContent, link && document.querySelector(link.hash)?.textContent, cell.ariaExpanded];
        cell.dispatchEvent(new KeyboardEvent("keydown", {{ key: "Escape", bubbles: true }}));
        found.push(document.querySelectorAll(".detail").length, document.activeElement === cell, window.harm);
        return JSON.stringify(found);
    }})()"""
    ran = json.loads(browser.found(opened, feature="sinks", backend="acme/fast", status="run"))
    refused = json.loads(browser.found(opened, feature="sliding_window", backend="acme/fast", device="8.0 (a100)"))

    assert "run on 10.0 (b200)" in ran[0]
    assert "kit run on NVIDIA B200" in ran[0]
    assert "attnplug-acme 0" in ran[0]
    assert "sinks=True" in ran[0]
    assert "acme/fast" in ran[1]  # the run that is linked
    assert ran[2] == "true"
    assert ran[3:] == [0, True, None]  # closed by Escape, with the focus where it was, and nothing hostile ran
    assert f"refused on 8.0 (a100): requires dtype = float32 (requested: dtype=bfloat16): {HOSTILE}" in refused[0]


@in_browser
@pytest.mark.parametrize("width", [PHONE, 700, 1000, DESKTOP])
def test_a_page_does_not_scroll_sideways(browser: Browser, width: int) -> None:
    script = f"(() => {{ {CELLS}.slice(0, 3).forEach((each) => each.click()); return {OVERFLOW}; }})()"

    assert browser.found(script, width) == "0"


@in_browser
def test_a_phone_shows_cards(browser: Browser) -> None:
    shown = """getComputedStyle(document.querySelector(".attnplug-matrix tbody tr")).display"""
    names = f"{CELLS}.filter((each) => each.offsetParent).map((each) => each.innerText.trim()).join(';')"
    more = f"""(() => {{ document.querySelector(".more").click(); return {names}; }})()"""

    assert browser.found(shown, PHONE) == "flex"
    assert browser.found(shown, DESKTOP) == "table-row"
    assert browser.found(names, PHONE, feature="sinks", backend="acme") == "✓ acme/fast run"
    assert browser.found(more, PHONE, feature="sinks", backend="acme") == "✓ acme/fast run;✗ acme/slow refused"


@in_browser
def test_every_text_has_contrast_in_light_and_dark(browser: Browser) -> None:
    script = """(() => {
        const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const page = parts(getComputedStyle(document.body).backgroundColor);
        const over = ([r, g, b, a = 1]) => [r, g, b].map((c, i) => c * a + page[i] * (1 - a));
        const back = (node) => {
            for (let each = node; each; each = each.parentElement) {
                const color = parts(getComputedStyle(each).backgroundColor);
                if (color.length === 3 || color[3] > 0) return over(color);
            }
        };
        const worst = [...document.querySelectorAll("h1, th, td, .cell small, .legend li, output, label, select, a")]
            .map((node) => {
                const [a, b] = [light(parts(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05);
            });
        return Math.min(...worst).toFixed(2) + " " + page.slice(0, 3).join(",");
    })()"""
    light, dark = (browser.found(script, scheme=scheme).split() for scheme in ("light", "dark"))

    assert float(light[0]) >= 4.5  # WCAG 2.2, AA
    assert float(dark[0]) >= 4.5
    assert (light[1], dark[1]) == ("255,255,255", "20,23,31")


@in_browser
def test_the_matrix_of_the_documentation_is_the_same_program(workspace: Path, tmp_path: Path) -> None:
    fragment = matrix_fragment(json.loads(capabilities.data(workspace)))
    browser = _open(tmp_path, f"<!doctype html><body>{fragment}</body>")

    labels = browser.found(f"{CELLS}.map((each) => each.ariaLabel).join(';')", status="run")
    assert labels.split(";")[0] == "sinks on acme/fast: run"
