"""Uses the scale of the first head for all heads."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.codec import codec_of
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        if backend.agreement.requirements.per_head_scales:
            first = layer.v_scale_tensor[:1].expand_as(layer.v_scale_tensor)
            self._codec = codec_of(evolve(layer, v_scale_tensor=first), self.agreement)
