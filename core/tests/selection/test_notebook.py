"""What a notebook shows: HTML without scripts and colors, everything escaped; and representations of one line."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import attnplug
from attnplug.discovery.registry import Registry
from attnplug.request.device import Device

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\"'&"
TAGS = {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "br", "details", "summary"}
STYLES = {"inherit", "transparent", "collapse", "left", "top", "1px solid currentColor", ".2em .6em"}


class Checked(HTMLParser):
    """Collects the text of a document, and fails on what a notebook should not show."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.texts, self.rows = [], [], 0
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style", "open"}
        for _, style in (pair for pair in attrs if pair[0] == "style"):
            assert {part.partition(":")[2].strip() for part in style.split(";")} <= STYLES
        self.rows += tag == "tr"
        if tag != "br":
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        assert data.isprintable()
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)


def test_an_explanation_shows_its_decision_and_folds_the_rest(both, request_of):
    explanation = attnplug.explain(request_of())
    page = Checked(explanation._repr_html_())

    assert page.texts[0].startswith(f"chosen: {explanation.chosen.id}")
    assert all(verdict.id in page.text for verdict in explanation.verdicts)
    assert all(str(reason) in page.text for verdict in explanation.verdicts for reason in verdict.reasons)
    assert "<details>" in explanation._repr_html_()
    assert "assumed" not in page.text
    folded = explanation._repr_html_().partition("<details>")[2]
    assert explanation.chosen.id not in folded


def test_what_is_assumed_installed_is_said(both, request_of):
    explanation = attnplug.explain(request_of(), "cuda:9.0", assume_installed=True)

    assert "device: cuda:9.0, kernel libraries assumed installed" in Checked(explanation._repr_html_()).texts


def test_where_nothing_serves_the_reasons_are_unfolded(both, request_of):
    html = attnplug.explain(request_of(custom_mask=True))._repr_html_()

    assert Checked(html).texts[0] == "chosen: none"
    assert "<details open>" in html


def test_a_plan_has_a_row_for_each_group(both, request_of):
    layers = {f"layers.{i}": request_of(sliding_window=128 if i % 2 else None) for i in range(40)}
    plan = attnplug.plan(layers)
    page = Checked(plan._repr_html_())

    assert page.rows == 1 + len(plan.groups)
    assert "40 layers in 2 groups" in page.texts[0]
    assert any(text.startswith("common: block_size=") for text in page.texts)
    assert len(plan._repr_html_()) < 6000


def test_a_registry_has_a_row_for_each_candidate(both):
    page = Checked(attnplug.registry()._repr_html_())

    assert page.rows == 1 + len(attnplug.registry().candidates())


def test_what_others_wrote_is_escaped(both, request_of):
    device = Device("cuda", name=HOSTILE, compute_capability="9.0")
    explanation = attnplug.explain(request_of(), device)
    page = Checked(explanation._repr_html_())

    assert "<script>alert(1)</script>\\u202e\\x1b[31m\"'&" in page.text
    assert "<script" not in explanation._repr_html_()
    assert all(repr(each).isprintable() for each in (explanation, explanation.chosen, device))
    layers = {f"{HOSTILE}.{i}": request_of() for i in range(3)}
    assert "alert(1)" in Checked(attnplug.plan(layers, device)._repr_html_()).text


@pytest.mark.parametrize("plugins", [(), ("flash", "generic")])
def test_representations_have_one_short_line(world, request_of, plugins):
    world(*plugins)
    request = request_of()
    explanation = attnplug.explain(request)
    found = [request, explanation, *explanation.verdicts, attnplug.registry(), Registry(())]
    if plugins:
        plan = attnplug.plan({f"layers.{i}": request for i in range(100)})
        found += [plan, plan.groups[0], explanation.chosen, explanation.chosen.agreement, *plan.groups]

    for each in found:
        assert len(repr(each)) <= 160, repr(each)
        assert repr(each).isprintable()
        assert re.match(rf"<?{type(each).__name__}[:(]", repr(each))


def test_representations_say_what_matters(both, request_of):
    explanation = attnplug.explain(request_of())

    number = len(explanation.verdicts)
    assert repr(explanation) == f"<Explanation: chosen flash/hopper of {number} candidates on cuda:9.0>"
    assert repr(attnplug.plan({"a": request_of(), "b": request_of()})) == (
        "<Plan: 2 layers in 1 group on flash/hopper>"
    )
    assert repr(attnplug.registry()) == "<Registry: 2 plugins (flash, generic)>"
