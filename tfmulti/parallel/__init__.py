"""Models that are larger than one device: their layers, weights or activations are divided."""
