"""
Pure functions of a batch: who decodes, who prefills, which slots and pages they use.

Hosts and builders share them. Sizes come from host copies or from the caller, so that nothing here waits for a device.
"""

from attnplug.batching.draft import BatchDraft
from attnplug.batching.padding import pad_batch, pad_rows, padded_size
from attnplug.batching.pages import Pages, pages_of
from attnplug.batching.positions import positions_of, positions_of_new_tokens
from attnplug.batching.reach import first_attended_key, num_freeable_blocks
from attnplug.batching.reorder import Reordering, reorder_batch_to_split_decodes_and_prefills
from attnplug.batching.slots import slots_of_new_tokens
from attnplug.batching.split import Split, split_decodes_and_prefills

__all__ = [
    "BatchDraft",
    "Pages",
    "Reordering",
    "Split",
    "first_attended_key",
    "num_freeable_blocks",
    "pad_batch",
    "pad_rows",
    "padded_size",
    "pages_of",
    "positions_of",
    "positions_of_new_tokens",
    "reorder_batch_to_split_decodes_and_prefills",
    "slots_of_new_tokens",
    "split_decodes_and_prefills",
]
