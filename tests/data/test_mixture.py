"""Mixtures: pure functions whose laws can be checked."""

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
    def loader(seed: int = 1, lanes: int = 1) -> TrainLoader:
        order = WindowOrder("shuffled", sum(SHARDS), T, seed, SHARDS, 2, lanes)
        return TrainLoader(DatasetWindows(Numbers(sum(SHARDS)), order), batch_size=4)

    def record(loader: TrainLoader, **more) -> RunRecord:
        identity = loader.identity() | more
        return RunRecord(config=GPTConfig(), settings=Settings(), data_identity=identity)

    saved, lanes = record(loader()), record(loader(lanes=2))
    check_order(saved, record(loader()))
    check_order(lanes, record(loader(lanes=2)))
    of_2632cfa = ("dataset", "data.order", "data.seed", "data.block_size", "data.shuffle_windows")
    blocks = ("shuffled blocks", "shuffled lanes")
    for parts in mixture().identity()["data.mixture"].values():
        assert set(parts) == {*of_2632cfa, *blocks}  # nested ones are compared as a whole
    for theirs, ours, said in (
        (saved, record(loader(seed=2)), r"data\.seed 1, this run has 2: "),
        (saved, lanes, "shuffled lanes 1, this run has 2: "),
        # orders of 2632cfa that are gone
        (record(loader(), **{"data.shuffle_windows": 200}), saved, r"shuffle_windows 200, this"),
        (record(loader(lanes=2), **{"windows left by lanes": "in the last block"}), lanes,
         "left by lanes in the last block, this run has none: "),
        (record(loader(), dataset="letters"), saved, "the checkpoint has another dataset"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            check_order(theirs, ours)
