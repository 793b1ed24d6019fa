"""Text by a small GPT, one character at a time, from a cache of keys and values.

Prompts of different lengths decode together. Every step has the shape of the one before, and its
logits are those of the whole text read at once.
"""

import time

import torch
from nanogpt import DEVICE, GPT, train

from ropegraph.cli.demo.text import king_james

PROMPTS = ("And God said", "In the", "The LORD spake unto Moses")
NEW, ROOM = 60, 96


def padded(corpus, texts):
    """Token numbers [b, longest], padded at the end, and how many are real."""
    numbers = [torch.tensor([corpus.alphabet.index(c) for c in text]) for text in texts]
    lengths = torch.tensor([len(n) for n in numbers], dtype=torch.int32)
    rows = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
    return rows.to(DEVICE), lengths.to(DEVICE)


@torch.inference_mode()
def with_cache(model, tokens, lengths):
    """The new tokens [b, NEW], and the logits that each was chosen by."""
    caches = model.new_caches(len(tokens), ROOM)
    last = (lengths - 1).long()[:, None, None]
    logits = model(tokens, caches, seq_lens=lengths)  # the prompts
    logits = logits.take_along_dim(last, dim=1)
    made, seen = [], []
    for _ in range(NEW):
        token = torch.multinomial((logits[:, -1] / 0.8).softmax(-1), 1)
        made.append(token)
        seen.append(logits[:, -1])
        logits = model(token, caches)  # [b, 1]: the same shape at every step
    assert caches[0].lengths.tolist() == (lengths + NEW).tolist()
    return torch.cat(made, 1), torch.stack(seen, 1)


@torch.inference_mode()
def at_once(model, prompt, made):
    """The logits before each character of ``made``, from the whole text without a cache."""
    return model(torch.cat((prompt, made))[None])[0, len(prompt) - 1 : -1]


def main():
    torch.manual_seed(0)
    corpus = king_james()
    model = GPT(corpus.vocab_size, width=96).to(DEVICE)
    loss = train(model, corpus, steps=80)[-1]
    model.eval()
    tokens, lengths = padded(corpus, PROMPTS)
    with_cache(model, tokens, lengths)  # builds the two forms of the step
    start = time.perf_counter()
    made, logits = with_cache(model, tokens, lengths)
    elapsed = time.perf_counter() - start
    print(f"loss {loss:.2f}; {made.numel() / elapsed:.0f} characters a second on {DEVICE}")
    for row, n, one, own in zip(tokens, lengths.tolist(), made, logits, strict=True):
        gap = (own - at_once(model, row[:n], one)).abs().max().item()
        print(repr("".join(corpus.alphabet[i] for i in [*row[:n], *one])))
        print(f"    logits differ from those of the whole text by {gap:.1e}")
        assert gap < (1e-3 if DEVICE == "cpu" else 1e-2)


if __name__ == "__main__":
    main()
