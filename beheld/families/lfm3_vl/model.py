"""LFM3-VL: LFM2's convolutions; its tower reads the grids of images on the host."""

from __future__ import annotations

from beheld.families.lfm2.model import adapt
from beheld.families.model import FamilyModel

MODEL = FamilyModel(adapt=adapt, host_features=frozenset(("image_grid_thw", "video_grid_thw")))
