"""
Every exception that attnplug raises on purpose.

Each one has three parts: the problem, what was expected (left out where it adds nothing), and the fix.

    AttnplugError
    ├── RequestError (ValueError)           the request itself is wrong
    │   ├── RequirementsError               unknown, contradictory or impossible requirements
    │   ├── DeviceError                     a device that does not exist or does not parse
    │   ├── UnknownLayerError (KeyError)    a layer that a plan is not for
    │   ├── SettingsError                   an environment variable, a setting or a plugin option
    │   └── DecisionError                   data from another process that is not a decision
    ├── ManifestError (ValueError)          an attnplug.toml breaks a rule; carries the path and the line
    │   └── ApiVersionError                 it is written for another major version of the contract
    ├── RegistryError                       what is installed contradicts itself
    │   ├── DuplicateBackendError           two distributions offer one name
    │   └── UnknownBackendError (LookupError)
    ├── NoBackendError                      nothing can serve; carries the Explanation with every verdict
    ├── PluginError (RuntimeError)          a plugin's own code failed
    │   ├── PluginLoadError                 its module does not import, or its probe refuses
    │   └── PluginContractError             it loads, and breaks the contract
    └── ContractError (ValueError)          a call that the negotiated agreement does not cover
        ├── NotNegotiatedError              a layer or batch has what was not requested
        ├── LayerError                      a layer whose values are wrong
        ├── LimitsError                     limits that contradict each other
        ├── BatchError                      a batch whose numbers contradict each other
        ├── TensorError                     a tensor of the wrong shape, dtype or device
        └── CacheError                      a slot, a block or a KV cache that does not fit
"""

from __future__ import annotations

from reprlib import Repr
from typing import TYPE_CHECKING, Any, Final, Protocol

from attnplug._escape import escaped_lines
from attnplug._foreign import ForeignCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "ApiVersionError",
    "AttnplugError",
    "BatchError",
    "CacheError",
    "ContractError",
    "DecisionError",
    "DeviceError",
    "DuplicateBackendError",
    "LayerError",
    "LimitsError",
    "ManifestError",
    "NoBackendError",
    "NotNegotiatedError",
    "PluginContractError",
    "PluginError",
    "PluginLoadError",
    "RegistryError",
    "RequestError",
    "RequirementsError",
    "SettingsError",
    "TensorError",
    "UnknownBackendError",
    "UnknownLayerError",
]


class AttnplugError(Exception):
    """
    The base of every error here. Its text is safe to print: what others wrote in it is escaped.

    Args:
        problem: What is wrong.
        expected: What would be right; empty where the problem says it all.
        fix: What to do.
    """

    def __init__(self, problem: str, expected: str, fix: str) -> None:
        super().__init__(problem, expected, fix)
        self.problem = problem
        self.expected = expected
        self.fix = fix

    @property
    def summary(self) -> str:
        """The problem in a line, for hosts that count why they call something else."""
        return self.problem

    def __str__(self) -> str:
        return escaped_lines(self._text())

    def _text(self) -> str:
        expected = f"\n  expected: {self.expected}" if self.expected else ""
        return f"{self.problem}{expected}\n  fix: {self.fix}"


class RequestError(AttnplugError, ValueError):
    """The request itself is wrong."""


class RequirementsError(RequestError):
    """The requirements are unknown, contradictory or impossible."""


class DeviceError(RequestError):
    """The device does not exist here, or its description does not parse."""


class UnknownLayerError(RequestError, KeyError):
    """A layer is requested of a plan that is not for it."""


class SettingsError(RequestError):
    """An environment variable, a configuration file or a plugin option is wrong."""


class DecisionError(RequestError):
    """Data from another process is not a decision."""


class ManifestError(AttnplugError, ValueError):
    """
    A manifest breaks a rule.

    Attributes:
        path: The file, as its reader names it.
        line: The line of the offending key, counted from 1, or None where the file does not parse that far.
    """

    def __init__(self, problem: str, expected: str, fix: str, path: str = "", line: int | None = None) -> None:
        super().__init__(problem, expected, fix)
        self.path = path
        self.line = line

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem, self.expected, self.fix, self.path, self.line)

    def _text(self) -> str:
        where = f"{self.path}:{self.line}" if self.line is not None else self.path
        return f"{where}: {super()._text()}" if where else super()._text()


class ApiVersionError(ManifestError):
    """A manifest is written for another major version of the contract than this core has."""


class RegistryError(AttnplugError):
    """What is installed contradicts itself."""


class DuplicateBackendError(RegistryError):
    """Two distributions offer a backend of the same name."""


class UnknownBackendError(RegistryError, LookupError):
    """No installed or known backend has this name."""


class Explained(Protocol):
    """What a `NoBackendError` carries: an `attnplug.Explanation`. Its module imports this one, not the reverse."""

    @property
    def chosen(self) -> Any:
        """The decision; None where nothing can serve."""

    @property
    def verdicts(self) -> Sequence[Any]:
        """The verdict on every candidate, with its reasons and its fix."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""


class NoBackendError(AttnplugError):
    """
    Nothing can serve the requirements.

    Attributes:
        explanation: The `attnplug.Explanation`: the verdict on every candidate, with its reasons and its fix.
    """

    def __init__(self, problem: str, expected: str, fix: str, explanation: Explained | None = None) -> None:
        super().__init__(problem, expected, fix)
        self.explanation = explanation

    @property
    def summary(self) -> str:
        """The request in a line; the problem has the reasons of every candidate."""
        requested = getattr(self.explanation, "requirements", None)
        if requested is None:
            return self.problem
        return f"no backend serves {', '.join(f'{name}={value}' for name, value in requested.to_dict().items())}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem, self.expected, self.fix, self.explanation)


class PluginError(AttnplugError, RuntimeError):
    """A plugin's own code failed."""


class PluginLoadError(PluginError):
    """A plugin does not import, or its probe refuses this machine, or this request."""


class PluginContractError(PluginError):
    """A plugin loads, and breaks the contract."""


class ContractError(AttnplugError, ValueError):
    """A call that the negotiated agreement does not cover."""


class NotNegotiatedError(ContractError):
    """A layer or a batch has a feature that was not requested at selection."""


class LayerError(ContractError):
    """A layer's own values are wrong."""


class LimitsError(ContractError):
    """Limits contradict each other or the agreement."""


class BatchError(ContractError):
    """A batch's numbers contradict each other."""


class TensorError(ContractError):
    """A tensor has the wrong shape, dtype or device."""


class CacheError(ContractError):
    """A slot, a block or a KV cache does not fit."""


_MOST_BITS: Final = 400  # 120 digits; Python itself refuses to write out more than 4,300


class _Short(Repr):
    """Bounds the length and the depth of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 240
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 24

    def repr_int(self, value: int, level: int) -> str:
        """Return the digits of a number, or its size where they fill lines."""
        del level
        return repr(value) if value.bit_length() <= _MOST_BITS else f"<an int of {value.bit_length()} bits>"


_SHORT: Final = _Short()
_LONGEST_NAME: Final = 200


def shown(value: object) -> str:
    """Return the repr of a value, cut to a length that a message can hold; its class where it has none."""
    with ForeignCode("repr() of it raises") as code:
        text = _SHORT.repr(value)
    return text if code.error is None else f"<{type(value).__name__}>"


def near(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" where a name is close to one of `names`, else an empty text."""
    matches = close(name, names)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def close(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a name is close to, the closest first."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong name needs it

    if len(name) > _LONGEST_NAME:
        return []  # comparing takes time that grows with the square of the length
    return get_close_matches(name, list(names), cutoff=0.6)
