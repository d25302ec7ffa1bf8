"""Every file in configs/ parses, describes a model that can be built, and says what it computes."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from gpt_lightning.cli import main
from gpt_lightning.data.texts import CORPORA
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.parsing import CONFIGS, config_file, config_names, resolve_configs
from gpt_lightning.reproduce.cases import CASES

# the first line of an overlay names the configuration that it changes
OVERLAY = re.compile(r"# Overlay of (any run|[\w/-]+)\. ")
PURPOSE = {name: config_file(name).read_text().splitlines()[0] for name in config_names()}
RUNS = [name for name in PURPOSE if not OVERLAY.match(PURPOSE[name])]
TRAINED = [name for name in RUNS if "/" not in name]  # reproduce/test_cases.py has the ladders
TOKENS_PER_STEP = {
    "quickstart": 16 * 128,
    "shakespeare_char": 64 * 256,
    "shakespeare_char_cpu": 12 * 64,
    "gpt2_124m": 524_288,
    "finetune_shakespeare": 32_768,
    "bench_ladder": 2 * 256,
    "openwebtext": 12 * 1024 * 40,
    "fineweb_edu": 524_288,
}


@pytest.fixture
def parse(parser):
    return lambda *names: (
        parser.parse_args(
            ["fit", *resolve_configs([f"--config={name}" for name in names]), "--data.seed=1"]
        ).fit
    )


def combination(name: str) -> list[str]:
    """A configuration with all that it is an overlay of, the base first."""
    overlay = OVERLAY.match(PURPOSE[name])
    if overlay is None:
        return [name]
    below = "gpt2_124m" if overlay[1] == "any run" else overlay[1]
    return [*combination(below), name]


def flat(config) -> dict:
    return {key: value for key, value in vars(config.as_flat()).items() if key != "config"}


def written_keys(settings: dict, prefix: str = "") -> set[str]:
    keys = set()
    for key, value in settings.items():
        nested = isinstance(value, dict)
        keys |= written_keys(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}"}
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("name", PURPOSE)
def test_every_configuration_parses_and_its_model_can_be_built(name, parse):
    config = parse(*combination(name))
    shape = {**config.model.config.as_dict()}
    shape["vocab_size"] = shape["vocab_size"] or 65
    with torch.device("meta"):
        GPT(GPTConfig(**shape))
    assert config.data.corpus in CORPORA or config.data.dataset
    assert config.trainer.check_val_every_n_epoch is None  # val_check_interval counts across epochs


@pytest.mark.parametrize("name", PURPOSE)
def test_the_first_line_says_what_it_is(name):
    assert re.fullmatch(r"# .+[.]", PURPOSE[name])
    if name not in RUNS:
        text = config_file(name).read_text()
        assert sum(not line.startswith("#") for line in text.splitlines()) <= 12  # a few lines


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PURPOSE if name not in RUNS])
def test_an_overlay_sets_nothing_that_is_set_already(name, parse):
    *below, _ = combination(name)
    values = flat(parse(*below, name))
    before = flat(parse(*below))
    changed = {key for key in values if values[key] != before[key]}
    if name != "model/gpt2":  # the size of the base that the others replace
        assert changed == written_keys(yaml.safe_load(config_file(name).read_text()))


@pytest.mark.parametrize("name", ["lecture-ladder", "precision-ladder"])
def test_the_first_lines_name_the_rungs_below(name):
    for rung in CASES[name].rungs:
        assert list(rung.configs) == combination(rung.configs[-1])


@pytest.mark.parametrize("name", TRAINED)
def test_tokens_per_step_are_as_documented(name, parse):
    config = parse(name)
    block_size = config.data.block_size or config.model.config.block_size
    accumulate = config.trainer.accumulate_grad_batches or 1
    assert config.data.batch_size * block_size * accumulate == TOKENS_PER_STEP[name]
    assert config.trainer.val_check_interval % accumulate == 0  # validate between optimizer steps
    assert (
        "matmul_precision" in config_file(name).read_text()
    )  # an explicit setting, never a hidden default


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_an_overlay_of_any_run(name, parse):
    config = parse("gpt2_124m", f"model/{name}")
    published = SIZES[name]
    for key in ("n_layer", "n_head", "n_embd"):
        assert config.model.config[key] == getattr(published, key)
    assert config.data.batch_size == 32  # the rest stays


def test_configurations_are_listed_with_their_first_lines(capsys):
    assert main(["configs"]) == 0
    runs, overlays = capsys.readouterr().out.split("overlays: ")
    for name, purpose in PURPOSE.items():
        part = runs if name in RUNS else overlays
        assert re.search(rf"^  {name} +{re.escape(purpose[2:])}$", part, re.MULTILINE)


def test_a_name_is_a_file_of_configs_unless_there_is_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a folder, such as that of the runs, is no configuration
    assert config_file("quickstart") == CONFIGS / "quickstart.yaml"
    assert resolve_configs(["fit", "--config", "quickstart", "--config=model/gpt2", "--x"]) == [
        "fit",
        f"--config={CONFIGS / 'quickstart.yaml'}",
        f"--config={CONFIGS / 'model' / 'gpt2.yaml'}",
        "--x",
    ]
    with pytest.raises(UserError, match="is an overlay of any run: give the run before it"):
        resolve_configs(["fit", "--config", "model/gpt2", "--config=quickstart"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "gpt2").write_text("seed_everything: 1")
    assert config_file("model/gpt2") == Path("model/gpt2")


def test_a_wheel_carries_the_configurations():
    with (CONFIGS.parent / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "gpt_lightning/configs"}
