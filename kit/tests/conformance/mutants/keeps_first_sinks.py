"""Takes the sinks of the first call for all later ones."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    changes = 0

    def parameters_changed(self):
        self.changes += 1  # the first one is that of the constructor
        if self.changes <= 2:
            super().parameters_changed()
