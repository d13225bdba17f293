"""Tiny tokenizers of the two kinds that split characters: bytes as letters, and pieces with bytes as a fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SIZE = 300
END = "<end>"
TEXT = (
    "stop at the first stop, then go on: the other stops are not at the border of a token, the last one is. é 日本 🙂"
)


@cache
def byte_level():
    """Return a tokenizer of bytes with some merges, in the manner of GPT-2; `END` is its token 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


@cache
def byte_fallback():
    """Return a tokenizer of letters, some words, and bytes for all else, in the manner of Llama 2."""
    words = ["▁", "▁stop", "▁the", "st", "op", "▁a", "at", *sorted({*TEXT} - {" ", "🙂", "日", "本"})]
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    vocabulary = {name: index for index, name in enumerate(names[:SIZE])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def letters(tokenizer):
    """Return the tokens that are printable ASCII text, so that random models write text."""
    found = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return [token for token, text in enumerate(found) if text and text.isascii() and text.isprintable()]
