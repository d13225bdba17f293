"""
The hooks. The probe records its call in the file SLOW_PROBE_TRACE, takes SLOW_PROBE seconds, and then waits for the
file SLOW_PROBE_UNTIL, where one is named.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, agreement):
    from attnplug.contract import AttentionImpl, Backend  # noqa: PLC0415 - torch is imported when the backend is

    class Impl(AttentionImpl):
        cache_write = "forward"

        def run(self, query, key, value, kv_cache, metadata, output, lse):
            output.zero_()

    return type("SlowBackend", (Backend,), {"impl_class": Impl})


@hookimpl
def attnplug_probe(variant):
    with Path(os.environ["SLOW_PROBE_TRACE"]).open("a", encoding="utf-8") as trace:
        trace.write(f"{variant}\n")
    time.sleep(float(os.environ.get("SLOW_PROBE", "0")))
    until = os.environ.get("SLOW_PROBE_UNTIL")
    end = time.monotonic() + 60
    while until and not Path(until).exists():
        if time.monotonic() > end:
            msg = f"{until} was not written"
            raise TimeoutError(msg)
        time.sleep(0.01)
