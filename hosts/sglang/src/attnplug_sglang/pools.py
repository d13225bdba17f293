"""The memory pools of SGLang as KV caches of attnplug: which are served, their form, and the slots in each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

FULL: Final = "full"
SWA: Final = "swa"
_LAYOUTS: Final = (None, "nhd", "hnd")
_LATENTS: Final = "MLATokenToKVPool"


@frozen(eq=False)
class Pools:
    """
    The KV caches of a model runner: one pool, or one for full layers and one for those with a window.

    Page 0 of each is the null block: SGLang writes the K/V of padding there, and gives it to no request.

    Attributes:
        pool: What SGLang keeps as `token_to_kv_pool`.
        parts: Its pools, by `FULL` and `SWA`.
        page_size: Tokens of a page.
    """

    pool: Any
    parts: dict[str, Any]
    page_size: int

    def part_of(self, layer_id: int) -> str:
        """Return whose slots a layer has."""
        return SWA if SWA in self.parts and self.pool.layers_mapping[layer_id][1] else FULL

    @property
    def latent_sizes(self) -> tuple[int, int] | None:
        """The sizes of a latent and of its rotary part; None where the pool has keys and values per head."""
        full = self.parts[FULL]
        return (full.kv_lora_rank, full.qk_rope_head_dim) if type(full).__name__ == _LATENTS else None

    @property
    def dtype(self) -> Any:
        """The dtype of keys and values."""
        return self.parts[FULL].dtype

    @property
    def kv_layout(self) -> str:
        """The order of heads and tokens of a page."""
        return "HND" if getattr(self.parts[FULL], "use_hnd", False) else "NHD"

    @property
    def num_blocks(self) -> int:
        """Pages of the largest pool, page 0 included."""
        return max(int(part.size + self.page_size) // self.page_size for part in self.parts.values())

    def views(self, layer_id: int) -> dict[str, Tensor]:
        """
        Return a layer's keys and values, ``(pages, page_size, heads, size)``, over the pool's memory.

        Where K/V come back from the CPU layer by layer, it waits until this layer's have arrived.
        """
        keys = self._paged(self.pool.get_key_buffer(layer_id))
        if self.latent_sizes is not None:
            return {"k": keys, "v": keys[..., : self.latent_sizes[0]]}
        return {"k": keys, "v": self._paged(self.pool.get_value_buffer(layer_id))}

    def _paged(self, rows: Tensor) -> Tensor:
        if self.kv_layout == "HND":
            return rows.transpose(1, 2)
        pages = len(rows) // self.page_size
        return rows[: pages * self.page_size].view(pages, self.page_size, *rows.shape[1:])

    def forms(self, layer_id: int) -> tuple[str, ...]:
        """Return the forms that the pool of a layer has, as `kv_cache_form`, the closest first."""
        if self.latent_sizes is not None:
            return ("latent",)
        views = self.views(layer_id)
        keys, values = views["k"], views["v"]
        shared = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        if shared and keys.shape == values.shape and values.storage_offset() > keys.storage_offset():
            return ("joint", "split", "independent")
        return ("split", "independent")

    def wait(self, layer_id: int) -> None:
        """Wait until the K/V of a layer that come back from the CPU have arrived."""
        if self.pool.layer_transfer_counter is not None:
            self.pool.get_key_buffer(layer_id)

    def translation(self, part: str) -> Tensor | None:
        """Return the slot of a part for each slot of the full pool, in page 0 for freed tokens; None for that pool."""
        # SGLang keeps a proxy of it.
        return None if part == FULL else self.pool.full_to_swa_index_mapping.detach()

    def slots(self, part: str, slots: Tensor) -> Tensor:
        """Return slots of the full pool as slots of a part, in the same shape; those of freed tokens are in page 0."""
        if part == FULL:
            return slots
        translated: Tensor = self.pool.translate_loc_from_full_to_swa(slots.long())
        return translated


def pools_of(runner: Any) -> Pools:
    """
    Return the pools of a model runner.

    Raises:
        NotNegotiatedError: They are of a kind that is not served.
    """
    pool = runner.token_to_kv_pool
    parts = {FULL: pool}
    if type(pool).__name__ == "SWAKVPool":
        parts = {FULL: pool.full_kv_pool, SWA: pool.swa_kv_pool}
    for part in parts.values():
        for problem in _problems(part):
            raise NotNegotiatedError(
                f"SGLang's pool is {problem}",
                "attnplug-sglang serves MHATokenToKVPool, SWAKVPool made of two of them, and MLATokenToKVPool: K and V "
                "of each layer in rows of heads, or its latents in rows, with one id for each slot",
                "serve this model with one of SGLang's own backends, or leave out what chooses this pool",
            )
    return Pools(pool, parts, runner.page_size)


def _problems(part: Any) -> list[str]:
    """Return what a pool is that is not served."""
    name = type(part).__name__
    found = []
    if "DSA" in name or getattr(part, "use_dsa", False):
        found.append(f"{name}: sparse latent attention (DSA), whose tokens attend to those that an indexer selects")
    elif "Unified" in name:
        found.append(f"{name}: slots of a unified pool are translated at each step")
    elif name not in {"MHATokenToKVPool", _LATENTS}:
        found.append(name)
    if getattr(part, "is_quantized_kv_cache", False):
        found.append(f"{name} with blocks of scales (FP4 KV cache)")
    layout = getattr(part, "kv_cache_layout", None)
    if layout not in _LAYOUTS:
        found.append(f"{name} with kv_cache_layout={layout!r}")
    if getattr(part, "post_capture_active", False):
        found.append(f"{name} that gets its memory after graphs are captured")
    return found
