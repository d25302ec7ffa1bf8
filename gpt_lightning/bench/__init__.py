"""Measurements of one's own machine; columns.yaml has the columns of their tables."""

from pathlib import Path

import yaml

from gpt_lightning.tables.rows import row_type

TABLE = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))
# bench -> name of a table -> class of its rows
COLUMNS = {
    bench: {name: row_type(columns) for name, columns in tables.items()}
    for bench, tables in TABLE.items()
}
