"""Measurements of one's own machine; columns.yaml has the columns of their tables."""

from gpt_lightning.files import yaml_beside
from gpt_lightning.tables.rows import row_type

TABLE = yaml_beside(__file__, "columns.yaml")
# bench -> name of a table -> class of its rows
COLUMNS = {
    bench: {name: row_type(columns) for name, columns in tables.items()}
    for bench, tables in TABLE.items()
}
