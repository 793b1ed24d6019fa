"""A training step under DistributedDataParallel: two processes, half of the batch each.

The gradients of both, averaged by DDP, are those of one process with the whole batch.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nanogpt import GPT, loss_of
from torch.nn.parallel import DistributedDataParallel

from ropegraph.cli.demo.text import batches, king_james

RANKS, BATCH, LENGTH, STEPS = 2, 8, 48, 3
HAS_CUDA = torch.cuda.is_available()


def steps(model, corpus, device, rank=0, ranks=1):
    """Train on this rank's share of every batch; the gradients and weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens, targets in batches(corpus, BATCH, LENGTH, STEPS, seed=1):
        own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        optimizer.zero_grad()
        loss_of(model, tokens[own].to(device), targets[own].to(device)).backward()
        optimizer.step()
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: (p.grad.cpu(), p.detach().cpu()) for name, p in named.items()}


def made(corpus, device):
    torch.manual_seed(0)
    return GPT(corpus.vocab_size).to(device)


def work(rank, folder):
    """One process. gloo also serves two processes that share a GPU, which NCCL refuses."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    device = f"cuda:{rank % torch.cuda.device_count()}" if HAS_CUDA else "cpu"
    if HAS_CUDA:
        torch.cuda.set_device(device)
    corpus = king_james()
    model = DistributedDataParallel(made(corpus, device))
    torch.save(steps(model, corpus, device, rank, RANKS), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=RANKS)
        first, second = (torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS))
    corpus, device = king_james(), "cuda" if HAS_CUDA else "cpu"
    alone = steps(made(corpus, device), corpus, device)
    worst = 0.0
    for name, (gradient, weight) in alone.items():
        assert torch.equal(first[name][0], second[name][0])
        assert torch.equal(first[name][1], second[name][1])
        gaps = [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(first[name], (gradient, weight), strict=True)
        ]
        worst = max(worst, *gaps)
    print(
        f"{len(alone)} gradients and weights after {STEPS} steps of {RANKS} processes on {device}"
    )
    print(f"largest relative difference from one process: {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
