"""What a run exercises: the lengths, sizes and features of every scene whose result equals the oracle's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.request import FIELDS
from attnplug_kit.fields import CUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attnplug.contract import LoadedBackend
    from attnplug_kit.oracle.scene import Scene

    Observer = Callable[[LoadedBackend, Scene], None]

_observers: Final[list[Observer]] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call an observer after every comparison that passes, in any thread, with the backend and the scene."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def passed(backend: LoadedBackend, scene: Scene) -> None:
    """Report a comparison that passed to the observers."""
    for observer in _observers:
        observer(backend, scene)


@frozen(eq=False)
class Exercised:
    """
    What scenes have exercised together.

    Attributes:
        ranges: The smallest and the largest value by name: fields of requests, and ``query_len``, ``seq_len`` (keys),
            ``num_reqs``, ``num_tokens`` and ``block_number`` of batches.
        sizes: All values of sizes that kernels are written for, by field.
    """

    ranges: dict[str, tuple[float, float]] = field(factory=dict)
    sizes: dict[str, set[int]] = field(factory=dict)

    def add(self, backend: LoadedBackend, scene: Scene) -> None:
        """Add a scene; an observer of `observing`."""
        for name, value in (*_of_batch(scene), *_of_request(backend, scene)):
            self._extend(name, value, value)
        for name, size in _sizes(backend, scene):
            self.sizes.setdefault(name, set()).add(size)

    def has_effect(self, name: str, value: Any) -> bool:
        """Whether a value of a field can have changed a result: a window or a chunk that is in its range."""
        if name not in CUTS:
            return True
        ends = self.ranges.get(name)
        return ends is not None and bool(ends[0] <= value <= ends[1])

    def merge(self, data: Mapping[str, Any]) -> None:
        """Add what `to_dict` of another one returned."""
        for name, (low, high) in data["ranges"].items():
            self._extend(name, low, high)
        for name, sizes in data["sizes"].items():
            self.sizes.setdefault(name, set()).update(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ranges": {name: list(ends) for name, ends in sorted(self.ranges.items())},
            "sizes": {name: sorted(sizes) for name, sizes in sorted(self.sizes.items())},
        }

    def _extend(self, name: str, low: float, high: float) -> None:
        ends = self.ranges.get(name, (low, high))
        self.ranges[name] = (min(low, ends[0]), max(high, ends[1]))


def _running(scene: Scene) -> list[tuple[int, int]]:
    """Return the query and the key length of each request that has both."""
    return [pair for pair in zip(scene.case.query_lens, scene.case.key_lens, strict=True) if min(pair) > 0]


def _of_batch(scene: Scene) -> Iterator[tuple[str, int]]:
    for query_len, key_len in _running(scene):
        yield from (("query_len", query_len), ("seq_len", key_len))
    yield from (("num_reqs", len(scene.case.query_lens)), ("num_tokens", scene.case.num_tokens))


def _of_request(backend: LoadedBackend, scene: Scene) -> Iterator[tuple[str, float]]:
    case, wanted = scene.case, backend.agreement.requirements
    longest = max((keys for _, keys in _running(scene)), default=0)
    for name, value in wanted.facts().items():
        if not FIELDS[name].has_ranges or value is None:
            continue
        if (name not in CUTS or longest > value) and (name != "decode_query_len" or value in case.query_lens):
            yield name, value
    for row, keys in enumerate(case.key_lens if wanted.paged else ()):
        if case.query_lens[row] and keys > 0:
            yield "block_number", int(scene.block_table[row, : -(-keys // case.block_size)].max())


def _sizes(backend: LoadedBackend, scene: Scene) -> Iterator[tuple[str, int]]:
    """Yield sizes; that of blocks where a request has more than one of them."""
    wanted, case = backend.agreement.requirements, scene.case
    yield "head_size", wanted.head_size
    size_v = wanted.head_size_v
    if size_v is not None and size_v != wanted.head_size:  # equal sizes show nothing about different ones
        yield "head_size_v", size_v
    if wanted.paged and any(keys > case.block_size for _, keys in _running(scene)):
        yield "block_size", case.block_size
