"""The one place that opens a URL or a user's path; every guard lives here."""
