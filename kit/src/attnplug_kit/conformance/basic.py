"""The first tier: plain attention, over everything that every backend declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import plain, runner_for, serve
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import tested
from attnplug_kit.oracle import materialize

if TYPE_CHECKING:
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.subject import Subject


def _declared_by_all(subject: Subject) -> Any:
    return field_values_of(subject).of(*tested("plain"))


def _declared_by_some(subject: Subject) -> Any:
    return field_values_of(subject).of(*tested("scores"))


class Basic(Tier):
    """
    Plain attention: dtypes, head sizes, query heads per KV head, pages and layouts, batches of each kind; and each
    declared feature of the scores alone, at the ends of pages.

    It is for the first hours with a backend, and shows nothing about features together, writes into the KV cache, long
    sequences, graphs, advanced steps, and what has to be refused.
    """

    @over(_declared_by_all)
    def test_plain_attention(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Each declared dtype, size and layout gives the oracle's output."""
        spec = draw(point, many_heads=True)
        serve(subject, spec, record, spec.case(seed=1))

    @over(_declared_by_some)
    def test_features_at_page_ends(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Each declared window, chunk, cap, slope, sink and LSE, in sequences that end around the ends of pages."""
        spec = draw(point)
        size = spec.fields.get("block_size", 16)
        lens: dict[str, Any] = {"query_lens": (1, 1, 1, 7, 17), "context_lens": (size - 1, size, 2 * size, size, 0)}
        if spec.fields.get("phases", ("prefill", "decode")) == ("prefill", "decode"):
            serve(subject, spec, record, spec.case(seed=8, **lens))
        else:
            serve(subject, spec, record, spec.case(seed=8))

    def test_mixed_batch(self, subject: Subject, draw: Draw, record: Record) -> None:
        """Decodes come first, then prefills, and each row of the output belongs to its token."""
        spec = draw(plain(subject), many_heads=True)
        context_lens = spec.over_pages((40, 3, 17, 0, 25))
        serve(subject, spec, record, spec.case(seed=2, query_lens=(1, 1, 1, 9, 21), context_lens=context_lens))

    def test_one_token(self, subject: Subject, draw: Draw, record: Record) -> None:
        """A request of a single token attends to itself."""
        spec = draw(plain(subject), many_heads=True)
        serve(subject, spec, record, spec.case(seed=3, query_lens=(1,), context_lens=(0,)))

    def test_rows_of_wider_tensors(self, subject: Subject, draw: Draw) -> None:
        """Tensors may have strides: rows of a fused projection, and a block table as wide as the engine's."""
        spec = draw(plain(subject))
        scene = materialize(spec.case(seed=6, strides="rows"))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        runner.forward(call, runner.builder.build(call.batch))
        runner.compare(call, scene, f"{subject}: rows of wider tensors")

    def test_profiling_run(self, subject: Subject, draw: Draw) -> None:
        """A run without metadata and KV cache, by which an engine measures memory, succeeds."""
        spec = draw(plain(subject), keep=("kv_in_cache",))
        scene = materialize(spec.case(seed=7))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        lse = call.lse if runner.backend.agreement.requirements.return_lse else None
        try:
            runner.impl.forward(call.query, call.key, call.value, None, None, call.output, lse=lse)
        except Exception as error:
            raise AssertionError(f"{subject}: a profiling run, without metadata and cache, raised {error!r}") from error

    @needs(phases=("decode",))
    def test_decodes_alone(self, subject: Subject, draw: Draw, record: Record) -> None:
        """A batch may have no prefills."""
        spec = draw(plain(subject, phases=("decode",)))
        serve(subject, spec, record, spec.case(seed=4, query_lens=(1, 1, 1), context_lens=spec.over_pages((0, 64, 31))))

    @needs(phases=("prefill",))
    def test_prefills_alone(self, subject: Subject, draw: Draw, record: Record) -> None:
        """A batch may have no decodes."""
        spec = draw(plain(subject, phases=("prefill",)))
        serve(
            subject, spec, record, spec.case(seed=5, query_lens=(2, 33, 17), context_lens=spec.over_pages((0, 5, 16)))
        )
