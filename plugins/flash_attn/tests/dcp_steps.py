"""A step with decode context parallelism on the plugin's kernels: exact ones, libraries, and their fakes."""

from __future__ import annotations

import atexit
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.contract import torch_dtype
from attnplug_flash_attn import packing
from plugins.flash_attn.tests import dcp_mutants
from plugins.flash_attn.tests.conftest import NAME, pytest_unconfigure, stage
from plugins.flash_attn.tests.exact_backend import make_backend
from plugins.flash_attn.tests.real import FLASH_ATTN
from tests.backends.dcp_steps import requirements_of, run_on

if TYPE_CHECKING:
    from attnplug.contract import LoadedBackend
    from tests.backends.dcp_steps import DcpStep, Result


def run(rank: int, group: Any, step: DcpStep, mutant: str | None = None, *, replayed: bool = False) -> Result:
    """
    Do what a host does on one rank, and return what came out.

    Args:
        rank: The rank.
        group: The process group.
        step: The step.
        mutant: The mistake that is made.
        replayed: Whether the step runs on what a graph would read: metadata of a capture, which a build wrote into.
    """
    per_key = 2 * step.kv_heads * step.head_size * torch_dtype(step.dtype).itemsize
    with dcp_mutants.active(mutant), pytest.MonkeyPatch.context() as patch:
        if step.max_packed_keys is not None:
            patch.setattr(packing, "MAX_BYTES", step.max_packed_keys * per_key)
        return run_on(backend_of(step, replayed=replayed), rank, group, step, replayed=replayed)


def run_real(rank: int, group: Any, step: DcpStep, variant: str, *, replayed: bool = False) -> Result:
    """Do so on a kernel library."""
    required = evolve(requirements_of(step), cudagraph="always" if replayed else "never")
    with pytest.MonkeyPatch.context() as patch:
        FLASH_ATTN.register(patch)
        return run_on(FLASH_ATTN.load(required, variant), rank, group, step, replayed=replayed)


def run_fake(rank: int, group: Any, step: DcpStep, variant: str) -> Result:
    """Do so on the fake of a kernel library."""
    with _stage().active():
        backend = attnplug.load(requirements_of(step), Device.cpu(), backend=f"{NAME}/{variant}")
        return run_on(backend, rank, group, step)


@cache
def _stage() -> Any:
    """The stage of this process, which ends without pytest."""
    found = stage()
    atexit.register(pytest_unconfigure)
    return found


def backend_of(step: DcpStep, *, replayed: bool = False) -> LoadedBackend:
    return make_backend(requirements_of(step), step.kernel_kind, cudagraph="always" if replayed else "never")
