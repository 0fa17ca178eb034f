"""Encoders of speech before decoders of text that are made as BART's."""

from __future__ import annotations

from beheld.families.vision_encoder_decoder.model import MODEL

__all__ = ["MODEL"]
