"""Where a model's config.json is: a file, a folder, or a model id in the local Hugging Face cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from attnplug.errors import RequirementsError
from attnplug.request.files import read_text

CONFIG: Final = "config.json"
_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_LONGEST_REF: Final = 1024  # bytes; a commit has 40


def find_config(name: str) -> Path:
    """
    Return the path of a model's config.json. Nothing is downloaded.

    Args:
        name: The file, the folder that holds it, or a model id such as ``"Qwen/Qwen3-8B"``, with ``@REVISION`` for
            another revision than ``main``. A file or a folder of that name comes first.

    Raises:
        RequirementsError: There is none; the message says where it was looked for.
    """
    path = Path(name)
    if _is(path, "is_dir"):
        if not _is(path / CONFIG, "exists"):
            raise _no_config_in(path)
        return path / CONFIG
    model, at, revision = name.partition("@")
    if _is(path, "exists") or _ID.fullmatch(model) is None or path.suffix == ".json" or path.is_absolute():
        return path  # where it does not open, its reader says why
    return _in_cache(model, revision if at else "main")


def hub_cache() -> Path:
    """
    Return the folder of the Hugging Face cache, by the variables that its library reads.

    Source: huggingface_hub's documentation of its environment variables.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(  # noqa: PTH118 - a variable with a default, as the library has it
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _in_cache(model: str, revision: str) -> Path:
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    if not _is(folder, "is_dir"):
        raise _not_found(
            model,
            f"there is no file or folder {model!r} here, and no {str(folder)!r} in the Hugging Face cache",
            f"pass the path of its config.json, or download it: `hf download {model} {CONFIG}`",
        )
    commit = _commit_of(folder, revision)
    snapshot = folder / "snapshots" / commit
    if _is(snapshot / CONFIG, "exists"):
        return snapshot / CONFIG
    others = sorted(each.name for each in (folder / "snapshots").glob("*") if _is(each / CONFIG, "exists"))
    raise _not_found(
        model,
        f"the cache has no {str(snapshot / CONFIG)!r}"
        + (f"; revisions with a {CONFIG} are {', '.join(others)}" if others else ""),
        f"pass {model}@{others[0]}" if others else f"download it: `hf download {model} {CONFIG}`",
    )


def _commit_of(folder: Path, revision: str) -> str:
    """Return the commit of a branch or tag; a commit is its own."""
    if ".." in Path(revision).parts or Path(revision).is_absolute():
        return "invalid"
    try:
        return read_text(folder / "refs" / revision, _LONGEST_REF).strip()
    except (OSError, ValueError):
        return revision


def _is(path: Path, test: str) -> bool:
    """Whether a path is a folder, or exists; a name that no file system admits is neither."""
    try:
        return bool(getattr(path, test)())
    except (OSError, ValueError):
        return False


def _no_config_in(folder: Path) -> RequirementsError:
    native = next((name for name in ("params.json", "model_index.json") if _is(folder / name, "exists")), None)
    other = {
        "params.json": "; its params.json is the publisher's own format",
        "model_index.json": "; its model_index.json is a pipeline of diffusers, whose parts are folders with a config",
    }
    return RequirementsError(
        f"the folder {str(folder)!r} was given as the configuration, and has no {CONFIG}",
        f"a model of transformers has one{other.get(native or '', '')}",
        "pass the folder that has it, or the file",
    )


def _not_found(model: str, expected: str, fix: str) -> RequirementsError:
    return RequirementsError(f"{model!r} was given as the configuration, and is not found", expected, fix)
