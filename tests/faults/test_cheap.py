"""Cases of one short process each, for the default suite: R18, R20, R21, R30."""

import pytest
from folders import contents
from harness import fit, gpt

pytestmark = pytest.mark.slow  # CI runs them


@pytest.mark.case("R18")
@pytest.mark.parametrize(
    ("text", "args", "words"),
    [
        ("", ("--model.learning_rat", "0.1"), ("learning_rat", "did you mean", "learning_rate")),
        ("", ("--model.learning_rate", "fast"), ("learning_rate", "fast", "float")),
        ("\ndata: {corpus: x}\n", (), ("data", "twice")),
    ],
)
def test_wrong_keys(folder, case, text, args, words):
    with (folder / "run.yaml").open("a") as file:
        file.write(text)
    before = contents(folder)
    line = fit(folder, *args).refused(*words)
    case.saw(line.removeprefix("error: "))
    assert contents(folder) == before


@pytest.mark.case("R20")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data.block_size", "32"), ("block_size is 32", "16")),
        (("--data.batch_size", "500"), ("500", r"\b202\b|windows")),
    ],
)
def test_sizes_that_cannot_work(folder, case, args, words):
    ended = fit(folder, *args)
    line = ended.refused(*words)
    case.saw(line.removeprefix("error: "))
    assert "step  1/" not in ended.out
    assert not (folder / "lightning_logs").exists()


@pytest.mark.case("R21")
@pytest.mark.parametrize("content", [b"", b"good text \xff"])
def test_texts_that_make_no_dataset(tmp_path, case, content):
    (tmp_path / "bad.txt").write_bytes(content)
    line = gpt(tmp_path, "prepare", "bad.txt", "--out", "set").refused("bad.txt")
    case.saw(line.removeprefix("error: "))
    assert not (tmp_path / "set").exists()


@pytest.mark.case("R30")
def test_a_path_that_is_missing(folder, case):
    line = fit(folder, "--resume", "nowhere").refused("nowhere")
    case.saw(line.removeprefix("error: "))
