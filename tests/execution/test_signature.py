"""What tells whether a set of buffers is the one that was checked."""

import pytest
import torch
from torch import Tensor

from ropegraph.execution import signature
from ropegraph.execution.signature import addresses_of, form_check, forms_of


def base() -> Tensor:
    return torch.randn(2, 3, 4, 8)


OTHERS = {
    "shape": base().reshape(2, 3, 8, 4),
    "rank": base().unsqueeze(0),
    "stride": base().transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": base().double(),
    "requires_grad": base().requires_grad_(),
    "device": base().to("meta"),
}


@pytest.fixture(params=["torch's guards", "without them"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of asking: the private one of torch's compilers, and ours where it is missing."""
    if request.param == "without them":

        def missing(name: str) -> None:
            raise ImportError(name)

        monkeypatch.setattr(signature, "import_module", missing)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_another_form_is_seen(what: str, place: int) -> None:
    buffers = [base(), base()]
    has_form = form_check(buffers)
    assert has_form(*buffers)
    assert has_form(base(), base())
    buffers[place] = OTHERS[what]
    assert not has_form(*buffers)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.resize_(2, 2), lambda x: x.unsqueeze_(0)]
)
def test_one_tensor_that_changed_its_form_is_seen(change) -> None:
    x = torch.randn(4, 5)
    has_form = form_check([x])
    change(x)
    assert not has_form(x)


def test_this_torch_has_the_fast_way() -> None:
    assert type(form_check([base()])).__name__ == "builtin_function_or_method"


def test_a_check_keeps_no_buffer_alive() -> None:
    import weakref

    x = base()
    seen = weakref.ref(x)
    has_form = form_check([x])
    del x
    assert seen() is None
    assert has_form(base())


def test_addresses_and_forms() -> None:
    x = base()
    assert addresses_of([x, x[1]]) == (x.data_ptr(), x[1].data_ptr())
    assert forms_of([x]) == (x.shape, x.stride(), x.dtype, x.device, False)
