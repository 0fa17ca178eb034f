"""InternLM2's tokenizer, of tokenizer.model: transformers has none for it.

Some pieces of the vocabulary were unused when it was trained; tokenizer_config.json gives them the names of control
tokens. Text between control tokens is encoded piece by piece, each as a text of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.errors import ModelError

_CLASSES = ("InternLM2Tokenizer", "InternLM2TokenizerFast")
_REMEDY = "Fetch the checkpoint again: tokenizer.model, tokenizer_config.json and added_tokens.json belong together."
_PROBES = ("What is in this image?", " Zwei  Leerzeichen,\nein Umbruch\t2026", "これは絵です。 🙂", "x", "user\n")


def read(path: Path) -> Any:
    """Return the tokenizer of the checkpoint in `path`; None if it is not InternLM2's.

    Raises:
        ModelError: a file is missing, or they contradict each other.
    """
    settings = read_json(path / "tokenizer_config.json")
    if settings.get("tokenizer_class") not in _CLASSES:
        return None
    if not (path / "tokenizer.model").is_file():
        raise ModelError("The file tokenizer.model of InternLM2's tokenizer is missing.", _REMEDY)
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ModelError(
            "InternLM2's tokenizer needs the package sentencepiece, which is not installed.",
            "Install it: pip install sentencepiece",
        ) from error
    from transformers import PreTrainedTokenizerFast

    pieces = SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    named = {int(index): entry["content"] for index, entry in (settings.get("added_tokens_decoder") or {}).items()}
    named |= {index: token for token, index in read_json(path / "added_tokens.json").items()}
    options = {name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    bos = options["bos_token"] if settings.get("add_bos_token", True) else None
    found = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(pieces, named, bos),
        chat_template=settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        additional_special_tokens=settings.get("additional_special_tokens") or [],
        model_max_length=settings.get("model_max_length"),
        **{name: token for name, token in options.items() if token is not None},
    )
    for probe in _PROBES:
        if pieces.encode(probe) != found.encode(probe, add_special_tokens=False):
            raise ModelError("InternLM2's tokenizer.model is of a kind that is not supported.", _REMEDY)
    return found


def _tokenizer(pieces: Any, named: dict[int, str], bos: str | None) -> Any:
    """Return the tokenizer of a SentencePiece model of pairs, with the tokens `named` by id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers.tokenization_utils_base import generate_merges

    size = pieces.get_piece_size()
    words = [named.get(index, pieces.id_to_piece(index)) for index in range(size)]
    vocab = {word: index for index, word in enumerate(words)}
    scores = {word: pieces.get_score(index) for index, word in enumerate(words)}
    unknown = words[pieces.unk_id()]
    merges = generate_merges(vocab, scores)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    made.add_special_tokens([AddedToken(named[index], normalized=False, special=True) for index in sorted(named)])
    for index, token in named.items():
        if made.token_to_id(token) != index:
            raise ModelError(
                f"InternLM2's tokenizer gives {token!r} the id {made.token_to_id(token)}, not {index}.", _REMEDY
            )
    is_prefixed = pieces.encode("x", out_type=str)[0].startswith("▁")
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if is_prefixed else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if is_prefixed else steps)
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return made
