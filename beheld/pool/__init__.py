"""Hidden states -> vectors, scores and classes."""
