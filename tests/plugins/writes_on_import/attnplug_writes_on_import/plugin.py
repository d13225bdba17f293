"""Leaves a trace when this code runs."""

import os
from pathlib import Path

with Path(os.environ["WRITES_ON_IMPORT"]).open("a", encoding="utf-8") as trace:
    trace.write(f"{__name__}\n")

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, agreement):
    from attnplug.contract import AttentionImpl, Backend  # noqa: PLC0415 - torch is imported when the backend is

    class Impl(AttentionImpl):
        cache_write = "forward"

        def run(self, query, key, value, kv_cache, metadata, output, lse):
            output.zero_()

    return type("WritingBackend", (Backend,), {"impl_class": Impl})
