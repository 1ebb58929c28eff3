"""What tfmulti promises, tried one by one under every strategy and on stock Keras."""
