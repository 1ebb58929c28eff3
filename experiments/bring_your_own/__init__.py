"""A user's package under tfmulti."""
