"""Other systems' own signatures over the graph: a script ports by changing an import.

transformer_engine, nemo and neuron; docs/compat.md says what maps to what.
"""
