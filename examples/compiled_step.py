"""A training step under torch.compile: one graph without breaks, for every sequence length.

Attention is one operator in it, forward and backward, so compiling changes what is around it and
leaves its bits alone. Inductor needs a C++ compiler on a CPU; without one the step is compiled by
aot_eager, which fuses nothing.
"""

import os
import shutil
import time

import torch
from nanogpt import DEVICE, GPT, loss_of

from ropegraph.cli.demo.text import batches, king_james

LENGTHS = (48, 64, 80)
ROUNDS = 8


def backend():
    """Inductor where it can work."""
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    return "inductor" if DEVICE == "cuda" or has_compiler else "aot_eager"


def run(step, corpus):
    """Losses of steps whose lengths take turns, and the seconds of the last round."""
    torch.manual_seed(0)
    model = GPT(corpus.vocab_size, layers=1).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses, start = [], 0.0
    for turn in range(ROUNDS):
        start = time.perf_counter()
        for length in LENGTHS:
            ((tokens, targets),) = batches(corpus, 8, length, steps=1, seed=100 * turn + length)
            loss = step(model, tokens.to(DEVICE), targets.to(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, time.perf_counter() - start


def main():
    name, corpus = backend(), king_james()
    why = "" if name == "inductor" else ": no C++ compiler was found for inductor"
    print(f"backend {name} on {DEVICE}{why}")
    torch._dynamo.utils.counters.clear()
    start = time.perf_counter()
    compiled = torch.compile(loss_of, backend=name, fullgraph=True, dynamic=True)
    losses, fast = run(compiled, corpus)
    total = time.perf_counter() - start
    wanted, slow = run(loss_of, corpus)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gap = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    print(f"{graphs} graph for lengths {LENGTHS}; {total:.1f} s with compiling")
    print(
        f"a round of {len(LENGTHS)} steps: {1e3 * fast:.0f} ms, in eager mode {1e3 * slow:.0f} ms"
    )
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, from eager mode's by at most {gap:.1e}")
    assert graphs == 1
    assert gap < 1e-3
    assert losses[-1] < losses[0] - 1.0


if __name__ == "__main__":
    main()
