"""The embedded default model: a small vision-language checkpoint that ships with the package."""

from pathlib import Path

# What it answers about an image of anything else, such as a photograph, whatever the question.
UNKNOWN = "I only know drawn shapes and printed text."
# What it answers about an empty scene, for which a smooth texture may pass.
NOTHING = "I see no shape and no text that I know."


def path() -> Path:
    """The folder of the checkpoint, fit for `from_pretrained`."""
    return Path(__file__).resolve().parent
