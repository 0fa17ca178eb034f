"""From token ids to text: detokenising, stop strings, and the outputs that users see."""
