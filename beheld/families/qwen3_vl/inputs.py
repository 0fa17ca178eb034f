"""Qwen3-VL: features of several tower layers enter the first layers of its language model."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

DEEPER = "layers beyond the first take more of {modality} than its embeddings"

# Times stand between the frames of a video, which embeddings lack.
INPUTS = FamilyInputs(embedded={"video": DEEPER})
