"""Towers in other processes or on other hosts than the text: the messages, the client and the server."""
