"""Inverse frequencies and raw angles of every rope type of Hugging Face transformers, in torch."""

from ropegraph.angles.axial import axial
from ropegraph.angles.default import default
from ropegraph.angles.dynamic import dynamic
from ropegraph.angles.linear import linear
from ropegraph.angles.llama3 import llama3
from ropegraph.angles.longrope import longrope
from ropegraph.angles.mrope import mrope
from ropegraph.angles.parameters import ROPE_TYPES, inv_freq
from ropegraph.angles.proportional import proportional
from ropegraph.angles.result import RopeAngles
from ropegraph.angles.tables import cos_sin, freqs
from ropegraph.angles.yarn import yarn

__all__ = [
    "ROPE_TYPES",
    "RopeAngles",
    "axial",
    "cos_sin",
    "default",
    "dynamic",
    "freqs",
    "inv_freq",
    "linear",
    "llama3",
    "longrope",
    "mrope",
    "proportional",
    "yarn",
]
