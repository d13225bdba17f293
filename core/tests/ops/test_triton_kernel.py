"""A kernel is compiled for all that Triton looks at, and for nothing else."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attnplug.ops import Kernel
from attnplug.ops import triton as triton_launch

ROWS = torch.zeros(64)


class Double:
    """In the place of a launch."""

    made: list[Double]

    def __init__(self, function, constants, **options):
        self.given, self.calls, self.is_compiled = (function, constants, options), [], False
        self.made.append(self)

    def first(self, grid, *arguments):
        self.is_compiled = True
        self.calls.append(("first", grid, arguments))

    def again(self, grid, *arguments):
        self.calls.append(("again", grid, arguments))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(triton_launch, "Launch", Double)
    monkeypatch.setattr(Double, "made", [], raising=False)
    return Double.made


@pytest.fixture
def run(made):
    kernel = Kernel("kernel")

    def running(programs=5, rows=ROWS, stride=16, number=3, constants=(64,), **options):
        kernel.run(programs, (rows,), (stride, 8), (number, 0.5), constants, **{"num_warps": 4, **options})

    return running


@pytest.mark.parametrize("other", [{}, {"programs": 6}, {"stride": 32}, {"stride": 0}, {"number": 1}, {"number": 16}])
def test_like_arguments_go_straight_to_the_driver(run, made, other):
    run()
    run(**other)

    (launch,) = made
    first, again = launch.calls
    stride, number = other.get("stride", 16), other.get("number", 3)
    assert launch.given == ("kernel", (64,), {"num_warps": 4})
    assert first == ("first", (5,), (ROWS, 16, 8, 3, 0.5))
    assert again == ("again", (other.get("programs", 5), 1, 1), (ROWS.data_ptr(), stride, 8, number, 0.5))


def described(rows=ROWS, box=(16,)):
    return SimpleNamespace(base=rows, block_shape=list(box))


def test_descriptors_come_first_and_as_they_are(run, made):
    one, other = described(), described(torch.ones(32))
    run(descriptors=[one])
    run(descriptors=[other])

    (launch,) = made
    assert [arguments[0] for _, _, arguments in launch.calls] == [one, other]
    assert launch.calls[1][2][1:] == (ROWS.data_ptr(), 16, 8, 3, 0.5)


@pytest.mark.parametrize("other", [[], [described(box=(32,))], [described(ROWS.half())], [described()] * 2], ids=len)
def test_other_descriptors_are_compiled(run, made, other):
    run(descriptors=[described()])
    run(descriptors=other)

    assert len(made) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 1},
        {"stride": 24},
        {"constants": (32,)},
        {"num_warps": 8},
        {"maxnreg": 168},
        {"rows": ROWS.half()},
        {"rows": ROWS[1:]},
    ],
    ids=str,
)
def test_others_are_compiled(run, made, other):
    run()
    run(**other)

    assert [[kind for kind, *_ in launch.calls] for launch in made] == [["first"], ["first"]]


def test_a_stride_of_1_is_no_multiple_of_16(run, made):
    """Python holds 1 and True for the same key."""
    run(stride=1)
    run(stride=16)

    assert len(made) == 2


def test_no_programs_are_no_launch(run, made):
    run(programs=0)

    assert made == []


def test_a_kernel_has_launches_of_its_own(made):
    for name in ("one", "another"):
        Kernel(name).run(1, (ROWS,), (), (), ())

    assert [launch.given[0] for launch in made] == ["one", "another"]


class Elsewhere:
    """A tensor on the second device."""

    dtype = torch.float32

    def get_device(self):
        return 1

    def data_ptr(self):
        return 4096


def test_a_launch_is_on_the_device_of_its_tensors(run, made, monkeypatch):
    current = [0]

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    where = []
    monkeypatch.setattr(Double, "first", lambda *_: where.append(current[-1]))

    run(rows=Elsewhere())
    run()  # one in host memory, as where kernels are interpreted

    assert where == [1, 0]
    assert current == [0]
    assert len(made) == 2
