"""The text of generated tokens, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_INCOMPLETE: Final = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


@frozen
class _State:
    """
    What was decoded so far.

    Attributes:
        count: Tokens that were decoded.
        start: The token from which the next one is decoded, so that the tokenizer sees what is before it.
        complete: Tokens whose text is complete.
        text: The complete characters; once a stop string was found, all before it.
        rest: What the tokens behind `complete` decode to; it ends with an incomplete character.
        stop: The stop string that was found.
    """

    count: int = 0
    start: int = 0
    complete: int = 0
    text: str = ""
    rest: str = ""
    stop: str | None = None


class Detokenizer:
    """
    Decodes tokens one by one, and finds stop strings across their borders.

    The state changes in one assignment: an exception leaves the one before or the one after a token.

    Args:
        tokenizer: A tokenizer of transformers.
        stop: Strings that end the text.
        skip_special_tokens: Whether special tokens are left out.
        min_tokens: Tokens in which no stop string ends the text.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), *, skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._skip = skip_special_tokens
        self._min_tokens = min_tokens
        self._state = _State()

    @property
    def text(self) -> str:
        """All text so far, with what decodes to an incomplete character at its end."""
        return self._state.text + self._state.rest

    @property
    def stable(self) -> str:
        """The text that no later token changes: of complete characters, and without the beginning of a stop string."""
        state = self._state
        if state.stop is None:
            for size in range(min(self._longest - 1, len(state.text)), 0, -1):
                if any(one.startswith(state.text[-size:]) for one in self._stop):
                    return state.text[:-size]
        return state.text

    def update(self, tokens: Sequence[int], first: int) -> str | None:
        """
        Decode what is new, and return the stop string that it completes; None without one.

        Args:
            tokens: All tokens of a request.
            first: Index of the first generated one.
        """
        while self._state.count < len(tokens) - first and self._state.stop is None:
            self._state = self._next(tokens, first)
        return self._state.stop

    def reset(self) -> None:
        """Forget all text: the tokens may have changed."""
        self._state = _State()

    def _next(self, tokens: Sequence[int], first: int) -> _State:
        state = self._state
        count = state.count + 1
        start = first + state.start
        before = self._decode(tokens[start : first + state.complete])
        more = self._decode(tokens[start : first + count])[len(before) :]
        text = state.text + more.rstrip(_INCOMPLETE)
        # A match that ended in earlier text would have been found there.
        places = {one: text.find(one, max(0, len(state.text) - len(one) + 1)) for one in self._stop}
        found = [(place, one) for one, place in places.items() if place >= 0]
        if found and count > self._min_tokens:
            place, stop = min(found, key=lambda pair: pair[0])
            return _State(count, state.start, count, text[:place], "", stop)
        if more.endswith(_INCOMPLETE):
            return evolve(state, count=count, rest=more)
        if not more:  # such as a special token: the text before it decides how the next one begins
            return evolve(state, count=count, complete=count, rest="")
        return _State(count, state.complete, count, state.text + more)

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text
