"""Two GPUs: what runs where, whichever device is current (case C33)."""

import threading

import pytest
import torch

import ropegraph as rg
from tests.gpu.test_graph import Pair, check, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on(device: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The inputs on a device, the strides kept."""
    found: dict[str, torch.Tensor] = {}
    for name, x in inputs(seed).items():
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=f"cuda:{device}")
        found[name] = made.copy_(x)
    return found


def moved(pair: Pair, x: dict[str, torch.Tensor], device: int) -> None:
    """Bind the pair to buffers on another device, outputs poisoned."""
    for pack in (pair.pack, pair.back):
        for name, old in pack.items():
            made = torch.empty_strided(
                old.shape, old.stride(), dtype=old.dtype, device=f"cuda:{device}"
            )
            pack[name] = x[name] if name in x else made.fill_(torch.nan)
    pair.back |= {n: pair.pack[n] for n in pair.back if n in pair.pack}


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_the_buffers_say_where_it_runs(device, current):
    x = on(device)
    pair = Pair(inputs())
    moved(pair, x, device)
    with torch.cuda.device(current):
        for _ in range(4):  # launched, captured, replayed
            for n in "qkv":
                pair.back[f"d{n}"].fill_(torch.nan)
            pair.step()
            assert torch.cuda.current_device() == current
            torch.cuda.synchronize(device)
            right(pair)


def right(pair: Pair, seed: int = 0) -> None:
    """Check what was written, on the first device whichever is current."""
    got = [pair.pack["o"], *(pair.back[f"d{n}"] for n in "qkv")]
    with torch.cuda.device(0):
        check([t.to("cuda:0") for t in got], inputs(seed))


def test_devices_take_turns():
    pair, packs = Pair(inputs()), {}
    for device in (0, 1):
        other = Pair(inputs())
        moved(other, on(device, device), device)
        packs[device] = (other.pack, other.back)
    for device in (0, 1, 0, 1, 1, 0, 0, 1):
        pair.pack, pair.back = packs[device]
        pair.step()
        torch.cuda.synchronize(device)
        right(pair, device)


def test_a_first_call_from_a_new_thread():
    x = on(1)
    pair = Pair(inputs())
    moved(pair, x, 1)
    thread = threading.Thread(target=pair.step)
    thread.start()
    thread.join()
    torch.cuda.synchronize(1)
    right(pair)


def test_inputs_on_two_devices_are_refused():
    pair = Pair(inputs())
    pair.pack["k"] = on(1)["k"]
    with pytest.raises(rg.GraphError, match="'k' is bound to a buffer on cuda:1"):
        pair.forward.execute(pair.pack)


def test_a_side_stream_of_the_other_device():
    x = on(1)
    pair = Pair(inputs())
    moved(pair, x, 1)
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        for seed in range(4):
            fresh = on(1, seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                for name in x:
                    x[name].copy_(fresh[name])
                pair.step()
            side.synchronize()
            right(pair, seed)
