"""Every bound on what one request may hold; the schema, the reader and the documents take them from here."""

from __future__ import annotations

# Of the JSON, counted before it is parsed: many small things cost far more than a few large ones.
MAX_DEPTH = 64
MAX_KEYS = 50_000
# Objects and lists, each of which the interpreter tracks.
MAX_CONTAINERS = 50_000
# Values in lists and objects, of which token ids are the most: 64 prompts of 8192. A longer model may have more.
MAX_VALUES = 1 << 19
# Digits of a whole number: reading them takes time that grows with their square.
MAX_DIGITS = 32

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
# What a body may have sent before it counts as held: small ones are never kept out by large ones.
FREE_BYTES = 64 << 10
