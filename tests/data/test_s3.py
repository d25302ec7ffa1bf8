"""S3: a dataset and token shards of others in a bucket of moto's server."""

import numpy as np
import pytest
from prepared import write_dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.formats import file_header

s3fs = pytest.importorskip("s3fs", reason="needs pip install s3fs")
moto = pytest.importorskip("moto.server", reason="needs pip install 'moto[server]'")
pytestmark = pytest.mark.slow  # moto takes seconds to start


@pytest.fixture
def bucket(monkeypatch):
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("tokens")
    yield system
    system.rm("tokens", recursive=True)
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_datasets_in_a_bucket(bucket, tmp_path):
    folder = write_dataset(tmp_path / "mine", np.arange(4_000, dtype=np.uint16).reshape(4, 1_000))
    bucket.put(str(folder), "s3://tokens/mine", recursive=True)
    stream = TokenDataset("s3://tokens/mine", tmp_path).stream("train", 16)
    assert stream.windows(np.array([990, 3_000]), 20)[:, 0].tolist() == [990, 3_000]
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 3
    for index in range(3):
        tokens = np.arange(index * 500, (index + 1) * 500, dtype=np.uint16)
        content = file_header("llmc", "uint16", 500) + tokens.tobytes()
        bucket.pipe_file(f"tokens/llmc/fineweb_train_{index:06d}.bin", content)
    one, two = (TokenDataset("s3://tokens/llmc", tmp_path).stream("train", 16) for _ in "12")
    assert one.windows(np.array([495]), 10)[0].tolist() == [*range(495, 505)]
    assert one.digest == two.digest
