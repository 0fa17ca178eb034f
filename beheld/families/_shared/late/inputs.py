"""The prompts of queries and of page images, as transformers' processors write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from beheld.core.errors import PromptError

# How many tokens that only compute stand after a query.
_NUM_SPARE = 10


@dataclass(frozen=True)
class LatePrompts:
    """Writes them.

    Attributes:
        query: what stands before a query.
        spare: the token that fills up a query.
        page: the whole prompt of an image.
        image: the image's placeholder.
        words: what a page is asked.
    """

    query: str
    spare: str
    page: str
    image: str
    words: str = "Describe the image."

    def rewritten(self, text: str, counts: Mapping[str, int]) -> str:
        """Return the prompt of a query, or of an image; its text is empty, its placeholder, or the words of `page`.

        Raises:
            PromptError: an image comes with another text.
        """
        if not counts.get("image"):
            return f"{self.query}{text}{self.spare * _NUM_SPARE}\n"
        if text.strip() not in ("", self.image, self.page.strip(), self.words):
            raise PromptError(
                f"This model reads a page's image with words of its own ({self.words!r}), and no other text.",
                "Send the image alone, and the text as a prompt or a message of its own.",
            )
        return self.page
