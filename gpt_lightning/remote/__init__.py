"""Files behind addresses of fsspec: attempts, listing, uploads, partial reads, a bounded cache."""
