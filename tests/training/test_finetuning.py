"""Fine-tuning: frozen parameters, factors of the learning rate, and LoRA."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_fit import TINY_RUN
from torch import nn

from gpt_lightning import GPTModule
from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.model import lora
from gpt_lightning.model.fast.decoder import Decoder
from gpt_lightning.model.flops import flops_per_token
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.transforms import transform
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import find_checkpoint
from gpt_lightning.runs.settings import Settings
from gpt_lightning.runs.sources import load_model
from gpt_lightning.training.build import choose_trained
from gpt_lightning.training.optimizers.adamw import build
from gpt_lightning.training.optimizers.muon import MuonAdamW

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11)
LORA = ["--model.lora_rank=2", "--model.lora_targets=[c_attn, mlp.c_proj]"]


@pytest.fixture
def tokens():
    return torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(TINY)


def trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def run_weights(run="lightning_logs/run/version_0"):
    return read_checkpoint(find_checkpoint(Path(run))).weights


def test_lora_begins_as_the_model_itself_and_trains_its_matrices_alone(model, tokens):
    before, n = model(tokens), model.num_params()
    lora.install(model, 4, 8.0, ["c_attn"])
    assert torch.equal(model(tokens), before)
    ends = (".attn.c_attn.lora_a", ".attn.c_attn.lora_b")
    assert trained(model) == [f"transformer.h.{i}{end}" for i in range(2) for end in ends]
    assert model.num_params() == n + 2 * 4 * (16 + 3 * 16)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(["*"], 4), (["attn.c_proj"], 1), (["c_proj"], 2), (["c_fc", "mlp.*"], 2)],
)
def test_the_layers_that_targets_name(targets, layers, model):
    lora.install(model, 1, 1.0, targets)
    assert sum(type(m) is lora.LoRALinear for m in model.modules()) == 2 * layers


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_only_layers_that_are_called_as_linear_ones_get_lora():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # eval reads them
    network = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8), encoder).eval()
    x = torch.randn(2, 3, 8)
    before = network(x)
    lora.install(network, 1, 1.0, ["*"])
    torch.testing.assert_close(network(x), before)
    assert [type(m) for m in network.modules()].count(lora.LoRALinear) == 1
    for target in ("1", "out_proj", "2.linear1"):
        with pytest.raises(UserError, match=rf"lora_targets '{target}' is .*{target}, not"):
            lora.install(network, 1, 1.0, [target])
    with pytest.raises(AssertionError, match="methods"):
        transform(network, {Doubled: lora.LoRALinear})


def test_merged_weights_compute_the_same(model, tokens):
    lora.install(model, 4, 8.0, ["*"])
    for name, parameter in model.named_parameters():
        if name.endswith(lora.B):
            nn.init.normal_(parameter, std=0.3)
    plain = GPT(TINY)
    plain.load_state_dict(lora.merged(model.state_dict(), 8.0 / 4))
    expected = model(tokens)
    assert (expected - GPT(TINY)(tokens)).abs().max() > 0.1
    torch.testing.assert_close(plain(tokens), expected, atol=1e-5, rtol=0)
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        decoder = Decoder(model, dtype)
        with torch.no_grad():
            found = decoder(tokens, 0, decoder.new_caches(*tokens.shape))
        torch.testing.assert_close(found, expected[:, -1], atol=atol, rtol=0)


def test_equal_to_peft(model, tokens):
    peft = pytest.importorskip("peft")
    theirs = GPT(TINY)
    theirs.load_state_dict(model.state_dict())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"])
    theirs = peft.get_peft_model(theirs, config)
    lora.install(model, 4, 8.0, ["c_attn"])
    with torch.no_grad():
        for (name, ours), their in zip(
            ((n, p) for n, p in model.named_parameters() if p.requires_grad),
            (p for p in theirs.parameters() if p.requires_grad),
            strict=True,
        ):
            assert ours.shape == their.shape, name
            their.copy_(ours)
    for subject in (model, theirs):
        optimizer = torch.optim.AdamW([p for p in subject.parameters() if p.requires_grad], lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            subject(tokens, tokens.roll(-1, dims=1)).backward()
            optimizer.step()
    torch.testing.assert_close(model(tokens), theirs(tokens), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_with_lora_leaves_the_weights_and_resumes_exactly():
    base = [*TINY_RUN, "--trainer.max_steps=4"]
    assert main(["fit", *base, "--run_name=base"]) == 0
    start = str(find_checkpoint(Path("lightning_logs/base/version_0")))
    options = [*TINY_RUN, *LORA, f"--model.init_from={start}", "--checkpoint.every_n_steps=4"]
    assert main(["fit", *options, "--trainer.max_steps=8"]) == 0
    assert main(["fit", *options, "--trainer.max_steps=4", "--run_name=cut"]) == 0
    assert main(["fit", *options, "--trainer.max_steps=8", "--run_name=cut", "--resume=auto"]) == 0
    whole, before = run_weights(), read_checkpoint(Path(start)).weights
    cut = read_checkpoint(
        Path("lightning_logs/cut/version_0/checkpoints")
        / find_checkpoint(Path("lightning_logs/run/version_0")).name
    ).weights
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    assert all(torch.equal(whole[name], tensor) for name, tensor in before.items())
    assert all(whole[name].any() for name in whole.keys() - before.keys())
    model, _ = load_model("lightning_logs/run/version_0")
    names = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert names == ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_proj.weight"]


def test_a_run_with_factors_saves_and_resumes():
    factors = '--model.learning_rate_factors={"transformer.h.0.*": 0.5}'
    options = [*TINY_RUN, factors]
    assert main(["fit", *options, "--trainer.max_steps=2"]) == 0
    assert main(["fit", *options, "--trainer.max_steps=3", "--resume=auto"]) == 0


def test_frozen_parameters_stay():
    options = [*TINY_RUN, "--model.freeze=[transformer.wte.*, '*.bias']"]
    assert main(["fit", *options, "--trainer.max_steps=2", "--checkpoint.every_n_steps=1"]) == 0
    folder = Path("lightning_logs/run/version_0/checkpoints")
    first, last = (read_checkpoint(path).weights for path in sorted(folder.glob("*.ckpt"))[-2:])
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    frozen = {name for name in first if name.endswith((".bias", "wte.weight", "lm_head.weight"))}
    assert changed == first.keys() - frozen


def test_factors_of_the_learning_rate(model):
    factors = {"transformer.h.0.*": 0.1, "transformer.h.*.bias": 2.0}
    settings = Settings(learning_rate=1.0, learning_rate_factors=factors)
    groups = build(model, settings, fused=False).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            first = name.startswith("transformer.h.0.")
            bias = name.endswith(".bias") and ".h." in name
            assert group["lr"] == (0.1 if first else 2.0 if bias else 1.0), name
            assert group["weight_decay"] == (0.1 if parameter.dim() >= 2 else 0.0)
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_muon_needs_parameters_for_its_adamw(model):
    settings = Settings(optimizer="muon", lora_rank=2)
    choose_trained(model, settings)
    with pytest.raises(UserError, match="muon has no parameter for its AdamW"):
        MuonAdamW(model, settings, fused=False)


def test_frozen_weights_cost_less(model):
    """A linear layer does 2 FLOPs a weight three times: forward, its input's gradient, its own."""
    module = GPTModule(config=TINY)
    module.configure_model()
    parameters, T, C = dict(module.model.named_parameters()), 8, 16
    total, block = module.flops_per_token, module.model.transformer.h[0]
    assert total == flops_per_token(module.model.num_params(embeddings=False), 2, C, T)
    n_block = sum(p.numel() for p in block.parameters())
    parameters["transformer.h.1.mlp.c_fc.weight"].requires_grad_(False)
    assert module.flops_per_token == total - 2 * 4 * C * C
    parameters["transformer.wpe.weight"].requires_grad_(False)
    assert module.flops_per_token == total - 2 * 4 * C * C
    parameters["transformer.wte.weight"].requires_grad_(False)
    assert module.flops_per_token == total - 2 * 4 * C * C - 2 * 11 * C
    block.requires_grad_(False)
    rest = total - 2 * 4 * C * C - 2 * 11 * C - 4 * n_block - 8 * T * C
    assert module.flops_per_token == rest


def test_a_head_that_is_trained_alone_costs_no_gradient_of_its_input():
    module = GPTModule(config=replace(TINY, tie_weights=False))
    module.configure_model()
    module.model.transformer.requires_grad_(False)
    (blocks, T, C), vocabulary = (2, 8, 16), 11
    n_blocks = sum(p.numel() for p in module.model.transformer.h.parameters())
    forward = 2 * n_blocks + 4 * blocks * T * C
    assert module.flops_per_token == forward + 2 * (2 * C) + 4 * vocabulary * C
    module.model.transformer.ln_f.requires_grad_(True)
    assert module.flops_per_token == forward + 4 * (2 * C) + 6 * vocabulary * C
