"""Plan and the caller's buffers -> results."""
