"""`gpt-lightning bench peers` on a tiny model."""

import sys

import pytest
import torch

from gpt_lightning.bench import peers
from gpt_lightning.bench.models import make_model
from gpt_lightning.tables.worker import SkippedError, call, failure

TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "compile": False,
    "size": "2/2/32",
    "batch": 2,
    "context": 16,
    "steps": 2,
    "warmup": 1,
    "rounds": 2,
}


def test_the_peer_is_our_model_with_weights_of_its_own():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make_model("gpt2", "2/2/32", 16)
    peer = peers.Peer(model)
    assert sum(p.numel() for p in peer.parameters()) == model.num_params()
    x, y = (torch.randint(10_000, (2, 16)) for _ in range(2))
    for _ in range(2):  # an update of one is none of the other
        losses = [m(x, y) for m in (model, peer)]
        # float32 sums in another order
        assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-4)
        for m, loss in zip((model, peer), losses, strict=True):
            loss.backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()


def test_a_row_agrees_with_itself():
    pytest.importorskip("transformers")
    row = call(peers.measure_peers, TINY)
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    for name in ("ours", "theirs"):
        assert row[f"{name}_tokens_per_sec"] == pytest.approx(2 * 16 / row[f"{name}_ms"] * 1e3)
        assert row[f"{name}_graphs"] == 0
    assert row["ours_loss"] == pytest.approx(row["theirs_loss"], abs=1e-5)


def test_without_transformers_the_row_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SkippedError, match="transformers is missing") as caught:
        call(peers.measure_peers, TINY)
    assert failure(caught.value)["status"] == "skipped"
