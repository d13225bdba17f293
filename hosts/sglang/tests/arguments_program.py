"""
SGLang's own arguments after its plugins were loaded. A program: it reads command lines from standard input as JSON, and
writes what SGLang makes of each. `test_arguments` runs it: SGLang's lists, hooks and plugins belong to a process.
"""

# ruff: noqa: PLC0415 - the stubs stand before whatever imports SGLang
from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import sys


def without_torchvision():
    """Let torchvision import beside the CPU build of torch: its build wants CUDA, and its operators are not there."""
    import torch

    register = torch.library.register_fake

    def skip(name, *args, **kwargs):
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = skip


def load():
    """Load SGLang's plugins as each of its processes does."""
    without_torchvision()
    from sglang.srt.plugins import load_plugins

    load_plugins()


def registered(_=None):
    """Return our names in the lists and in the registry of this process, each as often as it is there."""
    load()
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    import attnplug_sglang

    attnplug_sglang.register()  # once more: nothing is added twice
    lists = [name for name in vars(server_args) if name.endswith("ATTENTION_BACKEND_CHOICES")]
    own = {name: [each for each in getattr(server_args, name) if each.startswith("attnplug")] for name in lists}
    return {**own, "registry": [name for name in ATTENTION_BACKENDS if name.startswith("attnplug")]}


def parse(argv):
    """Return what SGLang makes of one command line: the backends and the page size, or the error."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = ServerArgs.from_cli_args(parser.parse_args(argv))
        if hasattr(found, "resolve_once"):  # 0.5.15 resolves in the constructor
            found.resolve_once()
            found = overrides.resolved_view(found)
    except SystemExit:
        return {"error": said.getvalue()}
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "page_size")
    more = ("speculative_draft_attention_backend", "enable_deterministic_inference")
    return {name: getattr(found, name) for name in (*names, *more)}


if __name__ == "__main__":
    requests = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        here = registered()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worker = pool.map(registered, [None])[0]
        answers = [parse(argv) for argv in requests]
    json.dump({"here": here, "worker": worker, "answers": answers}, sys.stdout)
