"""Triton kernels are compiled once per kind of arguments, and run on torch where Triton does not work."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from attnplug.ops import Kernel, write
from attnplug.ops import triton as triton_launch
from attnplug.ops.triton import Launch, triton_function, triton_works

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeKernel:
    """A fake of a Triton kernel and of its compiled form."""

    def __init__(self) -> None:
        self.calls = []
        self.compiled = {}

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return FakeCompiled(self.calls)

        return run


class FakeCompiled:
    def __init__(self, calls) -> None:
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("direct", grid, arguments))


def triton_of(version: str, target) -> SimpleNamespace:
    active = SimpleNamespace(get_current_target=target)
    return SimpleNamespace(
        __version__=version, __spec__=object(), runtime=SimpleNamespace(driver=SimpleNamespace(active=active))
    )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    caches = (triton_works, triton_function, triton_launch._is_stable, triton_launch._fusion)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_a_compiled_kernel_is_launched_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.7.1", object))
    kernel = FakeKernel()
    launch = Launch(kernel, (7, True), num_warps=2)
    assert not launch.is_compiled

    launch.first((3, 1, 1), "tensor", 5)
    assert launch.is_compiled
    launch.again((4, 1, 1), 1234, 5)

    assert kernel.calls == [
        ((3, 1, 1), ("tensor", 5, 7, True), {"num_warps": 2}),
        ("direct", (4, 1, 1), (1234, 5, 7, True)),
    ]


def test_an_older_triton_inspects_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.5.1", object))
    launch = Launch(FakeKernel(), ())

    launch.first((1, 1, 1))

    assert not launch.is_compiled


def test_every_launch_on_an_amd_gpu_is_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.7.1", object))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch = Launch(FakeKernel(), ())

    launch.first((1, 1, 1))

    assert not launch.is_compiled


@pytest.mark.parametrize(("version", "said"), [("3.8.0", {}), ("3.9.0", {"enable_fp_fusion": True})])
def test_newer_tritons_get_the_fusion_option(
    monkeypatch: pytest.MonkeyPatch, version: str, said: dict[str, bool]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of(version, object))
    kernel = FakeKernel()

    Launch(kernel, (), num_warps=2).first((1, 1, 1))

    assert kernel.calls == [((1, 1, 1), (), {"num_warps": 2, **said})]


def test_without_a_driver_everything_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def target() -> None:
        raise RuntimeError("0 active drivers")

    monkeypatch.setitem(sys.modules, "triton", triton_of("3.7.1", target))

    assert not triton_works()
    assert triton_function("attnplug.ops.triton_write", "write") is None
    assert len(caplog.records) == 1
    assert "0 active drivers" in caplog.text


def test_without_triton_nothing_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: None)

    assert not triton_works()
    assert not caplog.records


def test_importing_the_operations_imports_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: pytest.fail("Triton was looked up on the CPU"))

    write.write_kv(*torch.ones(2, 2, 1, 4), *torch.zeros(2, 2, 4, 1, 4), torch.tensor([4, 5]))


def test_modules_with_kernels_are_imported_on_a_gpu_only() -> None:
    code = "import sys, attnplug.ops, attnplug.batching; print(*[name for name in sys.modules if '.triton_' in name])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "attnplug.ops.triton_write" not in done.stdout
    assert "attnplug.batching.triton_pages" not in done.stdout


ROWS = torch.zeros(64)


class FakeLaunch:
    """A fake launch."""

    made: list[FakeLaunch]

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
    monkeypatch.setattr(triton_launch, "Launch", FakeLaunch)
    monkeypatch.setattr(FakeLaunch, "made", [], raising=False)
    return FakeLaunch.made


@pytest.fixture
def run(made):
    kernel = Kernel("kernel")

    def running(programs=5, rows=ROWS, stride=16, number=3, constants=(64,), **options):
        kernel.run(programs, (rows,), (stride, 8), (number, 0.5), constants, **{"num_warps": 4, **options})

    return running


@pytest.mark.parametrize("other", [{}, {"programs": 6}, {"stride": 32}, {"stride": 0}, {"number": 1}, {"number": 16}])
def test_arguments_of_one_kind_go_straight_to_the_driver(run, made, other):
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


def test_descriptors_come_first_and_unchanged(run, made):
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


def test_a_stride_of_1_is_not_a_multiple_of_16(run, made):
    """1 and True are the same dictionary key."""
    run(stride=1)
    run(stride=16)

    assert len(made) == 2


def test_no_programs_launch_nothing(run, made):
    run(programs=0)

    assert made == []


def test_kernels_do_not_share_launches(made):
    for name in ("one", "another"):
        Kernel(name).run(1, (ROWS,), (), (), ())

    assert [launch.given[0] for launch in made] == ["one", "another"]


class Elsewhere:
    """A fake tensor on the second device."""

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
    monkeypatch.setattr(FakeLaunch, "first", lambda *_: where.append(current[-1]))

    run(rows=Elsewhere())
    run()  # one in host memory, as where kernels are interpreted

    assert where == [1, 0]
    assert current == [0]
    assert len(made) == 2
