"""Parameter servers with a slow worker."""
