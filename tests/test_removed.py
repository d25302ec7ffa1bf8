"""Settings of earlier versions: dropped with their old default, one line with another value."""

from typing import Any

import pytest
import yaml

from gpt_lightning import removed
from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.removed import REMOVED, edited, without_removed

ROWS: dict[str, dict[str, Any]] = {
    "model.old": {"default": "auto", "fix": "leave it out"},
    "model.config.kind": {"default": "gpt2", "weights": True, "fix": "use another network"},
    "model.config.attention": {"value": "chunked", "instead": "auto", "fix": "set it to auto"},
}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "REMOVED", ROWS)


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key a.b."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.usefixtures("rows")
def test_a_key_with_its_old_default_is_dropped_and_no_other_is() -> None:
    config = {"kind": "gpt2", "attention": "sdpa", "n_layer": 2}
    found = without_removed({"old": "auto", "config": config, "freeze": []}, "model.")
    assert found == {"config": {"attention": "sdpa", "n_layer": 2}, "freeze": []}
    text = "# a comment\nmodel:\n  rate: 1e-3\n"
    assert edited(text) == text
    assert yaml.safe_load(edited(f"{text}  old: auto\n")) == yaml.safe_load(text)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("key", ROWS)
def test_another_value_is_an_error_that_names_the_key(key: str) -> None:
    settings = nested(key, ROWS[key].get("value", "other"))
    with pytest.raises(UserError, match=f"{key} is .*{ROWS[key]['fix']}"):
        edited(yaml.safe_dump(settings))


@pytest.mark.usefixtures("rows")
def test_trained_weights_are_read_unless_they_would_mean_something_else() -> None:
    found = {"old": "other", "config": {"attention": "chunked"}}
    assert without_removed(found, "model.", trained=True) == {"config": {"attention": "auto"}}
    with pytest.raises(UserError, match="kind"):
        without_removed({"config": {"kind": "other"}}, "model.", trained=True)


@pytest.mark.parametrize("key", REMOVED)
def test_each_row_is_read_from_a_config_and_is_one_line_on_the_command_line(key, tmp_path, capsys):
    row, config = REMOVED[key], tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(nested(key, row.get("default", "auto"))))
    assert main(["fit", "--config", str(config), "--print_config"]) == 0
    name = key.rpartition(".")[2]
    assert "value" in row or f"{name}:" not in capsys.readouterr().out
    for options in (f"--{key}={row.get('value', 'x')}",), (f"--{key}", str(row.get("value", "x"))):
        assert main(["fit", *options]) == 2
        line = capsys.readouterr().err
        assert row.get("value", row["fix"]) in line
