"""A manifest is read, or refused with the line and the rule that it breaks."""

from __future__ import annotations

import pytest

from attnplug.errors import ApiVersionError, ManifestError, SettingsError
from attnplug.manifest.line_numbers import locate
from attnplug.manifest.reader import parse_manifest, read_manifest
from attnplug.manifest.schema import Holds, IsInstalled, IsRequested

GOOD = """\
api = "1.0"
backend = { name = "acme", aliases = ["ACME"], summary = "an example" }
[supports]
device_type = ["cpu", "cuda"]
dtype = ["bf16", "float16"]
head_size = { multiple_of = 8, max = 256 }
kv_cache_dtype = ["auto", "fp8"]
features = ["paged", "sliding_window", "acme.fused"]
block_size = { multiple_of = 16 }
[[rules]]
when = { sliding_window = true, installed = "acme-kernels <2" }
need = { head_size = { max = 128 }, logits_soft_cap = false }
because = "wrong values before version 2"
[variants.fast]
summary = "the fast one"
requires = ["acme-kernels >=1.5"]
jit = "triton"
supports = { compute_capability = ["9.0a", { min = "10.0", max = "11.0" }], features = ["sinks"] }
[variants.slow]
supports = { dtype = "float32", head_size = [64, 128] }
emulates = { paged = "gathers" }
[[variants.slow.rules]]
when = { sinks = true }
because = "no sinks"
[[prefer]]
order = ["fast", "slow"]
when = { compute_capability = "9.0" }
because = "faster"
[options.ratio]
type = "int"
min = 1
default = 4
help = "a ratio"
"""


@pytest.fixture
def manifest():
    return parse_manifest(GOOD, "acme.toml")


def test_shared_and_own_fields_merge(manifest):
    fast, slow = manifest.variants

    assert str(fast.supports["dtype"]) == "bfloat16, float16"
    assert str(slow.supports["dtype"]) == "float32"
    assert str(slow.supports["head_size"]) == "64, 128"
    assert "sinks" in fast.supports
    assert "sinks" not in slow.supports
    assert fast.features == slow.features == ("acme.fused",)
    assert str(fast.supports["kv_layout"]) == "NHD"


def test_rules_are_shared_then_own(manifest):
    fast, slow = manifest.variants
    shared = fast.rules[0]

    assert [type(c) for c in shared.when] == [IsRequested, IsInstalled]
    assert [type(c) for c in shared.need] == [Holds, IsRequested]
    assert slow.rules[0] == shared
    assert slow.rules[1].need == ()
    assert slow.rules[1].line == 22


def test_the_rest_is_there(manifest):
    assert (manifest.name, manifest.aliases, manifest.api) == ("acme", ("ACME",), (1, 0))
    assert manifest.variants[0].jit == "triton"
    assert manifest.variants[1].emulates == {"paged": "gathers"}
    assert manifest.prefer[0].order == ("fast", "slow")
    assert not manifest.is_newer


def test_how_to_get_what_is_required_is_read():
    text = GOOD.replace('jit = "triton"', 'install = { acme-kernels = "from its vendor" }')

    assert [dict(one.install) for one in parse_manifest(text).variants] == [{"acme-kernels": "from its vendor"}, {}]


def test_a_manifest_without_variants_has_one():
    offer = 'supports = { device_type = "cpu", dtype = "float32", head_size = 64 }'
    text = f'api = "1.9"\nbackend = {{ name = "toy", summary = "s" }}\n{offer}'

    manifest = parse_manifest(text)

    assert [variant.name for variant in manifest.variants] == ["default"]
    assert manifest.is_newer


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('jit = "triton"', 'install = { acme-kernel = "x" }', 17, "did you mean 'acme-kernels'"),
        ('jit = "triton"', 'install = { Acme-Kernels = "x" }', 17, "what requires names: acme-kernels"),
        ('emulates = { paged = "gathers" }', 'install = { acme-kernels = "x" }', 21, "what requires names: nothing"),
        ('jit = "triton"', 'install = { acme-kernels = " " }', 17, "'acme-kernels' is a text"),
        ('jit = "triton"', 'install = "from its vendor"', 17, "a table"),
        ('api = "1.0"', "api = 1", 1, "contract version as text"),
        ('api = "1.0"', 'api = "0.9"', 1, "this core has contract 1.x"),
        ('name = "acme"', 'name = "Acme"', 2, "lower-case"),
        ('name = "acme", ', "", 2, "no 'name'"),
        ('summary = "an example"', "summary = 3", 2, "a text"),
        ("head_size = {", "head_sise = {", 6, "did you mean 'head_size'"),
        ("multiple_of = 8", "multiple = 8", 6, "did you mean 'multiple_of'"),
        ("multiple_of = 8", "multiple_of = 0", 6, "from 1 on"),
        ("max = 256 }\nkv", "max = 7 }\nkv", 6, "at least one value"),
        ('dtype = ["bf16", "float16"]', 'dtype = ["bf17"]', 5, "'bfloat16'"),
        ('dtype = ["bf16", "float16"]', "dtype = []", 5, "at least one"),
        ('dtype = ["bf16", "float16"]', "", 14, "no 'dtype' in supports"),
        ("block_size = { multiple_of = 16 }", "", 14, "paged without block_size"),
        ('"sliding_window", "acme', '"sliding_windw", "acme', 8, "did you mean 'sliding_window'"),
        ('features = ["paged"', 'features = [1, "paged"', 8, "a list of names"),
        ("sliding_window = true, installed", "sliding_windw = true, installed", 11, "did you mean 'sliding_window'"),
        ("when = { sliding_window = true, installed", "when = { head_size = true, installed", 11, "always requested"),
        ('"acme-kernels <2"', '"acme kernels"', 11, "PEP 508"),
        ('"acme-kernels <2"', "[]", 11, "PEP 508"),
        ("when = { sinks = true }\n", "", 22, "a rule says when it applies"),
        ('because = "no sinks"\n', "", 22, "no 'because'"),
        ('because = "no sinks"', 'reason = "no sinks"', 24, "the key 'reason'"),
        ('jit = "triton"', 'jit = "gcc"', 17, "nvcc, triton"),
        ('requires = ["acme-kernels >=1.5"]', 'requires = ["acme-kernels => 1"]', 16, "PEP 508"),
        ('requires = ["acme-kernels >=1.5"]', 'requires = "acme-kernels"', 16, "a list of texts"),
        ('emulates = { paged = "gathers" }', 'emulates = { sinks = "x" }', 21, "supported too"),
        ("[variants.slow]", "[variants.Slow]", 19, "lower-case"),
        ('order = ["fast", "slow"]', 'order = ["fast", "fast"]', 26, "each once"),
        ('type = "int"', 'type = "integer"', 30, "int, float"),
        ("default = 4", "default = 0", 32, "from 1"),
        ("default = 4\n", "", 29, "without a default"),
        ("[options.ratio]", "[options.ratio", 29, "not TOML"),
        ("[options.ratio]", "[option.ratio]", 29, "did you mean 'options'"),
        ('summary = "the fast one"', 'sumary = "the fast one"', 15, "did you mean 'summary'"),
    ],
)
def test_a_broken_rule_is_named_with_its_line(old, new, line, message):
    assert old in GOOD
    with pytest.raises(ManifestError) as caught:
        parse_manifest(GOOD.replace(old, new, 1), "acme.toml")

    error = caught.value
    assert message in str(error)
    assert error.fix
    assert (error.path, error.line) == ("acme.toml", line), str(error)
    assert str(error).startswith(f"acme.toml:{line}: ")


def test_another_major_version_is_its_own_error():
    with pytest.raises(ApiVersionError, match="install a plugin version"):
        parse_manifest(GOOD.replace('"1.0"', '"2.0"', 1))


def test_a_newer_minor_version_may_know_more_fields():
    more = GOOD.replace("dtype = [", 'rotary = "neox"\ndtype = [', 1)
    more = more.replace('"sliding_window", ', '"sliding_window", "rotary_cache", ', 1)
    newer = more.replace('api = "1.0"', 'api = "1.7"')

    manifest = parse_manifest(newer)

    assert "rotary" not in manifest.variants[0].supports
    assert "rotary_cache" not in manifest.variants[0].features
    with pytest.raises(ManifestError, match="rotary"):
        parse_manifest(more)
    with pytest.raises(ManifestError, match="the key 'unless'"):  # what may narrow a claim is never passed over
        parse_manifest(newer.replace("because =", "unless = 1\nbecause =", 1))


@pytest.mark.parametrize("value", ['"text"', "{ max = 3, min = '9' }", "{}", "{ min = 3, max = 2 }"])
def test_ranges_that_cannot_be(value):
    with pytest.raises(ManifestError):
        parse_manifest(GOOD.replace("{ multiple_of = 16 }", value, 1))


def test_names_without_an_order_have_no_range():
    with pytest.raises(ManifestError, match="has no order"):
        parse_manifest(GOOD.replace('dtype = ["bf16", "float16"]', 'dtype = { min = "bf16" }', 1))


def test_files(tmp_path):
    path = tmp_path / "attnplug.toml"
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(path)
    path.write_text(GOOD)
    assert read_manifest(path).path == str(path)


class TestOptions:
    def test_default_and_given(self, manifest):
        assert manifest.read_options({}, {}) == {"ratio": 4}
        assert manifest.read_options({"ratio": "7"}, {}) == {"ratio": 7}

    @pytest.mark.parametrize("value", [0, "x", "0", 1.5, True, None])
    def test_refused(self, manifest, value):
        with pytest.raises(SettingsError, match=r"environment variable X(.|\n)*int from 1(.|\n)*default is 4"):
            manifest.read_options({"ratio": value}, {"ratio": "environment variable X"})

    def test_unknown(self, manifest):
        with pytest.raises(SettingsError, match="did you mean 'ratio'"):
            manifest.read_options({"ratios": 1}, {})

    @pytest.mark.parametrize(
        ("kind", "good", "bad"), [("bool", "true", "7"), ("float", "0.5", "x"), ("str", "a", 3), ("int", "3", "3.5")]
    )
    def test_types(self, kind, good, bad):
        default = {"bool": "false", "float": "1.0", "str": '"b"', "int": "1"}[kind]
        text = GOOD.replace('type = "int"\nmin = 1\ndefault = 4', f'type = "{kind}"\ndefault = {default}')
        manifest = parse_manifest(text)

        assert (
            manifest.read_options({"ratio": good}, {})["ratio"]
            == {"bool": True, "float": 0.5, "str": "a", "int": 3}[kind]
        )
        with pytest.raises(SettingsError):
            manifest.read_options({"ratio": bad}, {})


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("api",), 1),
        (("supports", "dtype"), 5),
        (("rules", 0, "need", "head_size"), 12),
        (("variants", "slow", "rules", 0), 22),
        (("variants", "fast", "supports", "features"), 18),
        (("options", "ratio", "default"), 32),
        (("nothing",), None),
    ],
)
def test_keys_are_found(path, line):
    assert locate(GOOD, path) == line


def test_keys_are_found_inside_arrays_over_several_lines():
    text = 'api = "1.0"\nfeatures = [\n  "paged",\n  "sinkz",\n]\nnext = 1\n'

    assert locate(text, ("features", "sinkz")) == 4


def test_a_quoted_name_is_one_part_of_a_path():
    text = '[project.entry-points."attnplug.backends"]\n"odd.name" = "acme.plugin"\nacme = "acme.plugin"\n'

    assert locate(text, ("project", "entry-points", "attnplug.backends", "acme")) == 3
    assert locate(text, ("project", "entry-points", "attnplug.backends", "odd.name")) == 2
    assert locate(text, ("project", "entry-points", "attnplug.backends")) == 1
