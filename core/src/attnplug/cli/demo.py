"""``attnplug demo``: real model architectures through the chosen backend, held against transformers' own attention."""

from __future__ import annotations

from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.exits import NO, OK
from attnplug.cli.output import say, say_json
from attnplug.errors import RequestError
from attnplug.selection.scope import using

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.hosts.transformers.demonstration import Outcome
    from attnplug.selection.selection import Selection

_NEW_TOKENS: Final = 32
_LEAST_TEXT: Final = 100
_NOT_HERE: Final = ("absent", "lacks_dependency")

_EPILOG: Final = """\
Each model is small, its weights are random and its tokens are bytes, so that nothing is downloaded. It continues
three pieces of a text, of different lengths and in one batch, greedily: once on transformers' eager attention, and
once through the backend that attnplug chooses for each layer. Every token has to be the same.

exit codes: 0 all tokens agree, 1 some do not, or nothing can serve, 2 the question is wrong
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
    text, origin = _text(arguments.text)
    outcomes = []
    with _quiet(), using(backend=arguments.backend):
        for found in _outcomes(text):
            outcomes.append(found)
            if not arguments.json:
                _show(found, first=len(outcomes) == 1, origin=origin)
    if arguments.json:
        say_json({"text": origin, "models": [_describe(outcome) for outcome in outcomes]})
    else:
        _conclude(outcomes)
    return OK if all(outcome.agrees for outcome in outcomes) else NO


def _text(path: str | None) -> tuple[bytes, str]:
    """Return the text and where it is from: a file, the README of this folder, or the package's own description."""
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
    if len(text) < _LEAST_TEXT:
        raise RequestError(
            f"{origin} has {len(text)} bytes", f"three prompts are cut from at least {_LEAST_TEXT}", "pass --text FILE"
        )
    return text, origin


def _outcomes(text: bytes) -> Iterator[Outcome]:
    from attnplug.hosts.transformers.registration import register  # noqa: PLC0415 - imports torch and transformers

    register()  # says what is missing, if something is
    import torch  # noqa: PLC0415 - as above

    from attnplug.hosts.transformers.demonstration import EXAMPLES, cut_prompts, demonstrate  # noqa: PLC0415 - as above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny, and threads that wait for each other are not
    try:
        for example in EXAMPLES:
            yield demonstrate(example, cut_prompts(text), _NEW_TOKENS)
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


def _show(outcome: Outcome, *, first: bool, origin: str) -> None:
    from attnplug.cli.explain.layers import abbreviated  # noqa: PLC0415 - JSON does without
    from attnplug.cli.rows import wrapped  # noqa: PLC0415 - likewise

    if first:
        shape = f"{len(outcome.expected)} pieces of {origin}, {outcome.expected.shape[1]} new tokens each"
        say("\n".join(wrapped(f"Random weights in float32, a token per byte, {shape}, padded on the left.")))
    say(f"\n{outcome.example.name}: {outcome.example.about}")
    for names, selection in _groups(outcome.decisions):
        say("\n".join(wrapped(f"{abbreviated(names)} -> {selection.id}{_asked(selection)}", "  ")))
        for line in _others(selection):
            say("\n".join(wrapped(line, "      ")))
    say(f"  continues with {' '.join(map(str, outcome.tokens[0, :12].tolist()))} ...")
    say("\n".join(wrapped(_sentence(outcome), "  ")))


def _others(selection: Selection) -> Iterator[str]:
    """Yield what the choice has to emulate, and why it is not one of the other candidates that are installed."""
    for verdict in selection.verdicts:
        if verdict.id == selection.id:
            yield from (f"emulates {name}: {text}" for name, text in verdict.emulated.items())
        elif verdict.status not in _NOT_HERE:
            reasons = "; ".join(map(str, verdict.reasons))
            yield f"{verdict.id} {verdict.status}" + (f": {reasons}" if reasons else "")


def _groups(decisions: Mapping[str, Selection]) -> list[tuple[list[str], Selection]]:
    """Collect the modules that share a decision."""
    found: dict[Any, tuple[list[str], Selection]] = {}
    for name, selection in decisions.items():
        found.setdefault(selection.agreement, ([], selection))[0].append(name)
    return list(found.values())


def _asked(selection: Selection) -> str:
    """Return what the layers ask for beside their shape, and which criterion decided."""
    shape = {"head_size", "num_q_heads", "num_kv_heads", "dtype"}
    asked = [f"{name}={value}" for name, value in selection.requirements.asked() if name not in shape]
    words = [f"asked for {', '.join(asked)}"] if asked else []
    words += [f"decided by {selection.decided_by}"] if selection.decided_by else []
    return f"  ({'; '.join(words)})" if words else ""


def _sentence(outcome: Outcome) -> str:
    total = outcome.expected.numel()
    if outcome.agrees:
        return f"all {total} tokens are those of transformers' eager attention (closest choice {outcome.margin:.4f})"
    sequence, place = (int(i) for i in (outcome.expected != outcome.tokens).nonzero()[0])
    pair = f"{int(outcome.tokens[sequence, place])} instead of {int(outcome.expected[sequence, place])}"
    return f"WRONG: {outcome.num_equal} of {total} tokens agree; token {place} of prompt {sequence} is {pair}"


def _conclude(outcomes: Sequence[Outcome]) -> None:
    from attnplug.cli.rows import wrapped  # noqa: PLC0415 - JSON does without

    verdicts = [v for o in outcomes for s in o.decisions.values() for v in s.verdicts if v.status in _NOT_HERE]
    if verdicts:
        say("\nnot installed here:")
        for verdict in {verdict.id: verdict for verdict in verdicts}.values():
            say("\n".join(wrapped(f"{verdict.id}: {verdict.remedy}", "  ")))
    good = [outcome for outcome in outcomes if outcome.agrees]
    tokens = sum(outcome.num_equal for outcome in outcomes)
    total = sum(outcome.expected.numel() for outcome in outcomes)
    say(f"\n{len(good)} of {len(outcomes)} architectures agree, {tokens} of {total} tokens")


def _describe(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.example.name,
        "about": outcome.example.about,
        "agrees": outcome.agrees,
        "num_tokens": outcome.expected.numel(),
        "num_equal": outcome.num_equal,
        "margin": outcome.margin,
        "tokens": outcome.tokens.tolist(),
        "expected": outcome.expected.tolist(),
        "layers": {name: selection.to_dict() for name, selection in outcome.decisions.items()},
    }
