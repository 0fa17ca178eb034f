"""Granite Docling: features of several tower layers enter the first layers of its language model."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

DEEPER = "layers beyond the first take more of {modality} than its embeddings"

INPUTS = FamilyInputs(
    embedded={"image": DEEPER},
    unbuilt={"fine_route": "Leave it out: the finer route of its connector is not computed here yet."},
)
