"""The names of the modules that the library compiles, in memory and on disk."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch
from packaging.version import Version

from flashinfer.journal import journal

if TYPE_CHECKING:
    from flashinfer.wrapper import Planned

SAFE: Final = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def compile_for(planned: Planned) -> None:
    """Record the module that a plan loads, unless its wrapper's constructor has loaded one."""
    q, kv, o = (SAFE[dtype] for dtype in (planned.q, planned.kv, planned.o))
    size, size_v, params = planned.head_size, planned.head_size_v, planned.params
    form = f"with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_dtype_idx_i32_head_dim_qk_{size}_head_dim_vo_{size_v}"
    form += f"_posenc_0_use_swa_{params.window_left >= 0}_use_logits_cap_{params.soft_cap > 0}"
    if planned.backend == "cuda_cores":
        journal.compile(f"batch_decode_{form}", planned.kernel)
    else:
        is_newer = Version(import_module("flashinfer").__version__) >= Version("0.7")
        ending = "_sm90" if planned.backend == "fa3" else "_kv_stride_equal" * is_newer
        journal.compile(f"batch_prefill_{form}_f16qk_False{ending}", planned.kernel)
