"""A bucket of moto's server on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest


@contextmanager
def bucket(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """While the block runs, an empty bucket is there, and s3fs finds it; yields a file system. Skips without both."""
    if find_spec("s3fs") is None or find_spec("moto") is None:
        pytest.skip("s3fs and moto are not installed (pip install 'moeq[s3]' 'moto[server]')")
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    for variable, value in (endpoint | keys).items():
        monkeypatch.setenv(variable, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir(name)
    try:
        yield system
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
