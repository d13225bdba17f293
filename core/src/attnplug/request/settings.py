"""
The settings of the environment and of the configuration file, read once.

Precedence, highest first: the call, `using`, environment variables, the configuration file, automatic.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import field, fields, frozen

from attnplug.errors import SettingsError, near
from attnplug.request.domains import LAYOUT
from attnplug.request.entries import check_entries, parse_entries, parse_names, validate_entries
from attnplug.request.files import read_text
from attnplug.request.tables import read_only

BackendNames = str | Sequence[str]
"""A backend, or backends in order of preference."""

PAIR = "+"
"""Joins the names of a routed pair: the backend of pure decodes, then that of all other batches."""

PREFIX = "ATTNPLUG_"
OPTION_PREFIX = "ATTNPLUG_OPT_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_log = logging.getLogger("attnplug")
_LARGEST = 2**20  # bytes of a configuration file at most
_DEEPEST = 32  # parts of a dotted key at most: a parser takes quadratic time for them
_LONG_NUMBER = re.compile(r"[0-9A-Fa-f_]{16}")  # every number of more than 64 bits has as many characters of these
_INT64 = range(-(2**63), 2**63)

Options = Mapping[str, Mapping[str, Any]]


def _frozen_options(options: Options) -> Options:
    return read_only({backend: read_only(values) for backend, values in options.items()})


@frozen
class Settings:
    """
    Settings that are not part of a call.

    Attributes:
        backend: Backends in order of preference; empty means automatic.
        allow: Backends, variants (``backend/variant``) or distributions that may be used, each but a variant with a
            version where one is meant (``name==1.0``). None means all, an empty set none.
        block: Those that may not be used. A blocked backend's code never runs.
        strict: Whether a plugin's failure is raised where it happens instead of being recorded.
        profile: File or folder of measured times, or None; ``#sha256=HASH`` behind it pins its content.
        evidence: Folders with evidence of what was verified, besides what plugins ship.
        record: File to which each built step's lengths and terms are written, or None.
        kv_layout: The layout of paged KV caches whose requirements leave it open; None leaves it to the negotiation.
        options: Options of each backend, raw as read; each backend's manifest validates its own.
        sources: Where each setting comes from. A source with precedence over others is placed after them: that order
            decides between two values of an option that were set under two names of one backend.
        unread: The user's configuration file where it could not even be looked for, and why: nothing is read from it.
    """

    backend: tuple[str, ...] = ()
    allow: frozenset[str] | None = field(default=None, validator=validate_entries)
    block: frozenset[str] = field(default=frozenset(), validator=validate_entries)
    strict: bool = False
    profile: str | None = None
    evidence: tuple[str, ...] = ()
    record: str | None = None
    kv_layout: str | None = None
    options: Options = field(factory=dict, converter=_frozen_options, hash=False)
    sources: Mapping[str, str] = field(factory=dict, converter=read_only, eq=False)
    unread: tuple[tuple[str, str], ...] = field(default=(), eq=False)

    def __repr__(self) -> str:
        plain = Settings()
        values = {item.name: getattr(self, item.name) for item in fields(Settings)}
        given = {name: value for name, value in values.items() if value != getattr(plain, name)}
        if self.options:
            given["options"] = {backend: dict(values) for backend, values in self.options.items()}
        if self.sources:
            given["sources"] = dict(self.sources)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
        """
        Read the environment and the configuration file. A home or a configuration folder that cannot be looked into is
        no error: it is recorded as `unread`.

        Args:
            environ: The environment; this process's by default.
            file: The configuration file; by default the one that ATTNPLUG_CONFIG names, else
                ``config.toml`` in the user's configuration folder.

        Raises:
            SettingsError: A value does not parse, a file that is there cannot be read, or one that was named does not
                exist.
        """
        environ = os.environ if environ is None else environ
        named = file or _named_file(environ)
        place = named or _default_file(environ)
        out_of_reach = "" if named else _out_of_reach(place)
        found: dict[str, tuple[Any, str]] = {} if out_of_reach else _from_file(place, named=named is not None)
        # Sources are in the order of precedence, the file first: what is read later replaces it and comes after it.
        tables, origin = found.pop("options", ({}, ""))
        options = _option_tables(tables, origin)
        sources = {f"options.{backend}.{option}": origin for backend in options for option in options[backend]}
        found |= _from_environment(environ)
        sources |= {name: source for name, (_, source) in found.items()}
        for (backend, option), (value, source) in _options_from_environment(environ).items():
            options.setdefault(backend, {})[option] = value
            sources = layered(sources, {f"options.{backend}.{option}": source})
        if "profile" not in found and (folder := _profile_folder(environ)):
            found["profile"] = (folder, f"folder {folder}")
            sources = layered(sources, {"profile": f"folder {folder}"})
        unread = ((str(place), out_of_reach),) if out_of_reach else ()
        return cls(
            **{name: value for name, (value, _) in found.items()}, options=options, sources=sources, unread=unread
        )


def parse_toml(text: str) -> dict[str, Any]:
    """
    Parse a TOML document, with the standard library from Python 3.11 on, and with tomli before.

    Raises:
        ValueError: The text is not TOML; the message has the line.
    """
    # The parser costs 10 ms to import, and many processes read no file.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - see above
    else:
        import tomli as tomllib  # noqa: PLC0415 - see above
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _DEEPEST and _has_deep_key(line):
            raise ValueError(f"a key of more than {_DEEPEST} parts is nested too deeply (at line {number})")
    try:
        found = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
    if _LONG_NUMBER.search(text):
        _check_numbers(found)
    return found


_TOKEN = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*(?:"|\\?$)|'[^']*(?:'|$)|[A-Za-z0-9_-]+|.)""")


def _has_deep_key(line: str) -> bool:
    """Whether a line has a dotted key of too many parts, as far as a line alone shows."""
    parts, dotted = 0, False
    for token in _TOKEN.finditer(line):
        if token[1] == "#":
            return False
        if token[1] == ".":
            parts, dotted = (0 if dotted else parts), True
        elif token[1][0] in "\"'-_" or token[1][0].isalnum():
            parts, dotted = (parts + 1 if dotted else 1), False
            if parts > _DEEPEST:
                return True
        else:
            parts, dotted = 0, False
    return False


def _check_numbers(value: Any) -> None:
    """Refuse numbers that do not fit into 64 bits, as TOML 1.0 says: Python would not even print the largest."""
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, int) and each not in _INT64:
            raise ValueError("a whole number does not fit into 64 bits")
        values += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def layered(below: Mapping[str, str], above: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of settings after some were overridden: those come last, as `Settings.sources` says."""
    return {**{name: source for name, source in below.items() if name not in above}, **above}


def parse_flag(text: str, name: str) -> bool:
    """
    Read a boolean.

    Raises:
        SettingsError: The text is neither true nor false.
    """
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise SettingsError(
        f"{name}={text!r} is set", f"it is one of {', '.join(_TRUE + _FALSE)}", f"set {name}=1 or {name}=0, or unset it"
    )


def parse_folders(text: str, name: str) -> tuple[str, ...]:
    """
    Read a list of folders, separated as in ``PATH``. Whether they exist is seen where they are read.

    Raises:
        SettingsError: A folder is empty.
    """
    folders = tuple(part.strip() for part in text.split(os.pathsep))
    if not all(folders):
        raise SettingsError(
            f"{name}={text!r} is set",
            f"it is a list of folders, separated by {os.pathsep!r}",
            "remove the empty ones; the current folder is '.'",
        )
    return folders


def parse_layout(value: Any, name: str) -> str:
    """
    Read a layout of the KV cache.

    Raises:
        SettingsError: The layout is invalid.
    """
    try:
        return str(LAYOUT.canonical(value))
    except ValueError as error:
        raise SettingsError(
            f"{name}={value!r} is set{near(str(value).upper(), LAYOUT.values)}",
            f"it is {error}",
            f"set {name}={_meant(value)}, or unset it: each backend then has its own order of layouts",
        ) from None


def _meant(value: Any) -> str:
    """Return the layout whose name is nearest to what was written."""
    return next(iter(get_close_matches(str(value).upper(), LAYOUT.values, n=1)), LAYOUT.values[0])


_VARIABLES: Mapping[str, Callable[[str, str], Any]] = {
    "backend": parse_names,
    "allow": parse_entries,
    "block": parse_entries,
    "strict": parse_flag,
    "profile": lambda text, _: text or None,
    "evidence": parse_folders,
    "record": lambda text, _: text,
    "kv_layout": parse_layout,
}


def _is_unset(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable counts as unset: an empty one does, but for ATTNPLUG_ALLOW, whose empty list permits none."""
    return variable != f"{PREFIX}ALLOW" and not environ[variable].strip()


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = {}
    known = {PREFIX + name.upper(): name for name in _VARIABLES}
    for variable in sorted(environ):
        if variable in known:
            if _is_unset(variable, environ):
                continue
            name = known[variable]
            found[name] = (_VARIABLES[name](environ[variable], variable), f"environment variable {variable}")
        elif variable.startswith(PREFIX) and not variable.startswith(OPTION_PREFIX) and variable != "ATTNPLUG_CONFIG":
            _log.warning(
                "The environment variable %r is not a setting and has no effect%s",
                variable,
                near(variable, list(known)),
            )
    return found


def _options_from_environment(environ: Mapping[str, str]) -> dict[tuple[str, str], tuple[str, str]]:
    found = {}
    for variable in sorted(environ):
        if variable.startswith(OPTION_PREFIX) and not _is_unset(variable, environ):
            backend, separator, option = variable[len(OPTION_PREFIX) :].lower().partition("__")
            if not (backend and separator and option):
                raise SettingsError(
                    f"{variable}={environ[variable]!r} is set",
                    f"an option is {OPTION_PREFIX}<BACKEND>__<OPTION>, with two underscores between them",
                    f"set, for example, {OPTION_PREFIX}FLASHINFER__TENSOR_CORE_RATIO=4",
                )
            found[backend, option] = (environ[variable], f"environment variable {variable}")
    return found


def names_of_pair(name: str) -> tuple[str, ...] | None:
    """Return the names that a routed pair joins, as they were written; None for the name of one backend."""
    return tuple(name.split(PAIR)) if PAIR in name else None


def _named_file(environ: Mapping[str, str]) -> Path | None:
    name = environ.get("ATTNPLUG_CONFIG", "")
    return Path(name) if name.strip() else None


def _default_file(environ: Mapping[str, str]) -> Path:
    try:
        folder = _user_folder(environ if {"XDG_CONFIG_HOME", "HOME"} & environ.keys() else os.environ)
    except RuntimeError:  # platformdirs finds no home of this user
        folder = Path("~", ".config", "attnplug")
    return folder / "config.toml"


def profile_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's folder of measured times, ``profiles`` beside ``config.toml``; it may not exist."""
    return _default_file(os.environ if environ is None else environ).parent / "profiles"


def _profile_folder(environ: Mapping[str, str]) -> str:
    """Return the user's folder of measured times, if it has any; empty where it has none or is out of reach."""
    folder = str(profile_folder(environ))
    try:
        with os.scandir(folder) as files:
            return folder if any(file.name.endswith(".json") for file in files) else ""
    except (OSError, ValueError):
        return ""


def _user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return what platformdirs returns. Importing it takes 3 ms of a first selection's 15, so the usual case of Linux, the
    XDG base directory specification, is handled here.
    """
    given, home = environ.get("XDG_CONFIG_HOME", ""), environ.get("HOME", "")
    if sys.platform == "linux" and given.startswith("/"):
        return Path(given, "attnplug")
    if sys.platform == "linux" and not given and home.startswith("/"):
        return Path(home, ".config", "attnplug")
    from platformdirs import user_config_path  # noqa: PLC0415 - see above

    return user_config_path("attnplug", appauthor=False)


def _out_of_reach(file: Path) -> str:
    """Return why it cannot be said whether there is a file, or an empty text: it may be there, or it is not."""
    if file.parts[0] == "~":  # older versions of platformdirs leave it in
        return "the home folder of this user is not known"
    try:
        os.stat(file)  # noqa: PTH116 - pathlib costs more
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return str(error.strerror if isinstance(error, OSError) else error)
    return ""


def _from_file(file: Path, *, named: bool) -> dict[str, tuple[Any, str]]:
    try:
        text = read_text(file, _LARGEST)
    except FileNotFoundError:
        if not named:
            return {}
        raise SettingsError(
            f"the configuration file {str(file)!r} does not exist", "", "create it, or unset ATTNPLUG_CONFIG"
        ) from None
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the configuration file {str(file)!r} cannot be read: {error}", "", "repair it, or move it"
        ) from error
    return {name: (_checked(file, name, value), f"file {file}") for name, value in _parse(file, text).items()}


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise SettingsError(f"the configuration file {str(file)!r} is not TOML: {error}", "", "repair it") from error


def _checked(file: Path, name: str, value: Any) -> Any:
    if name in ("backend", "allow", "block", "evidence") and _is_names(value):
        names = [value] if isinstance(value, str) else value
        if name in ("allow", "block"):
            check_entries(names, f"{name} in {str(file)!r}")
        return frozenset(names) if name in ("allow", "block") else tuple(names)
    if (name == "strict" and isinstance(value, bool)) or (name in ("profile", "record") and isinstance(value, str)):
        return value
    if name == "kv_layout":
        return parse_layout(value, f"kv_layout in {str(file)!r}")
    if name == "options":
        return value
    known = (*_VARIABLES, "options")
    raise SettingsError(
        f"{name} = {value!r} is in {str(file)!r}{near(name, known) if name not in known else ''}",
        "the settings are backend, allow, block (a name or a list of names), strict (true or false), profile (a file), "
        "evidence (a folder or a list of folders), record (a file), kv_layout ('NHD' or 'HND'), [options.BACKEND]",
        "correct or remove the line",
    )


def _is_names(value: Any) -> bool:
    items: Iterable[Any] = value if isinstance(value, list) else [value]
    return all(isinstance(item, str) and item for item in items)


def _option_tables(value: Any, origin: str) -> dict[str, dict[str, Any]]:
    if isinstance(value, Mapping) and all(isinstance(table, Mapping) for table in value.values()):
        return {str(backend): dict(table) for backend, table in value.items()}
    raise SettingsError(
        f"options = {value!r} is in the {origin}",
        "options are tables [options.BACKEND]",
        "write one table a backend",
    )
