"""Tensors of all workers, added and sent by MPI."""
