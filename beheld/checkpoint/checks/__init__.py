"""The files of a checkpoint, each checked in one place before anything is made of it."""
