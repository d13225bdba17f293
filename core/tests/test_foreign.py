"""The guard around code of plugins, finders and distributions."""

from __future__ import annotations

import pytest

from attnplug.commands import ForeignCode
from attnplug.errors import AttnplugError, PluginError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit(2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (UnprintableError(), "UnprintableError (its text cannot be shown: str() of it raises SystemExit)"),
        (OSError("red \x1b[31m,\nnext"), "OSError: red \\x1b[31m,\nnext"),
        (KeyError("x" * 9000), "KeyError: 'xxx"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_is_recorded_with_its_stage(error: BaseException, text: str) -> None:
    with ForeignCode("the probe raised") as code:
        raise error

    assert code.error is error
    assert code.problem.startswith(f"the probe raised {text}")
    assert len(code.problem) < 2100


def test_an_exception_is_the_cause_of_the_refusal() -> None:
    code = ForeignCode("loading raised", lambda problem: PluginError(problem, "", "repair it"))
    with pytest.raises(PluginError, match="loading raised SystemExit: 3") as caught, code:
        raise SystemExit(3)

    assert isinstance(caught.value.__cause__, SystemExit)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PluginError("known", "", "repair it")])
def test_an_interrupt_and_what_is_named_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, ForeignCode("loading raised", passing=(AttnplugError,)):
        raise error

    assert caught.value is error


def test_nothing_is_recorded_where_nothing_is_raised() -> None:
    with ForeignCode("loading raised") as code:
        pass

    assert (code.error, code.problem) == (None, "")
