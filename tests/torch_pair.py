"""
Two backends of tests that make a routed pair: the built-in one twice, each noting the batches that it runs.

The first one is for decodes alone: of queries of several lengths it computes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attnplug
import attnplug.torch_backend
from attnplug.contract import hookimpl
from attnplug.selection.process import PROCESS
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

PAIR: Final = "first/sdpa+second/sdpa"
"""The pair: pure decodes run on ``first``, all other batches on ``second``."""

RUNS: Final[list[tuple[str, list[int]]]] = []
"""Each call over a paged KV cache: the backend, and the query lengths of its batch."""

_MANIFEST: Final = Path(attnplug.torch_backend.__file__).with_name("attnplug.toml")


class NotedImpl(TorchImpl):
    """Notes its calls."""

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Note the batch, and run it."""
        assert metadata.agreement == self.agreement, "metadata of another backend was given"
        lens = metadata.batch.query_start_loc.diff().tolist()
        if self.is_paged:
            RUNS.append((self.agreement.backend, lens))
        if self.agreement.backend == "first" and len({length for length in lens if length}) > 1:
            output.zero_()
            return
        super().run(query, key, value, kv_cache, metadata, output, lse)


class NotedBackend(TorchBackend):
    """A backend of tests."""

    impl_class = NotedImpl


@hookimpl
def attnplug_backend() -> type[NotedBackend]:
    """Return the backend class."""
    return NotedBackend


def offer_pair(folder: Path, patch: pytest.MonkeyPatch | None = None) -> str:
    """
    Offer both backends to this process, or to one test of it, forget former calls, and return the name of the pair.
    """
    if patch is not None:
        patch.setattr(PROCESS, "state", None)
    text = _MANIFEST.read_text("utf-8").partition("[variants.flex]")[0]
    for name in ("first", "second"):
        path = folder / f"{name}.toml"
        own = text.replace('name = "torch", aliases = ["TORCH_SDPA"]', f'name = "{name}"')
        phases = '[supports]\nphases = ["decode"]' if name == "first" else "[supports]"
        path.write_text(own.replace("[supports]", phases, 1), "utf-8")
        attnplug.register(__name__, manifest=path)
    RUNS.clear()
    return PAIR
