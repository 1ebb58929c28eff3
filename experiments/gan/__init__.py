"""Two networks, two optimizers and a train_step of one's own."""
