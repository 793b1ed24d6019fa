"""Scale nodes around a rotation: folded or not, forward and backward stay adjoint."""

import pytest
import torch

import ropegraph
from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within, relative
from ropegraph.testing.inputs import normal
from tests.numerics.attention import FOLDS, execute, scales

F64 = torch.float64
DIM = (1, 2, 3, 4)


def inputs() -> dict[str, torch.Tensor]:
    found = {n: normal(DIM, F64, seed=i) for i, n in enumerate(("x", "k", "v", "do", "do2"))}
    return found | {"freqs": oracle.angles(3, 4).reshape(3, 1, 1, 2)}


def start(fold: str, log2: bool) -> tuple[ropegraph.pygraph, dict[str, ropegraph.tensor]]:
    g = ropegraph.pygraph(io_data_type=F64, fold=fold, fold_log2=log2, engines="reference")
    given = inputs()
    return g, {n: g.tensor_like(given[n], name=n) for n in ("x", "k", "v", "freqs")}


def attend(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factor: float) -> torch.Tensor:
    """softmax(0.3 <R factor x, R k>) v."""
    angles = oracle.angles(3, 4)
    q, k = oracle.rope(factor * x, angles), oracle.rope(k, angles)
    return oracle.attention(q, k, v, attn_scale=0.3)[0]


def check(got: dict[str, torch.Tensor], outputs: list[tuple[str, float]]) -> None:
    """got: dx, dk and dv of the sum of attend(x, k, v, factor) * do over ``outputs``."""
    given = inputs()
    leaves = [oracle.leaf(given[n]) for n in ("x", "k", "v")]
    total = sum((attend(*leaves, factor) * given[d]).sum() for d, factor in outputs)
    grads = torch.autograd.grad(total, leaves)
    for name, want in zip(("dx", "dk", "dv"), grads, strict=True):
        assert_within(got[name], want, relative(want, 1e-12), name)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("is_visible", [False, True])
def test_a_scale_node_that_folds_only_on_one_side(fold, log2, place, is_visible):
    # A visible value keeps its scale node in the forward; its gradient is nobody's to see.
    g, t = start(fold, log2)
    first = (
        g.scale(t["x"], 0.5) if place == "before" else g.rope(t["x"], t["freqs"], half_width=True)
    )
    q = g.rope(first, t["freqs"], half_width=True) if place == "before" else g.scale(first, 0.5)
    if is_visible:
        first.set_output(True)
    k = g.rope(t["k"], t["freqs"], half_width=True)
    o, _ = g.sdpa(q, k, t["v"], 0.3, name="attn")
    o.set_output(True).set_name("o")
    backward = g.backward_graph(["o"], ["x", "k", "v"])
    given = inputs()
    results = execute(g, given)
    check(execute(backward, given | results), [("do", 0.5)])
    # rope pair and sdpa; and the scale, where it could not fold.
    assert len(g.plan.steps) == (3 if is_visible else 2)
    assert len(backward.plan.steps) == 2


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_a_scale_node_read_by_two_rotations(fold, log2):
    # Forward: the scale goes into both.  Backward: it stands behind the sum of both gradients.
    g, t = start(fold, log2)
    half = g.scale(t["x"], 0.5)
    k = g.rope(t["k"], t["freqs"], half_width=True)
    for name in ("o", "o2"):
        q = g.rope(half, t["freqs"], half_width=True, output_scale=2.0 if name == "o2" else 1.0)
        out, _ = g.sdpa(q, k, t["v"], 0.3, name=f"attn_{name}")
        out.set_output(True).set_name(name)
    backward = g.backward_graph(["o", "o2"], ["x", "k", "v"])
    given = inputs()
    results = execute(g, given)
    got = execute(backward, given | results)
    check(got, [("do", 0.5), ("do2", 1.0)])


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("style", ["scale node", "output_scale", "and unscaled"])
def test_a_hand_made_backward_may_keep_or_fold_its_scale_node(fold, log2, style):
    g, t = start(fold, log2)
    q = g.rope(g.scale(t["x"], 0.5), t["freqs"], half_width=True).set_saved(True).set_name("q_rot")
    k = g.rope(t["k"], t["freqs"], half_width=True).set_saved(True).set_name("k_rot")
    o, stats = g.sdpa(q, k, t["v"], 0.3, name="attn")
    o.set_output(True).set_name("o")
    stats.set_output(True).set_name("stats")
    given = inputs()
    results = execute(g, given)

    b = ropegraph.pygraph(io_data_type=F64, fold_contract=g.fold_contract, engines="reference")
    names = ("q_rot", "k_rot", "v", "o", "do", "stats")
    t = {n: b.tensor_like((given | results)[n], name=n) for n in (*names, "freqs")}
    dq_rot, dk_rot, dv = b.sdpa_backward(*(t[n] for n in names), attn_scale=0.3, name="attn")
    is_folded = style == "output_scale"
    dx = b.rope_backward(dq_rot, t["freqs"], 0.5 if is_folded else 1.0, half_width=True)
    dk = b.rope_backward(dk_rot, t["freqs"], half_width=True)
    if not is_folded:
        dx = b.scale(dx, 0.5)
    if style == "and unscaled":
        dx, dk, dv = (b.scale(grad, 1 / 128) for grad in (dx, dk, dv))
    for grad, name in ((dx, "dx"), (dk, "dk"), (dv, "dv")):
        grad.set_output(True).set_name(name)
    got = execute(b, given | results)
    if style == "and unscaled":
        got = {name: 128 * grad for name, grad in got.items()}
    check(got, [("do", 0.5)])


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("changed", ["nothing", "inverse", "output_scale", "scale"])
def test_a_rotation_behind_a_scale_node_is_compared_too(fold, log2, changed):
    g, t = start(fold, log2)
    q = g.scale(g.rope(t["x"], t["freqs"], half_width=True).set_output(True), 0.5)
    o, _ = g.sdpa(q, g.rope(t["k"], t["freqs"], half_width=True), t["v"], 0.3, name="attn")
    o.set_output(True)
    given = inputs()

    b = ropegraph.pygraph(io_data_type=F64, fold_contract=g.fold_contract)
    t = {n: b.tensor_like(given[n], name=n) for n in ("x", "k", "v", "do", "freqs")}
    stats = b.tensor((1, 2, 3, 1), name="stats")
    dq, dk, _ = b.sdpa_backward(
        t["x"], t["k"], t["v"], b.tensor_like(given["do"]), t["do"], stats, 0.3, name="attn"
    )
    dq = b.scale(dq, 0.6 if changed == "scale" else 0.5)
    keywords = {"inverse": {"inverse": True}, "output_scale": {"output_scale": 1.5}}
    b.rope_backward(dq, t["freqs"], half_width=True, **keywords.get(changed, {})).set_output(True)
    b.rope_backward(dk, t["freqs"], half_width=True).set_output(True)
    if changed == "nothing":
        b.build()
    else:
        with pytest.raises(ropegraph.FoldContractError, match="'attn'"):
            b.build()


def test_the_users_own_scales_multiply():
    g, t = start("q", log2=False)
    q = g.rope(g.scale(t["x"], 0.5), t["freqs"], 3.0, half_width=True, name="rope_q")
    q = g.scale(q, -0.25)
    k = g.rope(t["k"], t["freqs"], half_width=True, name="rope_k")
    o, _ = g.sdpa(q, k, t["v"], 0.3, name="attn")
    o.set_output(True)
    got = scales(g)
    assert got.pop("attn") == (1.0, False)
    assert got == pytest.approx({"rope_q": 0.5 * 3 * -0.25 * 0.3, "rope_k": 1.0})
