"""Copies the keys of blocks without their values."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend


class MutantBackend(TorchBackend):
    def swap_blocks(self, src, dst, src_to_dst):
        values = dst.v
        held = values.clone()
        super().swap_blocks(src, dst, src_to_dst)
        values.copy_(held)


@hookimpl
def attnplug_backend():
    return MutantBackend
