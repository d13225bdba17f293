"""
What the author of a backend tests with: a float64 oracle, and a generator of cases.

    case = random_case(random.Random(7), sinks=True)
    scene = materialize(case)                               # its tensors
    expected = scene.expected()                             # the oracle's result
    backend = attnplug.load(case.requirements(), backend="torch")
    paged = scene.paged(backend)                            # the batch, and a KV cache whose unused slots are poisoned
    check(backend, scene)                                   # run it and compare

`check_replays` does the same for CUDA graphs. `padded_for` pads a batch to a captured shape with more requests:

    decodes = Case(query_lens=(1, 1), context_lens=(9, 30))
    backend = attnplug.load(decodes.requirements(cudagraph="uniform_batch"), backend="torch")
    check_replays(backend, [materialize(padded_for(decodes, spare=3))], num_reqs=5, max_seq_len=64)

`check_replays_without_build` writes the steps into a host's own tensors on the device, and `check_shared_state` runs
several agreements in one state.

`cases` is a hypothesis strategy of the same cases.
"""

from attnplug_kit.oracle.attention import OracleResult, attend, seen_by
from attnplug_kit.oracle.case import FEATURES, Case, cases, random_case
from attnplug_kit.oracle.closeness import Tolerance, assert_close, assert_output, tolerance
from attnplug_kit.oracle.host_memory import bind_pool, untouched
from attnplug_kit.oracle.materializing import materialize
from attnplug_kit.oracle.replaying import check_replays, check_replays_without_build, check_shared_state
from attnplug_kit.oracle.rounding import INT8_DTYPES, Int8Rounding, by_channel, int8_rounding, nearest, paged_tensors
from attnplug_kit.oracle.running import (
    RunResult,
    SceneRunner,
    check,
    compare,
    limits_of,
    padded_for,
    run,
)
from attnplug_kit.oracle.scene import CANARY, Dense, Paged, Scene

__all__ = [
    "CANARY",
    "FEATURES",
    "INT8_DTYPES",
    "Case",
    "Dense",
    "Int8Rounding",
    "OracleResult",
    "Paged",
    "RunResult",
    "Scene",
    "SceneRunner",
    "Tolerance",
    "assert_close",
    "assert_output",
    "attend",
    "bind_pool",
    "by_channel",
    "cases",
    "check",
    "check_replays",
    "check_replays_without_build",
    "check_shared_state",
    "compare",
    "int8_rounding",
    "limits_of",
    "materialize",
    "nearest",
    "padded_for",
    "paged_tensors",
    "random_case",
    "run",
    "seen_by",
    "tolerance",
    "untouched",
]
