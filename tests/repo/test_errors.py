"""The error hierarchy: builtin bases, messages, pickling, and what each error means for a commit."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.checkpoint import location
from bytecheckpoint.errors import CommitUnknownError, SavePendingError, StorageError
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend

BUILTIN_BASES = {
    "AccessDeniedError": PermissionError,
    "CheckpointNotFoundError": FileNotFoundError,
    "DeadlineError": TimeoutError,
    "KeyExistsError": FileExistsError,
    "KeyNotFoundError": FileNotFoundError,
    "NameNotFoundError": KeyError,
    "PlanError": ValueError,
    "SavePendingError": TimeoutError,
    "StateError": ValueError,
    "StorageError": OSError,
    "TensorIndexError": IndexError,
    "ThreadError": RuntimeError,
    "UnknownObjectError": TypeError,
    "UnserializableError": TypeError,
    "UnsupportedTensorError": TypeError,
    "UnsupportedURLError": ValueError,
    "UsageError": ValueError,
}


@pytest.mark.parametrize(("name", "base"), BUILTIN_BASES.items())
def test_builtin_base(name: str, base: type[Exception]) -> None:
    with pytest.raises(base) as caught:
        raise getattr(errors, name)("what happened, and where")
    assert isinstance(caught.value, errors.BytecheckpointError)


@pytest.mark.parametrize("name", errors.__all__)
def test_message_and_pickling(name: str) -> None:
    error = getattr(errors, name)("it's broken")
    assert str(error) == "it's broken"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_only_two_errors_leave_the_commit_open() -> None:
    raised = [name for name in errors.__all__ if name.endswith("Error")]
    unknown = {name for name in raised if getattr(errors, name)("x").may_have_committed}
    assert unknown == {"CommitUnknownError", "SavePendingError"}


def _save_with(rule: FaultRule, path: Path, monkeypatch: pytest.MonkeyPatch, *more: FaultRule) -> Exception:
    real = location.open_backend
    monkeypatch.setattr(
        location, "open_backend", lambda url, **options: FaultyBackend(real(url, **options), [rule, *more])
    )
    with pytest.raises(errors.BytecheckpointError) as caught:
        bcp.save(path, {"model": {"w": torch.zeros(4)}}, step=1)
    monkeypatch.undo()
    return caught.value


def test_a_commit_that_certainly_did_not_land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FaultRule("put", "manifest.msgpack", error=StorageError("no answer"))
    error = _save_with(rule, tmp_path, monkeypatch)
    assert isinstance(error, StorageError)
    assert not error.may_have_committed
    assert not list(tmp_path.iterdir()), "the failed attempt is removed"


def test_a_commit_whose_outcome_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails while it writes the manifest, and again when the manifest is read back."""
    put = FaultRule("put", "manifest.msgpack", error=StorageError("no answer"), after=True)
    get = FaultRule("get", "manifest.msgpack", nth=2, error=StorageError("still no answer"))
    error = _save_with(put, tmp_path, monkeypatch, get)
    assert isinstance(error, CommitUnknownError)
    assert error.may_have_committed
    assert bcp.open(tmp_path).verify().ok, "nothing was deleted, and in this case the checkpoint did land"


def test_waiting_for_a_result_times_out_while_the_save_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = location.open_backend
    rule = FaultRule("put", "manifest.msgpack", wait=release)
    monkeypatch.setattr(location, "open_backend", lambda url, **options: FaultyBackend(real(url, **options), [rule]))
    handle = bcp.save(tmp_path, {"model": {"w": torch.zeros(4)}}, async_save=True)
    for wait in (handle.result, handle.exception):
        with pytest.raises(SavePendingError, match=r"has not ended after 0\.01 s and continues") as caught:
            wait(0.01)
        assert caught.value.may_have_committed
    release.set()
    assert handle.result(60).url == bcp.open(tmp_path).url


def test_names_that_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.zeros(4, 2)}}, step=1)
    checkpoint = bcp.open(tmp_path)
    with pytest.raises(KeyError, match=r"no tensor 'model\.x' in"):
        checkpoint["model.x"]
    assert checkpoint.get("model.x") is None
    assert "model.x" not in checkpoint
    with pytest.raises(KeyError, match="no section 'optimizer'; it has model"):
        checkpoint.section_values("optimizer")
    with pytest.raises(IndexError, match=r"model\.w"):
        checkpoint["model.w"][7]
    with pytest.raises(FileNotFoundError):
        bcp.open(tmp_path / "nothing")
