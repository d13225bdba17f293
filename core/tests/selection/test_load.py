"""Loading: the winner is imported, checked and probed; a failure is isolated, recorded and explained."""

from __future__ import annotations

import json
import sys

import pytest

import attnplug
from attnplug.discovery.registry import Registry
from attnplug.errors import (
    DecisionError,
    DuplicateBackendError,
    ManifestError,
    NoBackendError,
    PluginContractError,
    PluginLoadError,
    RequirementsError,
)
from attnplug.request.settings import Settings
from attnplug.selection import process
from attnplug.selection.plan import Plan
from attnplug.selection.selection import Selection

pytest.importorskip("torch", reason="torch is not installed")

from attnplug.contract import LoadedBackend

REFUSING_PROBE = """{source}
from attnplug import Reason

@hookimpl
def attnplug_probe(variant):
    return Reason("broken", "sinks", True, "built without sinks", "rebuild it with sinks")
"""
RAISING_CONSTRUCTOR = """{source}
_made = attnplug_backend

@hookimpl
def attnplug_backend(variant, agreement):
    class Raises(_made(variant, agreement)):
        def __init__(self, agreement, device):
            raise ValueError("no device")

    return Raises
"""
# What a plugin may raise, with what a message says of it: nothing of it is an Exception, or can be printed.
ODD = {
    "base": ("type('Odd', (BaseException,), {})('why')", "Odd: why"),
    "cancelled": ("__import__('asyncio').CancelledError()", "CancelledError"),
    "left": ("GeneratorExit()", "GeneratorExit"),
    "exit": ("SystemExit('why')", "SystemExit: why"),
    "unprintable": (
        "type('Odd', (Exception,), {'__str__': lambda self: 1 / 0, '__repr__': lambda self: 1 / 0})()",
        "Odd (its text cannot be shown: str() of it raises ZeroDivisionError)",
    ),
    "exits when printed": (
        "type('Odd', (BaseException,), {'__str__': lambda self: exit(), '__repr__': lambda self: exit()})()",
        "Odd (its text cannot be shown: str() of it raises SystemExit)",
    ),
}
# Where a plugin may raise it.
PLACES = {
    "import": "raise {odd}",
    "hook": "from attnplug.contract import hookimpl\n@hookimpl\ndef attnplug_backend(variant): raise {odd}",
    "probe": "{source}\n@hookimpl\ndef attnplug_probe(device): raise {odd}",
    "attributes of the module": "{source}\ndef __dir__(): raise {odd}",
    "repr of the probe's answer": """{source}
def raise_odd(self): raise {odd}

@hookimpl
def attnplug_probe(device): return type("Answer", (), {"__repr__": raise_odd})()
""",
    "repr of the hook's answer": """from attnplug.contract import hookimpl
def raise_odd(self): raise {odd}

@hookimpl
def attnplug_backend(variant): return type("Answer", (), {"__repr__": raise_odd})()
""",
    "constructor": """{source}
_made = attnplug_backend

@hookimpl
def attnplug_backend(variant, agreement):
    def __init__(self, agreement, device): raise {odd}
    return type("Raises", (_made(variant, agreement),), {"__init__": __init__})
""",
    "attribute of the backend": """{source}
_made = attnplug_backend

@hookimpl
def attnplug_backend(variant, agreement):
    def read(self, name):
        if name == "device_properties": raise {odd}
        return object.__getattribute__(self, name)
    return type("Raises", (_made(variant, agreement),), {"__getattribute__": read})
""",
}
FAILURES = {
    "import": ("raise ImportError('libflash.so.3: no such file')", PluginLoadError, "does not import"),
    "exit": ("raise SystemExit(3)", PluginLoadError, "SystemExit"),
    "os": ("raise OSError('no such library')", PluginLoadError, "OSError"),
    "no hook": ("x = 1", PluginContractError, "implements no hook attnplug_backend"),
    "unknown hook": ("{source}\n@hookimpl\ndef attnplug_other(variant): ...", PluginContractError, "attnplug_other"),
    "argument": (
        "from attnplug.contract import hookimpl\n@hookimpl\ndef attnplug_backend(variant, colour): ...",
        PluginContractError,
        "colour",
    ),
    "no backend": (
        "from attnplug.contract import hookimpl\n@hookimpl\ndef attnplug_backend(variant): return int",
        PluginContractError,
        "int",
    ),
    "hook raises": (
        "from attnplug.contract import hookimpl\n@hookimpl\ndef attnplug_backend(variant): raise KeyError('x')",
        PluginLoadError,
        "raised KeyError",
    ),
    "probe refuses": (REFUSING_PROBE, PluginLoadError, "built without sinks"),
    "probe raises": (
        "{source}\n@hookimpl\ndef attnplug_probe(device): raise OSError('no nvcc')",
        PluginLoadError,
        "raised OSError: no nvcc",
    ),
    "probe returns nonsense": (
        "{source}\n@hookimpl\ndef attnplug_probe(agreement): return 'no'",
        PluginContractError,
        "returned 'no'",
    ),
    "constructor": (RAISING_CONSTRUCTOR, PluginLoadError, "raised ValueError: no device"),
}


@pytest.fixture(params=sorted(FAILURES))
def failing(request, world, flash_manifest, plugin_source):
    code, error, text = FAILURES[request.param]
    world("generic", bad=(flash_manifest, code.replace("{source}", plugin_source)))
    return error, text


def test_load_returns_the_backend_of_the_selection(both, request_of):
    backend = attnplug.load(request_of(sinks=True))

    assert isinstance(backend, LoadedBackend)
    assert backend.id == "flash/new"
    assert backend.selection is attnplug.select(request_of(sinks=True))


def test_a_named_backend_fails_loudly(failing, request_of):
    error, text = failing

    with pytest.raises(error) as caught:
        attnplug.load(request_of(), backend="flash/hopper")

    assert text in str(caught.value)
    assert caught.value.fix


def test_an_unnamed_one_is_left_out_and_the_next_is_loaded(failing, request_of, caplog):
    backend = attnplug.load(request_of())

    assert backend.id == "generic/default"
    broken = {v.id: v for v in backend.selection.verdicts if v.status == "broken"}
    assert {"flash/hopper", "flash/new", "flash/old"} == set(broken)
    assert failing[1] in "".join(str(reason) for v in broken.values() for reason in v.reasons)
    assert "flash/hopper failed to load and is left out" in caplog.text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("odd", "text"), ODD.values(), ids=ODD)
def test_whatever_a_plugin_raises_breaks_only_that_plugin(
    world, request_of, flash_manifest, plugin_source, caplog, place, odd, text
):
    code = PLACES[place].replace("{source}", plugin_source).replace("{odd}", odd)
    registry = world("generic", bad=(flash_manifest, code))

    with pytest.raises((PluginLoadError, PluginContractError)) as caught:
        attnplug.load(request_of(), backend="flash/hopper")
    assert text in str(caught.value)
    assert attnplug.load(request_of()).id == "generic/default"

    assert text in caplog.text
    broken = {c.id: c for c in registry.candidates() if c.backend == "flash"}
    assert {c.availability for c in broken.values()} == {"broken"}
    assert text in str(broken["flash/hopper"].reasons[0])


@pytest.mark.parametrize("place", PLACES)
def test_the_users_interrupt_passes_and_breaks_nothing(world, request_of, flash_manifest, plugin_source, place):
    code = PLACES[place].replace("{source}", plugin_source).replace("{odd}", "KeyboardInterrupt")
    registry = world("generic", bad=(flash_manifest, code))

    with pytest.raises(KeyboardInterrupt):
        attnplug.load(request_of())

    assert {c.availability for c in registry.candidates() if c.backend == "flash"} == {"ready"}


def test_auto_in_a_list_permits_falling_back(failing, request_of):
    assert attnplug.load(request_of(), backend=["flash/hopper", "generic"]).id == "generic/default"


def test_the_original_failure_is_the_cause(world, request_of, flash_manifest):
    world(bad=(flash_manifest, "import not_there_at_all"))

    with pytest.raises(PluginLoadError) as caught:
        attnplug.load(request_of(), backend="flash/hopper")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)

    with pytest.raises(NoBackendError) as caught:
        attnplug.load(request_of())
    assert "not_there_at_all" in str(caught.value)


def test_strict_raises_where_it_happens(world, request_of, flash_manifest):
    world("generic", bad=(flash_manifest, "1 / 0"), settings=Settings(strict=True))

    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        attnplug.load(request_of())


def test_loading_without_torch_says_so(both, request_of, monkeypatch):
    def fails(name):
        raise ModuleNotFoundError(name="torch")

    with monkeypatch.context() as patch:
        patch.setattr("attnplug.selection.load.import_module", fails)
        with pytest.raises(PluginLoadError, match=r"attnplug\[torch\]"):
            attnplug.load(request_of(), backend="flash/hopper")
    assert attnplug.load(request_of()).id == "flash/hopper"


def test_without_torch_no_candidate_is_tried_again(both, request_of, monkeypatch):
    def fails(name):
        raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr("attnplug.selection.load.import_module", fails)
    with pytest.raises(PluginLoadError, match=r"attnplug\[torch\]"):
        attnplug.load(request_of())
    assert {v.status for v in attnplug.explain(request_of()).verdicts} & {"chosen"}


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        (OSError("libcudart.so.12: cannot open shared object file"), "the installation of torch"),
    ],
)
def test_a_torch_that_does_not_import_is_named(both, request_of, monkeypatch, error, fix):
    def fails(name):
        raise error

    monkeypatch.setattr("attnplug.selection.load.import_module", fails)
    with pytest.raises(PluginLoadError, match=f"does not import: {type(error).__name__}") as caught:
        attnplug.load(request_of())
    assert caught.value.__cause__ is error
    assert fix in caught.value.fix


def test_selecting_and_explaining_import_no_plugin(both, request_of):
    attnplug.select(request_of())
    str(attnplug.explain(request_of(sinks=True)))

    assert not [name for name in sys.modules if name.startswith("scratch_")]


def test_loading_imports_only_the_winner(both, request_of):
    attnplug.load(request_of())

    assert {name for name in sys.modules if name.endswith(".plugin") and name.startswith("scratch_")} == {
        "scratch_flash.plugin"
    }


def test_a_decision_is_loaded_as_it_is(both, request_of):
    selection = attnplug.select(request_of(), backend="generic")

    assert attnplug.load(selection).selection == selection
    with pytest.raises(RequirementsError, match="was to be loaded with device and backend"):
        attnplug.load(selection, "cpu", backend="flash")
    for ask in (attnplug.select, attnplug.explain):
        with pytest.raises(RequirementsError, match=r"load it with selection\.load\(\)") as caught:
            ask(selection)
        assert len(str(caught.value)) < 300


class TestElsewhere:
    """A decision that came from another process is carried out as it is, or refused."""

    @pytest.fixture
    def sent(self, both, request_of):
        return json.loads(
            json.dumps(attnplug.select(request_of(sinks=True), options={"flash": {"splits": 4}}).to_dict())
        )

    def test_exactly_that_decision_is_loaded(self, sent, world):
        world("flash", "generic", settings=Settings(backend=("generic",)))

        backend = Selection.from_dict(sent).load()

        assert backend.id == "flash/new"
        assert dict(backend.agreement.options) == {"splits": 4}

    def test_another_version_is_refused(self, sent, world):
        world("flash")
        sent["verdicts"][0]["distribution"] = "dist-flash 0.9"

        with pytest.raises(
            PluginLoadError,
            match=r"'dist-flash 0\.9' was selected, and 'dist-flash 1\.0' is installed here(.|\n)*on every rank",
        ):
            Selection.from_dict(sent).load()

    def test_a_missing_plugin_is_refused(self, sent, world):
        world("generic")

        with pytest.raises(PluginLoadError, match="'flash/new' is not installed here"):
            Selection.from_dict(sent).load()

    def test_a_missing_library_is_refused(self, sent, world):
        world("flash", missing=("flash-new",))

        with pytest.raises(PluginLoadError, match="flash-new >=4 is required and not installed"):
            Selection.from_dict(sent).load()

    def test_a_blocked_plugin_is_refused(self, sent, world):
        world("flash", settings=Settings(block=frozenset({"flash"})))

        with pytest.raises(PluginLoadError, match="may not be used here"):
            Selection.from_dict(sent).load()
        assert "scratch_flash.plugin" not in sys.modules

    def test_terms_that_do_not_hold_here_are_refused(self, sent, world):
        world("flash")
        sent["agreement"]["block_size"] = 24

        with pytest.raises(PluginLoadError, match="does not support block_size=24; supported: 128, multiples of 16"):
            Selection.from_dict(sent).load()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"cudagraph": "always"}, "cudagraph would be 'never', not 'always'"),
            ({"reads_lengths": True}, "reads_lengths would be False, not True"),
            ({"kv_cache_dtype": "float16"}, "kv_cache_dtype would be 'bfloat16', not 'float16'"),
            ({"kv_cache_form": None}, "block_size and kv_layout and kv_cache_form would be True, not False"),
            ({"kv_layout": None}, "block_size and kv_layout and kv_cache_form would be True, not False"),
            ({"block_size": None}, "block_size and kv_layout and kv_cache_form would be True, not False"),
            ({"options": {"foo": 1}}, "the option 'foo' of 'flash'"),
            ({"options": {}}, "options would be {'splits': 0}, not {}"),
        ],
    )
    def test_terms_that_were_changed_are_refused(self, sent, world, change, message):
        world("flash")
        sent["agreement"].update(change)

        with pytest.raises(PluginLoadError) as caught:
            Selection.from_dict(sent).load()
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        "change", [lambda d: d.pop("verdicts"), lambda d: d.update(more=1), lambda d: d["agreement"].pop("variant")]
    )
    def test_what_is_no_decision_is_refused(self, sent, change):
        change(sent)

        with pytest.raises(DecisionError, match=r"whole and unchanged"):
            Selection.from_dict(sent)
        with pytest.raises(DecisionError):
            Plan.from_dict(sent)


@pytest.fixture
def by_hand(tmp_path):
    """Return the file of a manifest for `notebook_plugin`, which serves what no other one does."""
    manifest = tmp_path / "notebook.toml"
    manifest.write_text(
        'api = "1.0"\nbackend = { name = "mine", summary = "by hand" }\n'
        '[supports]\ndevice_type = "cuda"\ncompute_capability = "9.0"\ndtype = "bfloat16"\nhead_size = 64\n'
        'features = ["custom_mask"]\n'
    )
    yield manifest
    sys.modules.pop("notebook_plugin", None)


def rescanned(registry):
    """Return a scan that finds what a registry has been given besides what was registered by hand."""
    installed = [plugin for plugin in registry.plugins if not plugin.is_by_hand]
    return lambda settings, by_hand: Registry(
        (*installed, *by_hand), version_of=registry._version_of, settings=settings
    )


class TestRegister:
    def test_a_registered_backend_is_selected_like_any(self, both, request_of, tmp_path, plugin_source, by_hand):
        (tmp_path / "notebook_plugin.py").write_text(plugin_source)

        name = attnplug.register("notebook_plugin", manifest=by_hand)
        attnplug.register("notebook_plugin", manifest=by_hand)

        assert name == "mine"
        assert attnplug.load(request_of(paged=False, custom_mask=True)).id == "mine/default"

    def test_a_refresh_keeps_it_and_tries_it_again(
        self, both, request_of, tmp_path, plugin_source, by_hand, monkeypatch
    ):
        monkeypatch.setattr(process, "Registry", type("Scanned", (), {"scan": staticmethod(rescanned(both))}))
        module = tmp_path / "notebook_plugin.py"
        module.write_text("raise OSError('half-way')\n")
        attnplug.register("notebook_plugin", manifest=by_hand)
        wanted = request_of(paged=False, custom_mask=True)

        with pytest.raises(PluginLoadError, match="does not import: OSError: half-way") as caught:
            attnplug.load(wanted, "cuda:9.0", backend="mine")
        assert caught.value.fix == (
            "repair the module 'notebook_plugin', then attnplug.refresh(); or set ATTNPLUG_BLOCK=mine"
        )
        failed = next(v for v in attnplug.explain(wanted).verdicts if v.id == "mine/default")
        assert str(failed.reasons[0]).startswith("the module 'notebook_plugin' of the backend 'mine'")
        assert str(failed.fix) == "repair the module 'notebook_plugin', then attnplug.refresh()"

        module.write_text(plugin_source + "# repaired\n")
        attnplug.refresh()
        attnplug.refresh()

        assert attnplug.load(wanted, "cuda:9.0", backend="mine").id == "mine/default"
        assert [plugin.name for plugin in attnplug.registry().by_hand] == ["mine"]

    def test_an_edited_manifest_replaces_the_former(self, both, request_of, by_hand):
        attnplug.register("notebook_plugin", manifest=by_hand)
        by_hand.write_text(by_hand.read_text().replace("head_size = 64", "head_size = 64\nkv_layout = 'HND'"))
        attnplug.register("notebook_plugin", manifest=by_hand)
        by_hand.write_text(by_hand.read_text().replace('"mine"', '"renamed"'))

        assert attnplug.register("notebook_plugin", manifest=by_hand) == "renamed"

        assert [plugin.name for plugin in attnplug.registry().by_hand] == ["renamed"]
        assert attnplug.select(request_of(paged=False, custom_mask=True)).backend == "renamed"

    def test_a_path_that_does_not_exist_is_refused(self, both, tmp_path):
        for path in (tmp_path / "none.toml", tmp_path, "none.toml"):
            with pytest.raises(ManifestError, match="there is no such file") as caught:
                attnplug.register("anything", manifest=path)
            assert repr(str(path)) in caught.value.problem
            assert "wheel" not in str(caught.value)

    def test_nothing_is_half_registered(self, both, request_of, tmp_path, flash_manifest):
        generation = both.generation
        broken = tmp_path / "broken.toml"
        broken.write_text("api = 3")
        twin = tmp_path / "twin.toml"
        twin.write_text(flash_manifest)

        with pytest.raises(ManifestError):
            attnplug.register("anything", manifest=broken)
        with pytest.raises(DuplicateBackendError):
            attnplug.register("anything", manifest=twin)

        assert both.generation == generation
        assert attnplug.select(request_of()).id == "flash/hopper"
