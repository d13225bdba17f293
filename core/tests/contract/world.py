"""Agreements, batches, tensors and refusals for the contract's tests."""

from __future__ import annotations

import gc
import pickle
import sys
from collections import Counter
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug.contract import Batch, Layer, Limits, LoadedBackend
from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from attnplug.selection.selection import Selection
from core.tests.contract.toy import ToyBackend

BLOCK_SIZE = 4
NUM_BLOCKS = 32


def agree(*, agreed_graphs="never", device="cpu", **requested):
    """Return the selection of the toy for these requirements, as if it had declared them all."""
    requirements = Requirements(
        **{"head_size": 8, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "float32", **requested}
    )
    paged = requirements.paged
    agreement = Agreement(
        backend="toy",
        variant="plain",
        requirements=requirements,
        block_size=(requirements.block_size or BLOCK_SIZE) if paged else None,
        kv_layout=(requirements.kv_layout or "NHD") if paged else None,
        kv_cache_form=(requirements.kv_cache_form or "joint") if paged else None,
        kv_cache_dtype=requirements.kv_cache_dtype,
        cudagraph=agreed_graphs,
    )
    return Selection(agreement=agreement, device=Device(device))


def make_backend(cls=ToyBackend, **requested):
    selection = agree(**requested)
    return LoadedBackend(cls(selection.agreement, selection.device))


def make_layer(backend, **fields):
    """Return the backend's implementation of a layer."""
    return backend.make_impl(Layer(**{"name": "layers.0", **fields}))


def random_cache(backend, num_blocks):
    """Return a KV cache of random numbers."""
    cache = backend.make_cache(num_blocks)
    for tensor in cache.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def copy_of(backend, cache):
    """Return another KV cache with the same numbers."""
    copy = backend.make_cache(cache.num_blocks)
    for role, tensor in cache.tensors.items():
        copy[role].copy_(tensor)
    return copy


def same(cache, other):
    """Whether two KV caches hold the same numbers."""
    return all(torch.equal(tensor, other[role]) for role, tensor in cache.tensors.items())


def is_clear(cache):
    """Whether a KV cache holds zeros alone."""
    return not any(tensor.any() for tensor in cache.tensors.values())


def limits(**changes):
    return Limits(**{"max_num_reqs": 16, "max_num_tokens": 64, "max_seq_len": 64, "num_blocks": NUM_BLOCKS, **changes})


def make_builder(backend, *impls, **changes):
    return backend.make_builder(impls or [make_layer(backend)], backend.make_state(limits(**changes)))


def page_out(query_lens, seq_lens, block_size=BLOCK_SIZE, width=None):
    """Return the block table and slots of requests that own consecutive blocks from 1 on."""
    counts = [-(-length // block_size) for length in seq_lens]
    table = torch.zeros(len(seq_lens), width or max([*counts, 1]), dtype=torch.int32)
    free = count(1)
    for row, used in enumerate(counts):
        table[row, :used] = torch.tensor([next(free) for _ in range(used)], dtype=torch.int32)
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - query, length)
    ]
    return table, torch.tensor(slots, dtype=torch.int64)


def make_batch(query_lens, seq_lens, *, block_size=BLOCK_SIZE, width=None, device=None, **changes):
    """Return a paged batch of requests that own consecutive blocks from 1 on."""
    table, slots = page_out(query_lens, seq_lens, block_size, width)
    fields = {"block_table": table, "slot_mapping": slots, "device": device, **changes}
    return Batch.from_lengths(query_lens, seq_lens, **fields)


def make_qkv(backend, tokens, keys=None):
    """Return query, key, value and output of a call."""
    requested = backend.agreement.requirements
    dtype = getattr(torch, requested.dtype)
    rows = tokens if keys is None else keys
    query = torch.randn(tokens, requested.num_q_heads, requested.head_size).to(dtype)
    key = torch.randn(rows, requested.num_kv_heads, requested.head_size).to(dtype)
    value = torch.randn(rows, requested.num_kv_heads, requested.head_size_v).to(dtype)
    return query, key, value, torch.full((tokens, requested.num_q_heads * requested.head_size_v), 7.0, dtype=dtype)


class Counted(TorchDispatchMode):
    """Counts the tensor operations inside of this context, by name."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def calls_of(run):
    """Return the Python functions and the functions of C that ``run()`` calls, itself included, each with its count."""
    python, foreign = Counter(), Counter()

    def count_call(frame, event, function):
        if event == "call":
            python[f"{frame.f_code.co_name} of {frame.f_globals.get('__name__')}"] += 1
        elif event == "c_call" and function is not sys.setprofile:
            foreign[getattr(function, "__qualname__", repr(function))] += 1

    before = sys.getprofile()
    gc.disable()  # finalizers of other tests are no calls of this one
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return python, foreign


def operations_of(run):
    """Return the tensor operations that ``run()`` dispatches, each with its count."""
    with Counted() as counted:
        run()
    return counted.operations


def at_most(counts, most):
    """Check a count of calls, and say what they are where there are more."""
    listed = "\n".join(f"{number:5} {name}" for name, number in counts.most_common())
    assert counts.total() <= most, f"{counts.total()} in place of at most {most}:\n{listed}"


@contextmanager
def refused(kind, problem="", expected="", fix=""):
    """Expect an error whose three sentences hold these texts, and which survives pickling."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    for part, text in ((error.problem, problem), (error.expected, expected), (error.fix, fix)):
        assert part
        assert text in part
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
