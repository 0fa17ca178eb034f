"""The embedded default model: a small vision-language checkpoint that ships with the package."""

from pathlib import Path


def path() -> Path:
    """The folder of the checkpoint, fit for `from_pretrained`."""
    return Path(__file__).resolve().parent
