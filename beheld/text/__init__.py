"""From token ids to text: detokenization, stop strings, reasoning, tool calls, and the outputs that users see."""
