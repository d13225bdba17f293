"""The classes that vLLM gets for the names of attnplug: one for each choice, answered from manifests."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attnplug.errors import RequirementsError
from attnplug_vllm import facts, registration, selector
from attnplug_vllm.builder import make_builder_class
from attnplug_vllm.cache import CacheMembers
from attnplug_vllm.impl import make_impl_class
from attnplug_vllm.names import CPU, MLA_ON_CPU, SLOT, is_own_name, own_name

if TYPE_CHECKING:
    from collections.abc import Callable

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own


class _Listed:
    """An attribute of a class that is computed when it is read: what vLLM reads as a list follows from manifests."""

    def __init__(self, compute: Callable[[facts.Choice], list[Any]]) -> None:
        self._compute = compute

    def __get__(self, _: object, owner: type[Answers]) -> list[Any]:
        return self._compute(owner.choice)


class Answers:
    """
    What vLLM asks a backend class, answered from manifests for a choice.

    Attributes:
        choice: The identifiers of the candidates that may be chosen; empty where attnplug decides.
        latent: Whether it is for latent attention.
    """

    choice: ClassVar[facts.Choice] = ()
    latent: ClassVar[bool] = False
    supported_dtypes = _Listed(selector.dtypes)
    supported_kv_cache_dtypes = _Listed(selector.kv_cache_dtypes)

    @classmethod
    def get_name(cls) -> str:
        """Return the name of the enum's member."""
        return own_name(cls.choice)

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Return why the choice cannot serve what vLLM's selector requests, all of it at once; empty where it can."""
        return selector.validate(asked, cls.choice, latent=cls.latent)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that all layers of the current configuration can have."""
        del kv_cache_spec
        sizes = selector.block_sizes(cls.choice, latent=cls.latent)
        return [size if isinstance(size, int) else MultipleOf(size.multiple_of) for size in sizes] or [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether a candidate has kernels for heads of this size."""
        return facts.serves(cls.choice, head_size=head_size)

    @classmethod
    def supports_dtype(cls, dtype: Any) -> bool:
        """Whether a candidate computes in this dtype."""
        return facts.serves(cls.choice, dtype=str(dtype).removeprefix("torch."))

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether a candidate reads KV caches of this dtype."""
        try:
            name = facts.cache_dtype(kv_cache_dtype or "auto")
        except RequirementsError:
            return False
        return name == "auto" or facts.serves(cls.choice, kv_cache_dtype=name)

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether a candidate has attention sinks."""
        return facts.serves(cls.choice, sinks=True)

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Whether a candidate has ALiBi with square roots of distances."""
        return facts.serves(cls.choice, alibi="sqrt")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether a candidate has bidirectional spans, those of images."""
        return facts.serves(cls.choice, mm_prefix=True)

    @classmethod
    def supports_rswa(cls) -> bool:
        """Return False: it is not served."""
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        """Return False: it is not served."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: batches are planned from the query lengths on the CPU."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether a candidate takes a scale for each KV head."""
        return facts.serves(cls.choice, per_head_scales=True)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a candidate has sliding windows, of a length that nobody has stated yet."""
        return facts.serves(cls.choice, sliding_window=facts.UNKNOWN_WINDOW)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a candidate attends to later tokens with a paged KV cache."""
        return facts.serves(cls.choice, causal=False, paged=True)

    @classmethod
    def supports_non_causal_dcp(cls) -> bool:
        """Whether a candidate does so with decode context parallelism."""
        return facts.serves(cls.choice, causal=False, paged=True, dcp_size=2)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether the results of a candidate can be made independent of what else is in a batch."""
        return facts.serves(cls.choice, batch_invariant=True)

    @classmethod
    def supports_dcp(cls) -> bool:
        """Whether a candidate has decode context parallelism."""
        return facts.serves(cls.choice, **({"latent": True, "return_lse": True} if cls.latent else {"dcp_size": 2}))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether a candidate has this attention of a model."""
        name = facts.text_of(attn_type)
        return name != selector.CROSS and facts.serves(cls.choice, attn_type=name)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether a candidate runs on this device."""
        del capability  # of the device that `facts.device` names
        return facts.serves(cls.choice)


class AttnplugBackend(Answers, CacheMembers, AttentionBackend):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
    """A choice of attnplug as vLLM's backend class. vLLM makes no instance of it."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the implementation of a layer."""
        return make_impl_class(cls.choice)

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the builder of a step's metadata."""
        return make_builder_class(cls.choice)


def backend_class(choice: facts.Choice = (), *, latent: bool = False) -> type[Answers]:
    """
    Return the class of a choice.

    Args:
        choice: The identifiers of the candidates that may be chosen; empty leaves it to attnplug and its settings.
        latent: Whether it is for latent attention.
    """
    return _class_of(choice, latent)


@cache
def _class_of(choice: facts.Choice, latent: bool) -> type[Answers]:  # noqa: FBT001 - a key of the cache
    name = own_name(choice)
    members = {"choice": choice, "latent": latent, "__module__": __name__, "__qualname__": name}
    if not latent:
        return type(name, (AttnplugBackend,), members)
    from attnplug_vllm.latent import latent_base, latent_classes  # noqa: PLC0415 - imports vLLM's layers

    impl, builder = latent_classes(choice)
    members |= {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type(name, (Answers, latent_base()), members)


def __getattr__(name: str) -> Any:
    """Return the class of a name that vLLM knows."""
    if name == CPU or name in MLA_ON_CPU:
        return _of_cpu_platform(name)
    if name == SLOT or is_own_name(name):
        return backend_class(registration.choice_of(name), latent=facts.is_latent())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _of_cpu_platform(name: str) -> Any:
    """Return what vLLM's CPU platform gets for its own backend: ours where the current configuration has chosen one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415 - as in the registration

    chosen = selector.chosen_by_config()
    if chosen is None:
        module, _, class_name = AttentionBackendEnum[name].value.rpartition(".")
        return getattr(import_module(module), class_name)
    selector.check_model(chosen)
    found = backend_class(chosen, latent=name in MLA_ON_CPU)
    # vLLM has just written that it cannot use this name on a CPU.
    _log.info("attnplug runs %s in the place of vLLM's own CPU backend", found.get_name())
    return found
