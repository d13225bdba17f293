"""The nodes as ComfyUI loads and runs them, and the folder that they are in."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch

import attnplug
import attnplug_comfyui
from attnplug.errors import RequestError, SettingsError
from attnplug_comfyui import nodes
from attnplug_comfyui.__main__ import main
from attnplug_comfyui.folder import SOURCE
from attnplug_comfyui.nodes import AttnplugAttention, AttnplugAttentionReport


def run(node, **inputs):
    """Run a node as ComfyUI does: its class makes an object, whose function is called with inputs by name."""
    declared = node.INPUT_TYPES()
    known = {**declared["required"], **declared.get("optional", {})}
    assert inputs.keys() <= known.keys()
    assert declared["required"].keys() <= inputs.keys()
    return getattr(node(), node.FUNCTION)(**inputs)


def test_the_node_returns_a_patched_clone(comfyui) -> None:
    model = comfyui.model()

    (patched,) = run(AttnplugAttention, model=model, backend="auto", fallback=True, options="", replace=False)

    override = attnplug_comfyui.override_of(patched)
    assert (override.backend, override.options, override.fallback) == (None, None, True)
    assert patched is not model
    assert model.model_options == {"transformer_options": {}}


def test_the_defaults_of_inputs_are_those_of_the_function(comfyui) -> None:
    inputs = AttnplugAttention.INPUT_TYPES()
    defaults = {name: one[1]["default"] for part in inputs.values() for name, one in part.items() if len(one) > 1}

    (patched,) = AttnplugAttention().patch(comfyui.model())
    (same,) = run(AttnplugAttention, model=comfyui.model(), **defaults)

    assert repr(attnplug_comfyui.override_of(patched)) == repr(attnplug_comfyui.override_of(same))


def test_the_choices_are_what_serves_calls_here() -> None:
    choices = nodes.backend_choices()

    assert choices[0] == "auto"
    assert {"torch", "torch/sdpa"} <= set(choices)
    assert not [name for name in choices if name.startswith(("blocksparse", "int8_ixformer"))]
    assert len(set(choices)) == len(choices)
    for name in choices[1:]:
        attnplug.registry().check_name(name)


def test_a_wrong_setting_leaves_the_node_with_auto(monkeypatch, caplog) -> None:
    monkeypatch.setattr(attnplug, "explain", lambda _: _raise(SettingsError("a setting is wrong", "", "correct it")))

    assert nodes.backend_choices() == ["auto"]
    assert "a setting is wrong" in caplog.text


def _raise(error):
    raise error


def test_options_are_an_object_of_objects(comfyui) -> None:
    (patched,) = run(
        AttnplugAttention, model=comfyui.model(), backend="torch", fallback=False, options='{"torch": {"a": 1}}'
    )

    assert attnplug_comfyui.override_of(patched).options == {"torch": {"a": 1}}
    assert nodes.options_from(" \n") is None


@pytest.mark.parametrize("text", ["[]", "{", '{"torch": 1}', "1"])
def test_other_options_are_an_error(text, comfyui) -> None:
    with pytest.raises(SettingsError, match="the options") as caught:
        run(AttnplugAttention, model=comfyui.model(), backend="auto", fallback=False, options=text)

    assert "JSON object" in caught.value.expected


def test_the_report_node_says_where_calls_went(comfyui) -> None:
    (patched,) = run(AttnplugAttention, model=comfyui.model(), backend="auto", fallback=False)
    empty = run(AttnplugAttentionReport, model=patched, after={})
    for _ in range(2):
        patched.attend(*[torch.randn(1, 5, 32)] * 3, 2)

    kept = run(AttnplugAttentionReport, model=patched, after={}, reset=False)
    found = run(AttnplugAttentionReport, model=patched, after={})

    line = "2 × by torch/sdpa in float32, in place of ComfyUI's attention_pytorch"  # noqa: RUF001 - as it is written
    assert empty["result"] == ("no attention call was made",)
    assert kept == found == {"ui": {"text": (line,)}, "result": (line,)}
    assert run(AttnplugAttentionReport, model=patched, after={}) == empty
    assert math.isnan(AttnplugAttentionReport.IS_CHANGED(model=patched))  # equals nothing: it runs each time


def test_the_report_of_a_model_that_lost_its_override_is_an_error(comfyui) -> None:
    with pytest.raises(RequestError, match="no override"):
        run(AttnplugAttentionReport, model=comfyui.model(), after={})


@pytest.mark.parametrize("node", nodes.NODE_CLASS_MAPPINGS.values(), ids=nodes.NODE_CLASS_MAPPINGS)
def test_a_node_has_what_comfyui_reads(node) -> None:
    assert callable(getattr(node, node.FUNCTION))
    assert isinstance(node.RETURN_TYPES, tuple)
    assert node.CATEGORY
    assert node.DESCRIPTION
    for part in node.INPUT_TYPES().values():
        for declared in part.values():
            assert isinstance(declared[0], str | list)
            assert len(declared) == 1 or isinstance(declared[1], dict)
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == nodes.NODE_CLASS_MAPPINGS.keys()


def checkout(tmp_path):
    """Return a folder like a checkout of ComfyUI."""
    (tmp_path / "custom_nodes").mkdir()
    return tmp_path


def load(folder):
    """Load a folder as ComfyUI does: by its path, under a name of no package."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("link", [False, True])
def test_the_folder_is_written_and_loads(link, tmp_path) -> None:
    target = attnplug_comfyui.install(checkout(tmp_path), link=link)

    module = load(target)

    assert target == tmp_path / "custom_nodes" / "attnplug"
    assert target.is_symlink() is link
    assert module.NODE_CLASS_MAPPINGS is nodes.NODE_CLASS_MAPPINGS
    assert module.NODE_DISPLAY_NAME_MAPPINGS is nodes.NODE_DISPLAY_NAME_MAPPINGS


def test_a_second_call_renews_the_folder(tmp_path) -> None:
    comfyui = checkout(tmp_path)
    for link in (False, False, True, True, False):
        target = attnplug_comfyui.install(comfyui, link=link)
        if not link:
            (target / "__pycache__").mkdir(exist_ok=True)  # as importing it leaves it
        assert target.is_symlink() is link
        assert "NODE_CLASS_MAPPINGS" in (target / "__init__.py").read_text("utf-8")
    assert (SOURCE / "__init__.py").exists()


def test_what_is_something_else_is_left_alone(tmp_path) -> None:
    comfyui = checkout(tmp_path)
    other = comfyui / "custom_nodes" / "attnplug"
    other.mkdir()
    for name in ("__init__.py", "more.py"):
        (other / name).write_text("x = 1\n", "utf-8")
        with pytest.raises(RequestError, match="has something else: __init__"):
            attnplug_comfyui.install(comfyui)
    assert (other / "__init__.py").read_text("utf-8") == "x = 1\n"


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_what_is_no_folder_is_left_alone(kind, tmp_path) -> None:
    comfyui = checkout(tmp_path)
    other = comfyui / "custom_nodes" / "attnplug"
    if kind == "a file":
        other.write_text("", "utf-8")
    else:
        other.symlink_to(tmp_path)

    with pytest.raises(RequestError, match=f"has something else: {kind}"):
        attnplug_comfyui.install(comfyui)

    assert other.exists()


def test_the_command_writes_the_folder_or_says_why_not(tmp_path, capsys) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no folder custom_nodes" in capsys.readouterr().err
    assert main([str(checkout(tmp_path)), "--link"]) == 0
    assert "Attention by attnplug" in capsys.readouterr().out
    assert (tmp_path / "custom_nodes" / "attnplug").is_symlink()


def test_the_names_of_the_package_load_on_first_use() -> None:
    code = (
        "import sys, attnplug_comfyui as host; assert 'torch' not in sys.modules; "
        "print(dir(host) == sorted(host.__all__), all(hasattr(host, name) for name in host.__all__))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "True"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = attnplug_comfyui.nothing
