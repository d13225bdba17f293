"""Options of backends: the highest level counts, under whichever name, and its origin is reported."""

from __future__ import annotations

from itertools import product

import pytest

import attnplug
from attnplug.errors import PluginLoadError, SettingsError
from attnplug.request.settings import Settings
from attnplug.selection.selection import Selection

VARIABLE = "ATTNPLUG_OPT_FLASH__SPLITS"
NAMES = ("flash", "FLASH")


@pytest.fixture
def settled(world, tmp_path):
    """Return ``make(file=, environment=)``: a process with the settings that these say."""

    def make(file="", environment=None):
        config = tmp_path / "config.toml"
        config.write_text(file)
        world("flash", "generic", settings=Settings.read(environment or {}, config))
        return f"file {config}"

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_in_a_file_is_reported_with_the_file(settled, request_of, name):
    origin = settled(f"[options.{name}]\nsplits = -1\n")

    with pytest.raises(SettingsError) as caught:
        attnplug.select(request_of())

    assert caught.value.problem == f"splits=-1 was given by {origin}"


@pytest.mark.parametrize("text", ["\u0663", "\uff13", "0x3"])
def test_a_number_has_plain_digits(settled, request_of, text):
    settled("", {VARIABLE: text})
    with pytest.raises(SettingsError, match="splits"):
        attnplug.select(request_of())


def test_every_origin_is_reported(settled, request_of):
    file = settled("[options.flash]\nspilts = 1\n", {VARIABLE: "2"})
    with pytest.raises(SettingsError, match="'spilts' of 'flash' was given by file "):
        attnplug.select(request_of())

    file = settled("[options.flash]\nsplits = 1\n")
    assert attnplug.select(request_of()).provenance == {"options.flash.splits": file}
    settled("[options.flash]\nsplits = 1\n", {VARIABLE: "2"})
    assert attnplug.select(request_of()).provenance == {"options.flash.splits": f"environment variable {VARIABLE}"}


def test_an_invalid_table_is_reported_with_the_file(settled):
    with pytest.raises(SettingsError, match=r"options = 3 is in the file .*config\.toml"):
        settled("options = 3\n")


def test_settings_without_an_origin_are_not_blamed_on_the_call(world, request_of):
    world("flash", "generic", settings=Settings(options={"flash": {"splits": -1}}, backend=("flash/hopper",)))

    with pytest.raises(SettingsError, match="splits=-1 was given by the settings"):
        attnplug.select(request_of())


def test_the_same_words_of_another_origin_are_another_decision(both, request_of):
    by_call = attnplug.select(request_of(), backend="flash", options={"flash": {"splits": 2}})
    with attnplug.using(backend="flash", options={"flash": {"splits": 2}}):
        by_scope = attnplug.select(request_of())

    assert by_call.agreement == by_scope.agreement
    assert set(by_call.provenance.values()) == {"the call"}
    assert set(by_scope.provenance.values()) == {"using"}


def test_the_highest_level_counts_under_whichever_name(settled, request_of):
    """Levels by rising precedence, each with another number; a variable of the environment is in lower case."""
    for names in product((None, *NAMES), (None, "flash"), *[(None, *NAMES)] * 3):
        file, variable, *given = names
        settled(f"[options.{file}]\nsplits = 1\n" if file else "", {VARIABLE: "2"} if variable else {})
        outer, inner, call = ({name: {"splits": 3 + i}} if name else None for i, name in enumerate(given))

        with attnplug.using(options=outer), attnplug.using(options=inner):
            agreed = attnplug.select(request_of(), options=call).agreement

        message = [number for number, name in enumerate(names, 1) if name is not None]
        assert agreed.options["splits"] == (message[-1] if message else 0), names


def test_options_of_a_decision_are_not_blamed_on_the_call(both, request_of):
    sent = attnplug.select(request_of()).to_dict()
    sent["agreement"]["options"] = {"splits": -1}

    with pytest.raises(PluginLoadError) as caught:
        Selection.from_dict(sent).load()

    assert caught.value.problem == "'flash/hopper' cannot be loaded here: splits=-1 was given by the decision"
