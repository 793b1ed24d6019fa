"""Rotary kernels of our own, built by CuPy."""
