"""`gpt-lightning prepare`: texts become shards of tokens and a manifest, or nothing at all.

command.py chooses one of two routes by SOURCE:

| SOURCE | route |
| --- | --- |
| corpus name, text file | one text |
| URL of a text, standard input | one text, after a copy by spool.py |
| standard input that is JSONL | documents, after a copy by spool.py |
| JSONL, Parquet, folder, glob, URL, hf:NAME | documents |

One text: text.py reads it twice, and cuts it into splits by characters.

Documents, in the sequence of pipeline.py: inputs.py finds the files, units.py cuts them into pieces
of work, executors.py runs the pieces, documents.py (with columns.py and compressed.py) yields the
texts of a file, parts.py keeps the tokens of a piece, assemble.Assembly turns parts into shards.

One text is written by assemble.SplitWriter. Both routes lock and replace the folder, or write to an
address, with target.py.
"""
