"""The only code that opens a URL or a user's path, with all its safety checks."""
