"""``attnplug check`` of a manifest: every mistake with its line, and no false positives."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnplug.torch_backend

GOOD = """\
api = "1.0"
backend = { name = "acme", aliases = ["ACME"], summary = "an example" }
[supports]
device_type = "cuda"
dtype = ["bf16", "float16"]
head_size = { multiple_of = 8, max = 256 }
block_size = { multiple_of = 16 }
features = ["paged", "sliding_window", "cascade"]
[[rules]]
when = { cascade = true }
need = { sliding_window = false, head_size = { max = 128 } }
because = "one dense pass"
[variants.fast]
requires = ["acme-kernels >=1.5,<3"]
[variants.fast.supports]
compute_capability = { min = "8.0" }
[[variants.fast.rules]]
when = { installed = "acme-kernels <1.6", head_size = 256 }
because = "wrong values"
[variants.slow]
supports = { compute_capability = { min = "7.5" }, features = ["sinks"] }
[[prefer]]
order = ["fast", "slow"]
when = { compute_capability = "9.0" }
because = "measured"
[[prefer]]
order = ["slow", "fast"]
because = "measured"
"""


@pytest.fixture
def check(run, empty, tmp_path: Path):
    """Check the valid manifest with replacements; return the exit code, and (line, problem, expected) of findings."""

    def call(*changes: tuple[str, str]) -> tuple[int, list[tuple[int | None, str, str]]]:
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        file = tmp_path / "attnplug.toml"
        file.write_text(text, encoding="utf-8")
        outcome = run("check", str(file), "--json")
        found = outcome.json
        assert {each["path"] for each in (*found["problems"], *found["notes"])} <= {str(file)}
        assert (outcome.code == 1) == bool(found["problems"])
        return outcome.code, [(f["line"], f["problem"], f["expected"]) for f in (*found["problems"], *found["notes"])]

    return call


def test_a_valid_manifest_has_no_finding(check) -> None:
    assert check() == (0, [])


def test_the_built_in_backend_has_no_finding(run, empty) -> None:
    manifest = Path(attnplug.torch_backend.__file__).with_name("attnplug.toml")

    outcome = run("check", str(manifest))

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("no problem, 1 file checked\n")
    assert "note: " not in outcome.out


def test_a_terminal_shows_what_is_checked_except_beside_json(run, empty, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    file = tmp_path / "attnplug.toml"
    file.write_text(GOOD)

    assert "checking acme: rules" in run("check", str(file)).err
    assert run("check", str(file), "--json").err == ""


@pytest.mark.parametrize(
    ("old", "new", "line", "given", "allowed"),
    [
        ('api = "1.0"', 'api = "2.0"', 1, "api = '2.0'", "this core has contract 1.x"),
        ('api = "1.0"', "api = 1.0", 1, "api = 1.0", "the contract version as text"),
        ('api = "1.0"', "api = ", 1, "it is not TOML", "TOML 1.0"),
        ("head_size = {", "head_sise = 8\nhead_size = {", 6, "did you mean 'head_size'?", "the fields are"),
        ("max = 256", "maxi = 256", 6, "did you mean 'max'?", "min, max and multiple_of"),
        ('"sliding_window", "c', '"sliding_windo", "sliding_window", "c', 8, "did you mean 'sliding_window'?", ""),
        ("cascade = true", "cascades = true", 10, "did you mean 'cascade'?", "a condition is about"),
        ("cascade = true", 'cascade = "yes"', 10, "cascade = 'yes'", "true or false"),
        ('because = "one dense', 'why = "one dense', 9, "no 'because'", "has to be there"),
        (">=1.5,<3", ">=1.5 <3", 14, "'acme-kernels >=1.5 <3'", "PEP 508"),
        (">=1.5,<3", ">=3,<1.5", 14, "'acme-kernels >=3,<1.5' required", "some version meets all of them"),
        ("[variants.slow]", '[variants.slow]\njit = "gcc"', 21, "jit = 'gcc'", "nvcc"),
        ("[variants.slow]", '[variants.slow]\nemulates = { pagd = "x" }', 21, "did you mean 'paged'?", "supported too"),
        ("[variants.slow]", '[variants.slow]\ninstall = { torhc = "x" }', 21, "'torhc'", "requires names: nothing"),
        ("[variants.slow]", '[variants.slow]\nsupport = "x"', 21, "did you mean 'supports'?", "the keys are"),
        ("[variants.slow]", "[variants]\nodd = 3\n[variants.slow]", 21, "odd = 3", "a table"),
        ('["fast", "slow"]', '["fats", "slow"]', 23, "did you mean 'fast'?", "each once"),
        ('["fast", "slow"]', '["fast", "slow", "fast"]', 23, "order = ['fast', 'slow', 'fast']", "each once"),
    ],
)
def test_what_reading_refuses_is_found(check, old, new, line, given, allowed) -> None:
    code, found = check((old, new))

    assert code == 1
    assert [at for at, said, true in found if given in said and allowed in true] == [line]


def test_an_invalid_requirement_is_reported_once(check) -> None:
    got = "[variants.fast.supports]", 'install = { acme-kernels = "from its vendor" }\n[variants.fast.supports]'

    assert check(got) == (0, [])
    assert [line for line, *_ in check(got, (">=1.5,<3", ">=1.5 <3"))[1]] == [14]


@pytest.mark.parametrize(
    ("old", "new", "line", "given", "allowed"),
    [
        ("{ cascade = true }", "{ alibi = true }", 9, "never fires: when `alibi ", "some variant serves"),
        ("{ cascade = true }", '{ dtype = "float32" }', 9, "never fires", "`dtype = float32`"),
        ("{ cascade = true }", "{ block_size = true }", 9, "never fires", "`block_size "),
        ("{ cascade = true }", "{ head_size = 12 }", 9, "never fires", "`head_size = 12`"),
        ("{ cascade = true }", '{ kv_cache_dtype = "auto" }', 9, "never fires", "`kv_cache_dtype = auto`"),
        ("{ cascade = true }", "{ cascade = true, paged = false }", 9, "never fires", "contradict each other"),
        ("<1.6", "<1.5", 17, "never fires", "`installed: acme-kernels <1.5`"),
        ("{ max = 128 }", "12", 9, "needs `head_size = 12`", "otherwise the rule always refuses"),
        ("need = { sl", "need = { sinks = true, sl", None, "", ""),
        ("need = { sl", "need = { alibi = true, sl", 9, "needs `alibi ", "some variant"),
        ("<1.6", "<3", None, "", ""),
        ('<1.6", head_size = 256', '<3"', 13, "'fast' can never be chosen", "line 17 refuse all"),
        ("{ cascade = true }", '{ device_type = "cuda" }', None, "", ""),
        (
            "when = { cascade = true }\nneed = { sliding_window = false, head_size = { max = 128 } }",
            'when = { dtype = ["bf16", "float16"] }\nneed = { head_size = 12 }',
            13,
            "'fast' can never be chosen",
            "leave no head_size",
        ),
        ('{ compute_capability = "9.0" }', '{ compute_capability = "7.0" }', 22, "never applies", "`compute_cap"),
        ('{ compute_capability = "9.0" }', '{ device_type = "cuda" }', 26, "never applies", "number 1"),
        ('when = { compute_capability = "9.0" }\n', "", 25, "never applies", "number 1"),
    ],
)  # fmt: skip
def test_rules_and_orders_without_effect_are_found(check, old, new, line, given, allowed) -> None:
    code, found = check((old, new))

    assert code == (line is not None)
    assert [at for at, said, true in found if given in said and allowed in true] == ([line] if line else [])


def test_rules_that_leave_nothing_together_are_named(check) -> None:
    rules = '[[rules]]\nwhen = {{ dtype = ["bf16", "float16"] }}\nneed = {{ head_size = {} }}\nbecause = "x"\n'

    code, found = check(("[[rules]]", rules.format("{ max = 64 }") + rules.format("{ min = 65 }") + "[[rules]]"))

    assert code == 1
    why = "its rules leave some request; always firing, line 9, line 13 leave no head_size"
    assert {(given, allowed) for _, given, allowed in found} == {
        (f"the variant {name!r} can never be chosen", why) for name in ("fast", "slow")
    }


@pytest.mark.parametrize(
    ("old", "new", "line", "given"),
    [
        ('api = "1.0"', 'api = "1.7"', 1, "api = '1.7'"),
        ("{ sliding_window = false, head_size = { max = 128 } }", "{ alibi = false }", 9, "objects to nothing"),
        ('name = "acme"', 'name = "torch"', 2, "name = 'torch'"),
        ('name = "acme"', 'name = "flashinfer"', 2, "name = 'flashinfer'"),
    ],
)
def test_what_may_be_intended_is_a_note(check, old, new, line, given) -> None:
    code, found = check((old, new))

    assert code == 0
    assert [(at, given in said) for at, said, _ in found] == [(line, True)]


def test_all_mistakes_are_reported_at_once(check) -> None:
    code, found = check(
        ('summary = "an example"', "summary = 3"),
        ("head_size = {", "head_sise = {"),
        ('"cascade"]', '"cascades", "sink"]'),
        (">=1.5,<3", "=1.5"),
        ("acme-kernels <1.6", "acme kernels"),
        ('["fast", "slow"]', '["fat", "slow"]'),
        ('order = ["slow", "fast"]', 'order = "slow"'),
    )

    assert code == 1
    assert {line for line, _, _ in found} == {2, 6, 8, 14, 18, 23, 27}
    assert len(found) == 8  # two in line 8


@pytest.mark.parametrize(
    ("alias", "allowed"),
    [
        ("acme", "another name of this backend"),
        ("auto", "another name of this backend"),
        ("a/b", "a slash precedes a variant"),
        ("TORCH_SDPA", "an alias of the backend 'torch' of attnplug,"),
        ("flashinfer", "the name of the backend 'flashinfer' of attnplug-flashinfer"),
        ("FLASH_ATTN", "an alias of the backend 'flash_attn'"),
        ("local", "the name of the backend 'local' of attnplug-local,"),
    ],
)
def test_an_alias_of_another_backend_is_found(check, empty, alias, allowed) -> None:
    empty.add("local", GOOD.replace('name = "acme", aliases = ["ACME"]', 'name = "local"'))

    code, found = check(('["ACME"]', f'["ACME", "{alias}"]'))

    assert code == 1
    assert [(line, given) for line, given, true in found if allowed in true] == [(2, f"aliases contains {alias!r}")]


@pytest.mark.parametrize("path", ["nowhere", "nowhere/attnplug.toml", "."])
def test_a_path_with_nothing_to_check_is_an_invalid_request(run, tmp_path, monkeypatch, path) -> None:
    monkeypatch.chdir(tmp_path)

    outcome = run("check", path)

    assert outcome.code == 2
    assert outcome.err.startswith("attnplug: ")


def test_a_binary_file_is_a_finding(run, tmp_path) -> None:
    file = tmp_path / "attnplug.toml"
    file.write_bytes(b"\xff\xfe")

    outcome = run("check", str(file))

    assert outcome.code == 1
    assert f"{file}: the manifest cannot be read" in outcome.out


def test_a_person_reads_each_finding_with_its_place(run, tmp_path) -> None:
    file = tmp_path / "attnplug.toml"
    file.write_text(GOOD.replace("max = 256", "maxi = 256").replace("1.0", "1.3"), encoding="utf-8")

    outcome = run("check", str(file))

    assert outcome.code == 1
    assert outcome.out.startswith(f"{file}:6: 'maxi' in the range of head_size; did you mean 'max'?\n    expected: ")
    assert f"{file}:1: note: api = '1.3'\n" in outcome.out
    assert outcome.out.endswith("1 problem, 1 note, 1 file checked\n")


def test_on_a_terminal_the_count_has_a_color(on_terminal, tmp_path) -> None:
    file = tmp_path / "attnplug.toml"
    file.write_text(GOOD, encoding="utf-8")

    outcome = on_terminal("check", str(file))

    assert outcome.code == 0
    assert "\x1b[" in outcome.out
    assert "no problem, 1 file checked" in outcome.out


def test_neither_torch_nor_the_plugin_is_imported(start, tmp_path) -> None:
    file = tmp_path / "attnplug.toml"
    file.write_text(GOOD, encoding="utf-8")
    code = (
        f"import sys; from attnplug.cli.main import main; main(['check', {str(file)!r}]); print('torch' in sys.modules)"
    )

    assert start("-c", code).out.endswith("False\n")


def test_without_a_path_this_folder_is_checked(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    empty = run("check")
    run("new", "acme", "--path", str(tmp_path / "acme"))
    monkeypatch.chdir(tmp_path / "acme")

    assert empty.code == 2
    assert "the folder '.' has no pyproject.toml" in empty.err
    assert run("check").code == 0
    assert run("check").out == run("check", ".").out
