"""Sections that run a backend: each in a fresh process, which tells what it found, or why it found nothing."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any, Final

from attnplug import AttnplugError, errors
from attnplug.commands import describe_error
from attnplug_kit.bench.interpreter import interpreter

_CODE: Final = "from attnplug_kit.bench.worker import answer; answer({!r}, {!r})"


def ask(section: str, **arguments: Any) -> Any:
    """
    Return what ``child(**arguments)`` of a module of this package returns in a fresh process.

    Raises:
        AttnplugError: What it raised there, with the same three sentences.
    """
    with interpreter() as python:
        found = python.answer(_CODE.format(section, arguments))
    if "error" in found:
        raise _error(found["error"])
    return found["answer"]


def answer(section: str, arguments: dict[str, Any]) -> None:
    """Call a section's child, and print one JSON document; whatever else is printed meanwhile goes elsewhere."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)  # compilers that a plugin starts print there too
    try:
        told = {"answer": import_module(f"attnplug_kit.bench.{section}").child(**arguments)}
    except AttnplugError as error:
        told = {"error": describe_error(error)}
    sys.stdout.flush()
    with os.fdopen(ours, "w", encoding="utf-8") as out:
        json.dump(told, out)


def _error(told: dict[str, Any]) -> AttnplugError:
    kind: type[AttnplugError] = getattr(errors, told["type"])
    return kind(told["problem"], told["expected"], told["fix"])
