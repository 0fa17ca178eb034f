"""NVLM-D's text for an image: its tiles after tags."""

from __future__ import annotations

from beheld.families._shared.intern.processing import TileProcessor


class TagProcessor(TileProcessor):
    """Images and text of a prompt."""

    def words(self, num_tiles: int) -> str:
        """Return the text that an image of `num_tiles` tiles stands for; see TileProcessor.words."""
        tags = [f"<tile_{number}>" for number in range(1, num_tiles)] + ["<tile_global_thumbnail>"]
        tile = "<|vision_pad|>" * self.image_seq_length
        return f"<Image>{''.join(tag + tile for tag in tags)}</Image>"
