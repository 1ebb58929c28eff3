"""Kill and resume."""
