"""Towers in other processes than the text."""
