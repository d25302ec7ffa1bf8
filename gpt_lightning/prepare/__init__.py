"""`gpt-lightning prepare`: texts become shards of tokens and a manifest, or nothing at all.

command.py chooses one of two routes by SOURCE:

| SOURCE | route |
| --- | --- |
| corpus name, text file | one text |
| URL of a text, standard input | one text, after a copy |
| standard input that is JSONL | documents, after a copy |
| JSONL, Parquet, folder, glob, URL, hf:NAME | documents |

One text: text.py reads it twice, and cuts it into splits by characters.

Documents, in the sequence of pipeline.py: inputs.py finds the files; units.py cuts them into units
of work, which executors.py runs; documents.py yields the texts of a file; the tokens of a unit are
written into pieces, and these into shards; the manifest comes last.

Both routes lock and replace the folder, or write to an address, with target.py.
"""
