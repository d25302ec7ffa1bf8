import numpy as np
import pytest

from gpt_lightning.data.order import WindowOrder

N, T = 1003, 10


def order(name: str, seed: int = 1337) -> WindowOrder:
    return WindowOrder(name, N, T, seed)


def test_sequential_windows_tile_the_split():
    starts = order("sequential").starts(0, 0, order("sequential").n_windows)
    assert np.array_equal(starts, np.arange(100) * T)
    assert starts[-1] + T + 1 <= N


def test_shuffled_reads_each_window_once_an_epoch_in_a_new_order():
    first, second = (order("shuffled").starts(epoch, 0, 100) for epoch in (0, 1))
    assert np.array_equal(np.sort(first), np.arange(100) * T)
    assert np.array_equal(np.sort(second), np.arange(100) * T)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", ["sequential", "random", "shuffled"])
def test_starts_do_not_depend_on_how_they_are_asked_for(name):
    whole = order(name).starts(3, 0, 100)
    for first, count in [(0, 7), (1, 1), (5, 13), (93, 7), (42, 0)]:
        assert np.array_equal(order(name).starts(3, first, count), whole[first : first + count])


@pytest.mark.parametrize("name", ["random", "shuffled"])
def test_seed_and_epoch_change_the_order(name):
    base = order(name).starts(0, 0, 100)
    assert not np.array_equal(base, order(name, seed=1).starts(0, 0, 100))
    assert not np.array_equal(base, order(name).starts(1, 0, 100))


def test_random_starts_are_uniform_over_all_whole_windows():
    starts = order("random").starts(0, 0, 200_000)
    assert starts.min() == 0
    assert starts.max() == N - T - 1  # the last start whose T + 1 tokens fit
    counts = np.bincount(starts)
    # 993 cells of 201 expected draws: chi-squared per degree of freedom is 1 +- 0.045
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / (len(counts) - 1)
    assert chi2 == pytest.approx(1.0, abs=0.2)


def test_neighbouring_random_starts_are_uncorrelated():
    starts = order("random").starts(0, 0, 100_000).astype(float)
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.015  # 5 / sqrt(100,000)


def test_repeat_reads_the_first_windows_whatever_the_position():
    assert list(order("repeat").starts(3, 40, 4)) == [0, T, 2 * T, 3 * T]
