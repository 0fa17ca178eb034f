"""Text that Intern-S1's tokenizer encodes with other vocabularies: chemical formulas (SMILES) and proteins (FASTA).

The repository's tokenizer finds them by rules, or by the package RDKit where it is installed. What stands here is what
both have in common, so a text that passes is encoded with the ordinary vocabulary by either.
"""

from __future__ import annotations

import re
from collections import Counter

_TAGS = re.compile("</?(?:SMILES|SELFIES|IUPAC|FASTA|MOLFORMULA|SMILES_AUTO_DETECT|FASTA_AUTO_DETECT)>")
_PROTEIN = re.compile("[A-Z]{27,}")
_ELEMENTS = (
    "Ac Ag Al Am Ar As At Au Ba Be Bh Bi Bk Br Ca Cd Ce Cf Cl Cm Cn Co Cr Cs Cu Db Ds Dy Er Es Eu Fe Fl Fm Fr Ga Gd Ge "
    "He Hf Hg Ho Hs In Ir Kr La Li Lr Lu Lv Mc Md Mg Mn Mo Mt Na Nb Nd Ne Nh Ni No Np Og Os Pa Pb Pd Pm Po Pr Pt Pu Ra "
    "Rb Re Rf Rg Rh Rn Ru Sb Sc Se Sg Si Sm Sn Sr Ta Tb Tc Te Th Ti Tl Tm Ts Xe Yb Zn Zr"
).split()
_UNIT = rf"(?:\[[^\]]+\]|{'|'.join(_ELEMENTS)}|[BCFHIKNOPSUVWYbcnops]|[().=\-#@\d$%*:+/\\])"
_MOLECULE = re.compile(rf"(?![:.=])(?>{_UNIT}){{10,}}(?<![:.=])")
_LEAST_LETTERS = 5
_BRACKET = re.compile(r"\[[^\]]*\]")
_RING = re.compile(r"%\d\d|\d")


def first_formula(text: str) -> str | None:
    """Return the first part of a text that has or may have an encoding of its own; None if there is none."""
    for pattern in (_TAGS, _PROTEIN):
        found = pattern.search(text)
        if found is not None:
            return found[0]
    return next((match[0] for match in _MOLECULE.finditer(text) if _is_whole(text, match) and _may_be(match[0])), None)


def _is_whole(text: str, match: re.Match[str]) -> bool:
    """Return whether no letter stands before or after it."""
    around = (text[: match.start()][-1:], text[match.end() :][:1])
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
