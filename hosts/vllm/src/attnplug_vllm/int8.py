"""
Int8 KV caches in vLLM: their names for ``--kv-cache-dtype``, and which one a layer has.

From vLLM 0.33 on vLLM's own command line takes the names: ``--kv-cache-dtype int8`` (level 1, with a calibration file)
and ``int8_k`` (level 2). Earlier versions take no foreign names there. They have an option for what plugins need::

    --additional-config '{"attnplug": {"kv_cache_dtype": "int8"}}'

From vLLM 0.32 on a page is as large as the KV cache needs. vLLM 0.26 sizes pages itself: with ``--kv-cache-dtype
int8_per_token_head`` they have room for level 1 and four bytes more per token and head; level 2 only fits into the
16-bit pages of ``auto``, and saves no memory there.

The key ``features`` beside it requests what vLLM has no option for, such as the calibration:
``["int8_ixformer.calibrate"]``.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES: Final = ("int8", "int8_k")
"""The names of the KV caches: the same in attnplug's requirements and in vLLM."""

SECTION: Final = "attnplug"
"""The part of vLLM's ``additional_config`` that is read here."""

WIDER: Final = "int8_per_token_head"
"""vLLM's own int8 format, by which vLLM 0.26 makes pages that have room for level 1."""

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own

_FIX: Final = 'pass --additional-config \'{"attnplug": {"kv_cache_dtype": "int8"}}\', or leave it out'


def register_dtypes() -> None:
    """Let vLLM take the names for ``--kv-cache-dtype``, where its version takes foreign ones; others' names stay."""
    import vllm.config.cache as cache  # noqa: PLC0415, PLR0402 - of the process that registers

    if not takes_dtypes():
        return
    for name in DTYPES:
        if not cache.is_known_kv_cache_dtype(name):
            cache.register_kv_cache_dtype(name)(_handler(name))


def takes_dtypes() -> bool:
    """Whether this version of vLLM takes foreign names for ``--kv-cache-dtype``."""
    import vllm.config.cache as cache  # noqa: PLC0415, PLR0402 - see above

    return hasattr(cache, "register_kv_cache_dtype")


def cache_dtype(layer_dtype: str, config: Any) -> str:
    """
    Return the dtype of a layer's KV cache: vLLM's, or the int8 format that the additional configuration names.

    Args:
        layer_dtype: What vLLM says of the layer, in its words.
        config: vLLM's configuration, or None.

    Raises:
        SettingsError: The additional configuration names something else, or contradicts ``--kv-cache-dtype``.
    """
    named = _section(config).get("kv_cache_dtype")
    if named is None or named == layer_dtype:
        return layer_dtype
    if named not in DTYPES:
        raise SettingsError(
            f"vLLM's additional_config has kv_cache_dtype={named!r} for attnplug",
            f"it is one of {', '.join(DTYPES)}; other dtypes are --kv-cache-dtype",
            _FIX,
        )
    given = config.cache_config.cache_dtype
    if given == layer_dtype == "auto" and not config.cache_config.kv_cache_dtype_skip_layers:
        return str(named)
    if given == layer_dtype == WIDER and named == "int8":
        return str(named)
    if given != layer_dtype and given in ("auto", WIDER, *DTYPES):
        return layer_dtype  # vLLM leaves this layer unquantized
    raise SettingsError(
        f"vLLM was given --kv-cache-dtype {given}, and additional_config names {named!r} for attnplug",
        "a KV cache has one dtype; --kv-cache-dtype-skip-layers says nothing of layers whose dtype is auto",
        "leave --kv-cache-dtype and --kv-cache-dtype-skip-layers out; before vLLM 0.32, "
        f"--kv-cache-dtype {WIDER} makes smaller pages for 'int8'",
    )


def features(config: Any) -> tuple[str, ...]:
    """
    Return the open features of attnplug that the additional configuration requests of all layers.

    Raises:
        SettingsError: They are no list of names.
    """
    named = _section(config).get("features", [])
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise SettingsError(
            f"vLLM's additional_config has features={named!r} for attnplug",
            "they are a list of names",
            'pass "features": ["int8_ixformer.calibrate"], or leave it out',
        )
    return tuple(named)


@cache
def warn_of_unused_room(head_size: int) -> None:
    """
    Warn, once in a process, that vLLM 0.26 makes 16-bit pages for level 1, which needs about half of each.

    Args:
        head_size: Of keys and of values.
    """
    _log.warning(
        "attnplug: an int8 KV cache of level 1 needs %d of the %d bytes per token and KV head that vLLM allocates for "
        "--kv-cache-dtype auto, and the rest stays unused. Pass this option beside --additional-config: "
        "--kv-cache-dtype %s",
        2 * head_size + 4,
        4 * head_size,
        WIDER,
    )


def _section(config: Any) -> Mapping[str, Any]:
    """Return attnplug's part of the additional configuration."""
    whole = getattr(config, "additional_config", None)
    section = whole.get(SECTION, {}) if isinstance(whole, dict) else {}
    if not isinstance(section, dict) or not section.keys() <= {"kv_cache_dtype", "features"}:
        raise SettingsError(
            f"vLLM's additional_config has {SECTION}={section!r}",
            "it is a table with the keys 'kv_cache_dtype' and 'features'",
            _FIX,
        )
    return section


def _handler(name: str) -> type:
    """Return what vLLM is told of a dtype."""
    import torch  # noqa: PLC0415 - vLLM has imported it
    from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: PLC0415 - see above

    class Handler:
        """Bytes whose meaning is the backend's."""

        def torch_dtype(self) -> torch.dtype:
            """Return the dtype of a page's elements."""
            return torch.int8

        def quant_mode(self) -> Any:
            """Return that no kernel of vLLM reads it."""
            return KVQuantMode.CUSTOM

    Handler.name = name  # type: ignore[attr-defined]  # a member of vLLM's protocol
    return Handler
