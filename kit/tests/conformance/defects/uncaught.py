"""The defects that no test of the kit catches, and why."""

from __future__ import annotations

UNCAUGHT = {
    "clears_rows_of_idle_requests": "no request of the kit has keys, and no query in the step",
    "host_writes_hnd": "what a host wrote is compared, and not the attention over it",
    "lse_of_bfloat16": "queries that are scaled, and rounded once more, change an LSE by more",
    "lse_without_one_split": "the LSE over more than 1,000 keys is requested in float32",
    "offsets_of32_bits": "an offset beyond 2^31 needs a pool of gigabytes: the kit's is 128 MiB at most",
    "overflows_e5m2": "no value of the kit is beyond the largest number of e5m2",
    "rounds_keys_in_place": "the request of the test on inputs has no FP8 cache",
    "stops_at_padding": "rows without a slot come last in each batch",
    "writes_of256_tokens": "after a step of more than 256 tokens neither the KV cache nor a later step is compared",
}
