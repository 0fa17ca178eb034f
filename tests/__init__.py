"""The tests of beheld."""
