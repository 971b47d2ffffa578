"""Copies between two prefixes of a real S3 server by real processes, killed at any moment and continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("s3fs")

import torch
from killed_copies import (
    ENDS,
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
from s3_faults import Exchange, FaultProxy, fault_proxy
from transfer_launcher import Launcher

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.sampled(2, of=__name__)]


@pytest.fixture(scope="module")
def bcp_processes() -> Launcher:
    return Launcher()


def save(url: str, s3: dict[str, Any], seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    model = {
        f"t{i}": torch.from_numpy(generator.integers(0, 255, size, np.uint8)) for i, size in enumerate((32 << 20, 9))
    }
    moments = {"m": torch.from_numpy(generator.standard_normal(5 << 20).astype(np.float32))}
    bcp.save(url, {"model": model, "moments": moments, "extra": {"seed": seed}}, storage_options=s3)


@dataclass
class Between:
    """A copy from one prefix of a bucket to another one, through a proxy, with its journal in ``journals``."""

    bucket: str
    s3: dict[str, Any]
    proxy: FaultProxy
    journals: Path
    processes: Launcher

    @property
    def source_url(self) -> str:
        return f"s3://{self.bucket}/from/step-7"

    @property
    def target_url(self) -> str:
        return f"s3://{self.bucket}/to/step-7"

    @property
    def source(self) -> StorageBackend:
        return open_backend(self.source_url, **self.s3)

    @property
    def target(self) -> StorageBackend:
        return open_backend(self.target_url, **self.s3)

    @property
    def path(self) -> str:
        return f"/{self.bucket}/to/step-7/"

    @property
    def options(self) -> list[str]:
        return [f"-o{name}={value}" for name, value in {**self.s3, "endpoint_url": self.proxy.url}.items()]

    @property
    def command(self) -> tuple[object, ...]:
        return ("copy", self.source_url, self.target_url, "--journal", self.journals, *self.options)

    def run(self) -> int:
        """Copy without faults; return the exit code."""
        self.proxy.rule = lambda exchange: None
        self.proxy.go_on.set()
        self.processes.start(*self.command, window=WINDOW)
        return self.processes.wait()

    def kill_in_a_part(self) -> set[str]:
        """Begin, and kill while ``WINDOW`` parts are in flight. Returns the ids of the uploads."""
        pid = self.start_held()
        self.processes.kill(pid)
        self.proxy.go_on.set()
        return upload_ids(self.journals)

    def start_held(self) -> int:
        self.proxy.rule = Gate("part", 3, self.path)
        pid = self.processes.start(*self.command, window=WINDOW)
        for _ in range(WINDOW):
            assert self.proxy.waiting.acquire(timeout=time_limit(60)), self.proxy.kinds
        return pid

    def check_equal(self) -> None:
        assert contents(self.target) == contents(self.source)
        assert bcp.open(self.target_url, storage_options=self.s3).verify().ok
        assert not pending_ids(self.bucket, self.s3)
        assert [*self.journals.iterdir()] == []


@pytest.fixture
def between(s3: dict[str, Any], bucket: str, tmp_path: Path, bcp_processes: Launcher) -> Iterator[Between]:
    with fault_proxy(s3["endpoint_url"]) as proxy:
        found = Between(bucket, s3, proxy, tmp_path / "journals", bcp_processes)
        save(found.source_url, s3)
        yield found


def test_kills(between: Between) -> None:
    """No acknowledged part is sent again, and the result is equal, wherever the copy is killed."""
    total, begun = kill_often(
        [*PARTS, *ENDS], [between.command], between.journals, between.path, between.proxy, between.processes
    )
    assert begun
    known = acknowledged(between.journals)
    between.proxy.rule = gate = Gate("none", 0, between.path)
    between.processes.start(*between.command, window=WINDOW)
    assert between.processes.wait() == 0
    assert not known & set(gate.parts)
    total += len(gate.parts)  # a file without parts may be the last one that was killed, before another one is complete
    count = parts_of(bcp.open(between.source_url, storage_options=between.s3))
    assert count <= total <= count + WINDOW * len([*PARTS, *ENDS])
    between.check_equal()


def test_a_kill_after_the_commit(between: Between) -> None:
    """The next copy removes the journal, and writes nothing."""

    def hold(exchange: Exchange) -> str | None:
        return "late" if exchange.kind == "put" and exchange.path.endswith("/manifest.msgpack") else None

    between.proxy.rule = hold
    pid = between.processes.start(*between.command, window=WINDOW)
    assert between.proxy.waiting.acquire(timeout=time_limit(60)), between.proxy.kinds
    between.processes.kill(pid)
    between.proxy.go_on.set()
    assert len([*between.journals.iterdir()]) == 1
    between.proxy.rule = gate = Gate("none", 0, between.path)
    between.processes.start(*between.command, window=WINDOW)
    assert between.processes.wait() == 0
    assert gate.parts == []
    between.check_equal()


@pytest.mark.sampled(2, of="what follows the kill of a copy")
def test_the_uploads_were_ended(between: Between) -> None:
    """By ``bcp clean``: the copy begins again."""
    assert between.kill_in_a_part() <= pending_ids(between.bucket, between.s3)
    target = f"s3://{between.bucket}/to"
    ended = CliRunner().invoke(cli, ["clean", "--older-than", "0", "--yes", "--json", target, *between.options])
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["uploads"]
    assert not pending_ids(between.bucket, between.s3)
    assert between.run() == 0
    between.check_equal()


@pytest.mark.sampled(2, of="what follows the kill of a copy")
def test_the_source_is_damaged_after_a_kill(between: Between) -> None:
    """Nothing remains at the target, and no damaged byte is stored."""
    assert between.kill_in_a_part()
    key = bcp.open(between.source_url, storage_options=between.s3).manifest.files.name[0]
    data = bytearray(between.source.get(key))
    data[-1000] ^= 1
    between.source.put(key, data)
    assert between.run() == 4
    assert contents(between.target) == {}
    assert not pending_ids(between.bucket, between.s3)
    assert [*between.journals.iterdir()] == []


@pytest.mark.sampled(2, of="what follows the kill of a copy")
def test_another_checkpoint_is_saved_after_a_kill(between: Between) -> None:
    """The uploads of the first one are ended, and its files removed."""
    assert between.kill_in_a_part()
    save(between.source_url, between.s3, seed=1)
    assert between.run() == 0
    between.check_equal()


@pytest.mark.sampled(2, of="what follows the kill of a copy")
def test_another_process_makes_the_copy(between: Between) -> None:
    """It is refused, and does not disturb the first one."""
    between.start_held()
    [journal] = between.journals.iterdir()
    busy = CliRunner().invoke(cli, [*map(str, between.command)])
    assert busy.exit_code == 2
    assert f"it has locked {journal}" in busy.stderr
    assert f"from {between.source_url} at {between.proxy.url} to {between.target_url}" in busy.stderr
    between.proxy.go_on.set()
    assert between.processes.wait() == 0
    between.check_equal()


@pytest.mark.sampled(2, of="what follows the kill of a copy")
def test_another_journal_has_completed_the_copy(between: Between, tmp_path: Path) -> None:
    """Another user, or through another endpoint. The first journal ends its uploads, which cost money."""
    begun = between.kill_in_a_part()
    source = bcp.open(between.source_url, storage_options=between.s3)
    copy(source, bcp.Location(between.target_url, storage_options=between.s3), journal=between.journals)
    assert len([*between.journals.iterdir()]) == 1
    assert begun & pending_ids(between.bucket, between.s3)
    assert between.run() == 0
    between.check_equal()
