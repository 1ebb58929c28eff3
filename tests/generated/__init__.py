"""Whole programs, drawn by a seed: each must be one device's, or told."""
