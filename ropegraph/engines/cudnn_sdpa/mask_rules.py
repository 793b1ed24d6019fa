"""What scores may go through on their way to the softmax, forward and backward alike."""

from __future__ import annotations

from collections.abc import Iterator

from ropegraph.engines.cudnn_sdpa.facts import Facts, version_name
from ropegraph.engines.cudnn_sdpa.operands import is_usable_scale
from ropegraph.engines.cudnn_sdpa.rules import Rule

# First figure of the compute capability -> the cuDNN from which it is measured (tests/gpu) that
# nothing past the end of a sequence is read into it, and that empty sequences come out as zeros.
PADDING_MEASURED = {9: 91900}


def scale(f: Facts) -> Iterator[str]:
    """A positive number: see SCALE_RANGE."""
    given = f.attrs.attn_scale
    if given is None:
        if not f.value("attn_scale").is_host:
            yield "attn_scale is a tensor on the device, and cuDNN gives NaN unless it is positive"
    elif not is_usable_scale(given):
        yield f"attn_scale={given} is outside [2^-100, 2^100]; cuDNN gives NaN at 0 and below"


def score_mod(f: Facts) -> Iterator[str]:
    """None."""
    if f.attrs.score_mod is not None:
        yield "score_mod is a traced program, which runs on the torch engine"


def band(f: Facts) -> Iterator[str]:
    """What cuDNN knows of the diagonal band."""
    a = f.attrs
    if a.right_bound is not None and a.right_bound < 0:
        yield f"right_bound={a.right_bound} is negative"
    if f.is_causal_bottom_right:
        yield from _bottom_right(f)
    if a.left_bound is not None:
        yield from _window(f, a.left_bound)


def _bottom_right(f: Facts) -> Iterator[str]:
    if not f.attrs.padding and f.s_q > f.s_kv:
        yield f"bottom-right causal with s_q={f.s_q} above s_kv={f.s_kv}"
    for word, present in (
        ("bias", f.has("bias")),
        ("ALiBi", f.attrs.alibi),
        ("dropout", f.has_dropout),
    ):
        if present:
            yield f"bottom-right causal together with {word}"
    if f.before(90600) and (f.s_q % 64 or f.s_kv % 64):
        yield f"bottom-right causal before cuDNN 9.6 needs s_q={f.s_q}, s_kv={f.s_kv} in 64s"


def _window(f: Facts, left: int) -> Iterator[str]:
    a = f.attrs
    if left <= 0 and (f.is_backward or f.before(91000)):
        until = "" if f.is_backward else " before cuDNN 9.10"
        yield f"left_bound={left} must be positive{until}"
    if not a.padding and f.s_q > f.s_kv:
        yield f"a left bound with s_q={f.s_q} above s_kv={f.s_kv}"
    if f.before(91002):
        if a.right_bound is None:
            yield "a left bound before cuDNN 9.10.2 needs a right bound as well"
        if f.has_dropout or f.has("bias"):
            yield "a left bound before cuDNN 9.10.2 excludes dropout and bias"
    if f.before(90600) and f.is_causal_bottom_right and f.s_q != f.s_kv:
        yield f"a bottom-right window before cuDNN 9.6 needs s_q={f.s_q} equal to s_kv={f.s_kv}"
    if f.before(90901) and f.major == 9 and f.is_causal_bottom_right and f.s_q == f.s_kv:
        yield "a bottom-right window with s_q = s_kv on sm_90 needs a cuDNN newer than 9.9"
    if f.device.cudnn == 91400 and f.s_kv > 1024 and a.right_bound is None:
        yield f"cuDNN 9.14.0 computes a window over s_kv={f.s_kv} without a right bound wrongly"


def alibi(f: Facts) -> Iterator[str]:
    """A causal one only."""
    if f.attrs.alibi and f.attrs.right_bound != 0:
        yield f"ALiBi needs right_bound=0, this is {f.attrs.right_bound}"


def dropout(f: Facts) -> Iterator[str]:
    """A probability below 1."""
    p = f.attrs.dropout_p
    if p is not None and not 0.0 <= p < 1.0:
        yield f"dropout probability {p} is outside [0, 1)"


def sink(f: Facts) -> Iterator[str]:
    """From 9.13 on."""
    if f.has("sink_token") and f.before(91300):
        yield f"sink_token needs cuDNN 9.13 or newer, this is {version_name(f.device.cudnn)}"


def padding(f: Facts) -> Iterator[str]:
    """Padded tensors are recorded as ragged ones (recipe.py says why), so one set of rules."""
    if f.is_ragged and not f.attrs.padding:
        yield "ragged tensors need padding with seq_len_q and seq_len_kv"
    if f.has_ragged_units:
        yield "ragged offsets that count more than single elements"
    if not f.is_sequential or not f.device.cudnn:
        return
    since = PADDING_MEASURED.get(f.major)
    if since is None:
        yield f"padding on {f.device}: it is not measured there that nothing past seq_len leaks"
    elif f.before(since):
        yield (
            f"padding needs cuDNN {version_name(since)} or newer, this is {f.cudnn_name}: that "
            "nothing past seq_len leaks, and empty sequences give zeros, is not measured before"
        )
    if f.device.sm < 90 and f.before(91801):
        yield f"padding or ragged tensors on {f.device} need cuDNN 9.18.1 or newer"


MASKS: tuple[Rule, ...] = (scale, score_mod, band, alibi, dropout, sink, padding)
