"""Programs that make the models shipped with beheld."""
