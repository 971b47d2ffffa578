"""Mounts with caches, missing calls and errors at unusual moments; and two mounts of one folder.

The kernel and ``fuse_server`` do what sshfs, rclone, s3fs and others do. Caches never expire during a test.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sampling
import torch
from fuse_disk import FuseDisk, FuseRule, fuse_disk
from sorted_arguments import saving

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.lease import LEASE_KEY, Lease, check_holder, holder_of
from bytecheckpoint.checkpoint.manifest_file import read_manifest
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    RootInUseError,
    StorageError,
)
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import FaultRule, FaultyBackend

LONG_S = 3600
CHUNK = 1024


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseDisk]:
    with fuse_disk(tmp_path / "a") as disk:
        yield disk


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[FuseDisk, FuseDisk]]:
    """One folder, mounted as on two hosts."""
    with (
        fuse_disk(tmp_path / "a", cache_s=LONG_S) as first,
        fuse_disk(tmp_path / "b", other=first, cache_s=LONG_S) as second,
    ):
        yield first, second


def save(path: str, value: int, **options: Any) -> None:
    state = {"tree": {"t": torch.full((16 * CHUNK,), value), "same": torch.arange(16 * CHUNK)}}
    bcp.save(path, state, **saving(**{"chunk_size": CHUNK, **options})).result()


def check(path: str, value: int) -> None:
    opened = bcp.open(path)
    assert opened.verify().problems == ()
    assert opened["tree.t"].load().unique().tolist() == [value]


class HiddenError(Exception):
    """A cache hides a manifest that is listed."""


def check_elsewhere(path: str, value: int) -> None:
    try:
        check(path, value)
    except CheckpointError as error:
        if "is listed but cannot be opened" in str(error):
            raise HiddenError from error
        raise


# -- caches of two hosts -----------------------------------------------------------------------------------------------


def test_documents_are_read_to_their_end_although_their_size_is_cached(mounts: tuple[FuseDisk, FuseDisk]) -> None:
    writer, reader = (open_backend(f"{one.path}/root") for one in mounts)
    for size in (10, 100, 5, 0, 3 << 20):
        writer.put("doc", bytes(size))
        assert reader.get("doc") == bytes(size)
        assert reader.stat("doc").size == size
    with pytest.raises(StorageError, match="3145728 bytes"):
        reader.get("doc", max_size=100)


def test_no_damage_is_reported_after_an_overwrite_elsewhere(mounts: tuple[FuseDisk, FuseDisk]) -> None:
    first, second = (f"{one.path}/root/step-1" for one in mounts)
    for value, metadata in enumerate(({}, {"more": "x" * 5000}, {})):
        save(first, value, metadata=metadata)
        check(second, value)
        check(first, value)


def test_a_lease_is_alive_on_every_mount(mounts: tuple[FuseDisk, FuseDisk], caplog: pytest.LogCaptureFixture) -> None:
    first, second = (open_backend(one.path) for one in mounts)
    with closing(Lease.acquire(first, PeerIdentity.of_this_process(0), interval_s=60.0)) as lease:
        for beat in (1, 1000, 100_000):  # the encoded record gets longer
            lease._record = replace(lease._record, beat=beat)
            lease._send_heartbeat()
            assert holder_of(second) is not None
            with pytest.raises(RootInUseError, match=f"last heartbeat number {beat + 1},"):
                check_holder(second, b"other")
    assert "not a lease" not in caplog.text


# -- calls that a mount lacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EXDEV, errno.ENOTSUP, errno.EPERM, errno.ENOSYS])
def test_a_mount_that_has_no_links(mount: FuseDisk, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """rclone answers EIO, others another error. The server has no exclusive renames either."""
    mount.fail(FuseRule("link", number))
    assert not open_backend(mount.path).conditions().if_absent
    for value in (1, 2):
        save(f"{mount.path}/root/step-1", value)
        check(f"{mount.path}/root/step-1", value)
    with bcp.CheckpointManager(f"{mount.path}/managed", preemption=None, async_save=False) as manager:
        manager.save(1, {"tree": {"t": torch.ones(3)}}, force=True)
    assert "the lease cannot protect from a job that begins at the same moment" in caplog.text
    assert open_backend(f"{mount.path}/managed").list_children("") == ["step-1/"]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL])
def test_a_mount_that_opens_no_file_for_both_reading_and_writing(mount: FuseDisk, number: int) -> None:
    mount.fail(FuseRule("read and write", number))
    backend = open_backend(f"{mount.path}/root")
    with closing(Lease.acquire(backend, PeerIdentity.of_this_process(0), interval_s=60.0)) as lease:
        lease._send_heartbeat()
        assert lease._record.beat == 2
    for value in (1, 2):
        save(f"{backend.url}/step-1", value)
        check(f"{backend.url}/step-1", value)
    assert LEASE_KEY not in backend.list_children("")


@pytest.mark.parametrize("reported", ["nothing", "-1", "unlimited"])
def test_a_mount_that_does_not_know_its_free_space(mount: FuseDisk, reported: str) -> None:
    mount.fail(FuseRule("statfs", name=reported), FuseRule("fallocate", errno.EOPNOTSUPP))
    assert open_backend(mount.path).free_bytes() is None
    save(f"{mount.path}/step-1", 1)
    check(f"{mount.path}/step-1", 1)


@pytest.mark.parametrize("names", ["*.safetensors", "*/.bcp-tmp-*"], ids=["data", "manifest"])
def test_a_mount_that_reports_a_lost_write_at_close(mount: FuseDisk, names: str) -> None:
    """Such as s3fs, which uploads a file then. The manifest is not in place."""
    path = f"{mount.path}/step-1"
    save(path, 1)
    mount.fail(FuseRule("flush", errno.EIO, names))
    with pytest.raises(StorageError, match=r"writing '.*' in .*step-1: .*EIO"):
        save(path, 2)
    mount.mend()
    check(path, 1)
    save(path, 3)
    check(path, 3)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_mount_where_nothing_can_be_removed(mount: FuseDisk, number: int) -> None:
    mount.fail(FuseRule("unlink", number))
    for value in (1, 2):
        save(f"{mount.path}/step-{value}", value)
    save(f"{mount.path}/step-1", 3)
    check(f"{mount.path}/step-1", 3)
    check(f"{mount.path}/step-2", 2)


def test_a_manifest_that_a_cache_hides(mount: FuseDisk) -> None:
    """It is in the listing, and cannot be opened."""
    save(f"{mount.path}/root/step-1", 1)
    mount.fail(FuseRule("lookup", errno.ENOENT, f"*/{MANIFEST_KEY}"))
    with pytest.raises(CheckpointError, match=f"{MANIFEST_KEY} is listed but cannot be opened: another host"):
        bcp.open(f"{mount.path}/root/step-1")
    mount.mend()
    check(f"{mount.path}/root/step-1", 1)


def test_a_manifest_is_read_again_before_it_counts_as_damaged(tmp_path: Path) -> None:
    save(str(tmp_path / "step-1"), 1)
    stale = FaultRule("get", MANIFEST_KEY, cut=100)
    backend = FaultyBackend(open_backend(tmp_path / "step-1"), [stale])
    assert read_manifest(backend).step == bcp.open(tmp_path / "step-1").step
    assert stale.matched == 2
    stale.times = None
    with pytest.raises(CorruptionError, match=MANIFEST_KEY):
        read_manifest(backend)


# -- listings that lag -------------------------------------------------------------------------------------------------


def test_a_removal_elsewhere_keeps_what_a_fresh_save_refers_to(mounts: tuple[FuseDisk, FuseDisk]) -> None:
    first, second = (f"{one.path}/root" for one in mounts)
    save(f"{first}/step-1", 1, base="auto")
    mounts[1].fail(FuseRule("readdir", name="root/step-2"))
    save(f"{first}/step-2", 2, base="auto")
    assert bcp.open(f"{first}/step-2").manifest.references.name
    assert "a listing may lack" in remove(f"{second}/step-1").problem
    check(f"{first}/step-2", 2)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_two_hosts_save_overwrite_and_remove(mounts: tuple[FuseDisk, FuseDisk], number: int) -> None:
    """Each host sees in listings what the other one has saved some operations later, and caches what it has read.

    Whatever is committed loads on both hosts; the host that saved it sees it at once.
    """
    draw = random.Random(f"{sampling.seed()} {number}")
    committed: dict[str, tuple[int, int]] = {}  # the last value, and the host that has saved it
    hidden: list[dict[str, int]] = [{}, {}]  # by host, the names that its listings lack, and until when
    for value in range(60):
        here = draw.randrange(2)
        for host, disk in enumerate(mounts):
            hidden[host] = {name: until for name, until in hidden[host].items() if until > value}
            disk.fail(*(FuseRule("readdir", name=f"root/{name}") for name in hidden[host]))
        name = f"step-{draw.randrange(1, 6)}"
        path = f"{mounts[here].path}/root/{name}"
        if draw.random() < 0.7:
            save(path, value, base=draw.choice(["auto", "auto", None]), step=value)
            if name not in committed:
                hidden[1 - here][name] = value + draw.randrange(1, 6)
            committed[name] = value, here
        elif name in committed:
            try:
                remove(path)
            except CheckpointError:  # this host does not see it yet
                assert committed[name][1] != here
            else:
                del committed[name]
        if draw.random() < 0.3:
            session_of().engine.shared.last_commit = None  # as another process
        for one, (expected, host) in committed.items():
            check(f"{mounts[host].path}/root/{one}", expected)
            with suppress(CheckpointNotFoundError, HiddenError):  # it is not seen there yet
                check_elsewhere(f"{mounts[1 - host].path}/root/{one}", expected)


def test_a_folder_that_another_host_has_removed_is_created_again(mounts: tuple[FuseDisk, FuseDisk]) -> None:
    """Although this host has cached that it is there."""
    first, second = (f"{one.path}/root" for one in mounts)
    for value in (1, 2):
        save(f"{first}/step-1", value)
        check(f"{second}/step-1", value)
        remove(f"{first}/step-1")
        save(f"{second}/step-1", value + 10)
        check(f"{second}/step-1", value + 10)
