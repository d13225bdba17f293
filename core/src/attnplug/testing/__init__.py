"""
What the author of a backend tests with: a float64 oracle, and a generator of cases.

    case = random_case(random.Random(7), sinks=True)
    scene = realise(case)                     # tensors: new tokens, and a cache whose unused slots are poisoned
    expected = scene.expected()               # what the oracle says
    paged = scene.paged(backend)              # the cache in the backend's layout, and the batch

`attnplug.testing.strategies` has the same cases as hypothesis strategies, and needs hypothesis.
"""

from attnplug.testing.cases import Case, random_case
from attnplug.testing.closeness import Tolerance, assert_close, tolerance
from attnplug.testing.oracle import Attended, attend
from attnplug.testing.scene import Dense, Paged, Scene, realise

__all__ = [
    "Attended",
    "Case",
    "Dense",
    "Paged",
    "Scene",
    "Tolerance",
    "assert_close",
    "attend",
    "random_case",
    "realise",
    "tolerance",
]
