"""Wav2Vec 2 before a decoder: the decoder as in VisionEncoderDecoderModel."""

from __future__ import annotations

from beheld.families.vision_encoder_decoder.model import MODEL

__all__ = ["MODEL"]
