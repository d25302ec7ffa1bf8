import numpy as np
import pytest

from gpt_lightning.data.order import TABLE_WINDOWS, WindowOrder, permuted

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
    begin = second.min()
    assert np.array_equal(np.sort(second)[:99], begin + np.arange(99) * T)
    assert second.max() == min(begin + 99 * T, N - T - 1)
    assert not np.array_equal(first, second)


def test_borders_move_with_the_epochs():
    begins = [int(order("shuffled").starts(epoch, 0, 100).min()) for epoch in range(40)]
    assert begins[0] == 0
    assert len(set(begins)) > T // 2
    assert max(begins) < T


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


# ---- orders that checkpoints rely on: a changed number is a run that cannot go on ---------------

SHARDS = (10_003, 5_001, 7_777, 12_000, 500)
GOLDEN = {
    "whole": ({}, 0, 70, [1380, 19880, 11490, 10790, 6550, 2110]),
    "whole, moved": ({}, 2, 70, [2191, 19921, 23581, 12271, 22971, 29921]),
    "by shard": ({"shard_tokens": SHARDS}, 2, 600, [8131, 9011, 2821, 7531, 4561, 4181]),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_an_order_stays_what_it_was(kind):
    made, epoch, first, expected = GOLDEN[kind]
    chosen = WindowOrder("shuffled", sum(SHARDS), T, 1, **made)
    assert chosen.starts(epoch, first, 6).tolist() == expected


def test_a_large_split_is_permuted_without_a_table():
    n = TABLE_WINDOWS + 1_000
    chosen = WindowOrder("shuffled", n * T + 1, T, 3)
    starts = chosen.starts(0, 0, n)
    assert np.array_equal(np.sort(starts), np.arange(n) * T)
    for first, count in [(0, 1), (4_090, 10), (8_191, 1), (100, 9_000), (n - 3, 3)]:
        assert np.array_equal(chosen.starts(0, first, count), starts[first : first + count])
    # as random as numpy's permutation: steps of a third, hardly a pair of neighbours
    steps = np.abs(np.diff(starts // T))
    assert steps.mean() == pytest.approx(n / 3, rel=0.02)
    assert (steps == 1).sum() < 12  # 2 expected
    cells = np.histogram2d(np.arange(n), starts, bins=20)[0]
    chi2 = ((cells - cells.mean()) ** 2 / cells.mean()).sum() / 19**2
    assert chi2 == pytest.approx(1.0, abs=0.4)  # standard deviation 0.07


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 1_000])
def test_a_permutation_of_any_size(n):
    assert np.array_equal(np.sort(permuted((1, 2), n, np.arange(n))), np.arange(n))


# ---- shard by shard, for datasets behind URLs ----------------------------------------------------


def by_shard(shards: tuple[int, ...]) -> WindowOrder:
    return WindowOrder("shuffled", sum(shards), T, 1, shards)


@pytest.mark.parametrize("shards", [SHARDS, (3_000,) * 24, (640, 641, 650, 651), (5, 11, 10, 400)])
def test_each_window_is_read_once_and_stays_within_its_shard(shards):
    chosen = by_shard(shards)
    begins = np.cumsum([0, *shards])
    n_windows = [max(0, n - 1) // T for n in shards]
    assert chosen.n_windows == sum(n_windows)
    orders = set()
    for epoch in (0, 1, 5):
        starts = chosen.starts(epoch, 0, chosen.n_windows)
        assert len(set(starts.tolist())) == chosen.n_windows
        read = np.searchsorted(begins, starts, side="right")
        assert (starts + T < begins[read]).all()
        assert np.bincount(read - 1, minlength=len(shards)).tolist() == n_windows
        turns = read[np.flatnonzero(np.diff(read, prepend=0))]
        assert len(turns) == len(set(turns))  # one shard after the other
        orders.add(tuple(turns))
        for first, count in ((37, 11), (0, 1), (chosen.n_windows - 3, 9)):
            assert np.array_equal(chosen.starts(epoch, first, count), starts[first:][:count])
    assert len(orders) > 1 or shards[-1] == 400


def test_the_windows_of_a_shard_are_permuted():
    starts = by_shard((100_001,) * 4).starts(0, 0, 10_000)
    steps = np.abs(np.diff(starts // T))
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)
