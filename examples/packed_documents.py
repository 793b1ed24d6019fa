"""Documents of different lengths packed into one row: no padding, and none sees another.

`cu_seqlens` bounds them. The result and every gradient are those of a loop over the documents, and
of a padded batch, which has more rows to compute.
"""

import torch
from nanogpt import DEVICE, GPT
from torch.nn.functional import cross_entropy

from ropegraph.cli.demo.text import king_james

LENGTHS = (100, 7, 64, 1, 130, 33)
STEPS = 20


def documents(corpus, generator):
    """Token numbers of each document, one longer than what it is trained on."""
    starts = torch.randint(len(corpus.tokens) - 200, (len(LENGTHS),), generator=generator)
    pairs = zip(starts.tolist(), LENGTHS, strict=True)
    return [corpus.tokens[i : i + n + 1].to(DEVICE) for i, n in pairs]


def packed_loss(model, texts):
    """One call of the model on [1, t]: the mean over all tokens."""
    sizes = torch.tensor([0, *(len(t) - 1 for t in texts)], device=DEVICE)
    logits = model(
        torch.cat([t[:-1] for t in texts])[None],
        cu_seqlens=sizes.cumsum(0).int(),
        max_seqlen=max(LENGTHS),
    )
    return cross_entropy(logits[0], torch.cat([t[1:] for t in texts]))


def loop_loss(model, texts):
    """A call for each document."""
    sums = [cross_entropy(model(t[None, :-1])[0], t[1:], reduction="sum") for t in texts]
    return sum(sums) / sum(LENGTHS)


def padded_loss(model, texts):
    """One call on [documents, longest], with the lengths told."""
    rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32)
    logits = model(rows[:, :-1], seq_lens=lengths)
    real = torch.arange(max(LENGTHS), device=DEVICE) < lengths[:, None]
    return cross_entropy(logits[real], rows[:, 1:][real])


def main():
    torch.manual_seed(0)
    corpus, generator = king_james(), torch.Generator().manual_seed(0)
    model = GPT(corpus.vocab_size).to(DEVICE)
    texts = documents(corpus, generator)
    weights = list(model.parameters())
    results = {
        way: (loss.item(), torch.autograd.grad(loss, weights))
        for way in (loop_loss, packed_loss, padded_loss)
        for loss in (way(model, texts),)
    }
    wanted_loss, wanted = results[loop_loss]
    for way, (loss, gradients) in results.items():
        gap = max(
            ((a - b).norm() / b.norm()).item() for a, b in zip(gradients, wanted, strict=True)
        )
        print(f"{way.__name__:<12} {loss:.6f}, gradients differ from the loop's by {gap:.1e}")
        assert abs(loss - wanted_loss) < 1e-5
        assert gap < 1e-4
    print(f"rows: packed {sum(LENGTHS)}, padded {len(LENGTHS) * max(LENGTHS)}")

    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = packed_loss(model, documents(corpus, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"trained on {STEPS} packed rows: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < losses[0] - 1.0


if __name__ == "__main__":
    main()
