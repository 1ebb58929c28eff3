"""Images: a ResNet with all that goes with it."""
