"""The first tier: plain attention, over everything that every backend declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.testing.kit.menu import menu_of
from attnplug.testing.kit.serving import plain, serve
from attnplug.testing.kit.tier import Tier, needs, over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.testing.kit.record import Record
    from attnplug.testing.kit.subject import Subject


def _values_of(*names: str) -> Any:
    def points(subject: Subject) -> Mapping[str, Any]:
        asks = menu_of(subject).asks
        return {str(capability): ask for capability, ask in asks.items() if capability.field in names}

    return points


class Basic(Tier):
    """Plain attention: dtypes, head sizes, query heads per KV head, pages and layouts, batches of each kind."""

    @over(_values_of("dtype", "head_size", "gqa_ratio", "paged", "block_size", "kv_layout"))
    def test_plain_attention(self, subject: Subject, record: Record, point: Any) -> None:
        """Each declared dtype, size and layout gives the oracle's output."""
        serve(subject, point, record, point.case(seed=1))

    def test_mixed_batch(self, subject: Subject, record: Record) -> None:
        """Decodes come first, then prefills, and each row of the output is its own token's."""
        ask = plain(subject)
        serve(subject, ask, record, ask.case(seed=2, query_lens=(1, 1, 1, 9, 21), context_lens=(40, 3, 17, 0, 25)))

    def test_one_token(self, subject: Subject, record: Record) -> None:
        """A request of a single token attends itself."""
        ask = plain(subject)
        serve(subject, ask, record, ask.case(seed=3, query_lens=(1,), context_lens=(0,)))

    @needs(phases=("decode",))
    def test_decodes_alone(self, subject: Subject, record: Record) -> None:
        """A batch may have no prefills."""
        ask = plain(subject, phases=("decode",))
        serve(subject, ask, record, ask.case(seed=4, query_lens=(1, 1, 1), context_lens=(0, 64, 31)))

    @needs(phases=("prefill",))
    def test_prefills_alone(self, subject: Subject, record: Record) -> None:
        """A batch may have no decodes."""
        ask = plain(subject, phases=("prefill",))
        serve(subject, ask, record, ask.case(seed=5, query_lens=(2, 33, 17), context_lens=(0, 5, 16)))
