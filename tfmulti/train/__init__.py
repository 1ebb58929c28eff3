"""Trains a model on a dataset under a strategy, and writes the results."""
