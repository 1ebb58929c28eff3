"""Models that are larger than one device: checkpointed activations."""
