"""``attnplug demo``: real model architectures through the chosen backend, held against transformers' own attention."""

from __future__ import annotations

from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug import using
from attnplug.commands import NO, OK, say_json
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from attnplug_transformers.demo.outcome import Outcome

_LEAST: Final = 200

SUMMARY: Final = "real model architectures, served through the chosen backend"

_EPILOG: Final = """\
Each model is small, its weights are random and its tokens are bytes, so that nothing is downloaded.

A decoder runs in the paged engine. More requests than fit at once arrive at different steps, cut from a text: long
prompts are computed in pieces, equal beginnings once, and blocks are scarce. Every token has to be the one that
transformers' eager attention generates for that prompt alone. BERT (an encoder) and Whisper (with cross attention) run
through dense calls: tokens have to be the same, and hidden states within rounding.

exit codes: 0 everything agrees, 1 something does not, or nothing can serve, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Run real model architectures through the chosen backend, and compare every token."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--text", metavar="FILE", help="the text to continue; default: README.md here, or the package's"
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="this backend or backend/variant alone; repeated: in this order; auto permits any other",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run every architecture both ways."""
    text, origin = read_text(arguments.text)
    outcomes: list[Outcome] = []
    with _quiet(), using(backend=arguments.backend, source="--backend"):
        for found in _outcomes(text):
            if not arguments.json:
                _show(found, outcomes, origin)
            outcomes.append(found)
    agrees = all(outcome.agrees for outcome in outcomes)
    if arguments.json:
        from attnplug_transformers.demo.output import describe  # noqa: PLC0415 - text does without

        say_json({"text": origin, "agrees": agrees, "models": [describe(outcome) for outcome in outcomes]})
    else:
        from attnplug_transformers.demo.output import conclude  # noqa: PLC0415 - JSON does without

        conclude(outcomes)
    return OK if agrees else NO


def _show(outcome: Outcome, before: Sequence[Outcome], origin: str) -> None:
    from attnplug_transformers.demo.output import introduce, show  # noqa: PLC0415 - JSON does without

    if not before:
        introduce(origin)
    show(outcome, before)


def _outcomes(text: bytes) -> Iterator[Outcome]:
    from attnplug_transformers.registration import register  # noqa: PLC0415 - imports torch and transformers

    register()  # says what is missing, if something is
    import torch  # noqa: PLC0415 - as above

    from attnplug_transformers.demo.demonstrate import demonstrate  # noqa: PLC0415 - as above
    from attnplug_transformers.demo.example import EXAMPLES  # noqa: PLC0415 - as above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny, and threads that wait for each other are not
    try:
        for example in EXAMPLES:
            yield demonstrate(example, text)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' remarks on generation out of the output."""
    try:
        from transformers.utils import logging  # noqa: PLC0415 - as above
    except ImportError:  # `register` says so
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def read_text(path: str | None) -> tuple[bytes, str]:
    """
    Return the text and where it is from: a file, the README of this folder, or the package's own description.

    Args:
        path: The file; None for one of the others.

    Raises:
        RequestError: The file does not open, or is too short.
    """
    here = Path(path or "README.md")
    if path is None and not here.is_file():
        import attnplug  # noqa: PLC0415 - only without a README

        return _long_enough(str(attnplug.__doc__).encode(), "attnplug's own description")
    try:
        return _long_enough(here.read_bytes(), str(here))
    except OSError as error:
        raise RequestError(
            f"--text {path} was given", f"it does not open: {error.strerror}", "name a file that holds some text"
        ) from error


def _long_enough(text: bytes, origin: str) -> tuple[bytes, str]:
    if len(text) < _LEAST:
        raise RequestError(
            f"{origin} has {len(text)} bytes", f"prompts are cut from at least {_LEAST}", "pass --text FILE"
        )
    return text, origin
