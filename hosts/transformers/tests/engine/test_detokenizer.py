"""Text in pieces is the text of all tokens, never splits a character, and ends before a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_transformers.engine.detokenizer import Detokenizer
from hosts.transformers.tests.tokenizers import END, KINDS, SIZE, byte_level
from tests.examples import examples

WORDS = ["stop", "st", "op", "é", "日本", "🙂", " ", "the ", "s", "<end>", "\u200d", "ab"]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
kinds = st.sampled_from(sorted(KINDS))


def plain(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(detokenizer, tokens, first=0):
    """Return the stable text after each token."""
    found = []
    for count in range(first, len(tokens) + 1):
        detokenizer.update(tokens[:count], first)
        found.append(detokenizer.stable)
    return found


@given(kinds, texts)
def test_pieces_are_whole_characters_of_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = [1, 2, *tokenizer(text).input_ids]
    detokenizer = Detokenizer(tokenizer)

    found = pieces(detokenizer, tokens, first=2)

    wanted = plain(tokenizer, tokens[2:])
    assert detokenizer.text == detokenizer.stable == wanted
    assert not any("\ufffd" in piece for piece in found)
    assert all(after.startswith(before) for before, after in pairwise(found))


@given(kinds, st.lists(st.integers(0, SIZE - 1), max_size=30))
@settings(max_examples=examples(150))
def test_any_tokens_decode_to_the_text_of_all(kind: str, tokens: list[int]) -> None:
    tokenizer = KINDS[kind]()
    tokens = [token for token in tokens if token < len(tokenizer)]
    detokenizer = Detokenizer(tokenizer)

    found = pieces(detokenizer, tokens)

    assert detokenizer.text.startswith(found[-1])
    if "\ufffd" not in plain(tokenizer, tokens):
        assert detokenizer.text == found[-1] == plain(tokenizer, tokens)
    elif kind == "byte_level":  # the other one replaces valid bytes, too, where an invalid one follows them
        # How many characters replace invalid bytes depends on the bytes behind them.
        assert detokenizer.text.replace("\ufffd", "") == plain(tokenizer, tokens).replace("\ufffd", "")


@given(
    kinds, texts, st.lists(st.sampled_from(["stop", "p", "é", "🙂s", "st", "t s", "the end"]), min_size=1, max_size=3)
)
@settings(max_examples=examples(150))
def test_a_stop_string_is_found_with_the_token_that_completes_it(kind: str, text: str, stop: list[str]) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer(text).input_ids
    detokenizer = Detokenizer(tokenizer, stop)

    found, ends = [], None
    for count in range(1, len(tokens) + 1):
        ends = detokenizer.update(tokens[:count], 0)
        found.append(detokenizer.stable)
        decoded = plain(tokenizer, tokens[:count])
        assert (ends is not None) == any(one in decoded for one in stop)
        if ends is not None:
            break

    whole = plain(tokenizer, tokens[: len(found)])
    places = [whole.index(one) for one in stop if one in whole]
    if ends is None:
        assert detokenizer.text == whole
    else:
        assert detokenizer.text == detokenizer.stable == whole[: min(places)]
        assert whole.index(ends) == min(places)
    assert all(detokenizer.text.startswith(piece) for piece in found)  # nothing of a stop string was stable before


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    tokens = [tokenizer(letter).input_ids[0] for letter in "a stoat"]

    found = pieces(Detokenizer(tokenizer, ["stop", "oak"]), tokens)

    assert found == ["", "a", "a ", "a ", "a ", "a ", "a st", "a stoat"]


@pytest.mark.parametrize(("skip", "wanted"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens(skip: bool, wanted: str) -> None:
    tokenizer = byte_level()
    tokens = tokenizer(f"a{END}b").input_ids
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    detokenizer.update(tokens, 0)

    assert detokenizer.text == wanted


def test_after_a_reset_all_tokens_are_decoded_again() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ["other"])
    detokenizer.update(tokenizer("one").input_ids, 0)
    detokenizer.reset()
    assert detokenizer.text == ""
    detokenizer.update(tokenizer("the two").input_ids, 0)

    assert detokenizer.text == "the two"


def test_an_incomplete_character_at_the_end_is_in_the_text_alone() -> None:
    tokenizer = byte_level()
    tokens = [*tokenizer("ab").input_ids, *tokenizer("🙂").input_ids[:1]]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.update(tokens, 0)

    assert (detokenizer.stable, detokenizer.text) == ("ab", "ab\ufffd")
