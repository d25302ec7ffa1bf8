"""Keys, files and sizes that cannot work: the rest of R18 and R20."""

import pytest
from folders import contents
from harness import fit

pytestmark = pytest.mark.faults


@pytest.mark.case("R18")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--modle.learning_rate", "0.1"), ("modle", "did you mean", "model")),
        (("--trainer.max_step", "3"), ("max_step", "max_steps")),  # no abbreviations
        (("--trainer.max_steps", "ten"), ("max_steps", "ten")),
        (("--resum", "auto"), ("resum", "resume")),
        (("--resume",), ("resume",)),
        (("--config", "missing.yaml"), ("missing.yaml",)),
        (("--checkpoint.keep_last", "0"), ("keep_last", "0", "1")),
        (("--data.text_file", "missing.txt"), ("missing.txt",)),
    ],
)
def test_wrong_words(folder, case, args, words):
    before = contents(folder)
    line = fit(folder, *args).refused(*words)
    case.saw(line.removeprefix("error: "))
    assert contents(folder) == before


@pytest.mark.case("R18")
def test_an_unknown_key_in_a_file(folder, case):
    text = (folder / "run.yaml").read_text().replace("learning_rate:", "lerning_rate:")
    (folder / "run.yaml").write_text(text)
    line = fit(folder).refused("lerning_rate", "learning_rate")
    case.saw(line.removeprefix("error: "))


@pytest.mark.case("R20")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model.config.n_embd", "33"), ("33", "2")),
        # the validation split has 360 tokens
        (("--model.config.block_size", "400", "--data.batch_size", "1"), ("40[01]", "360")),
        (("--trainer.val_check_interval", "7"), ("7", "2")),
        (("--model.warmup_steps", "40"), ("40", "30")),
    ],
)
def test_sizes_that_cannot_work(folder, case, args, words):
    ended = fit(folder, *args)
    line = ended.refused(*words)
    case.saw(line.removeprefix("error: "))
    assert "step  1/" not in ended.out
    assert not (folder / "lightning_logs").exists()
