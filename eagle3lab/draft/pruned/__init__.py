"""The training step computed only at the positions whose loss counts: same loss and gradients, less work."""
