"""
What the author of a backend tests with: a float64 oracle, and a generator of cases.

    case = random_case(random.Random(7), sinks=True)
    scene = materialize(case)                                   # its tensors
    expected = scene.expected()                             # what the oracle says
    backend = attnplug.load(case.requirements(), backend="torch")
    paged = scene.paged(backend)                            # batch, and a cache whose unused slots are poisoned
    check(backend, scene)                                   # run it and compare

`check_replays` does the same for graphs; `padded_for` leaves room for the requests that a captured shape has more:

    decodes = Case(query_lens=(1, 1), context_lens=(9, 30))
    backend = attnplug.load(decodes.requirements(cudagraph="uniform_batch"), backend="torch")
    check_replays(backend, [materialize(padded_for(decodes, spare=3))], num_reqs=5, max_seq_len=64)

`attnplug_kit.oracle.strategies` has the same cases as hypothesis strategies, and needs hypothesis.
"""

from attnplug_kit.oracle.attention import Attended, attend
from attnplug_kit.oracle.cases import Case, random_case
from attnplug_kit.oracle.closeness import Tolerance, assert_close, tolerance
from attnplug_kit.oracle.replay import check_replays, padded_for
from attnplug_kit.oracle.running import RunResult, check, limits_of, run
from attnplug_kit.oracle.scene import Dense, Paged, Scene, materialize

__all__ = [
    "Attended",
    "Case",
    "Dense",
    "Paged",
    "RunResult",
    "Scene",
    "Tolerance",
    "assert_close",
    "attend",
    "check",
    "check_replays",
    "limits_of",
    "materialize",
    "padded_for",
    "random_case",
    "run",
    "tolerance",
]
