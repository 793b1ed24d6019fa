"""A ragged_offset on a tensor that is not data would be ignored: it is refused by name."""

import pytest
import torch

import ropegraph as rg


@pytest.mark.parametrize("port", ["bias", "sink_token", "seq_len_q", "freqs"])
def test_only_data_may_be_ragged(port):
    g = rg.pygraph(io_data_type=torch.float32)
    q, k, v = (g.tensor([1, 2, 4, 4], name=n) for n in "qkv")
    offset = g.tensor([2, 1, 1, 1], data_type=torch.int32, name="offset")
    dims = {"bias": [1, 2, 4, 4], "sink_token": [1, 2, 1, 1], "seq_len_q": [1, 1, 1, 1]}
    dtype = torch.int32 if port == "seq_len_q" else torch.float32
    odd = g.tensor(
        dims.get(port, [4, 1, 1, 4]), data_type=dtype, name=f"odd_{port}", ragged_offset=offset
    )
    if port == "freqs":
        out = g.rope(q, odd, name="node")
    else:
        extra = {port: odd}
        if port == "seq_len_q":
            extra |= {
                "use_padding_mask": True,
                "seq_len_kv": g.tensor([1, 1, 1, 1], data_type=dtype),
            }
        out, _ = g.sdpa(q, k, v, name="node", **extra)
    out.set_output(True)
    with pytest.raises(rg.GraphError, match=f"'node': {port} 'odd_{port}' has a ragged_offset"):
        g.build()
