"""What tfmulti guarantees, tried one by one under every strategy and on stock Keras."""
