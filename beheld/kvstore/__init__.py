"""Keys and values of prompts, kept in a folder that engines share."""
