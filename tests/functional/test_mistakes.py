"""Natural mistakes: what the functions answer."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph import angles
from ropegraph.functional import attention, cached_attention, qkv_attention, rope

Q = torch.randn(2, 4, 6, 8)
FREQS = torch.randn(6, 4)
LENS = torch.tensor([3, 6], dtype=torch.int32)
TURNS: dict[str, Any] = {
    "start_positions": LENS, "position_ids": torch.zeros(1, 6, dtype=torch.int64), "rope_dim": 4,
    "rope_offset": 0, "interleaved": True, "interleaved_output": True, "attention_factor": 2.0,
    "inverse": True, "half_width": True, "table_layout": "full", "angle_precision": "exact",
    "numerics": "hf",
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_rotation_without_angles_is_no_rotation(name: str) -> None:
    with pytest.raises(rg.GraphError, match=f"attention: {name}= is given but no angles"):
        attention(Q, Q, Q, **{name: TURNS[name]})
    with pytest.raises(rg.GraphError, match=f"qkv_attention: {name}= is given but no angles"):
        qkv_attention(torch.randn(2, 6, 12, 8), split=(4, 4, 4), **{name: TURNS[name]})


def test_what_is_no_tensor() -> None:
    made = angles.default(rope_theta=1e4, head_dim=8)
    with pytest.raises(rg.GraphError, match=r"freqs is RopeAngles.*inv_freq=angles\.inv_freq"):
        rope(Q, made)
    with pytest.raises(rg.GraphError, match=r"inv_freq is RopeAngles"):
        rope(Q, inv_freq=made)
    with pytest.raises(rg.GraphError, match="start_positions of q is int, no tensor"):
        attention(Q, Q, Q, FREQS, half_width=True, start_positions=(4, None))
    with pytest.raises(rg.GraphError, match=r"freqs: positions=48 is no tensor"):
        angles.freqs(made, 48)


def test_lengths_of_one_side() -> None:
    with pytest.raises(rg.GraphError, match=r"seq_lens=\(None, \.\.\.\); give both"):
        attention(Q, Q, Q, seq_lens=(None, LENS))
    with pytest.raises(rg.GraphError, match=r"seq_lens=\(\.\.\., None\); give both"):
        attention(Q, Q, Q, seq_lens=(LENS, None))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_whole_configuration_as_a_dictionary(key: str) -> None:
    whole = {"rope_theta": 5e5, key: {"rope_type": "linear", "factor": 2.0}, "head_dim": 128}
    for layer_type in (None, key):
        with pytest.raises(rg.GraphError, match=f"whole configuration, it has '{key}'"):
            angles.inv_freq(whole, head_dim=128, layer_type=layer_type)


def test_a_data_type_where_the_name_belongs() -> None:
    with pytest.raises(rg.GraphError, match=r"pygraph: name=torch\.float32 is no name"):
        rg.pygraph(torch.float32)


def test_in_place_in_a_view_is_refused_before_anything_is_written() -> None:
    leaf = torch.randn(2, 4, 32, requires_grad=True)
    before = leaf.detach().clone()
    projected = torch.nn.Linear(16, 32)(torch.randn(2, 4, 16))
    for qkv in (leaf.view(2, 4, 4, 8), projected):
        with pytest.raises(rg.GraphError, match="is a view of another tensor"):
            qkv_attention(qkv, FREQS, split=(2, 1, 1), half_width=True, in_place=True)
    assert torch.equal(leaf.detach(), before)
    plain = torch.nn.Linear(16, 32, bias=False)(torch.randn(2, 4, 16))
    o = qkv_attention(plain, FREQS, split=(2, 1, 1), half_width=True, in_place=True)
    o.sum().backward()


def test_gradients_of_freqs_that_do_not_exist_are_refused_in_the_forward() -> None:
    freqs = FREQS.clone().requires_grad_()
    bounds = torch.tensor([0, 2, 6])
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(
        rg.GraphError, match="freqs requires grad, which it has not with cu_seqlens"
    ):
        attention(x, x, x, freqs, half_width=True, cu_seqlens=bounds)
    qkv = torch.randn(2, 6, 32)
    before = qkv.clone()
    with pytest.raises(rg.GraphError, match="freqs requires grad, for which the unrotated"):
        qkv_attention(qkv, freqs, half_width=True, split=(2, 1, 1), in_place=True)
    assert torch.equal(qkv, before)


def test_padding_gives_nothing_to_the_gradient_of_freqs() -> None:
    q = torch.randn(1, 1, 2, 8)
    q[:, :, 1] = float("nan")
    freqs = torch.randn(2, 4, requires_grad=True)
    o = attention(q, q, q, freqs, half_width=True, seq_lens=torch.tensor([1], dtype=torch.int32))
    o.sum().backward()
    assert freqs.grad is not None
    assert torch.isfinite(freqs.grad).all()
    assert torch.equal(freqs.grad[1], torch.zeros(4))


@pytest.mark.parametrize("given", [{"freqs": FREQS, "half_width": True, "in_place": True}, {}])
def test_groups_of_several_heads_say_what_they_cannot_do(given: dict[str, Any]) -> None:
    with pytest.raises(rg.GraphError, match="heads of Q lie in two levels"):
        qkv_attention(torch.randn(2, 6, 2, 32), split=(16, 8, 8), by_groups=True, **given)


def test_packed_heads_may_be_expanded() -> None:
    one = torch.randn(1, 6, 32)
    both = qkv_attention(one.expand(2, 6, 32), FREQS, half_width=True, split=(2, 1, 1))
    alone = qkv_attention(one, FREQS, half_width=True, split=(2, 1, 1))
    assert torch.equal(both[:1], alone)
    assert torch.equal(both[1:], alone)


def test_a_longest_length_without_sequences() -> None:
    with pytest.raises(rg.GraphError, match="max_seqlen=3 speaks of cu_seqlens"):
        attention(Q, Q, Q, max_seqlen=3)
    with pytest.raises(rg.GraphError, match="max_seqlen=-3"):
        attention(Q[:1], Q[:1], Q[:1], max_seqlen=-3, cu_seqlens=torch.tensor([0, 6]))


CACHE, AT = torch.zeros(2, 4, 6, 8), torch.zeros(2, dtype=torch.int32)
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    rope: {"x": Q, "freqs": FREQS, "half_width": True},
    attention: {"q": Q, "k": Q, "v": Q, "freqs": FREQS, "half_width": True},
    qkv_attention: {
        "qkv": torch.randn(2, 6, 12, 8), "freqs": FREQS, "half_width": True, "split": (4, 4, 4)
    },
    cached_attention: {
        "q": Q, "k": Q, "v": Q, "k_cache": CACHE, "v_cache": CACHE.clone(), "lengths": AT,
        "freqs": FREQS, "half_width": True,
    },
}  # fmt: skip
# An argument that is read as another one, or that another one is read by.
SPOKEN = {"is_causal": "causal", "sin": "sin|cos", "k_cache": "cache", "dropout_p": "dropout",
          "seq_lens": "seq_len"}  # fmt: skip
TAKES_LARGE = ("scale", "output_scale", "attention_factor", "softcap")
JUNK = ("text", b"bytes", [1.5], (1, 2, 3, 4), {"a": 1}, object(), 1j, torch.randn(3), 10**30)


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f in CALLS for name in inspect.signature(f).parameters],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_whatever_an_argument_is_the_message_names_it(
    function: Callable[..., Any], name: str
) -> None:
    """Or it is taken: 10**30 is a scale."""
    if name in TAKES_LARGE:
        function(**{**CALLS[function], name: 10**30})
    for junk in JUNK if name not in TAKES_LARGE else JUNK[:-1]:
        with pytest.raises(rg.GraphError, match=SPOKEN.get(name, name)):
            function(**{**CALLS[function], name: junk})


@pytest.mark.parametrize(
    ("function", "keyword", "meant"),
    [
        (attention, "attn_mask", "bias or is_causal"),
        (attention, "attention_mask", "bias or is_causal or seq_lens"),
        (attention, "softmax_scale", "scale"),
        (attention, "sm_scale", "scale"),
        (attention, "use_causal_mask", "is_causal"),
        (attention, "dropout", "dropout_p"),
        (attention, "position_id", "position_ids"),
        (qkv_attention, "causal", "is_causal"),
        (qkv_attention, "window_size", "window"),
        (cached_attention, "cache_seqlens", "lengths"),
        (cached_attention, "scaling", "scale"),
        (rope, "rotary_interleaved", "interleaved"),
        (rope, "seqlen_offsets", "start_positions"),
        (rope, "zzz", ""),
    ],
)
def test_a_keyword_of_others_is_refused_by_the_name_it_has_here(
    function: Callable[..., Any], keyword: str, meant: str
) -> None:
    hint = rf"; did you mean {meant}\?" if meant else ""
    message = f"^{function.__name__}: {keyword}= is no argument here{hint}$"
    compiled = torch.compile(function, backend="eager")
    for called in (function, compiled):
        with pytest.raises(rg.GraphError, match=message):
            called(**CALLS[function], **{keyword: Q})


def test_what_functions_take_is_in_their_signatures_and_nothing_else() -> None:
    for function in CALLS:
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {
            inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
        }  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_tensors_without_strides_are_refused_by_name(function: Callable[..., Any]) -> None:
    given = CALLS[function]
    for name in [n for n in given if n in ("x", "q", "k", "v", "qkv", "k_cache")]:
        x = given[name]
        jagged = torch.nested.nested_tensor(list(x), layout=torch.jagged)
        for other in (x.to_sparse(), torch.nested.nested_tensor(list(x)), jagged):
            with pytest.raises(rg.GraphError, match=rf"{name} is (nested|torch.sparse_coo); use a"):
                function(**{**given, name: other})


@pytest.mark.parametrize("n", [-1, 7])
def test_a_number_of_new_rows_that_is_none_is_told_before_a_cache_is_written(n: int) -> None:
    before, given = CACHE.clone(), CALLS[cached_attention]
    with pytest.raises(rg.PositionError, match=rf"new_lens of sequence 1 is {n}; .* 0\.\.6"):
        cached_attention(**given, new_lens=torch.tensor([2, n]))
    assert torch.equal(CACHE, before)


WHICH = r"rope_dim=4 of heads 8 wide: say which channels turn, rope_offset=0 .* or rope_offset=4"


@pytest.mark.parametrize("norms", [False, True])
def test_a_part_of_a_head_has_a_place(norms: bool) -> None:
    """Models of Hugging Face turn the first channels, cuDNN the last: silence would be a guess."""
    freqs, turn = torch.randn(6, 4), {"rope_dim": 4}
    weights = {"q_norm": torch.ones(8), "k_norm": torch.ones(8)} if norms else {}
    bounds = torch.tensor([0, 6])
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "rope": lambda **given: rope(Q, freqs, **given),
        "attention": lambda **given: attention(Q, Q, Q, freqs, **weights, **given),
        "rows": lambda **given: attention(
            Q[:1], Q[:1], Q[:1], freqs, cu_seqlens=bounds, **weights, **given
        ),
        "qkv_attention": lambda **given: qkv_attention(
            torch.randn(2, 6, 12, 8), freqs, split=(4, 4, 4), **weights, **given
        ),
        "cached_attention": lambda **given: cached_attention(
            Q, Q, Q, torch.zeros(2, 4, 9, 8), torch.zeros(2, 4, 9, 8), torch.zeros(2).int(),
            torch.randn(9, 4), **weights, **given,
        ),
    }  # fmt: skip
    for name, run in calls.items():
        with pytest.raises(rg.GraphError, match=WHICH):
            run(**turn)
        first, last = run(**turn, rope_offset=0), run(**turn, rope_offset=4)
        assert not torch.equal(first, last), name


def test_tables_as_hugging_face_makes_them() -> None:
    half = torch.randn(2, 6, 4)
    cos, sin = (torch.cat((t, t), dim=-1) for t in (half.cos(), half.sin()))
    got = rope(Q, cos=cos, sin=sin)
    for i in range(2):
        want = rope(Q[i : i + 1], cos=cos[i], sin=sin[i])
        assert torch.equal(got[i : i + 1], want)
    one = rope(Q, cos=cos[:1], sin=sin[:1])
    assert torch.equal(one, rope(Q, cos=cos[0], sin=sin[0]))


@pytest.mark.parametrize(
    ("bounds", "longest", "message"),
    [
        ([2, 4, 6], None, r"cu_seqlens begins with 2, and must with 0; of lengths it is torch\.nn"),
        ([0, 4, 3], None, "cu_seqlens decreases from 4 to 3"),
        ([0, 4, 8], None, "cu_seqlens ends with 8, but there are 6 rows"),
        ([0, 1, 6], 4, "max_seqlen=4, but sequence 1 has 5 rows"),
    ],
)
def test_bounds_that_are_no_running_sum(
    bounds: list[int], longest: int | None, message: str
) -> None:
    given = {"cu_seqlens": torch.tensor(bounds), "max_seqlen": longest, "half_width": True}
    with pytest.raises(rg.GraphError, match=message):
        attention(Q[:1], Q[:1], Q[:1], FREQS, **given)


def test_positions_beside_packed_sequences() -> None:
    """Packed batches of Hugging Face carry both."""
    ids, bounds = torch.arange(6)[None] % 3, torch.tensor([0, 3, 6])
    with pytest.raises(rg.GraphError, match="restarts positions with every sequence; leave pos"):
        attention(Q[:1], Q[:1], Q[:1], FREQS, half_width=True, cu_seqlens=bounds, position_ids=ids)


def test_a_split_of_channels() -> None:
    with pytest.raises(rg.GraphError, match=r"qkv_attention: split=\[4, 2, 2\] .* all channels"):
        qkv_attention(torch.randn(2, 6, 8), FREQS, split=(4, 2, 2))
    with pytest.raises(rg.GraphError, match=r"qkv_attention: split=\[4, 2, 4\] .* up to 10; give"):
        qkv_attention(torch.randn(2, 6, 64), FREQS, split=(4, 2, 4))


def test_documents_without_rows_change_nothing() -> None:
    """Bounds padded to one length, and max_seqlen rounded up, as the docs say."""
    bounds = torch.tensor([0, 2, 6])
    padded = torch.cat((bounds, bounds[-1:].expand(3)))
    x = torch.randn(1, 4, 6, 8)
    given = {"half_width": True, "is_causal": True}
    want = attention(x, x, x, FREQS, cu_seqlens=bounds, max_seqlen=4, **given)
    got = attention(x, x, x, torch.randn(8, 4).copy_(torch.cat((FREQS, FREQS[:2]))),
                    cu_seqlens=padded, max_seqlen=8, **given)  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
