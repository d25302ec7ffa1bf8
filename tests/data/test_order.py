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
    "blocks": ({"blocks": 2}, 2, 600, [12071, 17751, 22721, 13521, 15111, 16251]),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_an_order_stays_what_it_was(kind):
    made, epoch, first, expected = GOLDEN[kind]
    chosen = WindowOrder("shuffled", sum(SHARDS), T, 1, SHARDS, **made)
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


# ---- blocks and lanes, for streams ---------------------------------------------------------------

LAYOUTS = [(1, 2), (2, 1), (4, 1), (2, 2), (1, 3)]


def blocks_of(blocks: int, lanes: int, shards: tuple[int, ...] = SHARDS) -> WindowOrder:
    return WindowOrder("shuffled", sum(shards), T, 1, shards, blocks, lanes)


@pytest.mark.parametrize(("blocks", "lanes"), LAYOUTS)
def test_blocks_read_each_window_once_and_stay_within_their_shards(blocks, lanes):
    chosen = blocks_of(blocks, lanes)
    begins = np.cumsum([0, *SHARDS])
    for epoch in (0, 1, 5):
        starts = chosen.starts(epoch, 0, chosen.n_windows)
        assert len(set(starts.tolist())) == chosen.n_windows
        shards = np.searchsorted(begins, starts, side="right")
        assert (starts + T < begins[shards]).all()
        # no token is far from a window: what is left out at a shard's ends is less than T
        gaps = np.diff(np.sort(starts))
        assert gaps.max() <= 2 * T
        assert chosen.starts(epoch, 37, 11).tolist() == starts[37:48].tolist()


@pytest.mark.parametrize("sizes", [(3_000,) * 24, (640,) * 25, SHARDS])
@pytest.mark.parametrize(("blocks", "lanes"), [*LAYOUTS, (3, 4), (1, 8)])
def test_a_lane_reads_the_shards_that_are_announced_and_few_others_read_them(blocks, lanes, sizes):
    chosen = blocks_of(blocks, lanes, sizes)
    begins = np.cumsum([0, *sizes])
    n, readers = len(sizes), np.zeros(len(sizes), int)
    for lane in range(lanes):
        starts = chosen.starts(1, 0, chosen.n_windows)[lane::lanes]
        shards = np.searchsorted(begins, starts, side="right") - 1
        read = list(dict.fromkeys(shards.tolist()))  # in the order of their first windows
        for first in (0, chosen.n_windows // 2, chosen.n_windows - 1):
            ahead = chosen.shards_ahead(1, first, 0, lane, lanes)
            here = shards[-(-(first - lane) // lanes) :]
            assert len(here) == 0 or here[0] in ahead[: -(-n // blocks) + 1]
            assert set(here.tolist()) <= set(ahead)
        begun = [read.index(shard) for shard in chosen.shards_ahead(1, 0, 0, lane, lanes)[:1]]
        assert begun[0] <= -(-n // blocks // lanes) + 1  # the first block's come first
        readers[list(set(read))] += 1
        if len(set(sizes)) == 1:
            assert len(set(read)) <= -(-n // lanes) + 2 * blocks
    assert (readers > 0).all()
    assert (readers - 1).sum() <= blocks * (lanes - 1)  # two lanes share the shard at their border


def test_a_step_sees_a_corpus_that_is_sorted():
    """Ten domains one after the other, in 90 shards: steps of 512 windows see nine or more."""
    shards = (100_000,) * 90
    for blocks, lanes in ((1, 1), (4, 1), (2, 4)):
        chosen = blocks_of(blocks, lanes, shards)
        for epoch in (0, 1):
            for first in range(0, chosen.n_windows - 512, 40 * 512):
                domains = chosen.starts(epoch, first, 512) * 10 // sum(shards)
                assert len(set(domains.tolist())) >= 9
