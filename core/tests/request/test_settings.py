"""Environment and configuration file: read strictly, with the source of each value."""

from __future__ import annotations

import json
import logging
import os

import pytest
from platformdirs import user_config_path

from attnplug.discovery.registry import Registry
from attnplug.errors import SettingsError
from attnplug.request import settings
from attnplug.request.settings import Settings, parse_flag


@pytest.fixture
def config(tmp_path):
    return tmp_path / "config.toml"


def read(environ=None, file=None, tmp_path=None):
    return Settings.read(environ or {}, file)


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "OFF"])
def test_every_spelling_of_off_is_off(text):
    assert parse_flag(text, "ATTNPLUG_STRICT") is False


@pytest.mark.parametrize("text", ["2", "maybe", "nope"])
def test_anything_else_is_an_error_that_names_the_variable(text, config):
    config.write_text("")

    with pytest.raises(SettingsError, match="ATTNPLUG_STRICT"):
        read({"ATTNPLUG_STRICT": text}, config)


def test_environment_over_file_with_sources(config):
    config.write_text(
        'backend = ["flashinfer", "auto"]\nblock = "x"\nstrict = true\n[options.flashinfer]\nratio = 2\nother = "a"\n'
    )

    settings = read(
        {
            "ATTNPLUG_BACKEND": "torch",
            "ATTNPLUG_OPT_FLASHINFER__RATIO": "4",
            "ATTNPLUG_ALLOW": "",
            "ATTNPLUG_PROFILE": "p.toml",
        },
        config,
    )

    assert settings.backend == ("torch",)
    assert settings.allow == frozenset()
    assert settings.block == {"x"}
    assert settings.strict
    assert settings.profile == "p.toml"
    assert dict(settings.options["flashinfer"]) == {"ratio": "4", "other": "a"}
    assert settings.sources["backend"] == "environment variable ATTNPLUG_BACKEND"
    assert settings.sources["options.flashinfer.ratio"] == "environment variable ATTNPLUG_OPT_FLASHINFER__RATIO"
    assert settings.sources["options.flashinfer.other"] == f"file {config}"
    assert settings.sources["block"] == f"file {config}"


def test_nothing_set_is_automatic(config, monkeypatch):
    config.write_text("")

    settings = read({}, config)

    assert settings == Settings()
    assert (settings.allow, settings.backend) == (None, ())


@pytest.mark.parametrize("given", [None, "", "/etc/somewhere", "somewhere"])
@pytest.mark.parametrize("home", ["/home/somebody", "/"])
def test_the_default_folder_is_the_one_of_the_platform(monkeypatch, given, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", given)

    assert settings._user_folder() == user_config_path("attnplug", appauthor=False)


def test_the_default_file_may_be_missing_and_a_named_one_may_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    assert Settings.read({}) == Settings()
    with pytest.raises(SettingsError, match="does not exist"):
        Settings.read({"ATTNPLUG_CONFIG": str(tmp_path / "none.toml")})


def test_unknown_variables_are_warned_about_with_the_near_match(config, caplog):
    config.write_text("")

    with caplog.at_level(logging.WARNING, "attnplug"):
        read({"ATTNPLUG_BACKENDS": "torch"}, config)

    assert "'ATTNPLUG_BACKENDS' is not a setting and has no effect; did you mean 'ATTNPLUG_BACKEND'?" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend = 3", "backend = 3"),
        ("backnd = 'x'", "did you mean 'backend'"),
        ("strict = 'yes'", "strict = 'yes'"),
        ("allow = ['a', '']", "allow"),
        ("kv_layout = 'hnd'", "did you mean 'HND'"),
        ("kv_layout = 3", "kv_layout in"),
        ("kv_layot = 'HND'", "did you mean 'kv_layout'"),
        ("evidence = 3", "a folder or a list of folders"),
        ("evidence = ['a', '']", "evidence = ['a', '']"),
        ("evidense = 'a'", "did you mean 'evidence'"),
        ("options = 3", "options = 3"),
        ("options = { a = 1 }", "options"),
        ("= 3", "is not TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(config, text, message):
    config.write_text(text)

    with pytest.raises(SettingsError) as caught:
        read({}, config)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "line", "folders", "source"),
    [
        ("a", "", ("a",), "environment variable ATTNPLUG_EVIDENCE"),
        (f"a{os.pathsep}b c", "evidence = 'd'", ("a", "b c"), "environment variable ATTNPLUG_EVIDENCE"),
        ("", "evidence = 'd'", ("d",), "file "),
        ("  ", "evidence = ['d', 'c']", ("d", "c"), "file "),
    ],
)
def test_folders_with_evidence_keep_their_order(config, variable, line, folders, source):
    config.write_text(line)

    settings = read({"ATTNPLUG_EVIDENCE": variable}, config)

    assert settings.evidence == folders
    assert settings.sources["evidence"].startswith(source)


@pytest.mark.parametrize("text", ["a{0}", "{0}a", "a{0}{0}b", "a{0} {0}b"])
def test_an_empty_folder_is_refused(config, text):
    config.write_text("")
    given = text.format(os.pathsep)

    with pytest.raises(SettingsError, match=r"the current folder is '\.'") as caught:
        read({"ATTNPLUG_EVIDENCE": given}, config)

    assert f"ATTNPLUG_EVIDENCE={given!r} is set" in str(caught.value)


def test_an_unreadable_file_is_an_error(config):
    config.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SettingsError, match="cannot be read"):
        read({}, config)


@pytest.mark.parametrize("variable", ["ATTNPLUG_OPT_FLASHINFER_RATIO", "ATTNPLUG_OPT___X", "ATTNPLUG_OPT_A__"])
def test_an_option_variable_has_a_backend_and_a_name(config, variable):
    config.write_text("")

    with pytest.raises(SettingsError, match=variable):
        read({variable: "4"}, config)


def test_empty_names_are_refused(config):
    config.write_text("")

    with pytest.raises(SettingsError, match="separated by commas"):
        read({"ATTNPLUG_BACKEND": "a,,b"}, config)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_layout_is_set_by_file_or_environment(config, layout):
    config.write_text(f"kv_layout = '{layout}'\n")
    other = "HND" if layout == "NHD" else "NHD"

    by_file, by_both = read({}, config), read({"ATTNPLUG_KV_LAYOUT": other}, config)

    assert (by_file.kv_layout, by_file.sources["kv_layout"]) == (layout, f"file {config}")
    assert (by_both.kv_layout, by_both.sources["kv_layout"]) == (other, "environment variable ATTNPLUG_KV_LAYOUT")


@pytest.mark.parametrize(("text", "message"), [("hnd", "HND"), ("HDN", "NHD"), ("nhd", "NHD"), ("x", "NHD")])
def test_another_layout_is_an_error_that_names_the_variable(config, text, message):
    config.write_text("")

    with pytest.raises(SettingsError) as caught:
        read({"ATTNPLUG_KV_LAYOUT": text}, config)

    assert f"ATTNPLUG_KV_LAYOUT={text!r}" in str(caught.value)
    assert caught.value.fix.startswith(f"set ATTNPLUG_KV_LAYOUT={message}, or unset it")


def test_an_empty_variable_counts_as_unset(config):
    config.write_text(
        'backend = "torch"\nblock = "x"\nstrict = true\nprofile = "p"\nkv_layout = "HND"\n[options.torch]\na = 1\n'
    )
    names = ("BACKEND", "BLOCK", "STRICT", "PROFILE", "KV_LAYOUT", "OPT_TORCH__A")

    found = read({f"ATTNPLUG_{name}": " " * (name == "BLOCK") for name in names}, config)

    assert found == read({}, config)
    assert found.sources == read({}, config).sources
    assert read({"ATTNPLUG_ALLOW": ""}, config).allow == frozenset()


def test_an_empty_name_of_a_file_names_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))

    assert Settings.read({"ATTNPLUG_CONFIG": ""}) == Settings.read({})


WRONG_ENTRIES = [
    *("name==", "name=1.0", "name==1.0; python_version > '3'", "name[extra]", "name[extra]==1.0", "name @ https://x"),
    *(
        "name/variant==1.0",
        "name/",
        "/variant",
        "a/b/c",
        "==1.0",
        "flash attn",
        "name==one",
        "name>=1 <2",
        "'name'",
        "-",
    ),
]


@pytest.mark.parametrize("entry", WRONG_ENTRIES)
@pytest.mark.parametrize("name", ["ALLOW", "BLOCK"])
def test_an_entry_that_could_never_match_is_refused(config, name, entry):
    config.write_text(f"{name.lower()} = ['sound', {json.dumps(entry)}]")
    given = ({f"ATTNPLUG_{name}": f"sound,{entry}"}, None), ({}, config)

    for environ, file in given:
        with pytest.raises(SettingsError) as caught:
            Settings.read(environ, file)
        assert repr(entry) in str(caught.value)
        assert (f"ATTNPLUG_{name}" if environ else str(config)) in caught.value.problem
        assert "a backend, a backend/variant or a distribution" in caught.value.expected
    with pytest.raises(SettingsError, match="could never match"):
        Settings(**{name.lower(): frozenset({entry})})


def test_entries_may_have_versions(config):
    config.write_text("block = ['a >=1,<2', 'b/c']")

    assert read({}, config).block == {"a >=1,<2", "b/c"}
    assert read({"ATTNPLUG_BLOCK": "a>=1,<2 , b==1.0,c, d/e"}, config).block == {"a>=1,<2", "b==1.0", "c", "d/e"}


@pytest.fixture
def unprivileged():
    """Run as nobody where the tests run as root, which may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def _folder(tmp_path, kind):
    """Return a folder in which no configuration file can be looked for."""
    folder = tmp_path / kind
    if kind == "file":
        folder.write_text("a file in place of a folder")
    elif kind == "loop":
        folder.symlink_to(folder)
    elif kind == "closed":
        folder.mkdir(mode=0)
    return {"long": "/" + "x" * 5000, "null": "/a\0b"}.get(kind, str(folder))


@pytest.mark.parametrize("kind", ["file", "loop", "long", "null", "closed"])
@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_a_folder_out_of_reach_is_a_diagnostic(tmp_path, kind, variable, unprivileged):
    os.seteuid(os.getuid())  # to make the folder
    folder = _folder(tmp_path, kind)
    os.seteuid(65534 if os.getuid() == 0 else os.getuid())

    found = Settings.read({variable: folder, "ATTNPLUG_BACKEND": "torch"})

    assert found.backend == ("torch",)
    ((place, why),) = found.unread
    assert folder in place
    assert why
    notes = Registry([], settings=found, version_of=lambda _: None).notes
    assert [(note.subject, note.stage) for note in notes] == [(place, "settings")]
    assert "no settings are read from it" in notes[0].message


def test_a_home_that_is_unknown_is_a_diagnostic(monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in passwd

    for environ in ({}, {"HOME": ""}, {"HOME": "relative"}):
        found = Settings.read(environ)
        assert found == Settings()
        assert [why for _, why in found.unread] == ["the home folder of this user is not known"]


@pytest.mark.parametrize("home", ["/nowhere/at/all", "/nowhere\udcff"])
def test_a_home_that_is_not_there_has_no_file(home):
    found = Settings.read({"HOME": home})

    assert (found, found.unread) == (Settings(), ())


def test_a_file_that_is_there_and_unreadable_is_an_error(tmp_path):
    (tmp_path / "attnplug" / "config.toml").mkdir(parents=True)

    with pytest.raises(SettingsError, match="cannot be read"):
        Settings.read({"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize("kind", ["file", "loop", "long", "null"])
def test_a_named_file_out_of_reach_is_an_error(tmp_path, kind):
    with pytest.raises(SettingsError, match=r"does not exist|cannot be read"):
        Settings.read({"ATTNPLUG_CONFIG": f"{_folder(tmp_path, kind)}/config.toml"})
