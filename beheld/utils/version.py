"""The version, where every room can read it: `beheld` itself imports the rooms."""

VERSION = "0.1.0"
