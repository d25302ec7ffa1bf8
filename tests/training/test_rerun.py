"""`COMMAND RUN`: the arguments that stand for a run, and that they do what --config does."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import read_config
from gpt_lightning.runs.history import read_changes
from gpt_lightning.training.rerun import with_run

CONFIG = {"trainer": {"max_steps": 8}, "data": {"dataset": "mine", "data_dir": "data"}}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the runs version_0 (two checkpoints) and version_1 (none), and inside of it."""
    for number, names in enumerate((["step-0000004-loss-1.5000", "step-0000008-loss-2.0000"], [])):
        run = tmp_path / f"project/lightning_logs/name/version_{number}"
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        for name in names:
            (run / f"checkpoints/{name}.ckpt").touch()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


QUIET = "--verbose=false"
RUN = "lightning_logs/name/version_0"
BEST = f"{RUN}/checkpoints/step-0000004-loss-1.5000.ckpt"
LAST = f"{RUN}/checkpoints/step-0000008-loss-2.0000.ckpt"


@pytest.mark.parametrize("address", [RUN, "lightning_logs/name", "lightning_logs/name/"])
@pytest.mark.parametrize(
    ("options", "file"), [([], BEST), (["--ckpt_path=best"], BEST), (["--ckpt_path", "last"], LAST)]
)
def test_an_evaluation_has_the_settings_and_the_checkpoint_of_the_run(
    project, address, options, file
):
    seed = ["--seed_everything", "1"]
    found = with_run(["validate", *seed, address, *options, "-c", "more.yaml"])
    expected = [f"--config={RUN}/config.yaml", f"--ckpt_path={file}", "--model.init_from=null"]
    assert found == ["validate", QUIET, *expected, "--seed_everything=1", "--config=more.yaml"]


def test_a_file_is_that_checkpoint_of_its_run(project):
    found = with_run(["test", LAST])
    assert found[1:4] == [QUIET, f"--config={RUN}/config.yaml", f"--ckpt_path={LAST}"]
    assert with_run(["resume", LAST])[2] == f"--resume={LAST}"


def test_a_checkpoint_without_settings_has_those_of_its_run(project):
    for address in (RUN, LAST):
        option = f"--ckpt_path={address}"
        assert with_run(["test", option]) == [*with_run(["test", address]), option]
    settings = ["--ckpt_path", RUN, "--data.text_file", "other.txt"]
    assert with_run(["test", *settings]) == ["test", QUIET, *settings]


def test_resume_is_fit_with_the_settings_of_the_run(project):
    found = with_run(["resume", "lightning_logs/name", "--trainer.max_steps", "16"])
    config = f"--config={RUN}/config.yaml"
    assert found == ["fit", config, f"--resume={RUN}", "--trainer.max_steps=16"]
    assert with_run(["resume", RUN, "--ckpt_path", "last"])[2:] == [f"--resume={RUN}"]
    assert with_run(["resume", "--ckpt_path", "best", RUN])[2:] == [f"--resume={BEST}"]
    for word in ("--resume=never", "--run_name=other"):
        with pytest.raises(UserError, match=rf"fit --config {RUN}/config.yaml {word}"):
            with_run(["resume", RUN, *word.split("=")])


@pytest.mark.parametrize(("root_dir", "place"), [(None, ""), ("out", "out/"), ("./a/b", "a/b/")])
def test_relative_paths_are_those_of_the_folder_in_which_the_run_was_started(
    tmp_path, monkeypatch, root_dir, place
):
    run = tmp_path / f"{place}lightning_logs/name/version_0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/step-0000004.ckpt").touch()
    data = {"text_file": "my.txt", "data_dir": "data", "dataset": "mine", "corpus": None}
    settings = {"trainer": {"default_root_dir": root_dir}, "data": data}
    settings["checkpoint"] = {"folder": "s3://bucket"}
    settings["evaluation"] = {"data": "/absolute"}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "my.txt").touch()
    for folder in ("data", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "other")
    found = with_run(["resume", str(run)])
    # `mine` is a name under data_dir: there is no such folder
    expected = [f"--data.text_file={tmp_path}/my.txt", f"--data.data_dir={tmp_path}/data"]
    assert found[2:-1] == expected
    (tmp_path / "mine").mkdir()
    assert f"--data.dataset={tmp_path}/mine" in with_run(["resume", str(run)])
    monkeypatch.chdir(tmp_path)
    assert with_run(["resume", str(run)])[2:] == [f"--resume={place}lightning_logs/name/version_0"]


def test_paths_among_names_are_relative_to_that_folder_too(project, monkeypatch):
    def resumed(dataset: str) -> list[str]:
        settings = {"data": {"dataset": dataset}, "model": {"init_from": "weights"}}
        (project / RUN / "config.yaml").write_text(yaml.safe_dump(settings))
        return with_run(["resume", f"../{RUN}"])[2:-1]

    (project / "plays").mkdir()
    (project / "other").mkdir()
    monkeypatch.chdir(project / "other")
    assert resumed("plays") == [f"--data.dataset={project}/plays"]
    for unmoved in ("named", "s3://bucket/c", f"{project}/plays"):
        assert resumed(unmoved) == []
    (project / "weights").mkdir()
    assert resumed("named") == [f"--model.init_from={project}/weights"]


@pytest.mark.parametrize(("word", "file"), [("best", BEST), ("last", LAST)])
def test_the_config_of_a_run_with_a_word_is_that_run(project, word, file):
    found = with_run(["validate", "--config", f"{RUN}/config.yaml", "--ckpt_path", word])
    assert found == with_run(["validate", RUN, f"--ckpt_path={word}"])
    assert f"--ckpt_path={file}" in found


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["resume"], "resume has no run: "),
        (["validate", "--ckpt_path", "last"], "validate has no run: "),
        (["validate", "nowhere"], "nowhere does not exist"),
        (["validate", "lightning_logs/name/version_1"], "ended before its first checkpoint: begin"),
        (
            ["resume", "lightning_logs/name/version_1"],
            "--config lightning_logs/name/version_1/config",
        ),
        (["validate", "--ckpt_path=nowhere"], "nowhere does not exist"),
        (["test", f"{RUN}/config.yaml"], "config.yaml has no checkpoints"),
        (["resume", "gs://bucket/run"], "gs://bucket/run is a URL: copy the run folder"),
    ],
)
def test_a_run_that_cannot_be_used_is_an_error(project, argv, words):
    with pytest.raises(UserError, match=re.escape(words)):
        with_run(argv)


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_a_run_is_evaluated_and_continued_by_its_name(tmp_path, monkeypatch, capsys):
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=8", "--trainer.log_every_n_steps=1"]) == 0
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=12", "--trainer.log_every_n_steps=1"]) == 0
    (tmp_path / "other").mkdir()
    capsys.readouterr()
    assert main(["validate", "lightning_logs/run/version_0"]) == 0
    here = capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "other")
    run = "../lightning_logs/run/version_0"
    assert main(["validate", run, "--trainer.enable_progress_bar=false"]) == 0
    there = capsys.readouterr().out
    assert here.replace("lightning_logs", "../lightning_logs") == there
    lines = here.splitlines()  # and no table of Lightning's
    assert [line.split()[0] for line in lines] == ["checkpoint", "validation"]
    assert main(["predict", run]) == 0
    assert (tmp_path / "lightning_logs/run/predict_0/token_losses.npy").exists()
    assert main(["resume", run, "--trainer.max_steps=12"]) == 0
    assert main(["resume", run]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("nothing to do: the run is at step 12, trainer.max_steps is 12; ")
    assert not (tmp_path / "other/lightning_logs").exists()
    resumed, whole = (
        [path.name for path in (tmp_path / f"lightning_logs/run/version_{n}").rglob("*12-*.ckpt")]
        for n in (0, 1)
    )
    assert len(resumed) == 1
    assert resumed == whole  # the step and the validation loss
    (more,) = re.findall("`.*gpt-lightning (.*)`", line)
    assert main(more.split()) == 0
    assert read_changes(Path(run))["trainer.max_steps"] == "8 -> 12 at step 8 -> 24 at step 12"


@pytest.mark.usefixtures("own_folder")
def test_the_results_are_beside_the_run_that_is_given_whatever_its_name_was(tmp_path, monkeypatch):
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=4"]) == 0
    logs, elsewhere = Path("lightning_logs"), Path("elsewhere")
    shutil.copytree(logs / "run", logs / "copy")
    shutil.copytree(logs / "run", elsewhere / "run")
    shutil.copytree(logs / "run/version_0", logs / "copy/version_1")
    shutil.copytree(logs / "run/version_0", elsewhere / "kept")
    (logs / "link").symlink_to("copy")
    Path("newest").symlink_to(logs / "copy/version_0")
    for given, results in (
        (logs / "copy", logs / "copy/validate_0"),  # its newest version
        (logs / "copy/version_0", logs / "copy/validate_1"),
        (logs / "link/version_0", logs / "copy/validate_2"),
        (Path("newest"), logs / "copy/validate_3"),
        (elsewhere / "run", elsewhere / "run/validate_0"),
        (elsewhere / "kept", elsewhere / "kept/validate_0"),
    ):
        assert main(["validate", str(given)]) == 0
        assert (results / "metrics.jsonl").is_file()
    assert main(["validate", str(logs / "copy"), "--run_name=run"]) == 0
    assert (logs / "run/validate_0/metrics.jsonl").is_file()  # what is typed has precedence
    assert main(["resume", str(logs / "copy/version_0"), "--trainer.max_steps=8"]) == 0
    assert read_config(logs / "copy/version_0/config.yaml")["run_name"] == "copy"
    assert sorted(os.listdir(logs / "run")) == ["validate_0", "version_0"]
    assert sorted(os.listdir(logs)) == ["copy", "link", "run"]


@pytest.mark.usefixtures("own_folder")
def test_config_yaml_of_a_renamed_run_continues_it_and_begins_others_beside_it(tmp_path, capsys):
    fit = ["fit", "--config=lightning_logs/new/version_0/config.yaml"]
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=4"]) == 0
    Path("lightning_logs/run").rename("lightning_logs/new")
    assert main([*fit, "--resume=auto", "--trainer.max_steps=8"]) == 0
    assert "resume      lightning_logs/new/version_0/" in capsys.readouterr().out
    assert main([*fit, "--run_name=run"]) == 0  # what is typed has precedence
    shutil.rmtree("lightning_logs/run")
    assert main(fit) == 0
    assert os.listdir("lightning_logs") == ["new"]
    assert sorted(os.listdir("lightning_logs/new")) == ["version_0", "version_1"]


@pytest.mark.usefixtures("own_folder")
def test_config_yaml_of_a_run_in_a_moved_folder_continues_it_there(tmp_path):
    root = f"--trainer.default_root_dir={tmp_path / 'old'}"
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=4", root]) == 0
    Path("old").rename("moved")
    config = "moved/lightning_logs/run/version_0/config.yaml"
    assert main(["fit", f"--config={config}", "--resume=auto", "--trainer.max_steps=8"]) == 0
    assert read_config(Path(config))["trainer"]["max_steps"] == 8
    assert not Path("old").exists()


@pytest.mark.usefixtures("own_folder")
def test_a_configuration_of_another_place_begins_a_run_here(tmp_path, monkeypatch):
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=4"]) == 0
    config = tmp_path / "lightning_logs/run/version_0/config.yaml"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir("here")
    text = f"--data.text_file={tmp_path / 'text.txt'}"
    assert main(["fit", f"--config={config}", "--resume=auto", text]) == 0
    assert Path("lightning_logs/run/version_0/config.yaml").is_file()
    assert os.listdir(tmp_path / "lightning_logs/run") == ["version_0"]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("folder", ["version_0", "version_0/checkpoints", "."])
def test_a_run_is_resumed_from_inside_its_folder(folder, tmp_path, monkeypatch):
    assert main(["fit", *TINY_RUN, "--trainer.max_steps=4"]) == 0
    run = tmp_path / "lightning_logs/run"
    monkeypatch.chdir(run / folder)
    assert main(["resume", os.path.relpath(run / "version_0"), "--trainer.max_steps=8"]) == 0
    assert read_config(run / "version_0/config.yaml")["run_name"] == "run"
    assert main(["validate", os.path.relpath(run / "version_0")]) == 0
    assert sorted(os.listdir(run)) == ["validate_0", "version_0"]
