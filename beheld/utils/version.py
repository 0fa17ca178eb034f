"""The version, where every room can read it: `beheld` itself imports the rooms."""

VERSION = "0.1.0"


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, by which it is compared with others."""
    return tuple(int(part) for part in version.split(".")[:2])
