"""What backward_graph knows of each operation: one module a family, and the table of them."""
