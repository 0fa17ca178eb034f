"""Intern-S1's tokenizer: Qwen's pairs, and the pieces of three further vocabularies, which answers may contain.

The repository's tokenizer encodes chemical formulas (SMILES) and proteins (FASTA) in a text with the further
vocabularies. It finds them by rules, or by the package RDKit where it is installed. What is refused here is what either
may find, so that every other text is encoded with Qwen's vocabulary alone.

The further pieces follow in the order of the vocabularies; ids of control tokens stand between them. Many are spelled
like pieces of others, so letters that no text is encoded with stand before them, as many as the number of the
vocabulary, and decoding drops them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.errors import ModelError

_REMEDY = "Fetch the checkpoint again: vocab.json, merges.txt, tokenizer_config.json and three tokenizer_*.model."
# The further vocabularies, and the control tokens that each brings along; Qwen's own come before them.
_QWEN_CONTROL = 26
_FURTHER = {"SMILES": 4, "IUPAC": 2, "FASTA": 0}
_MARK = "\ue0f0"
# Settings of transformers' InternVLProcessor.
_NAMED = {
    "context_image_token": "<IMG_CONTEXT>",
    "end_image_token": "</img>",
    "start_image_token": "<img>",
    "video_token": "<video>",
}
_TAGS = re.compile("</?(?:SMILES|SELFIES|IUPAC|FASTA|MOLFORMULA|SMILES_AUTO_DETECT|FASTA_AUTO_DETECT)>")
_PROTEIN = re.compile("[A-Z]{27,}")
_ELEMENTS = (
    *("Ac", "Ag", "Al", "Am", "Ar", "As", "At", "Au", "Ba", "Be", "Bh", "Bi", "Bk", "Br", "Ca", "Cd", "Ce", "Cf"),
    *("Cl", "Cm", "Cn", "Co", "Cr", "Cs", "Cu", "Db", "Ds", "Dy", "Er", "Es", "Eu", "Fe", "Fl", "Fm", "Fr", "Ga"),
    *("Gd", "Ge", "He", "Hf", "Hg", "Ho", "Hs", "In", "Ir", "Kr", "La", "Li", "Lr", "Lu", "Lv", "Mc", "Md", "Mg"),
    *("Mn", "Mo", "Mt", "Na", "Nb", "Nd", "Ne", "Nh", "Ni", "No", "Np", "Og", "Os", "Pa", "Pb", "Pd", "Pm", "Po"),
    *("Pr", "Pt", "Pu", "Ra", "Rb", "Re", "Rf", "Rg", "Rh", "Rn", "Ru", "Sb", "Sc", "Se", "Sg", "Si", "Sm", "Sn"),
    *("Sr", "Ta", "Tb", "Tc", "Te", "Th", "Ti", "Tl", "Tm", "Ts", "Xe", "Yb", "Zn", "Zr"),
)
# An atom in brackets. Only a short one may hold another "[", so that a text of many is read in linear time.
_ATOM = r"\[[^\[\]]+\]|\[[^\]]{1,32}\]"
_UNIT = rf"(?:{_ATOM}|{'|'.join(_ELEMENTS)}|[BCFHIKNOPSUVWYbcnops]|[().=\-#@\d$%*:+/\\])"
_MOLECULE = re.compile(rf"(?![:.=])(?>{_UNIT}){{10,}}(?<![:.=])")
_LEAST_LETTERS = 5
_BRACKET = re.compile(r"\[[^\]]*\]")
_RING = re.compile(r"%\d\d|\d")


def read(path: Path) -> Any:
    """Return the tokenizer of the checkpoint in `path`.

    Raises:
        ModelError: a file or the package sentencepiece is missing, or the files contradict each other.
    """
    wanted = ("vocab.json", "merges.txt", *(f"tokenizer_{name}.model" for name in _FURTHER))
    for name in wanted:
        if not (path / name).is_file():
            raise ModelError(f"The file {name} of Intern-S1's tokenizer is missing.", _REMEDY)
    from tokenizers import AddedToken, decoders
    from transformers import Qwen2Tokenizer

    settings = read_json(path / "tokenizer_config.json")
    entries = (settings.get("added_tokens_decoder") or {}).items()
    added = {int(index): entry["content"] for index, entry in entries}
    added |= {index: token for token, index in read_json(path / "added_tokens.json").items()}
    vocab = read_json(path / "vocab.json")
    spelled = vocab | _further(path, len(vocab))
    if set(spelled.values()) & set(added):
        raise ModelError("Intern-S1's tokenizer gives one id to two tokens.", _REMEDY)
    # A control token keeps the id that the vocabulary gives it.
    spelled |= {token: index for index, token in added.items()}
    lines = (path / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges: Any = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    found = Qwen2Tokenizer(vocab=spelled, merges=merges, chat_template=_template(path, settings), **_of_qwen(settings))
    _add(found, added, AddedToken)
    found.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace(_MARK, ""), decoders.ByteLevel()])
    for name, token in _NAMED.items():
        index = found.convert_tokens_to_ids(token)
        if token not in found.get_added_vocab():
            raise ModelError(f"Intern-S1's tokenizer has no token {token!r}.", _REMEDY)
        setattr(found, name, token)
        setattr(found, f"{name}_id", index)
    return found


def _further(path: Path, size: int) -> dict[str, int]:
    """Return the spelling, in the byte-level alphabet, and the id of each piece of the further vocabularies."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ModelError(
            "Intern-S1's tokenizer needs the package sentencepiece, which is not installed.",
            "Install it: pip install sentencepiece",
        ) from error
    found: dict[str, int] = {}
    start = size + _QWEN_CONTROL
    for rank, (name, control) in enumerate(_FURTHER.items(), start=1):
        pieces = SentencePieceProcessor(model_file=str(path / f"tokenizer_{name}.model"))
        for number in range(pieces.get_piece_size()):
            found[_MARK * rank + pieces.id_to_piece(number).replace("▁", "Ġ")] = start + number
        start += pieces.get_piece_size() + control
    return found


def _of_qwen(settings: dict[str, Any]) -> dict[str, Any]:
    names = ("unk_token", "bos_token", "eos_token", "pad_token", "model_max_length")
    return {name: settings[name] for name in names if settings.get(name) is not None}


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")


def _add(found: Any, added: dict[int, str], kind: Any) -> None:
    """Add control tokens, each with its own id."""
    for index in sorted(added):
        found.add_tokens([kind(added[index], special=True, normalized=False)])
        if found.convert_tokens_to_ids(added[index]) != index:
            raise ModelError(
                f"Intern-S1's tokenizer gives {added[index]!r} the id "
                f"{found.convert_tokens_to_ids(added[index])}, not {index}.",
                _REMEDY,
            )


def first_formula(text: str) -> str | None:
    """Return the first part of a text that has or may have an encoding of its own; None if there is none."""
    for pattern in (_TAGS, _PROTEIN):
        found = pattern.search(text)
        if found is not None:
            return found[0]
    return next((match[0] for match in _MOLECULE.finditer(text) if _is_whole(text, match) and _may_be(match[0])), None)


def _is_whole(text: str, match: re.Match[str]) -> bool:
    """Return whether no letter stands before or after it."""
    start, end = match.span()
    around = (text[max(0, start - 1) : start], text[end : end + 1])
    return not any(letter.isascii() and letter.isalpha() for letter in around)


def _may_be(candidate: str) -> bool:
    """Return whether a text has the letters, the closed parentheses and the closed rings of a molecule."""
    if sum(letter.isascii() and letter.isalpha() for letter in candidate) < _LEAST_LETTERS:
        return False
    depth = 0
    for letter in candidate:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    rings = Counter(_RING.findall(_BRACKET.sub("", candidate)))
    return depth == 0 and not any(count % 2 for count in rings.values())
