"""Columns of Parquet files, by pyarrow."""

from typing import TYPE_CHECKING, Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.input_file import DATA_EXTRA, Input, damaged

if TYPE_CHECKING:
    import pyarrow.parquet


def open_parquet(file: BinaryIO, entry: Input) -> "pyarrow.parquet.ParquetFile":
    """Open a Parquet file and read its footer.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"reading Parquet needs the package pyarrow: {DATA_EXTRA}") from error
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise damaged(entry, "Parquet", error) from error


def column_sizes(file: BinaryIO, entry: Input, text_field: str) -> list[int]:
    """Return the bytes of the text in each row group, decompressed.

    Raises:
        UserError: The file is not Parquet, or has no such column of strings.
    """
    table = open_parquet(file, entry)
    schema = table.schema_arrow
    if text_field not in schema.names:
        raise UserError(
            f"{entry.label}: expected a column {text_field!r}, found "
            f"{', '.join(map(repr, schema.names[:8]))}; name one with --text_field"
        )
    if not _holds_strings(schema.field(text_field).type):
        raise UserError(
            f"{entry.label}: expected strings in the column {text_field!r}, found "
            f"{schema.field(text_field).type}; name another with --text_field"
        )
    metadata = table.metadata
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    column, groups = paths.index(text_field), range(metadata.num_row_groups)
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in groups]


def _holds_strings(kind: Any) -> bool:
    import pyarrow.types as types

    value = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(value) for test in tests)


def bytes_of(column: Any) -> Any:
    """Return a column's strings as bytes: pyarrow does not check that they are UTF-8."""
    import pyarrow as pa

    return column.cast(pa.large_string()).cast(pa.large_binary())
