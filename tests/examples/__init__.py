"""Tests of the scripts in examples/ and of what the pages of the documentation show."""
