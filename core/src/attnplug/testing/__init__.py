"""
What the author of a backend tests with: a float64 oracle, and a generator of cases.

    case = random_case(random.Random(7), sinks=True)
    scene = realise(case)                                   # its tensors
    expected = scene.expected()                             # what the oracle says
    backend = attnplug.load(case.requirements(), backend="torch")
    paged = scene.paged(backend)                            # batch, and a cache whose unused slots are poisoned
    check(backend, scene)                                   # run it and compare
    roomy = realise(padded_for(decodes, spare=3))           # a case of equally long queries, and rows for 3 more
    check_replays(graphs, [roomy], num_reqs=8, max_seq_len=256)  # captured, replayed and compared

`attnplug.testing.strategies` has the same cases as hypothesis strategies, and needs hypothesis.
"""

from attnplug.testing.cases import Case, random_case
from attnplug.testing.closeness import Tolerance, assert_close, tolerance
from attnplug.testing.oracle import Attended, attend
from attnplug.testing.replay import check_replays, padded_for
from attnplug.testing.running import Ran, check, limits_of, run
from attnplug.testing.scene import Dense, Paged, Scene, realise

__all__ = [
    "Attended",
    "Case",
    "Dense",
    "Paged",
    "Ran",
    "Scene",
    "Tolerance",
    "assert_close",
    "attend",
    "check",
    "check_replays",
    "limits_of",
    "padded_for",
    "random_case",
    "realise",
    "run",
    "tolerance",
]
