"""A user's own package, which knows nothing of tfmulti."""
