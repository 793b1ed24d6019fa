"""The meaning of every op on any device, by torch."""
