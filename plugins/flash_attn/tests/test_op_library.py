"""The op libraries in vLLM's wheel are loaded once, from where they are, and only if they take what is passed."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import PluginLoadError
from attnplug_flash_attn import op_files
from attnplug_flash_attn.kernels import op_library

NAME = "_attnplug_test_C"


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(op_files.ARGUMENTS, NAME, {"fwd": "q k", "plan": "n"})
    monkeypatch.setitem(op_files.DISTRIBUTIONS, NAME, "vllm")
    monkeypatch.setitem(op_files.FILES, NAME, f"vllm/vllm_flash_attn/{NAME}")


@pytest.fixture
def define(known):
    made = []

    def define(*schemas):
        library = torch.library.Library(NAME, "FRAGMENT")
        for schema in schemas:
            library.define(schema)
        made.append(library)

    yield define
    for library in made:
        library._destroy()


def test_ops_that_are_registered_are_not_loaded(define, monkeypatch):
    define("fwd(Tensor q, Tensor k, bool new=False) -> Tensor", "plan(int n) -> Tensor")
    monkeypatch.setattr(op_library, "find", lambda library: pytest.fail("it was looked for"))
    assert op_library.load(NAME) is getattr(torch.ops, NAME)


@pytest.mark.parametrize(
    ("schemas", "changed"),
    [
        (["fwd(Tensor q, Tensor k) -> Tensor"], "plan"),
        (["fwd(Tensor q, Tensor v) -> Tensor", "plan(int n) -> Tensor"], "fwd"),
        (["fwd(Tensor q, Tensor k, Tensor new) -> Tensor", "plan(int n) -> Tensor"], "fwd"),
        (["fwd(Tensor q) -> Tensor", "plan(int n) -> Tensor"], "fwd"),
    ],
)
def test_ops_with_other_arguments_are_refused(define, schemas, changed):
    define(*schemas)
    with pytest.raises(PluginLoadError, match=rf"{NAME}\.{changed} of the installed vllm has an unsupported signature"):
        op_library.load(NAME)


def test_a_library_that_is_not_there(known, monkeypatch):
    monkeypatch.setattr(op_library, "find", lambda library: None)
    with pytest.raises(PluginLoadError, match=f"'{NAME}' is not installed"):
        op_library.load(NAME)


def test_a_file_that_does_not_load(known, monkeypatch, tmp_path):
    file = tmp_path / f"{NAME}.abi3.so"
    file.write_bytes(b"\x7fELF")
    monkeypatch.setattr(op_library, "find", lambda library: file)
    with pytest.raises(PluginLoadError, match=f"'{NAME}' does not load"):
        op_library.load(NAME)
