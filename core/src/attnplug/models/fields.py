"""A model's configuration as plain data, read by field name, so that neither transformers nor torch is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen

from attnplug.errors import RequirementsError
from attnplug.models.locate import find_config
from attnplug.request.files import read_text

_TEXT_PARTS: Final = ("text_config", "thinker_config", "llm_config", "language_config")
_LARGEST: Final = 2**24  # bytes; published ones have up to 200 KiB, of quantized models with a list of layers


@frozen
class Fields:
    """
    The fields of a model, or of a part of it.

    Attributes:
        data: Field name -> value; None counts as absent.
        origin: What it was read from, for messages.
        file: The config.json, where it is one.
        defaults: What the library assumes for fields that are not in `data`, not even as null.
        assumed: Those of them that were read, with their values; parts and layers share it.
        read: The fields that were looked up; parts and layers share it.
    """

    data: Mapping[str, Any]
    origin: str
    file: Path | None = None
    defaults: Mapping[str, Any] = field(factory=dict)
    assumed: dict[str, Any] = field(factory=dict, eq=False)
    read: set[str] = field(factory=set, eq=False)

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers, such as ``"llama"``."""
        return str(self.data.get("model_type") or "")

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is set, else the first default, else None."""
        name = self._name_of(names)
        return None if name is None else self._read(name)

    def is_off(self, name: str) -> bool:
        """Whether a field is false: null and absence without a default are not."""
        return self.get(name) is False

    def _name_of(self, names: tuple[str, ...]) -> str | None:
        """Return the first name that is set, else the first that is left out and has a default."""
        self.read.update(names)
        for name in names:
            if self.data.get(name) is not None:
                return name
        # Names that mean the same: where one is written as null, the default of another one does not replace it.
        if any(name in self.data for name in names):
            return None
        return next((name for name in names if self.defaults.get(name) is not None), None)

    def _read(self, name: str) -> Any:
        if name in self.data:
            return self.data[name]
        value = self.assumed[name] = self.defaults[name]
        return value

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
        name = self._name_of(names)
        if name is None:
            return None
        value = self._read(name)
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
            f"the attention of {self.model_type!r} follows from it, and no default of it is known",
            f"write {name!r} into the configuration, or pass the configuration object that its code makes of it",
        )

    def layer(self, index: int) -> Fields:
        """Return the fields of a layer: `per_layer_config` overrides the model's."""
        overrides = self.get("per_layer_config") or {}
        # Saved files write the numbers as text, of one width: "05" in a model of 30 layers.
        own = next(
            (value for key, value in overrides.items() if re.fullmatch("[0-9]{1,6}", str(key)) and int(key) == index),
            None,
        )
        return evolve(self, data={**self.data, **own}) if own else self

    def part(self, name: str) -> Fields:
        """Return a part of a composite model; it inherits the dtype of the whole."""
        inherited = {key: self.data.get(key) for key in ("dtype", "torch_dtype")}
        # A null that is written out counts: a window of null means no window. Only the dtype may be inherited.
        own = {key: value for key, value in self.need(name).items() if value is not None or key not in inherited}
        return evolve(self, data={**inherited, **own}, origin=f"{self.origin}.{name}")

    def text(self) -> Fields:
        """Return the language model's part of a composite model, or the whole of a plain model."""
        part = next((name for name in _TEXT_PARTS if isinstance(self.data.get(name), Mapping)), None)
        return self if part is None else self.part(part).text()


LIBRARY: Final = "transformers 5.24"
"""Whose classes ``defaults.json`` was made from, by ``python -m tools.model_defaults --write``."""


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """
    Return the library's defaults for fields that a config.json leaves out: field name -> value.

    It is empty for a type that the library has no class for, and for an unknown one.
    """
    found: Mapping[str, Any] = _defaults().get(model_type, {})
    return found


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def read_fields(config: object) -> Fields:
    """
    Return the fields of a configuration object of transformers, of a mapping, or of a ``config.json``.

    Args:
        config: One of these; a file is named as `attnplug.models.locate.find_config` takes it.

    Raises:
        RequirementsError: It is none of these, or names no model type.
    """
    fields = load_fields(config)
    if not fields.model_type:
        raise RequirementsError(
            f"{fields.origin} names no 'model_type'",
            "the model type says how the other fields are read",
            "pass a transformers configuration, or a config.json that has one",
        )
    return fields


def load_fields(config: object) -> Fields:
    """Return `read_fields` of a configuration that may name no model type, since its decoder is a part of it."""
    if isinstance(config, Mapping):
        return Fields(config, f"the {config.get('model_type', 'given')} configuration")
    if isinstance(config, (str, PathLike)):
        file = find_config(fspath(config))
        return Fields(_load_json(file), str(config), file)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise RequirementsError(
            f"a {type(config).__name__!r} was given as the configuration",
            "it is a transformers configuration, a mapping of its fields, or the path of a config.json",
            "pass model.config",
        )
    return Fields(to_dict(), type(config).__name__)


def _load_json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(read_text(file, _LARGEST))
    except OSError as error:
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration, and does not open: {error.strerror}",
            "",
            "pass the path of a model's config.json, or of the folder that holds it",
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration, and is not JSON: {error}", "", "pass a config.json"
        ) from error
    if not isinstance(data, dict):
        raise RequirementsError(
            f"{str(file)!r} was given as the configuration", "a config.json holds one object", "pass a config.json"
        )
    return data
