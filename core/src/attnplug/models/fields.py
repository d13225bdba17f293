"""A model's configuration as plain data, read by field name, so that neither transformers nor torch is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from attnplug.errors import RequirementsError

_TEXT_PARTS: Final = ("text_config", "thinker_config", "llm_config", "language_config")


@frozen
class Fields:
    """
    The fields of one model, or of one part of it.

    Attributes:
        data: Field name -> value; None counts as absent.
        origin: What it was read from, for messages.
    """

    data: Mapping[str, Any]
    origin: str

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers, such as ``"llama"``."""
        return str(self.data.get("model_type") or "")

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is set, else None."""
        return next((self.data[name] for name in names if self.data.get(name) is not None), None)

    def need(self, *names: str) -> Any:
        """
        Return the first of these fields that is set.

        Raises:
            RequirementsError: None of them is.
        """
        value = self.get(*names)
        if value is None:
            raise self.missing(names[0])
        return value

    def integer(self, *names: str, least: int = 1) -> int | None:
        """
        Return the first of these fields that is set, as a whole number; None where none is set.

        Args:
            names: Field names, which mean the same.
            least: The smallest valid number.

        Raises:
            RequirementsError: It is text, a boolean, a fraction, or below `least`. Zero does not count as absent.
        """
        name = next((name for name in names if self.data.get(name) is not None), None)
        if name is None:
            return None
        value = self.data[name]
        whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        if not whole or value < least:
            raise RequirementsError(
                f"{self.origin} has {name}={value!r}",
                f"{name!r} is a whole number, at least {least}",
                f"correct {name!r} in the configuration",
            )
        return int(value)

    def need_integer(self, *names: str, least: int = 1) -> int:
        """
        Return `integer` of these fields.

        Raises:
            RequirementsError: None of them is set, or it is no such number.
        """
        value = self.integer(*names, least=least)
        if value is None:
            raise self.missing(names[0])
        return value

    def missing(self, name: str) -> RequirementsError:
        """Return the error for a field that has to be there."""
        return RequirementsError(
            f"{self.origin} names no {name!r}",
            f"the attention of {self.model_type!r} follows from it, and transformers' default is not guessed here",
            f"write {name!r} into the configuration, or pass the configuration object that transformers makes of it",
        )

    def layer(self, index: int) -> Fields:
        """Return the fields of one layer: `per_layer_config` overrides the model's."""
        overrides = self.data.get("per_layer_config") or {}
        own = overrides.get(index) or overrides.get(str(index)) or {}
        return Fields({**self.data, **own}, self.origin) if own else self

    def part(self, name: str) -> Fields:
        """Return a part of a composite model; what it leaves out, such as the dtype, is the whole's."""
        inherited = {key: self.data.get(key) for key in ("dtype", "torch_dtype")}
        # A null that is written out counts: a window of null means no window. Only the dtype may be inherited.
        own = {key: value for key, value in self.need(name).items() if value is not None or key not in inherited}
        return Fields({**inherited, **own}, f"{self.origin}.{name}")

    def text(self) -> Fields:
        """Return the language model's part of a composite model, or the whole of a plain one."""
        part = next((name for name in _TEXT_PARTS if isinstance(self.data.get(name), Mapping)), None)
        return self if part is None else self.part(part).text()


def read_fields(config: object) -> Fields:
    """
    Return the fields of a configuration object of transformers, of a mapping, or of a ``config.json``.

    Raises:
        RequirementsError: It is none of these, or names no model type.
    """
    data, origin = _load(config)
    fields = Fields(data, origin)
    if not fields.model_type:
        raise RequirementsError(
            f"{origin} names no 'model_type'",
            "the model type says how the other fields are read",
            "pass a transformers configuration, or a config.json that has one",
        )
    return fields


def _load(config: object) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, f"the {config.get('model_type', 'given')} configuration"
    if isinstance(config, (str, PathLike)):
        return _load_json(Path(fspath(config))), str(config)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise RequirementsError(
            f"a {type(config).__name__!r} was given as the configuration",
            "it is a transformers configuration, a mapping of its fields, or the path of a config.json",
            "pass model.config",
        )
    return to_dict(), type(config).__name__


def _load_json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration, and does not open: {error.strerror}",
            "",
            "pass the path of a model's config.json, or of the folder that holds it",
        ) from error
    except ValueError as error:
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration, and is not JSON: {error}", "", "pass a config.json"
        ) from error
    if not isinstance(data, dict):
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration", "a config.json holds one object", "pass a config.json"
        )
    return data
