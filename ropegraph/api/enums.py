"""The enumerations of cuDNN Frontend, by its names."""

from __future__ import annotations

from enum import Enum

from ropegraph.dtypes import DType

data_type = DType


class heur_mode(Enum):  # noqa: N801 - FE's name
    """How plans are proposed. Accepted as a hint."""

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3


class build_plan_policy(Enum):  # noqa: N801
    """Which proposed plans are built. Accepted as a hint: there is one plan."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class diagonal_alignment(Enum):  # noqa: N801
    """Where the diagonal of the band starts: at query 0 and key 0, or at the last of both."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(Enum):  # noqa: N801
    """Which of FE's nodes serves sdpa. Accepted as a hint."""

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2


class norm_forward_phase(Enum):  # noqa: N801
    """Whether a norm gives inv_variance, which its backward reads: in TRAINING."""

    NOT_SET = 0
    INFERENCE = 1
    TRAINING = 2


class tensor_reordering(Enum):  # noqa: N801
    """Memory reordering of scale tensors. NONE is the only one served."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3
