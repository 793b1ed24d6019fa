"""The commands of ``python -m ropegraph``, one module or package each."""
