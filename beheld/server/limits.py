"""All limits on the content of one request, for the schema, the reader and the documentation."""

from __future__ import annotations

from beheld.utils.bounded_json import JsonBounds

# Limits of a body's JSON. Token ids are the most values: 64 prompts of 8192; a model with longer context may have more.
JSON = JsonBounds()

MAX_MESSAGES = 4096
# Limits of one message.
MAX_PARTS = 4096
# Fields of a part that nobody but the chat template or the processor may know.
MAX_PART_FIELDS = 16
MAX_TOOLS = 128
# Letters, and values with their keys, of all tools together: templates, answers and grammars write them in single calls
# of C code.
MAX_TOOLS_LETTERS = 1 << 20
MAX_TOOLS_VALUES = 1 << 15
# Letters of a response's instructions, and letters and values of its schema: every answer repeats them.
MAX_REPEATED_LETTERS = 1 << 20
MAX_REPEATED_VALUES = 1 << 15
# The most answers of one request, over n and all prompts.
MAX_ANSWERS = 64
# The most texts of one request that pools.
MAX_INPUTS = 2048
# Tensors whose digests one request names.
MAX_TENSORS = 1 << 17
# Cells of a table of token ids for positions of a prompt, 4 bytes each: 32 tokens at each of 131,072 positions.
MAX_TABLE_CELLS = 1 << 22
# Bytes of one of their log-probabilities: the number, and its copy that is sent.
SCORE_BYTES = 8
MAX_NAME = 512
# Fields of messages that nobody knows, and an answer names.
MAX_NOTES = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
# More than any vocabulary.
MAX_ALLOWED_IDS = 1 << 19
MAX_CHOICES = 1000
# Adapters that requests may name.
MAX_ADAPTERS = 1024
# Answers that one request ends.
MAX_ABORTED = 1024
# Entries of a response's metadata, and the letters of each value.
MAX_METADATA = 128
MAX_METADATA_LETTERS = 4096
# Variables of a chat template.
MAX_VARIABLES = 128
# Letters of a chat template in a request, as of one in a checkpoint.
MAX_TEMPLATE_LETTERS = 1 << 20
# Candidates of each answered token that the engine allows by default, and the bytes of a request's candidates that are
# not counted, so that usual requests never keep others out.
FREE_CANDIDATES = 20
FREE_COLUMN_BYTES = 64 << 20
# Bytes of a candidate until it is sent: in a whole answer, and in a stream, which keeps candidates as columns.
CANDIDATE_BYTES = 640
STREAMED_CANDIDATE_BYTES = 16

# Bodies up to this size are parsed in the event loop; larger ones in a thread.
INLINE_BYTES = 32 << 10
# Bodies with more objects are parsed in a thread, whatever their size: to check 900 messages takes 10 ms.
INLINE_OBJECTS = 128
# Bodies up to this size are parsed in the turn in which their request began, or when they arrive.
QUICK_BYTES = 2 << 10
# Larger bodies are parsed one at a time and in small steps: json.loads lets no other thread run while it reads a text.
LARGE_BYTES = 8 << 20
# Bytes of a body that are not counted, so that large bodies never keep small ones out.
FREE_BYTES = 64 << 10
# What each list and object of a body takes in memory, parsed and checked, and each value and key: a body of small parts
# takes thirty times its bytes.
CONTAINER_BYTES = 768
VALUE_BYTES = 64
