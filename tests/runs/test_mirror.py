"""`--checkpoint.folder`: copies of runs on file systems that are slow, fail, and truncate."""

import json
import re
import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from tiny_fit import RUN, TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare
from gpt_lightning.remote import attempts
from gpt_lightning.runs.folders import saved_checkpoints
from gpt_lightning.runs.sources import find_model

pytestmark = pytest.mark.slow  # CI runs them


class Flaky(MemoryFileSystem):
    """A file system whose uploads can be told to fail or to lose their end."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[dict[str, int]] = {}  # part of a name -> uploads that still fail
    torn: ClassVar[dict[str, int]] = {}  # part of a name -> uploads that still lose their end
    log: ClassVar[list[str]] = []  # what was done to which name

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.rpartition("://")[2])

    def _do(self, kinds: dict[str, int], path: str) -> bool:
        for part in kinds:
            if part in path and kinds[part] > 0:
                kinds[part] -= 1
                return True
        return False

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.log.append(f"put {path.rpartition('/')[2]}")
        if self._do(self.failing, path):
            raise ConnectionError("lost")
        super().pipe_file(path, value[:-1] if self._do(self.torn, path) else value, mode)

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm_file(self, path):
        super().rm_file(path)
        self.log.append(f"rm {path.rpartition('/')[2]}")


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def _file_systems(monkeypatch, tmp_path):
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kinds in (Flaky.store, Flaky.failing, Flaky.torn):
        kinds.clear()
    Flaky.log.clear()
    MemoryFileSystem.store.clear()


def fit(*args: str, steps: int = 6, folder: str = "flaky://bucket/runs") -> int:
    more = ["--checkpoint.every_n_steps=2", "--data.batch_size=4", f"--trainer.max_steps={steps}"]
    return main(["fit", *TINY_RUN, *more, f"--checkpoint.folder={folder}", *args])


@pytest.fixture(scope="module")
def six_steps(trained, tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A folder with a run of six steps, and the files of its copy."""
    folder = tmp_path_factory.mktemp("six")
    shutil.copy(trained / "text.txt", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Flaky.store.clear()
        assert fit() == 0
    return folder, {name: file.getvalue() for name, file in Flaky.store.items()}


@pytest.fixture
def copied(six_steps, tmp_path) -> None:
    """That run, that copy."""
    shutil.copytree(six_steps[0], tmp_path, dirs_exist_ok=True)
    for name, content in six_steps[1].items():
        Flaky.store[name] = MemoryFile(None, name, content)


def there(folder: str = "/bucket/runs/run/version_0") -> dict[str, bytes]:
    """The content of a copy by name."""
    return {
        path.removeprefix(f"{folder}/"): file.getvalue()
        for path, file in sorted(Flaky.store.items())
        if path.startswith(f"{folder}/")
    }


def here() -> dict[str, bytes]:
    """The files of the run folder that are copied."""
    return {
        str(path.relative_to(RUN)): path.read_bytes()
        for path in sorted(RUN.rglob("*"))
        if path.is_file() and not path.name.startswith(("events", "hparams", "."))
    }


# ---- copies --------------------------------------------------------------------------------------


def test_a_run_is_copied_and_the_same_files_are_kept(text_file):
    assert fit() == 0
    assert there() == here()
    assert len([name for name in here() if name.endswith(".ckpt")]) == 2
    puts = [line for line in Flaky.log if "step-0000006" in line and line.startswith("put")]
    assert "sha256" not in puts[0]
    assert "sha256" in puts[-1]  # last
    older = next(i for i, line in enumerate(Flaky.log) if re.match("rm step-0000002.*ckpt", line))
    assert older > Flaky.log.index(puts[-1])  # deleted after


def test_a_lost_connection_ends_the_run_with_an_error(text_file, capsys):
    Flaky.torn["step-0000004"] = 1000
    Flaky.failing["step-0000006"] = 1000
    assert fit() == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("warning: not in checkpoint.folder: cannot write" in line for line in lines)
    assert re.match("error: the last checkpoint is not in flaky://.*resume auto", lines[-1])
    kept = [name for name in there() if name.endswith(".sha256")]
    assert [name[12:24] for name in kept] == ["step-0000002"]  # never the only copy lost
    assert len(saved_checkpoints(RUN / "checkpoints")) >= 2
    Flaky.failing.clear()
    Flaky.torn.clear()
    assert fit("--resume=auto") == 0  # nothing to train, all to copy
    assert there().items() >= here().items()


def test_an_interrupted_upload_is_never_taken(copied):
    newest = max(name for name in there() if name.endswith(".ckpt"))
    del Flaky.store[f"/bucket/runs/run/version_0/{newest}.sha256"]
    shutil.rmtree("lightning_logs")
    assert fit("--resume=auto") == 0
    assert saved_checkpoints(RUN / "checkpoints")[0].step == 6
    assert there() == here()


def test_the_checkpoints_of_a_branch_that_was_left_are_removed(text_file):
    """Else a new machine would continue the other branch, whose step is the higher one."""
    assert fit(steps=8) == 0
    (older,) = (path for path in (RUN / "checkpoints").glob("step-0000006*.ckpt"))
    other = ["--model.learning_rate=0.1", "--data.allow_changes=true"]
    assert fit(f"--resume={older}", *other, steps=7) == 0
    shutil.rmtree(RUN)
    assert fit("--resume=auto", *other, steps=7) == 0
    assert saved_checkpoints(RUN / "checkpoints")[0].step == 7


# ---- continue ------------------------------------------------------------------------------------


def test_a_new_machine_continues_exactly(text_file):
    assert main(["fit", *TINY_RUN, "--run_name=whole", "--data.batch_size=4",
                 "--checkpoint.every_n_steps=2", "--trainer.max_steps=10"]) == 0  # fmt: skip
    assert fit("--model.decay_steps=10", steps=6) == 0
    shutil.rmtree(RUN)
    assert fit("--resume=auto", steps=10) == 0
    whole = Path("lightning_logs/whole/version_0")
    found = compare(whole, RUN)
    assert all(found.values()), found
    assert there() == here()


def test_the_higher_step_of_the_same_run_wins(text_file, capsys):
    assert fit(steps=4) == 0
    shutil.copytree(RUN, "old")
    assert fit("--resume=auto", steps=8) == 0
    shutil.rmtree(RUN)
    shutil.copytree("old", RUN)
    assert fit("--resume=auto", steps=8) == 0
    assert "fetched     flaky://bucket/runs/run/version_0/checkpoints/step-0000008" in (
        capsys.readouterr().out
    )
    for name in [name for name in Flaky.store if "step-0000008" in name]:
        del Flaky.store[name]
    capsys.readouterr()
    assert fit("--resume=auto", steps=8) == 0
    assert "fetched" not in capsys.readouterr().out
    (newest,) = (name for name in here() if re.search("step-0000008.*ckpt$", name))
    assert there()[newest] == here()[newest]  # copied again


def test_a_damaged_copy_is_passed_over(copied, capsys):
    newest = max(name for name in Flaky.store if name.endswith(".ckpt"))
    Flaky.store[newest].seek(1000)
    Flaky.store[newest].write(b"damage")
    shutil.rmtree(RUN)
    assert fit("--resume=auto") == 0
    captured = capsys.readouterr()
    assert re.search(r"warning: cannot fetch .*step-0000006.*skipped", captured.err)
    assert "checkpoints/step-0000004" in captured.out
    assert there() == here()


def test_a_lost_connection_is_no_damage(copied, capsys, monkeypatch):
    shutil.rmtree(RUN)

    def lost(self, rpath, lpath, **kwargs):
        raise ConnectionError("lost")

    monkeypatch.setattr(Flaky, "get_file", lost)
    assert fit("--resume=auto") == 75
    assert re.match("error: cannot fetch .*step-0000006.*lost", capsys.readouterr().err)


def test_a_copy_without_a_whole_checkpoint_is_refused(copied, capsys):
    for name in Flaky.store:
        if name.endswith(".ckpt"):
            Flaky.store[name].write(b"damage")
    shutil.rmtree(RUN)
    assert fit("--resume=auto") == 2
    assert "no checkpoint of flaky://bucket/runs/run/version_0 is whole" in capsys.readouterr().err


def test_a_later_run_of_this_machine_is_not_replaced_by_an_earlier_copy(text_file, capsys):
    assert fit(steps=2) == 0
    assert main(["fit", *TINY_RUN, "--data.batch_size=4", "--trainer.max_steps=2"]) == 0
    shutil.rmtree(RUN)
    assert fit("--resume=auto", steps=4) == 0
    assert [path.name for path in RUN.parent.iterdir()] == ["version_1"]
    assert saved_checkpoints(RUN.with_name("version_1") / "checkpoints")[0].step == 4


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_copy_of_another_run_is_not_replaced(copied, capsys, resume):
    theirs = json.loads(there()["run.json"])["run_id"]
    before = there()
    shutil.rmtree(RUN)
    assert fit(steps=2, folder="flaky://bucket/other") == 0
    ours = json.loads((RUN / "run.json").read_text())["run_id"]
    capsys.readouterr()
    if resume == "never":
        shutil.rmtree(RUN)
    assert fit(f"--resume={resume}", steps=8) == 2
    error = capsys.readouterr().err
    assert theirs in error
    assert (ours in error) == (resume == "auto")
    assert "choose another --run_name or --checkpoint.folder" in error
    assert there() == before


# ---- other commands, other places ----------------------------------------------------------------


def test_other_commands_read_from_there(copied, capsys):
    shutil.rmtree("lightning_logs")
    url = "flaky://bucket/runs/run"
    assert main(["sample", url, "--max_new_tokens=3"]) == 0
    found = find_model(f"{url}/version_0")
    assert found == find_model(url)
    assert find_model(f"{url}/version_0/checkpoints/{found.name}") == found
    validate = ["validate", *TINY_RUN, "--data.batch_size=4"]
    assert main([*validate, f"--ckpt_path={url}"]) == 0
    assert main([*validate, "--ckpt_path=flaky://bucket/nothing"]) == 2
    assert "flaky://bucket/nothing has no checkpoints/*.ckpt" in capsys.readouterr().err
    assert main(["fit", *TINY_RUN, f"--resume={url}"]) == 2
    assert "give --resume auto, and --checkpoint.folder" in capsys.readouterr().err


def test_a_shared_folder(text_file, tmp_path):
    assert fit(folder=str(tmp_path / "shared")) == 0
    copy = tmp_path / "shared/run/version_0"
    found = {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("[!.]*") if p.is_file()}
    assert found == here()
    shutil.rmtree(RUN)
    assert fit("--resume=auto", steps=8, folder=str(tmp_path / "shared")) == 0
    assert saved_checkpoints(copy / "checkpoints")[0].step == 8


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(text_file, capsys):
    Flaky.failing["run.json"] = 1000
    assert fit() == 75
    captured = capsys.readouterr()
    assert "cannot write flaky://bucket/runs/run/version_0/run.json" in captured.err
    assert "step 1/" not in captured.out
    assert there() == {}
