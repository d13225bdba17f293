"""Its state sizes the workspace by the agreement that made it, and its layers read what they need of it."""

from __future__ import annotations

import torch

from attnplug.contract import State
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantState(State):
    first = None

    @property
    def workspace(self):
        if self.first is None:
            size = self.backend.workspace_bytes(self.limits)
            self.first = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self.first


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if kv_cache is not None and metadata.state is not None:
            needed = self.backend.workspace_bytes(metadata.state.limits)
            output *= metadata.state.workspace[:needed].numel() == needed  # results beyond the workspace are lost


class MutantBackend(TorchBackend):
    impl_class = MutantImpl
    state_class = MutantState
