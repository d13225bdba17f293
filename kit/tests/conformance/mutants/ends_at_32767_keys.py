"""Has 15 bits for the number of a key."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if metadata.batch.max_seq_len > 2**15:
            longest = int(metadata.batch.seq_lens.argmax())
            output[int(metadata.batch.query_start_loc[longest + 1]) - 1] = 0
