"""The intermediate representation: frozen values, no torch, no CUDA."""
