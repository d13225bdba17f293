"""A plugin that serves the models of the demonstration, dense and paged, and forgets what it is told to."""

from __future__ import annotations

import torch

from attnplug.contract import Backend
from attnplug.contract.hooks import hookimpl
from core.tests.hosts.mirror import MANIFEST as DENSE
from core.tests.hosts.mirror import MirrorImpl

MANIFEST = DENSE.replace('"mirror"', '"forgetful"').replace(
    'features = ["sliding_window"', 'block_size = [16]\nkv_layout = ["NHD"]\nfeatures = ["paged", "sliding_window"'
)


class ForgetfulImpl(MirrorImpl):
    """
    What it may forget, beside a window, a soft cap and sinks.

    slots: where tokens are written. prefix: what earlier steps computed of a prompt. pages: that pages lie anywhere.
    length: where a sequence ends in its last page. borders: where a sequence of the batch ends. cross: that the keys
    of cross attention are as many as they are.
    """

    def _forward(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if kv_cache is not None:
            self._write(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc.tolist()
        for i in range(batch.num_reqs):
            rows = slice(starts[i], starts[i + 1])
            if kv_cache is None:
                keys = self._dense_keys(batch, i)
                found = self._attend(query[rows], key[keys], value[keys])
            elif self.forgets == "prefix" and rows.stop - rows.start > 1:
                found = self._attend(query[rows], key[rows], value[rows])
            else:
                found = self._attend(query[rows], *self._paged_keys(kv_cache, batch, i))
            output[rows] = found.to(output.dtype)

    def _write(self, key, value, kv_cache, slots):
        size = kv_cache.shape[1] * kv_cache.shape[2]
        slots = (slots + 1) % size if self.forgets == "slots" else slots
        for side, rows in zip(kv_cache, (key, value), strict=True):
            side.view(size, *side.shape[2:])[slots] = rows[: len(slots)]

    def _dense_keys(self, batch, i):
        starts = batch.key_start_loc.tolist()
        if self.forgets == "borders" and not self.causal:
            return slice(0, starts[-1])
        if self.forgets == "cross" and self.agreement.requirements.attn_type == "encoder_decoder":
            starts = batch.query_start_loc.tolist()
        return slice(starts[i], starts[i + 1])

    def _paged_keys(self, kv_cache, batch, i):
        size, length = kv_cache.shape[2], int(batch.seq_lens[i])
        count = -(-length // size)
        pages = batch.block_table[i, :count].long()
        if self.forgets == "pages":
            pages = torch.arange(int(pages[0]), int(pages[0]) + count) % kv_cache.shape[1]
        key, value = (side[pages].flatten(0, 1) for side in kv_cache)
        length = count * size if self.forgets == "length" else length
        return key[:length], value[:length]


class ForgetfulBackend(Backend):
    impl_class = ForgetfulImpl


@hookimpl
def attnplug_backend(variant, agreement):
    return ForgetfulBackend
