"""``python -m ropegraph demo``: the whole chain on real input, every claim checked."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import ropegraph as rg
from ropegraph.cli.demo import accuracy, fold_table
from ropegraph.cli.demo.attention import (
    graph_attention,
    plain_attention,
    slightly_wrong_attention,
)
from ropegraph.cli.demo.diagram import flowchart
from ropegraph.cli.demo.graphs import SETTINGS, RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.model import Shape
from ropegraph.cli.demo.screen import Progress, heading, sparkline, table
from ropegraph.cli.demo.text import Corpus, king_james
from ropegraph.cli.demo.training import Recipe, Run, gradient_gap, loss_gap, max_or_nan, train

# No width is a power of four: a scale of 1/8, say, costs no rounding and would flatter plain torch.
FULL = Sizes(b=2, h_q=6, h_kv=2, s=80, d=48, rotated=48)
PARTIAL = Sizes(b=2, h_q=6, h_kv=3, s=72, d=96, rotated=64)
TRAINED = tuple(s for s in SETTINGS if s.name != "symmetric + log2")

SAME_LOSS = 1e-5
SAME_GRADIENT = 1e-5
SAME_TORCH = 1e-6
FEW_STEPS = 10
# A second thread that has to fight for its core can take minutes over what is a check on the side.
THREAD_CHECK_SECONDS = 30.0


@dataclass(frozen=True)
class Claim:
    """Something that must hold: what was measured lies within [least, most].

    digits: how the numbers are printed, an error as 6.1e-07 and a ratio as 0.61.
    """

    what: str
    measured: float
    most: float = float("inf")
    least: float = float("-inf")
    digits: str = ".1e"

    @property
    def holds(self) -> bool:
        return self.least <= self.measured <= self.most  # False for a NaN

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The claim as a line of the summary."""
        sign, bound = ("<=", self.most) if self.most < float("inf") else (">=", self.least)
        digits = ".0e" if self.digits == ".1e" else "g"
        verdict = "ok" if self.holds else "FAILED"
        return self.what, f"{self.measured:{self.digits}}", f"{sign} {bound:{digits}}", verdict


RATIO = ".2f"


def add_to(commands: Any) -> None:
    """Add the command to ``python -m ropegraph``."""
    parser = commands.add_parser(
        "demo",
        help="graphs, folds, errors against fp64, and a model trained beside plain torch",
        description="The whole chain on real input. Exits with 1 if any of its claims fails.",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="N", help="training steps, 10 at least (200)"
    )
    parser.add_argument(
        "--threads",
        type=_threads_from,
        metavar="N",
        default=1,
        help="threads of torch (1: repeats to the last bit, and needs no idle core)",
    )
    parser.add_argument("--quick", action="store_true", help=f"a smaller model, {FEW_STEPS} steps")
    parser.set_defaults(run=run)


def _steps(text: str) -> int:
    """Read a number of steps: in fewer than ten, a wrong gradient hardly shows in the loss."""
    if not text.isdecimal() or int(text) < FEW_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {FEW_STEPS} or more")
    return int(text)


def _threads_from(text: str) -> int:
    """Read a number of threads."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 64")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Do all of it; 0 if every claim holds."""
    started = time.perf_counter()
    corpus = king_james()
    shape, recipe = Shape(corpus.vocab_size), Recipe()
    if options.quick:
        shape = replace(shape, layers=2, width=48, q_heads=3, kv_heads=1, hidden=96, length=48)
        recipe = replace(recipe, steps=FEW_STEPS, batch=4)
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)

    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    print(f"ropegraph {rg.__version__}, torch {torch.__version__}, on the CPU with {threads}")
    with _threads(options.threads):
        show_graphs(PARTIAL)
        claims = check_fold_table(PARTIAL)
        claims += check_accuracy()
        claims += check_training(corpus, shape, recipe)
    return summarize(claims, time.perf_counter() - started)


@contextmanager
def _threads(number: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show_graphs(sizes: Sizes) -> None:
    """Print the forward and the backward graph, before and after folding, and the fold report."""
    freqs = accuracy.random_inputs(sizes, torch.float32).freqs
    graphs = RotaryAttention(sizes, SETTINGS[1], freqs, torch.float32)
    named = (("forward", graphs.forward), ("backward", graphs.backward))
    heading('The graphs in Mermaid, as recorded and after fold="q"')
    print("To see one drawn, paste its block, from `flowchart` on, at https://mermaid.live;")
    print("graph.to_mermaid() adds shapes, types and colours.")
    for name, graph in named:
        for stage, ir in (("as recorded", graph.lowered.recorded), ("lowered", graph.plan.graph)):
            print(f"\n{name}, {stage}:\n{flowchart(ir)}")
    for name, graph in named:
        heading(f"What happened to the {name} graph")
        print(graph.explain())


def check_fold_table(sizes: Sizes) -> list[Claim]:
    """Print what each setting made of both graphs: a fold that was declined would prove nothing."""
    heading(f"The fold table as lowered, a = {sizes.attn_scale:.6g}")
    text, gap = fold_table.check(sizes)
    print(text)
    print(
        "\nrope_*: output_scale of the rotation. is_log2: softmax_input_is_log2, whether q.k is\n"
        "taken for a base-2 logarithm. launches: of the forward + of the backward."
    )
    return [Claim("fold table, forward and backward: error of any scale", gap, accuracy.EXACT)]


def check_accuracy() -> list[Claim]:
    """Print the error tables for full and partial rotation."""
    claims: list[Claim] = []
    for what, sizes in (("full", FULL), ("partial", PARTIAL)):
        heading(
            f"Errors against fp64, {what} rotation: h_q={sizes.h_q} h_kv={sizes.h_kv} "
            f"s={sizes.s} d={sizes.d} r={sizes.rotated}"
        )
        runs = len(SETTINGS) * len(accuracy.DTYPES)
        with Progress(f"{what} rotation", runs) as progress:
            result = accuracy.measure(sizes, progress.advance)
        print(result.text)
        for label, share in result.shares.items():
            if label == "f64":
                text = f"{what} rotation, f64: largest error of any fold"
                claims.append(Claim(text, share * accuracy.EXACT, accuracy.EXACT))
            else:
                text = f"{what} rotation, {label}: largest error / allowed"
                claims.append(Claim(text, share, 1.0, digits=RATIO))
    print(
        "\nh_q, h_kv: heads of Q and of K and V; s: sequence; d: head width; r: channels of it "
        "that turn.\nAn error is the largest of a tensor, relative to its largest element; worst: "
        "of all five tensors.\nallowed: twice (plain torch's own error + one rounding of the "
        "result); in f64, 1e-12."
    )
    return claims


def check_training(corpus: Corpus, shape: Shape, recipe: Recipe) -> list[Claim]:
    """Train with each attention from the same seed; print and compare the loss curves."""
    heading(
        f"Training on Genesis and Exodus, King James Version ({len(corpus.tokens):,} characters)"
    )
    print(
        f"A decoder that predicts the next character: {shape.layers} layers, {shape.q_heads} query "
        f"heads over {shape.kv_heads} of K and V,\n{recipe.steps} steps in f32, from one seed. The "
        "last two runs test the test: plain torch must agree with\nitself on other threads, and a "
        "gradient of Q that is wrong by 1 % must show."
    )
    plain = train(corpus, shape, plain_attention(shape), recipe, "plain torch")
    runs = {
        setting: train(corpus, shape, graph_attention(shape, setting), recipe, _label(setting))
        for setting in TRAINED
    }
    claims = [Claim("plain torch learns: last loss / first", _learned(plain), 0.9, digits=RATIO)]
    claims += [
        Claim(f"{_label(s)}: loss, every step", loss_gap(run, plain), SAME_LOSS)
        for s, run in runs.items()
    ]
    claims += [
        Claim(f"{_label(s)}: gradients of step 1", gradient_gap(run, plain), SAME_GRADIENT)
        for s, run in runs.items()
    ]
    claims += check_the_check(corpus, shape, recipe, plain)
    show_curves({"plain torch": plain, **{_label(s): run for s, run in runs.items()}})
    return claims


def _label(setting: Setting) -> str:
    return f"fold {setting.name}"


def _learned(run: Run) -> float:
    return run.losses[-1] / run.losses[0]


def check_the_check(corpus: Corpus, shape: Shape, recipe: Recipe, plain: Run) -> list[Claim]:
    """Show that agreement says something: plain torch agrees with itself, a wrong one does not."""
    threads = max(2, min(os.cpu_count() or 2, 8))
    if torch.get_num_threads() == threads:
        threads = 1
    label = f"plain, {threads} threads"
    with _threads(threads):
        again = train(corpus, shape, plain_attention(shape), recipe, label, THREAD_CHECK_SECONDS)
    few = replace(recipe, steps=FEW_STEPS)
    wrong = train(corpus, shape, slightly_wrong_attention(shape), few, "dQ wrong by 1 %")
    return [
        Claim(f"{label}: loss, {len(again.losses)} steps", loss_gap(again, plain), SAME_TORCH),
        Claim("dQ wrong by 1 % shows in the gradients", gradient_gap(wrong, plain), least=1e-4),
        Claim("dQ wrong by 1 % shows in the losses", loss_gap(wrong, plain), least=SAME_LOSS),
    ]


def show_curves(runs: dict[str, Run]) -> None:
    """Print the losses side by side, and each curve as one line."""
    heading("Loss curves")
    steps = len(next(iter(runs.values())).losses)
    marks = sorted({1, *range(max(1, steps // 10), steps + 1, max(1, steps // 10)), steps})
    rows = [(f"{n}", *(f"{run.losses[n - 1]:.6f}" for run in runs.values())) for n in marks]
    print(table(("step", *runs), rows))
    plain, *others = runs.values()
    print(
        f"\nAll within {max_or_nan([loss_gap(run, plain) for run in others]):.0e} of plain torch."
    )
    print()
    for label, run in runs.items():
        print(f"{label:<16} {sparkline(run.losses)} {run.losses[-1]:.4f}")


def summarize(claims: list[Claim], seconds: float) -> int:
    """Print every claim on one screen; the exit status."""
    heading("Summary")
    print(table(("claim", "measured", "bound", ""), [claim.row for claim in claims]))
    failed = sum(not claim.holds for claim in claims)
    verdict = f"{failed} FAILED" if failed else "all hold"
    print(f"\n{len(claims)} claims, {verdict}; {seconds:.0f} s")
    return 1 if failed else 0
