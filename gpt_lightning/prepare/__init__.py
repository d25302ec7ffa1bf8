"""`gpt-lightning prepare`: texts become shards of tokens and a manifest, or nothing at all.

command.py chooses one of two routes by SOURCE:

| SOURCE | route |
| --- | --- |
| corpus name, text file | one text |
| URL of a text, standard input | one text, after a copy |
| standard input that is JSONL | documents, after a copy |
| JSONL, Parquet, table, folder, glob, URL, hf:NAME | documents |

One text: text.py reads it twice, and cuts it into splits by characters.

Documents: sources.py finds the files, documents.py cuts them into units, which pool.py runs in
processes. readers.py yields the texts of a file. Each unit becomes shards; the manifest comes last.

Both routes lock and replace the folder with target.py.
"""
