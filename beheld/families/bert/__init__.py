"""BERT and models of its shape: encoders with learned positions and types of tokens."""

from __future__ import annotations

from beheld.families._shared.encoders.config import learned_only
from beheld.families.family import Family

FAMILY = Family(
    model_types=("bert",),
    encodes=True,
    both_ways="prompt",
    convert={"bert": learned_only},
    late={"HF_ColBERT": "BertModel", "ColBERTModel": "BertModel"},
)
