"""Adds and sends tensors of all workers with MPI."""
