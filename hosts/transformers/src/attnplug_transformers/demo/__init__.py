"""``attnplug demo``: a decision between backends, then real model architectures compared with transformers alone."""

from __future__ import annotations

from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug import using
from attnplug.commands import NO, OK, say_json, tracked
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from attnplug_transformers.demo.example import Example
    from attnplug_transformers.demo.outcome import Outcome

SUMMARY: Final = "a decision between backends, and real model architectures on the chosen one"

_EPILOG: Final = """\
First one request is decided for this CPU and for GPUs of three generations, between all installed plugins. Nothing of
them is imported, and the kernel libraries of the GPUs are assumed to be installed.

Then small models run, with random weights and a token per byte, so that nothing is downloaded. A decoder runs in the
paged engine: more requests than fit at once arrive at different steps, with chunked prefill, prefix caching and
preemption, and a second time with captured decode steps. Each token is compared with that of transformers' eager
attention for that prompt alone. BERT (an encoder) and Whisper (with cross attention) run through dense calls: tokens
are compared, and hidden states within rounding.

exit codes: 0 everything agrees, 1 a token differs or no backend supports a model, 2 an option is invalid
"""

_MIN_BYTES: Final = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Decide one request for several devices, run real model architectures, and compare each token."
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
    """Print the decisions and the comparison of each architecture, and return the exit code."""
    from attnplug_transformers.demo.decisions import decide, to_dict  # noqa: PLC0415 - the parser does without
    from attnplug_transformers.demo.output import describe, show, show_decisions, summarize  # noqa: PLC0415 - likewise

    text, origin = read_text(arguments.text)
    outcomes: list[Outcome] = []
    with _quiet(), using(backend=arguments.backend, source="--backend"):
        decisions = decide()
        if not arguments.json:
            show_decisions(decisions, origin)
        for outcome in _outcomes(text, shown=not arguments.json):
            if not arguments.json:
                show(outcome, outcomes)
            outcomes.append(outcome)
    agrees = all(outcome.agrees for outcome in outcomes)
    if arguments.json:
        models = [describe(outcome) for outcome in outcomes]
        say_json({"decisions": to_dict(decisions), "text": origin, "agrees": agrees, "models": models})
    else:
        summarize(outcomes)
    return OK if agrees else NO


def _outcomes(text: bytes, *, shown: bool) -> Iterator[Outcome]:
    from attnplug_transformers import register  # noqa: PLC0415 - an error names what is missing

    register()
    import torch  # noqa: PLC0415 - only the models need it

    from attnplug_transformers.demo.compare import compare  # noqa: PLC0415 - imports torch and transformers
    from attnplug_transformers.demo.example import EXAMPLES  # noqa: PLC0415 - likewise

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster than several, for models as small as these
    try:
        for done, example in enumerate(EXAMPLES):  # a bar each, erased before the result is printed
            for each in tracked((example,), _running, shown=shown, done=done, total=len(EXAMPLES)):
                outcome = compare(each, text)
            yield outcome
    finally:
        torch.set_num_threads(threads)


def _running(example: Example) -> str:
    return f"running {example.name}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' warnings about generation out of the output."""
    try:
        from transformers.utils import logging  # noqa: PLC0415 - only the models need it
    except ImportError:  # `register` raises for it
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
    Return the text that prompts and sentences are cut from, and its origin.

    Args:
        path: The file; None for the README of this folder, or else the package's own description.

    Raises:
        RequestError: The file does not open, or is too short.
    """
    file = Path(path or "README.md")
    if path is None and not file.is_file():
        import attnplug  # noqa: PLC0415 - only without a README

        text, origin = str(attnplug.__doc__).encode(), "attnplug's own description"
    else:
        try:
            text, origin = file.read_bytes(), str(file)
        except OSError as error:
            raise RequestError(f"--text {path} does not open: {error.strerror}", "", "name a text file") from error
    if len(text) < _MIN_BYTES:
        raise RequestError(
            f"{origin} has {len(text)} bytes", f"prompts are cut from at least {_MIN_BYTES}", "pass --text FILE"
        )
    return text, origin
