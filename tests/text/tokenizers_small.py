"""Small tokenizers of the kinds that models use, made on the spot."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The first image shows a red circle. The tenth image shows 10 birds, doesn't it?",
    "1. One 2. Two 10. Ten! You're right, they've seen Anna 's dog ' and it .",
    "Die Katze schläft; el niño mira la luna; これは絵です。 Это картина.",
)
SPECIALS = ("<s>", "</s>", "<image>")


def _finish(tokenizer: Tokenizer, **options: object) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Bytes as letters, as in GPT-2 and Qwen2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer)


def _byte_fallback() -> Tokenizer:
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<unk>", *fallback], show_progress=False)
    draft.train_from_iterator(CORPUS[:2], trainer)
    # Made anew from vocabulary and merges: to the trainer's product the bytes are special tokens.
    model = json.loads(draft.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = draft.pre_tokenizer
    return tokenizer


@cache
def llama() -> PreTrainedTokenizerFast:
    """Word boundaries as a letter, other characters as single bytes, one space taken off in front, as in Llama 2."""
    tokenizer = _byte_fallback()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Word boundaries as a letter, dropped from the first token, as in T5 and XLM-R."""
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return _finish(tokenizer)


def _word_pieces(*, clean: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer, clean_up_tokenization_spaces=clean)


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """Words and their continuations, as in BERT."""
    return _word_pieces(clean=False)


@cache
def cleaned_word_pieces() -> PreTrainedTokenizerFast:
    """The same with the clean-up of spaces before punctuation."""
    return _word_pieces(clean=True)
