"""
What a host engine's distribution says to ``attnplug explain --engine NAME`` and to ``attnplug doctor``.

A distribution adds an engine by an entry point in the group ``attnplug.engines``. Its name is the engine's, its value a
module with two functions:

``choose(requirements, device, *, assume_installed)``
    What the engine picks by itself for each of a sequence of `attnplug.Requirements` on an `attnplug.Device`, as an
    `EngineAnswer`. With `assume_installed` it supposes that the engine's own kernel libraries are installed.

``diagnose(*, load)``
    Whether the engine sees the backends of attnplug, as an `EngineDiagnosis`. Without `load` nothing of the engine is
    imported.

The module is imported for these two commands only, and imports neither torch nor the engine: what needs them runs in
another process, by `run_program`. Both functions may raise errors of `attnplug.errors`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of, optional

from attnplug.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["GROUP", "EngineAnswer", "EngineBackend", "EngineChoice", "EngineDiagnosis", "run_program"]

GROUP: Final = "attnplug.engines"
"""The entry-point group."""


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str):  # a text is iterable, too
        message = f"{values!r} is one text, where several values are expected"
        raise TypeError(message)
    return tuple(values)


_TEXTS: Final = deep_iterable(instance_of(str))


@frozen
class EngineBackend:
    """
    One of an engine's own backends, considered for one request.

    Attributes:
        name: Its name in the engine.
        reasons: Why the engine does not take it; empty where it could.
        kernels: What it runs, in words, such as ``"FlashAttention 3"``; empty where its name says it.
        same_as: The candidates of attnplug that run these kernels, each ``backend/variant``.
    """

    name: str = field(validator=instance_of(str))
    reasons: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)
    kernels: str = field(default="", validator=instance_of(str))
    same_as: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)

    def __str__(self) -> str:
        return f"{self.name} ({self.kernels})" if self.kernels else self.name


_BACKENDS: Final = deep_iterable(instance_of(EngineBackend))


@frozen
class EngineChoice:
    """
    What an engine picks by itself for one request.

    Attributes:
        chosen: The name of its backend; None where it has none for this.
        backends: Every backend that it considered, in its order of preference.
        ignored: The requested fields that its selection does not consider.
        reason: Why it considered none, in a sentence; empty where `backends` says it all.
    """

    chosen: str | None = field(validator=optional(instance_of(str)))
    backends: tuple[EngineBackend, ...] = field(
        default=(), converter=_tuple, validator=deep_iterable(instance_of(EngineBackend))
    )
    ignored: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)
    reason: str = field(default="", validator=instance_of(str))

    def __attrs_post_init__(self) -> None:
        if self.chosen is not None and self.backend is None:
            message = f"the chosen {self.chosen!r} is none of the backends"
            raise ValueError(message)

    @property
    def backend(self) -> EngineBackend | None:
        """The chosen backend, or None."""
        return next((each for each in self.backends if each.name == self.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return _plain(self)


_CHOICES: Final = deep_iterable(instance_of(EngineChoice))


@frozen
class EngineAnswer:
    """
    What an engine picks by itself on one device.

    Attributes:
        engine: The engine with its version, such as ``"vLLM 0.32.0"``.
        choices: One for each request, in the same order.
        assumed: What the answer supposes, a sentence each.
        warnings: What may make it wrong, a sentence each.
    """

    engine: str = field(validator=instance_of(str))
    choices: tuple[EngineChoice, ...] = field(
        default=(), converter=_tuple, validator=deep_iterable(instance_of(EngineChoice))
    )
    assumed: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)
    warnings: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)


@frozen
class EngineDiagnosis:
    """
    Whether an engine sees the backends of attnplug.

    Attributes:
        lines: The state, a sentence each.
        warnings: What has no effect, or may not work, a sentence each.
        problems: What is broken, as (what, fix) pairs.
    """

    lines: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)
    warnings: tuple[str, ...] = field(default=(), converter=_tuple, validator=_TEXTS)
    problems: tuple[tuple[str, str], ...] = field(default=(), converter=_tuple, validator=deep_iterable(_TEXTS))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return _plain(self)


def _plain(value: Any) -> dict[str, Any]:
    return attrs.asdict(value, value_serializer=lambda _, __, item: list(item) if isinstance(item, tuple) else item)


def run_program(
    module: str,
    request: Mapping[str, Any],
    *,
    engine: str,
    trial: str,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> dict[str, Any]:
    """
    Run a module in another process with the same import path, and return its answer.

    The module reads the request as JSON from standard input, and writes its answer as JSON to standard output. What it
    imports, and changes in the engine, ends with its process.

    Args:
        module: The module of a host's distribution, for example ``"attnplug_vllm.stand_in"``.
        request: What it reads, of JSON's values.
        engine: The engine's name in messages.
        trial: A statement that works where the engine does, such as ``"import torch"``: the fix names it.
        environment: Environment variables besides those of this process.
        timeout: The longest that it may take, seconds.

    Raises:
        PluginError: It fails, takes longer, or writes no JSON.
    """

    def failure(why: str) -> PluginError:
        return PluginError(
            f"{engine} fails where it is started to see what it selects: {why}",
            "",
            f"see whether `python -c {trial!r}` works; if it does, report this to the authors of "
            f"{module.partition('.')[0].replace('_', '-')}",
        )

    # -P keeps a file of the current folder from taking the place of a module; Python 3.10 does not know it.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and a module that a host's distribution names
            [sys.executable, *options, "-m", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired as error:
        raise failure(f"it takes more than {timeout:g} s") from error
    if done.returncode != 0:
        raise failure(next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}"))
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise failure("its answer is no JSON") from error
    return found
