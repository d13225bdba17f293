"""The command ``attnplug new``: a plugin project that passes the conformance kit, for a vendor to put a kernel into."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.commands import OK, escaped, say, say_json

if TYPE_CHECKING:
    import argparse

SUMMARY: Final = "writes a plugin project that passes the kit on the CPU"

_EPILOG: Final = """\
The backend computes attention in plain torch, over paged and contiguous K/V on the CPU. Its tests are the conformance
kit.

examples:
  attnplug new acme
  attnplug new acme --path plugins/acme

exit codes: 0 the project is written, 2 the name is invalid or taken, or DIR is not empty
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug new NAME [options]"
    parser.description = "Write a plugin project that can be installed, and passes the conformance kit as it is."
    parser.epilog = _EPILOG
    parser.add_argument("name", metavar="NAME", help="the backend's name, such as acme or acme_fast")
    parser.add_argument("--path", metavar="DIR", help="the project's folder; default: attnplug-NAME here")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write a project."""
    from attnplug_kit.new.project import new_name, render, write  # noqa: PLC0415 - help does without

    name, similar = new_name(arguments.name)
    folder = Path(arguments.path or name.distribution)
    files = render(name)
    write(folder, files)
    if arguments.json:
        names = {"backend": name.name, "distribution": name.distribution, "package": name.package}
        say_json({**names, "path": str(folder), "files": list(files), "alike": similar or None})
    else:
        _show(folder, files, name.name, similar)
    return OK


def _show(folder: Path, files: dict[str, str], name: str, similar: str) -> None:
    say(escaped(f"{name} is written to {folder}:"))
    say("\n".join(f"  {file}" for file in files))
    if similar:
        say(f"note: {name!r} is close to {similar!r}, the name of another backend: users may confuse them")
    say(f"\nnext:\n  cd {escaped(shlex.quote(str(folder)))}\n  pip install -e '.[test]'\n  attnplug check\n  pytest")
