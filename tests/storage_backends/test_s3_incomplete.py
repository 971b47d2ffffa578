"""Uploads that no process completes: they are listed and ended, by their age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

pytest.importorskip("s3fs")

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.attempts import attempt_name, new_attempt, new_attempt_id, remove_attempt
from bytecheckpoint.cli import cli
from bytecheckpoint.storage_backends import IncompleteUpload, open_backend

pytestmark = pytest.mark.s3


def _begin(bucket: str, s3: dict[str, Any], *keys: str) -> None:
    """Begin uploads, as a process that is killed then."""
    fs = fsspec.filesystem("s3", **s3)
    for key in keys:
        begun = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        fs.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x")


def _keys(bucket: str, s3: dict[str, Any]) -> list[str]:
    return sorted(found.key for found in open_backend(f"s3://{bucket}", **s3).incomplete())


def test_uploads_are_listed_and_ended(bucket: str, s3: dict[str, Any]) -> None:
    _begin(bucket, s3, "root/a/1", "root/a/1", "root/b/2", "root-2/c", "other")
    backend = open_backend(f"s3://{bucket}/root", **s3)
    found = [*backend.incomplete()]
    assert [one.key for one in found] == ["a/1", "a/1", "b/2"]
    assert len({one.upload_id for one in found}) == 3
    assert all(one.age_s >= 0 for one in found)
    assert [one.upload_id for one in backend.incomplete("a/")] == [one.upload_id for one in found[:2]]
    backend.abort_incomplete([found[0], found[2]])
    backend.abort_incomplete([found[0], IncompleteUpload("none", "none", 0.0)])  # they have ended
    assert [one.upload_id for one in backend.incomplete()] == [found[1].upload_id]
    assert _keys(bucket, s3) == ["other", "root-2/c", "root/a/1"]


def test_a_failed_attempt_is_removed_with_its_uploads(bucket: str, s3: dict[str, Any]) -> None:
    attempt, other = new_attempt(), new_attempt()
    _begin(bucket, s3, f"root/{attempt}/model", f"root/{other}/model")
    backend = open_backend(f"s3://{bucket}/root", **s3)
    backend.put(f"{attempt}/values", b"x")
    remove_attempt(backend, attempt)
    assert [*backend.list()] == []
    assert _keys(bucket, s3) == [f"root/{other}/model"]


def test_housekeeping_ends_the_uploads_of_ended_jobs(
    bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, unknown = attempt_name(new_attempt_id(b"dead")), new_attempt()
    uploads = [f"root/step-1/{ended}/model", f"root/step-1/{unknown}/model", f"root/unmanaged/{ended}/model"]
    _begin(bucket, s3, *uploads)
    grace = "bytecheckpoint.manager.housekeeping._UPLOAD_GRACE_S"
    for grace_s, remaining in ((1e12, uploads), (-1.0, uploads[1:])):
        monkeypatch.setattr(grace, grace_s)
        with bcp.CheckpointManager(f"s3://{bucket}/root", cadence=1, keep=2, storage_options=s3) as manager:
            manager.save(2, {"extra_state": {"step": 2}})
        assert _keys(bucket, s3) == sorted(remaining)


def _run(s3: dict[str, Any], *arguments: str, answer: str = "") -> tuple[int, str]:
    options = [text for name, value in s3.items() for text in ("-o", f"{name}={value}")]
    result = CliRunner().invoke(cli, [*arguments, *options], input=answer)
    return result.exit_code, result.stdout


def test_the_commands(bucket: str, s3: dict[str, Any]) -> None:
    _begin(bucket, s3, "root/step-1/attempt-1/model")
    root = f"s3://{bucket}/root"
    code, text = _run(s3, "clean", "--dry-run", "--older-than", "0", root)
    assert code == 0
    assert "step-1/attempt-1/model" in text
    assert "1 upload(s), 0 attempt(s) and 0 shared file(s) would be removed, 0 younger kept" in text
    code, text = _run(s3, "clean", "--dry-run", "--older-than", "0", "--json", root)
    (upload,) = json.loads(text)["uploads"]
    assert upload["key"] == "step-1/attempt-1/model"

    code, text = _run(s3, "clean", "--json", "--older-than", "1e9", root)
    found = json.loads(text)
    assert (code, found["root"], found["uploads"], found["younger"]) == (0, root, [], 1)
    code, text = _run(s3, "clean", "--older-than", "0", root, answer="n\n")
    assert code == 1
    assert "step-1/attempt-1/model" in text
    assert len(_keys(bucket, s3)) == 1
    code, text = _run(s3, "clean", "--older-than", "0", "--yes", "--json", root)
    assert code == 0
    assert [one["upload_id"] for one in json.loads(text)["uploads"]] == [upload["upload_id"]]
    assert _keys(bucket, s3) == []


def test_stores_without_uploads(tmp_path: Path) -> None:
    assert _run({}, "clean", str(tmp_path))[0] == 0
