"""Every bound on what one request may hold; the schema, the reader and the documents take them from here."""

from __future__ import annotations

from beheld.utils.bounded_json import JsonBounds

# Of the JSON of a body. Of its values token ids are the most: 64 prompts of 8192; a longer model may have more.
JSON = JsonBounds()

MAX_MESSAGES = 4096
# Of one message.
MAX_PARTS = 4096
MAX_TOOLS = 128
# n of one request, and its prompts, in all.
MAX_ANSWERS = 64
MAX_NAME = 512
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
# More than any vocabulary.
MAX_ALLOWED_IDS = 1 << 19
MAX_CHOICES = 1000

# A body of this size is read where it arrives; a larger one is parsed beside the event loop.
INLINE_BYTES = 32 << 10
# A larger one is parsed by itself, and in small steps: a library that reads one long text lets no other thread run.
LARGE_BYTES = 4 << 20
# What a body may have sent before it counts as held: small ones are never kept out by large ones.
FREE_BYTES = 64 << 10
