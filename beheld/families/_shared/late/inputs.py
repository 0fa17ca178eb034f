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
    """

    query: str
    spare: str
    page: str
    image: str

    def of_prompt(self, text: str, counts: Mapping[str, int]) -> str:
        """Return the prompt of a query, or of an image, whose text is empty, its placeholder or `page`.

        Raises:
            PromptError: an image comes with a text.
        """
        if counts.get("image") and text.strip() not in ("", self.image, self.page.strip()):
            raise PromptError(
                "This model reads a page's image with words of its own, and no other text.",
                "Send the image alone, and the text as a prompt of its own.",
            )
        return self.of_chat(text, counts)

    def of_chat(self, text: str, counts: Mapping[str, int]) -> str:
        """Return the same for a conversation; the words that its template writes around an image are left out."""
        return self.page if counts.get("image") else f"{self.query}{text}{self.spare * _NUM_SPARE}\n"
