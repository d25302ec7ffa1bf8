"""Settings that this version no longer has (removed.yaml); runs that have them can still be read.

A key with its old default is dropped, because it changed nothing. Another value is an error whose
message says what to do.
"""

import yaml

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, yaml_beside

REMOVED: dict[str, Fields] = yaml_beside(__file__) or {}


def without_removed(settings: Fields, prefix: str = "", trained: bool = False) -> Fields:
    """Return settings without the keys that this version no longer has.

    Args:
        settings: Values by name; a section is a dict.
        prefix: Key before the names, such as "model."; "" for none.
        trained: True for the settings of trained weights. Other values than the old default are
            dropped too, unless the weights would mean something else without them.

    Raises:
        UserError: A key has another value than its old default.
    """
    kept = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        row = REMOVED.get(key, {})
        is_gone = row and (value == row["value"] if "value" in row else value != row["default"])
        if is_gone and (row.get("weights") or not trained):
            raise UserError(f"{key} is {value}: {row['fix']}")
        if isinstance(value, dict):
            kept[name] = without_removed(value, f"{key}.", trained)
        elif not row or "value" in row:
            kept[name] = row["instead"] if is_gone else value
    return kept


def edited(config: str) -> str:
    """Return the YAML of a configuration without the keys that this version no longer has.

    Raises:
        UserError: A key has another value than its old default.
    """
    settings = yaml.safe_load(config)
    kept = without_removed(settings) if isinstance(settings, dict) else settings
    return config if kept == settings else yaml.safe_dump(kept, sort_keys=False)
