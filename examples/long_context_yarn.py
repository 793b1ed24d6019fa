"""Four times the context that a model was trained on, by YaRN.

Past the trained length unscaled rotations meet distances they have never seen. YaRN slows down the
low frequencies and leaves the high ones; only `rope_parameters` change, no weight does. A few steps
at the new length then adapt the model.
"""

import torch
from nanogpt import DEVICE, GPT, train
from torch.nn.functional import cross_entropy

from ropegraph.cli.demo.text import batches, king_james

SHORT, LONG = 64, 256
YARN = {
    "rope_type": "yarn",
    "factor": LONG / SHORT,
    "original_max_position_embeddings": SHORT,
}


def with_rope(model, vocab, rope):
    """The same weights with other angles, which are no part of a state_dict."""
    other = GPT(vocab, rope=rope).to(DEVICE)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def losses_by_position(model, corpus, length):
    """The mean loss of each quarter of sequences of a length."""
    ((tokens, targets),) = batches(corpus, 64, length, steps=1, seed=9)
    logits = model(tokens.to(DEVICE))
    losses = cross_entropy(logits.transpose(1, 2), targets.to(DEVICE), reduction="none")
    return losses.mean(0).view(4, -1).mean(1).tolist()


def show(name, quarters):
    print(f"{name:<28}" + "  ".join(f"{x:.3f}" for x in quarters))
    return quarters


def main():
    torch.manual_seed(0)
    corpus = king_james()
    model = GPT(corpus.vocab_size).to(DEVICE)
    train(model, corpus, steps=250, length=SHORT)
    print(f"loss in each quarter of the context, trained at {SHORT}")
    short = show(f"at {SHORT}", losses_by_position(model, corpus, SHORT))
    plain = show(f"at {LONG}, as it is", losses_by_position(model, corpus, LONG))
    stretched = with_rope(model, corpus.vocab_size, YARN)
    yarn = show(f"at {LONG}, YaRN", losses_by_position(stretched, corpus, LONG))
    train(stretched, corpus, steps=30, length=LONG, batch=4, lr=1e-3, seed=5)
    tuned = show(f"at {LONG}, YaRN, 30 steps", losses_by_position(stretched, corpus, LONG))
    factor = stretched.blocks[0].attention.angles.attention_factor
    print(f"attention_factor {factor:.4f}, on the rotated channels")
    assert plain[3] > short[3] + 0.1  # lost
    assert yarn[3] < plain[3] - 0.2  # found again, and the longer context helps
    assert tuned[3] < yarn[3]


if __name__ == "__main__":
    main()
