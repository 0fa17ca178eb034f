"""Qwen3-VL: the first layers of its language model take what several of its tower's layers make of an image."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

DEEPER = "layers beyond the first take more of {modality} than its embeddings"

INPUTS = FamilyInputs(embedded={"image": DEEPER, "video": DEEPER})
