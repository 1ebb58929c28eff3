"""Text: a transformer with masks."""
