"""What a kernel is compiled for, and that it is compiled once for that."""

from __future__ import annotations

import pytest
import torch

from attnplug_int8_ixformer import kernel
from attnplug_int8_ixformer.tiles import MOST_SPLITS, DecodeTiles


class Double:
    """In the place of a launch."""

    made: list[tuple] = []  # noqa: RUF012 - of the test

    def __init__(self, function, constants, **options):
        self.calls, self.is_compiled = [], False
        self.made.append((constants, options, self))

    def first(self, grid, *arguments):
        self.is_compiled = True
        self.calls.append(("first", grid, len(arguments)))

    def again(self, grid, *arguments):
        assert all(isinstance(argument, (int, float)) for argument in arguments)
        self.calls.append(("again", grid, len(arguments)))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(kernel, "Launch", Double)
    monkeypatch.setattr(Double, "made", [])
    return Double.made


def test_like_arguments_are_one_launch(made):
    run, tensor = kernel.Kernel(None).run, torch.zeros(64)
    for programs, number in ((3, 1.5), (7, -1)):
        run(programs, [tensor], [16, 1], [number], (128, True), warps=4)

    ((constants, options, launch),) = made
    assert (constants, options) == ((128, True), {"num_warps": 4})
    assert launch.calls == [("first", (3,), 4), ("again", (7, 1, 1), 4)]


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": [torch.zeros(64)[1:]]},
        {"tensors": [torch.zeros(64, dtype=torch.float64)]},
        {"strides": [17, 1]},
        {"strides": [16, 16]},
        {"constants": (128, False)},
        {"warps": 8},
    ],
    ids=str,
)
def test_other_arguments_are_another_launch(made, other):
    run = kernel.Kernel(None).run
    given = {"tensors": [torch.zeros(64)], "strides": [16, 1], "constants": (128, True), "warps": 4}
    for arguments in (given, {**given, **other}):
        run(1, arguments["tensors"], arguments["strides"], [], arguments["constants"], warps=arguments["warps"])

    assert len(made) == 2


def test_no_programs_are_no_launch(made):
    kernel.Kernel(None).run(0, [torch.zeros(1)], [], [], (), warps=4)

    assert made == []


def test_splits_fill_the_device_and_no_more():
    tiles = DecodeTiles(keys=64, programs=16)

    assert tiles.splits(sequences=512, keys=4096, multiprocessors=132) == 5
    assert tiles.splits(sequences=1, keys=100, multiprocessors=132) == 1
    assert tiles.splits(sequences=8, keys=1 << 20, multiprocessors=132) == MOST_SPLITS
    assert tiles.splits(sequences=8, keys=1 << 20, multiprocessors=132, most=3) == 3
    for requests in (1, 7, 64, 500):
        most = tiles.most_parts(requests=requests, kv_heads=8, multiprocessors=132)
        assert requests * tiles.splits(sequences=requests * 8, keys=1 << 20, multiprocessors=132) <= most
