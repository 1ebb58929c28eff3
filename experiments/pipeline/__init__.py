"""A model of which each worker has one half of the layers."""
