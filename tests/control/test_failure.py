from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from bytecheckpoint import errors
from bytecheckpoint.control.base import SingleProcess
from bytecheckpoint.control.failure import FailureRecord
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import (
    BytecheckpointError,
    CorruptionError,
    MismatchError,
    RankFailedError,
    StorageError,
)
from bytecheckpoint.runtime.messages import describe_disagreement, format_ranks, ranks_text

HERE = PeerIdentity(2, "host-a", 4711, 99, "boot", "pidns", "netns")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ThrottledError(StorageError):
    """An error that a plug-in defines."""


def round_trip(error):
    try:
        raise error
    except BaseException as raised:
        return FailureRecord.unpack(FailureRecord.from_exception(raised, "write", HERE).pack())


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([5, 0, 1, 2], "0-2,5"), ([0, 2, 4], "0,2,4"), ([1, 0], "0-1")]
)
def test_ranks_are_formatted_as_spans(ranks, text):
    assert format_ranks(ranks) == text


def test_many_spans_are_shortened():
    assert ranks_text([7]) == "rank 7"
    assert ranks_text(range(2000)) == "ranks 0-1999"
    assert ranks_text(range(0, 2000, 2)) == "ranks 0,2,4,6,8,10,12,14,..."


def test_a_disagreement_lists_values_and_ranks():
    facts = [{"path": "a", "step": "1"}] * 3 + [{"path": "b", "step": "1"}, {"step": "1", "mode": "x"}]
    text = describe_disagreement("save/begin", facts)
    assert "path: 'a' on ranks 0-2; 'b' on rank 3; nothing on rank 4" in text
    assert "mode: nothing on ranks 0-3; 'x' on rank 4" in text
    assert "step" not in text
    assert describe_disagreement("save/begin", facts[:3]) == ""


def test_a_foreign_exception_becomes_rank_failed():
    error = round_trip(KeyError("wte")).error()
    assert type(error) is RankFailedError
    assert str(error).startswith("rank 2 on host-a failed in write: KeyError: 'wte'\n\n    Traceback")
    assert (error.rank, error.host, error.phase, error.error_type) == (2, "host-a", "write", "KeyError")
    assert "raise error" in error.traceback_text


def test_an_error_of_this_library_keeps_its_class_and_message():
    error = round_trip(CorruptionError("flipped")).error()
    assert type(error) is CorruptionError
    assert str(error) == "flipped"
    assert isinstance(error.__cause__, RankFailedError)
    assert error.__cause__.rank == 2


def test_an_error_of_a_plug_in_becomes_its_nearest_class():
    assert type(round_trip(ThrottledError("slow down")).error()) is StorageError


def test_faults_are_part_of_a_report():
    faults = [("missing", "model.wte", "did you mean model.wpe?")]
    error = round_trip(MismatchError("one fault", faults)).error()
    assert isinstance(error, MismatchError)
    assert error.faults == faults


def test_a_reported_failure_is_not_wrapped_again():
    first = round_trip(ValueError("x")).error()
    again = round_trip(first).error()
    assert type(again) is RankFailedError
    assert str(again) == str(first)
    assert (again.rank, again.phase, again.error_type) == (2, "write", "ValueError")


@pytest.mark.parametrize("error", [Unprintable(), ValueError("\ud800"), KeyboardInterrupt(), SystemExit(3)])
def test_any_exception_can_be_reported(error):
    assert isinstance(round_trip(error).error(), RankFailedError)


def test_every_error_class_can_be_reported():
    for name in errors.__all__:
        if issubclass(getattr(errors, name), Warning):
            continue
        error = round_trip(getattr(errors, name)("text")).error()
        assert isinstance(error, BytecheckpointError)
        assert type(error).__name__ == name
        assert "text" in str(error)


def test_a_record_cannot_name_a_class_outside_the_hierarchy():
    assert type(FailureRecord(0, "h", 1, "p", "t", "m", raised_as="annotations").error()) is BytecheckpointError


def test_a_process_is_identified_by_pid_and_start_time():
    here = PeerIdentity.of_this_process(0)
    assert not here.has_ended()
    assert here.can_observe(here)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    peer = PeerIdentity(1, here.host, child.pid, start, here.boot_id, here.pid_namespace, here.net_namespace)
    reused = PeerIdentity(1, here.host, child.pid, start + 1, here.boot_id, here.pid_namespace, here.net_namespace)
    assert not peer.has_ended()
    assert reused.has_ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert peer.has_ended(), "a zombie has ended"
    child.communicate()
    assert peer.has_ended()


def test_processes_of_other_hosts_cannot_be_observed():
    here = PeerIdentity.of_this_process(0)
    unknown = PeerIdentity(1, here.host, 1, 1, "", "", "")
    assert not here.can_observe(HERE)
    assert not unknown.can_observe(unknown)
    assert not unknown.shares_loopback(unknown)


def test_a_single_process_completes_every_exchange():
    operation = SingleProcess().operation("save", deadline_s=1)
    assert operation.gather("a", b"x") == [b"x"]
    assert operation.scatter("b", [b"y"]) == b"y"
    assert operation.broadcast("c", b"z") == b"z"
    operation.agree("d", {"path": "p"})
    operation.barrier("e")
    with pytest.raises(KeyError, match="original"):
        with operation.phase("f"):
            raise KeyError("original")
    operation.close()


def test_a_process_without_free_descriptors_does_not_take_others_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    here = PeerIdentity.of_this_process(0)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", fail)
    has_ended = here.has_ended()
    monkeypatch.undo()
    assert not has_ended
    assert not here.has_ended()
