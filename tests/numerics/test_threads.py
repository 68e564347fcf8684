import threading

import pytest
import torch

from moeq.numerics.factor import factorize
from moeq_kernels.threads import side_by_side


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_piece_is_done_once(threads: int, count: int) -> None:
    done: list[int] = []
    side_by_side(done.append, range(count))
    assert sorted(done) == list(range(count))
    assert torch.get_num_threads() == threads


def test_pieces_run_at_once_and_small(threads: int) -> None:
    """All threads meet: none would go on if they ran one after the other."""
    meeting = threading.Barrier(threads)
    settings = []

    def piece(_: int) -> None:
        meeting.wait(timeout=60)
        settings.append(torch.get_num_threads())

    side_by_side(piece, range(threads))
    assert settings == [1] * threads


def test_an_error_comes_out_and_the_setting_is_put_back(threads: int) -> None:
    def piece(number: int) -> None:
        if number == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        side_by_side(piece, range(5))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("inference", [False, True])
def test_gradients_are_off_and_inference_tensors_can_be_written(threads: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        into = torch.zeros(4)
    weight = torch.ones(4, requires_grad=True)

    def piece(number: int) -> None:
        into[number].add_(weight[number])

    with torch.inference_mode(inference):
        side_by_side(piece, range(4))
        assert into.tolist() == [1, 1, 1, 1]


def test_a_factor_is_the_same_in_every_batch(threads: int) -> None:
    """Workers and memory decide how many experts are factored at once; their codes must not hang on it."""
    seen = torch.randn(4, 1200, 640, generator=torch.Generator().manual_seed(2))
    hessians = seen.mT @ seen
    both = factorize(hessians)
    for expert in range(4):
        alone = factorize(hessians[expert : expert + 1])
        assert torch.equal(alone.unit_upper[0], both.unit_upper[expert])
        assert torch.equal(alone.pivots[0], both.pivots[expert])
    near = factorize(hessians, of_many=False)
    torch.testing.assert_close(near.unit_upper, both.unit_upper, rtol=1e-4, atol=1e-4)
