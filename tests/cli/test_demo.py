"""The demo end to end in its quick form, and the parts whose failure would make it say nothing."""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ropegraph as rg
from ropegraph.__main__ import main
from ropegraph.cli.demo import accuracy, command, fold_table
from ropegraph.cli.demo.attention import (
    graph_attention,
    plain_attention,
    slightly_wrong_attention,
)
from ropegraph.cli.demo.diagram import flowchart
from ropegraph.cli.demo.graphs import SETTINGS, RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.model import Shape, seeded_decoder
from ropegraph.cli.demo.screen import Progress, sparkline, table
from ropegraph.cli.demo.text import batches, king_james
from ropegraph.cli.demo.training import Recipe, Run, gradient_gap, loss_gap, max_or_nan, train

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(vocab=62, layers=2, width=48, q_heads=3, kv_heads=1, hidden=96, length=40)


@pytest.fixture(autouse=True)
def _short_thread_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads on a busy machine are slow, and how slow is not what is tested."""
    monkeypatch.setattr(command, "THREAD_CHECK_SECONDS", 1.0)


def test_the_quick_demo_passes_and_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick"]) == 0
    text = capsys.readouterr().out
    assert text.count("flowchart LR") == 4
    assert "moved to rope_q" in text
    assert "of plain torch" in text
    assert f"torch {torch.__version__}" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "all hold" in text
    assert "\r" not in text  # no bar where nobody watches
    for setting in command.TRAINED:
        assert text.count(f"fold {setting.name}") >= 4


def test_a_failed_claim_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "graph_attention", lambda shape, _: slightly_wrong_attention(shape)
    )
    assert main(["demo", "--quick"]) == 1
    assert "8 FAILED" in capsys.readouterr().out  # losses and gradients of four settings


@pytest.mark.parametrize("measured", [math.nan, 2.0, -1.0])
def test_a_claim_does_not_hold_outside_its_bounds(measured: float) -> None:
    assert not command.Claim("x", measured, most=1.0, least=0.0).holds


def test_as_a_command_without_a_terminal_or_unicode() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ropegraph", "demo", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "OMP_WAIT_POLICY": "PASSIVE"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    assert b"all hold" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--steps", "3"], "'3' is not a whole number of 10 or more"),
        (["demo", "--steps", "-20"], "'-20' is not a whole number"),
        (["demo", "--threads", "0"], "'0' is not a whole number from 1 to 64"),
        (["demo", "--threads", "many"], "'many' is not a whole number"),
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_a_wrong_command_line_says_why(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"ropegraph {rg.__version__}, torch ")


def test_a_flowchart_is_a_line_or_two_a_node() -> None:
    sizes = Sizes(b=1, h_q=2, h_kv=1, s=4, d=16, rotated=16)
    freqs = accuracy.random_inputs(sizes, torch.float32).freqs
    graphs = RotaryAttention(sizes, Setting("q", "q"), freqs, torch.float32)
    assert flowchart(graphs.forward.lowered.recorded).splitlines() == [
        "flowchart LR",
        '    q & freqs --> rope_q["rope_q: output_scale=1"]',
        '    k & freqs --> rope_k["rope_k: output_scale=1"]',
        "    rope_q -->|q_rot| attention",
        "    rope_k -->|k_rot| attention",
        '    v --> attention["attention: attn_scale=0.25"]',
        "    attention --> o & stats",
    ]
    assert '["rope_q+rope_k: output_scale=0.25, 1"]' in flowchart(graphs.forward.plan.graph)
    backward = flowchart(graphs.backward.plan.graph)
    assert "    rope_q_backward_rope_k_backward --> dq & dk" in backward.splitlines()


def test_a_flowchart_of_a_pair_that_turns_nothing() -> None:
    g = rg.pygraph(io_data_type=torch.float32)
    rows = g.tensor([2], data_type=torch.int32, name="rows")
    for x in "kv":
        cache = g.tensor([2, 1, 9, 4], name=f"{x}_cache")
        g.cache_write(g.tensor([2, 1, 3, 4]), cache=cache, cache_positions=rows, name=x)
    assert '["k+v: cache_write"]' in flowchart(g.plan.graph)


@pytest.mark.parametrize(
    ("claim", "row"),
    [
        (command.Claim("e", 6.1e-7, 1e-5), ("e", "6.1e-07", "<= 1e-05", "ok")),
        (command.Claim("r", 0.61, 1.0, digits=command.RATIO), ("r", "0.61", "<= 1", "ok")),
        (command.Claim("s", 1e-9, least=1e-4), ("s", "1.0e-09", ">= 1e-04", "FAILED")),
    ],
)
def test_how_a_claim_is_printed(claim: command.Claim, row: tuple[str, ...]) -> None:
    assert claim.row == row


def test_the_text_is_real_and_large_enough() -> None:
    corpus = king_james()
    assert 200_000 <= len(corpus.tokens) <= 400_000
    start = "".join(corpus.alphabet[t] for t in corpus.tokens[:54])
    assert start == "In the beginning God created the heaven and the earth."


def test_batches_repeat_and_targets_are_the_next_tokens() -> None:
    corpus = king_james()
    once, again = (list(batches(corpus, 3, 17, 4, seed=5)) for _ in range(2))
    for (tokens, targets), (tokens_again, _) in zip(once, again, strict=True):
        assert tokens.shape == targets.shape == (3, 17)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal(tokens, tokens_again)
    assert not torch.equal(once[0][0], once[1][0])


def test_weights_depend_on_the_seed_alone() -> None:
    first, second, other = (
        seeded_decoder(SMALL, plain_attention(SMALL), seed) for seed in (1, 1, 2)
    )
    state = first.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in second.state_dict().items())
    assert any(not torch.equal(x, state[name]) for name, x in other.state_dict().items())


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("rotated", [32, 32 - 8])
def test_one_attention_agrees_with_plain_torch_in_f64(setting: object, rotated: int) -> None:
    sizes = Sizes(b=1, h_q=4, h_kv=2, s=19, d=32, rotated=rotated)
    inputs = accuracy.random_inputs(sizes, torch.float64)
    found = accuracy.errors(accuracy.by_graphs(inputs, setting), accuracy.by_formula(inputs))
    assert max_or_nan(list(found.values())) < 1e-12


def test_graph_attention_survives_a_change_of_batch() -> None:
    attention, plain = graph_attention(SMALL, SETTINGS[1]), plain_attention(SMALL)
    for b in (2, 1, 2):
        q, k, v = (torch.randn(b, h, SMALL.length, 32, requires_grad=True) for h in (3, 1, 1))
        mine, theirs = attention(q, k, v), plain(q, k, v)
        torch.testing.assert_close(mine, theirs)
        do = torch.randn_like(mine)
        for x, y in zip(
            torch.autograd.grad(mine, (q, k, v), do),
            torch.autograd.grad(theirs, (q, k, v), do),
            strict=True,
        ):
            torch.testing.assert_close(x, y)


def test_gaps_see_a_wrong_gradient_and_pass_on_nan() -> None:
    corpus, recipe = king_james(), Recipe(steps=3, batch=2)
    right = train(corpus, SMALL, plain_attention(SMALL), recipe, "right")
    wrong = train(corpus, SMALL, slightly_wrong_attention(SMALL), recipe, "wrong")
    assert loss_gap(right, right) == gradient_gap(right, right) == 0.0
    assert gradient_gap(wrong, right) > 1e-4
    assert wrong.losses[0] == right.losses[0]
    assert wrong.losses[1] != right.losses[1]
    broken = Run((right.losses[0], math.nan, 1.0), {})
    assert math.isnan(loss_gap(broken, right))
    assert math.isnan(gradient_gap(broken, right))
    assert math.isnan(loss_gap(Run((), {}), right))


def test_drawing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(("what", "n"), [("a", "1"), ("longer", "22")]).splitlines()
    assert lines == ["what     n", "------  --", "a        1", "longer  22"]
    assert len(sparkline([1.0] * 500, width=50)) == 50
    assert sparkline([4.0, 3.0, 2.0, 1.0])[0] != sparkline([4.0, 3.0, 2.0, 1.0])[-1]
    assert sparkline([1.0, math.nan])[-1] == "?"
    assert sparkline([]) == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Progress("bar", 2) as progress:
        progress.advance("loss 1")
        progress.advance("loss 2")
        progress.close("done")
    drawn = capsys.readouterr().out
    assert "2/2 loss 2" in drawn
    assert drawn.rstrip().endswith("bar                    done")


def test_options_have_defaults() -> None:
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers())
    options = parser.parse_args(["demo"])
    assert (options.steps, options.threads, options.quick) == (None, 1, False)


def test_the_fold_table_is_read_off_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(b=1, h_q=4, h_kv=2, s=7, d=24, rotated=16)
    text, gap = fold_table.check(sizes)
    assert gap < 1e-12
    assert text.count("2 + 2") == len(SETTINGS)
    # A fold that did not happen must show.
    monkeypatch.setattr(fold_table, "SETTINGS", (Setting("q", "off"), Setting("off", "q")))
    monkeypatch.setattr(
        fold_table,
        "expected",
        lambda setting, a: (a, 1.0, 1.0, 0.0, a, 1.0) if setting.name == "q" else (1.0,) * 6,
    )
    assert fold_table.check(sizes)[1] > 0.1
