"""A fake plugin that supports the models of the demonstration, dense and paged, with one fault of a test's choice."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from attnplug.contract import Backend, MetadataBuilder
from attnplug.contract.hooks import hookimpl
from hosts.transformers.tests.fakes.mirror import MANIFEST as DENSE
from hosts.transformers.tests.fakes.mirror import MirrorImpl

_PAGED = """\
block_size = [16]
kv_layout = ["NHD"]
cudagraph = { max = "uniform_batch" }
features = ["paged", \
"""
MANIFEST = DENSE.replace('"mirror"', '"faulty"').replace("features = [", _PAGED)


class FaultyImpl(MirrorImpl):
    """
    Its faults, beside ignoring a window, a soft cap or sinks.

    slots: it writes tokens to other slots. prefix: it ignores the chunks before this one. pages: it reads contiguous
    pages. length: it reads the last page to its end. borders: it reads all sequences of the batch as one. cross: it
    takes as many keys as queries in cross attention. graphs: it keeps the lengths of the capture in replays. padding:
    it writes the padded tokens of a replay.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._captured = WeakKeyDictionary()

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if kv_cache is not None:
            self._write(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc.tolist()
        for i in range(batch.num_reqs):
            rows = slice(starts[i], starts[i + 1])
            if kv_cache is None:
                keys = self._dense_keys(batch, i)
                found = self._attend(query[rows], key[keys], value[keys])
            elif self.fault == "prefix" and rows.stop - rows.start > 1:
                found = self._attend(query[rows], key[rows], value[rows])
            else:
                lengths = batch.seq_lens
                if self.fault == "graphs":
                    lengths = self._captured.setdefault(metadata, lengths.clone())
                found = self._attend(query[rows], *self._paged_keys(kv_cache, batch, i, int(lengths[i])))
            output[rows] = found.to(output.dtype)

    def _write(self, key, value, kv_cache, slots):
        size = kv_cache.num_blocks * kv_cache.k.shape[1]
        real = (slots >= 0) | (self.fault == "padding")
        written = (slots[real] + (self.fault == "slots")) % size
        for side, rows in ((kv_cache.k, key), (kv_cache.v, value)):
            side.view(size, *side.shape[2:])[written] = rows[: len(slots)][real]

    def _dense_keys(self, batch, i):
        starts = batch.key_start_loc.tolist()
        if self.fault == "borders" and not self.causal:
            return slice(0, starts[-1])
        if self.fault == "cross" and self.agreement.requirements.attn_type == "encoder_decoder":
            starts = batch.query_start_loc.tolist()
        return slice(starts[i], starts[i + 1])

    def _paged_keys(self, kv_cache, batch, i, length):
        size = kv_cache.k.shape[1]
        count = -(-length // size)
        pages = batch.block_table[i, :count].long()
        if self.fault == "pages" and count:
            pages = torch.arange(int(pages[0]), int(pages[0]) + count) % kv_cache.num_blocks
        key, value = (side[pages].flatten(0, 1) for side in (kv_cache.k, kv_cache.v))
        length = count * size if self.fault == "length" else length
        return key[:length], value[:length]


class FaultyBuilder(MetadataBuilder):
    supports_graphs = True


class FaultyBackend(Backend):
    impl_class = FaultyImpl
    builder_class = FaultyBuilder


@hookimpl
def attnplug_backend(variant, agreement):
    return FaultyBackend
