"""Orders over many shards, and mixtures: pure functions whose laws can be checked."""

import dataclasses

import numpy as np
import pytest

from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.data.mixture import BLOCK, Mixture, quotas
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import DatasetWindows
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord
from gpt_lightning.runs.resume import check_order
from gpt_lightning.runs.settings import Settings

T = 10
SHARDS = (10_003, 5_001, 7_777, 12_000, 500)


class Numbers:
    """A split whose token i is first + i."""

    digest = "numbers"

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def horizon(self, block_size: int) -> int:
        return 0

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        assert not len(starts) or starts.max() + length <= self.n
        return self.first + starts[:, None] + np.arange(length)


def shuffled(seed: int = 1, windows: int = 200, shards: tuple[int, ...] = SHARDS) -> WindowOrder:
    return WindowOrder("shuffled", sum(SHARDS), T, seed, shards, windows)


@pytest.mark.parametrize("windows", [1, 7, 200, 3_000, 10**6])
def test_each_window_is_read_once_an_epoch(windows):
    order = shuffled(windows=windows)
    for epoch in (0, 5):
        starts = order.starts(epoch, 0, order.n_windows)
        assert np.array_equal(np.sort(starts), np.arange(order.n_windows) * T)


def test_starts_do_not_depend_on_how_they_are_asked_for():
    order = shuffled()
    whole = order.starts(3, 0, order.n_windows)
    for first, count in [(0, 7), (195, 10), (199, 1), (200, 1), (1000, 2000), (3520, 8)]:
        assert np.array_equal(order.starts(3, first, count), whole[first : first + count])


def test_a_group_touches_few_shards_and_epochs_differ_in_their_order():
    order, ends = shuffled(windows=100), np.cumsum(SHARDS)
    for first in range(0, order.n_windows - 100, 100):
        assert len(set(np.searchsorted(ends, order.starts(0, first, 100), side="right"))) <= 3
    firsts = {int(np.searchsorted(ends, order.starts(e, 0, 1)[0], side="right")) for e in range(20)}
    assert len(firsts) > 2


def test_a_small_split_is_permuted_as_a_whole_whatever_its_shards_are():
    one = shuffled(windows=10**6, shards=(sum(SHARDS),))
    assert np.array_equal(one.starts(2, 0, 3000), shuffled(windows=10**6).starts(2, 0, 3000))


def test_the_shuffle_is_as_wide_as_its_group():
    """Neighbours in the order are a third of the group apart, as in a random permutation."""
    order = WindowOrder("shuffled", 1_000_001, T, 1, (1_000_001,), 1_000)
    windows = order.starts(0, 0, 100_000) // T
    inside = np.abs(np.diff(windows.reshape(-1, 1_000), axis=1))
    assert inside.mean() == pytest.approx(1_000 / 3, rel=0.02)
    assert (inside == 1).mean() == pytest.approx(2 / 1_000, rel=0.5)  # neighbours stay so by chance


def mixture(weights=(3.0, 1.0), seed: int = 1) -> Mixture:
    sizes = {"a": (50_001, 0), "b": (2_001, 10**6)}
    corpora = {
        name: DatasetWindows(Numbers(n, first), WindowOrder("shuffled", n, T, seed))
        for name, (n, first) in sizes.items()
    }
    return Mixture(corpora, dict(zip(sizes, weights, strict=True)), seed)


def test_a_mixture_keeps_its_proportions():
    mixed = mixture()
    for samples in (1, 10, 999, 1_000, 1_001, 12_345):
        counts = mixed.counts(samples)
        assert counts.sum() == samples
        assert abs(counts[0] - 0.75 * samples) < BLOCK * 0.25
    assert mixed.counts(7 * BLOCK).tolist() == [5250, 1750]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 1.0, 1.0], [334, 333, 333]),  # of equal remainders the first
        ([2.0, 1.0], [667, 333]),
        ([1.0, 6.0], [143, 857]),  # 142.86 and 857.14
        ([0.0015, 0.9985], [2, 998]),
        ([5.0], [1000]),
    ],
)
def test_quotas_are_the_largest_remainders(weights, expected):
    found = quotas({f"d{index}": weight for index, weight in enumerate(weights)})
    assert found.tolist() == expected
    assert found.sum() == BLOCK


def test_shares_are_those_of_the_samples_so_far():
    mixed = mixture()
    assert mixed.shares(0, 0) == {"a": 0.0, "b": 0.0}
    shares = mixed.shares(0, 2 * BLOCK)
    assert shares == {"a": 0.75, "b": 0.25}
    which = mixed.read(0, 0, 100, 0, 1)[:, 0] >= 10**6
    assert mixed.shares(0, 100)["b"] == pytest.approx(which.mean())
    epoch = mixed.n_windows
    assert mixed.shares(1, 50) == mixed.shares(0, epoch + 50)


def test_a_mixture_reads_every_window_of_each_dataset_before_any_again():
    mixed = mixture()
    first = mixed.read(0, 0, 4 * BLOCK, 0, 1)[:, 0]
    b = first[first >= 10**6]
    assert len(b) == 1_000
    for epoch in range(5):  # of b, which has 200 windows
        part = np.sort(b[200 * epoch : 200 * (epoch + 1)]) - 10**6
        assert np.array_equal(part[:-1], part[0] + np.arange(199) * T)  # borders move
        assert part[-1] == 1_990
    assert len(set(first[first < 10**6].tolist())) == 3_000


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_questions_partition_one_order(world):
    mixed = mixture()
    whole = mixed.read(1, 0, 4_000, 0, 1)
    for first, count in [(0, 8), (996, 8), (2_000, 400)]:
        together = np.empty((count, T + 1), np.int64)
        for rank in range(world):
            together[rank::world] = mixed.read(1, first, count, rank, world)
        assert np.array_equal(together, whole[first : first + count])


def test_a_loader_goes_on_in_a_mixture():
    def loader(world=1, rank=0) -> TrainLoader:
        return TrainLoader(mixture(), batch_size=8 // world, rank=rank, world=world)

    alone = loader()
    batches = iter(alone)
    expected = [next(batches)[0] for _ in range(40)]
    half = loader()
    batches = iter(half)
    for _ in range(17):
        next(batches)
    state = half.state_dict()
    ranks = [loader(world=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    both = [iter(rank) for rank in ranks]
    for batch in expected[17:]:
        parts = [next(rank)[0] for rank in both]
        assert np.array_equal(np.stack(parts, axis=1).reshape(8, T), batch)


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ([1.0, 0.0], "data.mixture.b is 0.0; a weight must be above 0"),
        ([1.0, float("nan")], "data.mixture.b is nan; a weight must be above 0"),
        ([1.0, 1e-6], "data.mixture.b is less than 1 in 1000"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, line):
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        quotas(dict(zip("ab", weights, strict=True)))


def test_another_order_or_dataset_is_refused_on_resume():
    def loader(seed=1, windows=200) -> TrainLoader:
        return TrainLoader(
            DatasetWindows(Numbers(sum(SHARDS)), shuffled(seed, windows)), batch_size=4
        )

    def record(loader: TrainLoader) -> RunRecord:
        return RunRecord(config=GPTConfig(), settings=Settings(), data_identity=loader.identity())

    saved = record(loader())
    check_order(saved, record(loader()))
    with pytest.raises(UserError, match=r"data\.seed 1, this run has 2: "):
        check_order(saved, record(loader(seed=2)))
    with pytest.raises(UserError, match=r"data\.shuffle_windows 200, this run has 300: "):
        check_order(saved, record(loader(windows=300)))
    lanes = loader()
    lanes.source.order = dataclasses.replace(shuffled(1, 200), shuffle_windows=None, lanes=2)
    old = record(lanes)  # of a version that read the windows left by lanes at the epoch's end
    check_order(old, record(lanes))
    del old.data_identity["windows left by lanes"]
    with pytest.raises(UserError, match=r"left by lanes None, this run has in the last block: "):
        check_order(old, record(lanes))
    other = loader()
    other.source.stream.digest = "letters"
    with pytest.raises(UserError, match="the checkpoint has another dataset"):
        check_order(saved, record(other))
