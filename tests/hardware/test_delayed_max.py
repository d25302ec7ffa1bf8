"""Ranks read their maximum one call later, and nothing waits for a device."""

import torch

from gpt_lightning.hardware.distributed import DelayedMax


def test_all_ranks_read_the_largest_number_at_the_next_call(monkeypatch):
    """Simulate two ranks in one process: each number is reduced with one of the other rank."""
    handed = {"a": [0, 15, 15, 15], "b": [0, 0, 2, 2]}
    read = {}
    for rank, other in (("a", "b"), ("b", "a")):
        others = iter(handed[other])
        monkeypatch.setattr(
            torch.distributed,
            "all_reduce",
            lambda vote, op, others=others: vote.clamp_(min=next(others)),
        )
        agreement = DelayedMax(torch.device("cpu"))
        read[rank] = [agreement(number) for number in handed[rank]]
    assert read["a"] == read["b"] == [0, 0, 15, 15]


def test_only_the_hosts_copy_is_read(monkeypatch):
    """Nothing reads the vote on the device: on a GPU that would wait for all of its work."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vote, op: None)
    agreement = DelayedMax(torch.device("meta"))  # whose tensors cannot be read at all
    agreement._host.copy_ = lambda vote, non_blocking: None
    assert [agreement(15), agreement(15)] == [0, 0]
