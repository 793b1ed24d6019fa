"""What the caller touches, and the only mutable objects."""
