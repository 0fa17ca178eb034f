"""MiniCPM-o's model as the engine runs it: sizes and lengths are read as numbers."""

from __future__ import annotations

from beheld.families.minicpmv.model import MODEL as VISION
from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    host_features=VISION.host_features | {"audio_feature_lens", "audio_num_windows"},
    towers={**VISION.towers, "audio": ("model.apm", "model.audio_projection_layer")},
    # What speaks.
    unused_weights=("tts.",),
)
