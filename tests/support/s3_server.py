"""Provide a real S3 server process on 127.0.0.1."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

_SERVER = """
import sys
import threading
from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

# Without this, moto replies 500 about an unknown upload, where S3 replies 404.
def checked(operation):
    def run(self, bucket_name, multipart_id, *arguments):
        if multipart_id not in self.get_bucket(bucket_name).multiparts:
            raise NoSuchUpload(upload_id=multipart_id)
        return operation(self, bucket_name, multipart_id, *arguments)
    return run

S3Backend.upload_part = checked(S3Backend.upload_part)
S3Backend.complete_multipart_upload = checked(S3Backend.complete_multipart_upload)

# Without this, moto checks a condition and puts the object in two steps, so two conditional puts may both succeed.
put_object, one_at_a_time = S3Response.put_object, threading.Lock()
def put_alone(self):
    with one_at_a_time:
        return put_object(self)

S3Response.put_object = put_alone
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """Return the options of a running S3 server, which ends with its standard input, even if this process is killed."""
    pytest.importorskip("s3fs")
    if importlib.util.find_spec("moto") is None:
        pytest.skip("needs moto[server]")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield {"key": "testing", "secret": "testing", "endpoint_url": f"http://127.0.0.1:{port}"}
        server.communicate()


@pytest.fixture
def bucket(s3: dict[str, Any]) -> str:
    name = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3", **s3).mkdir(name)
    return name
