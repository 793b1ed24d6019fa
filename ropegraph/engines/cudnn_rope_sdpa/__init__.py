"""cuDNN's native rotation and attention in one graph: for comparison, and as an oracle."""
