"""A loss whose negatives are the other rows of the batch."""
