import pytest
import torch
from prepared import Numbers

from gpt_lightning.data.loader import IGNORE_INDEX, EvalBatches, TrainBatches, TrainLoader
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord
from gpt_lightning.runs.resume import check_order
from gpt_lightning.runs.settings import Settings


def loader(n=1003, name="shuffled", **kwargs) -> TrainLoader:
    kwargs = {"batch_size": 4, **kwargs}
    return TrainLoader(DatasetWindows(Numbers(n), WindowOrder(name, n, 10, 1337)), **kwargs)


def first_tokens(batches) -> list[list[int]]:
    return [x[:, 0].tolist() for x, _ in batches]


def test_targets_are_the_inputs_one_further():
    for x, y in loader():
        assert x.shape == y.shape == (4, 10)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)


def test_sequential_is_the_lectures_loader():
    """Position advances by B T; where B T + 1 tokens no longer fit it starts again."""
    n, B, T = 1003, 4, 10
    expected, position = [], 0
    for _ in range(60):
        expected.append(list(range(position, position + B * T, T)))
        position += B * T
        if position + B * T + 1 > n:
            position = 0
    ours = loader(name="sequential")
    assert (first_tokens(ours) + first_tokens(ours) + first_tokens(ours))[:60] == expected


def test_ranks_partition_one_global_order():
    alone = first_tokens(loader(batch_size=8))
    ranks = [first_tokens(loader(batch_size=2, rank=r, world=4)) for r in range(4)]
    for step, rows in enumerate(alone):
        together = [None] * 8
        for r in range(4):
            together[r::4] = ranks[r][step]
        assert together == rows


def test_workers_change_nothing():
    ours, alone = loader(num_workers=2), loader()
    for _ in range(2):  # epochs
        assert first_tokens(ours) == first_tokens(alone)


@pytest.mark.parametrize("name", ["sequential", "random", "shuffled", "repeat"])
@pytest.mark.parametrize("tokens", [1, 80, 130, 10**6])
def test_batches_that_are_read_together_are_those_read_alone(tokens, name):
    ours = loader(name=name, batch_size=2, rank=1, world=2, read_tokens=tokens)
    alone = TrainBatches(ours.source, 0, 2, 1, 2)
    for begin in (0, 7):
        ours.load_state_dict({"epoch": 0, "window": begin * 4})
        for index, batch in enumerate(ours, begin):
            assert all(map(torch.equal, batch, alone[index]))
            assert all(part.is_contiguous() for part in batch)
        assert index == len(ours) - 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_position_goes_on_where_it_was(workers):
    whole = loader(num_workers=workers)
    expected = first_tokens(whole) + first_tokens(whole)
    interrupted = loader(num_workers=workers)
    batches = iter(interrupted)
    seen = first_tokens(next(batches) for _ in range(7))
    state = interrupted.state_dict()
    del batches
    resumed = loader(num_workers=workers)
    resumed.load_state_dict(state)
    assert seen + first_tokens(resumed) + first_tokens(resumed) == expected


@pytest.mark.parametrize("other", [{"batch_size": 2}, {"batch_size": 1, "world": 4}])
def test_a_saved_position_means_the_same_to_other_batches(other):
    whole = [row for rows in first_tokens(loader()) for row in rows]
    interrupted = loader()
    batches = iter(interrupted)
    for _ in range(7):
        next(batches)
    resumed = loader(**other)
    resumed.load_state_dict(interrupted.state_dict())
    assert next(iter(resumed))[0][0, 0] == whole[7 * 4]
    fives = loader(batch_size=5)
    fives.load_state_dict(interrupted.state_dict())
    assert next(iter(fives))[0][0, 0] == whole[5 * 5]  # 28 windows were read: 3 are read again
    assert loader(batch_size=5).identity() != interrupted.identity() == loader().identity()


def test_the_identity_has_the_names_that_checkpoints_have():
    """A checkpoint holds it: under other names a resume would refuse every older file."""
    ours = loader(batch_size=2, world=4, accumulate=3)
    found = ours.identity()
    assert found["sequences a micro-batch"] == 8
    assert found["micro-batches a step"] == 3
    assert found.items() >= ours.source.identity().items()
    assert ours.state_dict() == {"epoch": 0, "window": 0}
    next(iter(ours))
    assert ours.state_dict() == {"epoch": 0, "window": 8}
    assert loader(batch_size=4, world=2, accumulate=3).identity() == found


def test_the_wait_for_batches_is_their_time(monkeypatch):
    clock = iter(range(1000))  # each look at the clock is a second
    monkeypatch.setattr("gpt_lightning.data.loader.time.perf_counter", lambda: next(clock))
    ours = loader()
    batches = iter(ours)
    for number in (1, 2, 3):
        next(batches)
        assert ours.wait_s == number


def test_a_position_of_another_kind_of_order_is_refused():
    with pytest.raises(UserError, match=r"another order: set --data.order nanogpt"):
        loader().load_state_dict({"generator": 1, "next": 2})


def test_an_epoch_is_a_multiple_of_the_accumulation():
    assert len(loader()) == 25
    assert len(loader(accumulate=4)) == 24
    assert len(loader(accumulate=30)) == 0


def test_reading_draws_nothing_from_the_runs_random_numbers():
    torch.manual_seed(0)
    list(loader())
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("n", [1001, 1002, 1003, 1010, 12])
def test_evaluation_predicts_every_token_once_in_batches_of_one_shape(n, world):
    targets = []
    for rank in range(world):
        batches = EvalBatches(Numbers(n), block_size=10, batch_size=4, rank=rank, world=world)
        for x, y in batches:
            assert x.shape == y.shape == (4, 10)
            real = y != IGNORE_INDEX
            assert torch.equal(y[real], x[real] + 1)
            targets += y[real].tolist()
    assert sorted(targets) == list(range(1, n))


def test_another_order_or_dataset_is_refused_on_resume():
    def loader(seed: int = 1, shard_tokens: tuple[int, ...] = ()) -> TrainLoader:
        order = WindowOrder("shuffled", 1003, 10, seed, shard_tokens)
        return TrainLoader(DatasetWindows(Numbers(1003), order), batch_size=4)

    def record(loader: TrainLoader, **more) -> RunRecord:
        identity = loader.identity() | more
        return RunRecord(config=GPTConfig(), settings=Settings(), data_identity=identity)

    saved, remote = record(loader()), record(loader(shard_tokens=(503, 500)))
    check_order(saved, record(loader()))
    for theirs, ours, said in (
        (saved, record(loader(seed=2)), r"data\.seed 1, this run has 2: "),
        (saved, remote, "shard by shard False, this run has True: "),
        (record(loader(), dataset="letters"), saved, "the checkpoint has another dataset"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            check_order(theirs, ours)
