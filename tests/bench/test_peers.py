"""`gpt-lightning bench peers` on a tiny model."""

import sys

import pytest
import torch

from gpt_lightning.bench import peers
from gpt_lightning.bench.models import make_model
from gpt_lightning.bench.peers import make_peer
from gpt_lightning.bench.step import Training
from gpt_lightning.tables.worker import SkippedError, call, failure

CPU = torch.device("cpu")
TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "compile": False,
    "size": "2/2/32",
    "shape": [2, 2, 32],
    "batch": 2,
    "context": 16,
    "steps": 2,
    "warmup": 1,
    "rounds": 2,
}


def test_both_train_the_same_model():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make_model("gpt2", [2, 2, 32], 16)
    peer = make_peer(model)
    x, y = (torch.randint(10_000, (2, 16)) for _ in range(2))
    ours, theirs = (
        Training(
            m, CPU, (x, y), "fp32", optimizer=torch.optim.AdamW(m.parameters(), 1e-4), norm="none"
        )
        for m in (model, peer)
    )
    ours.block(0, 1)
    theirs.block(0, 1)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)  # float32 sums in another order
    first = ours.loss
    for _ in range(3):
        ours.block(0, 1)
        theirs.block(0, 1)
    with torch.no_grad():
        after = [float(m(x, y)) for m in (model, peer)]
    assert after[0] == pytest.approx(after[1], abs=1e-4)
    assert after[0] < first - 1e-3  # neither shares the other's weights, or it had moved twice
    assert sum(p.numel() for p in peer.parameters()) == model.num_params()


def test_a_row_agrees_with_itself():
    pytest.importorskip("transformers")
    row = call(peers.measure_peers, TINY)
    assert row["ours_tokens_per_sec"] == pytest.approx(2 * 16 / row["ours_ms"] * 1e3)
    assert row["theirs_tokens_per_sec"] == pytest.approx(2 * 16 / row["theirs_ms"] * 1e3)
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    for name in ("ours", "theirs"):
        assert row[f"{name}_forward_ms"] > 0
        assert row[f"{name}_backward_ms"] > 0
        assert row[f"{name}_graphs"] == 0
    assert row["ours_loss"] == pytest.approx(row["theirs_loss"], abs=1e-5)
    assert (row["ours_attention"], row["attention"]) == ("flash", "sdpa")


def test_without_transformers_the_row_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SkippedError, match="transformers is not installed") as caught:
        call(peers.measure_peers, TINY)
    assert failure(caught.value)["status"] == "skipped"
