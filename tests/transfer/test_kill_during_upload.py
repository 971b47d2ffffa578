"""Copies by real processes to a real S3 server, killed at any moment and continued."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("s3fs")

import torch
from killed_copies import (
    ENDS,
    PART,
    PARTS,
    WINDOW,
    Gate,
    acknowledged,
    contents,
    kill_often,
    parts_of,
    pending_ids,
    upload_ids,
)
from s3_faults import FaultProxy, fault_proxy
from transfer_launcher import Launcher
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import finish_upload, unfinished_uploads
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.transfer.journal import find_journals

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.sampled(1, of=__name__)]


@pytest.fixture(scope="module")
def bcp_processes() -> Launcher:
    return Launcher()


@pytest.fixture
def proxy(s3: dict[str, Any]) -> Iterator[FaultProxy]:
    with fault_proxy(s3["endpoint_url"]) as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    model = {
        f"t{i}": torch.from_numpy(generator.integers(0, 255, size, np.uint8)) for i, size in enumerate((32 << 20, 9))
    }
    moments = {"m": torch.from_numpy(generator.standard_normal(5 << 20).astype(np.float32))}
    bcp.save(str(tmp_path / "root" / "step-7"), {"model": model, "moments": moments, "extra": {"step": 7}})
    return tmp_path / "root" / "step-7"


def test_ten_kills(source: Path, proxy: FaultProxy, bucket: str, s3: dict[str, Any], bcp_processes: Launcher) -> None:
    """No acknowledged part is sent again, and the result is equal, wherever the upload is killed."""
    url, target, root = f"s3://{bucket}/runs/step-7", f"/{bucket}/runs/step-7/", source.parent
    options = [f"-o{name}={value}" for name, value in {**s3, "endpoint_url": proxy.url}.items()]
    commands = [
        (*command, *options)
        for command in (("copy", source, url), ("upload", root), ("upload", root, f"s3://{bucket}/runs"))
    ]

    def check() -> None:
        assert [(one.path, one.url) for one in unfinished_uploads(str(root))] == [(str(source), url)]

    total, begun = kill_often([*PARTS, *ENDS], commands, source, target, proxy, bcp_processes, check)
    proxy.rule = gate = Gate("none", 0, target)
    bcp_processes.start("upload", root, *options, window=WINDOW)
    assert bcp_processes.wait() == 0
    assert gate.parts == []
    count = parts_of(bcp.open(str(source)))
    assert count <= total <= count + 2 * len(PARTS)
    assert contents(open_backend(url, **s3)) == contents(open_backend(source))
    assert bcp.open(url, storage_options=s3).verify().ok
    assert not begun & pending_ids(bucket, s3)
    assert list(find_journals(str(root))) == []


def _kill_in_a_part(source: Path, url: str, options: list[str], proxy: FaultProxy, processes: Launcher) -> None:
    """Begin a copy, and kill it while ``WINDOW`` parts are in flight."""
    proxy.rule = Gate("part", 3, url.removeprefix("s3:/") + "/")
    pid = processes.start("copy", source, url, *options, window=WINDOW)
    for _ in range(WINDOW):
        assert proxy.waiting.acquire(timeout=time_limit(60))
    processes.kill(pid)


@pytest.mark.sampled(1, of="what follows the kill of an upload")
def test_a_kill_before_the_id_of_the_upload_is_known(
    source: Path, proxy: FaultProxy, bucket: str, s3: dict[str, Any], bcp_processes: Launcher
) -> None:
    """The journal cannot name it, but the store lists it."""
    url, options = (
        f"s3://{bucket}/runs/step-7",
        [f"-o{name}={v}" for name, v in {**s3, "endpoint_url": proxy.url}.items()],
    )
    proxy.rule = lambda exchange: "late" if exchange.kind == "begin" else None
    pid = bcp_processes.start("copy", source, url, *options, window=WINDOW)
    assert proxy.waiting.acquire(timeout=time_limit(60))
    bcp_processes.kill(pid)
    proxy.go_on.set()
    assert upload_ids(source) == set()
    lost = pending_ids(bucket, s3)
    assert lost
    proxy.rule = lambda exchange: None
    bcp_processes.start("copy", source, url, *options, window=WINDOW)
    assert bcp_processes.wait() == 0
    shown = CliRunner().invoke(
        cli, ["clean", "--dry-run", "--older-than", "0", "--json", f"s3://{bucket}/runs", *options]
    )
    assert {one["upload_id"] for one in json.loads(shown.stdout)["uploads"]} == lost == pending_ids(bucket, s3)
    assert bcp.open(url, storage_options=s3).verify().ok


@pytest.mark.sampled(1, of="what follows the kill of an upload")
def test_the_store_has_dropped_the_upload(
    source: Path, proxy: FaultProxy, bucket: str, s3: dict[str, Any], bcp_processes: Launcher
) -> None:
    url = f"s3://{bucket}/step-7"
    options = [f"-o{name}={value}" for name, value in {**s3, "endpoint_url": proxy.url}.items()]
    _kill_in_a_part(source, url, options, proxy, bcp_processes)
    proxy.go_on.set()
    fs = fsspec.filesystem("s3", **s3)
    for upload in fs.list_multipart_uploads(bucket):
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    proxy.rule = lambda exchange: None
    bcp_processes.start("upload", source.parent, *options, window=WINDOW)
    assert bcp_processes.wait() == 0
    assert bcp.open(url, storage_options=s3).verify().ok


@pytest.mark.sampled(1, of="what follows the kill of an upload")
def test_damage_after_a_kill_ends_the_upload(
    source: Path, proxy: FaultProxy, bucket: str, s3: dict[str, Any], bcp_processes: Launcher
) -> None:
    """Nothing that costs money remains, and no damaged byte is stored."""
    url = f"s3://{bucket}/step-7"
    options = [f"-o{name}={value}" for name, value in {**s3, "endpoint_url": proxy.url}.items()]
    _kill_in_a_part(source, url, options, proxy, bcp_processes)
    begun = upload_ids(source)
    proxy.go_on.set()
    proxy.rule = lambda exchange: None
    path = source / bcp.open(str(source)).manifest.files.name[0]
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    bcp_processes.start("upload", source.parent, *options, window=WINDOW)
    assert bcp_processes.wait() == 4
    assert begun
    assert not begun & pending_ids(bucket, s3)
    assert fsspec.filesystem("s3", **s3).find(bucket) == []
    assert list(find_journals(str(source.parent))) == []


_SAVE = """
import json, sys
import numpy, torch
import bytecheckpoint as bcp
from bytecheckpoint.storage_backends.remote import parts

parts.PART_BYTES = int(sys.argv[4])
numbers = numpy.random.default_rng(0).integers(0, 255, 54 << 20, numpy.uint8)
state = {"model": {"t": torch.from_numpy(numbers)}, "extra": {"step": 7}}
location = bcp.Location(sys.argv[1], tier=bcp.Tier(sys.argv[2]), storage_options=json.loads(sys.argv[3]))
bcp.save(location, state).uploaded()
"""


def test_a_killed_save_with_a_tier(tmp_path: Path, proxy: FaultProxy, bucket: str, s3: dict[str, Any]) -> None:
    """The training job is killed twice while it uploads; what the store has confirmed is not sent again."""
    url, tier = f"s3://{bucket}/runs/step-7", tmp_path / "tier"
    options = {**s3, "endpoint_url": proxy.url}
    proxy.rule = Gate("part", 3, f"/{bucket}/runs/step-7/")
    command = ["-c", _SAVE, url, str(tier), json.dumps(options), str(PART)]
    job = warm_python().start(command, stdout=subprocess.DEVNULL, stderr=2)
    for _ in range(8):
        assert proxy.waiting.acquire(timeout=time_limit(60)), proxy.kinds
    job.kill()
    assert job.wait(time_limit(10)) == -signal.SIGKILL
    proxy.go_on.set()
    folder = tier / f"s3@{proxy.url.partition('://')[2].replace(':', '-')}" / bucket / "runs" / "step-7"
    known = acknowledged(folder)
    assert len(known) >= 3
    assert bcp.load(bcp.Location(url, tier=bcp.Tier(tier), storage_options=options), {"extra": {"step": 0}}).loaded
    proxy.rule = gate = Gate("none", 0, f"/{bucket}/runs/step-7/")
    [upload] = unfinished_uploads(str(tier))
    report = finish_upload(upload, bcp.Location(upload.url, storage_options=options))
    assert 0 < report.sent <= report.size - len(known) * PART
    assert not known & set(gate.parts)
    assert bcp.open(url, storage_options=s3).verify().ok
    assert not pending_ids(bucket, s3)
