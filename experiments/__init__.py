"""Experiments with tfmulti: one folder each, the same files in each."""
