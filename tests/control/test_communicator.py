from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from leak_watch import threads_left

from bytecheckpoint.control.base import SingleProcess
from bytecheckpoint.control.communicator import SocketCommunicator, current_communicator
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import (
    ControlError,
    DeadlineError,
    DisagreementError,
    MismatchError,
    RankFailedError,
)
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(20, of=__name__)

WORLDS = [2, 4]
LARGE = 9 << 20


SHORT_S = time_limit(1)
"""A deadline of which only the rank that never comes is too late, also where ranks run one after the other."""


def begin(kind="save", deadline_s=time_limit(20)):
    return current_communicator().operation(kind, deadline_s=deadline_s)


def raised_by(call):
    """Return class name, text and class name of the cause of what the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return None


def exchange(rank, world_size, operation):
    gathered = operation.gather("plan", b"from %d" % rank)
    scattered = operation.scatter("plan", [b"for %d" % r for r in range(world_size)] if rank == 0 else None)
    sent = operation.broadcast("plan", b"to all" if rank == 0 else None)
    operation.agree("arguments", {"path": "p"})
    operation.barrier("done")
    return gathered, scattered, sent


def run_operation(rank, world_size):
    operation = begin()
    result = exchange(rank, world_size, operation)
    operation.close()
    return result


def kinds_of_communicator(rank, world_size):
    first = current_communicator()
    return type(first).__name__, first is current_communicator(), first.rank, first.world_size


def large_payloads(rank, world_size):
    operation = begin()
    payload = bytes([rank]) * LARGE
    gathered = operation.gather("large", payload)
    assert gathered is None or gathered == [bytes([r]) * LARGE for r in range(world_size)]
    got = operation.scatter("large", gathered)
    sent = operation.broadcast("large", payload if rank == 0 else None)
    empty = operation.broadcast("empty", b"" if rank == 0 else None)
    operation.close()
    return got == payload, sent == bytes(LARGE), empty


def many_operations(rank, world_size, number):
    for _ in range(2):
        for _ in range(number):
            operation = begin()
            exchange(rank, world_size, operation)
            operation.close()
        for _ in range(3):
            operation = begin()
            raised_by(lambda operation=operation: fail_in_write(rank, operation, lambda: ValueError("again")))
            operation.close()
        dist.barrier()
        # Rank 0 receives the last messages a moment after the other ranks have left.
        give_up = time.monotonic() + time_limit(20)
        while current_communicator().router.unfinished_operations() and time.monotonic() < give_up:
            time.sleep(0.005)
        dist.barrier()
    return current_communicator().router.unfinished_operations()


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def fail_in_write(failing, operation, make_error):
    with operation.phase("write"):
        if operation.rank == failing:
            raise make_error()
        operation.barrier("written")


def one_rank_raises(rank, world_size, failing, kind):
    errors = {
        "foreign": lambda: ValueError("the disk is broken"),
        "unpicklable": Unpicklable,
        "own": lambda: MismatchError("does not fit", [("missing", "wte", "no such tensor")]),
    }
    operation = begin()
    seen = raised_by(lambda: fail_in_write(failing, operation, errors[kind]))
    repeated = raised_by(lambda: operation.barrier("later"))
    operation.close()
    return seen, repeated, run_operation(rank, world_size)[2]


def two_ranks_raise(rank, world_size):
    operation = begin()

    def fail():
        with operation.phase("write"):
            operation.barrier("together")
            raise ValueError(f"of rank {rank}")

    seen = raised_by(fail)
    operation.close()
    return seen


def interrupted(rank, world_size):
    operation = begin()
    try:
        with operation.phase("write"):
            if rank == 1:
                raise KeyboardInterrupt
            operation.barrier("written")
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    except RankFailedError as error:
        return "RankFailedError", error.error_type
    finally:
        operation.close()


def nested_phases(rank, world_size):
    operation = begin()

    def fail():
        with operation.phase("save"):
            fail_in_write(1, operation, lambda: ValueError("inner"))

    seen = raised_by(fail)
    operation.close()
    return seen


def disagree(rank, world_size):
    operation = begin()

    def differ():
        with operation.phase("begin"):
            operation.agree("arguments", {"path": "b" if rank == 3 else "a", "step": "7"})

    seen = raised_by(differ), raised_by(lambda: operation.barrier("later"))
    operation.close()
    return seen, run_operation(rank, world_size)[2]


def die(rank, world_size, dying, when):
    run_operation(rank, world_size)
    operation = begin(deadline_s=time_limit(30))
    if rank == dying:
        if when == "inside":
            operation.barrier("alive")
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on():
        # Either barrier may fail: one rank can have left the first while another is still in it.
        operation.barrier("alive")
        operation.barrier("written")

    first = raised_by(go_on)
    operation.close()
    following = begin(deadline_s=time_limit(30))
    second = raised_by(lambda: following.barrier("written"))
    following.close()
    return first, second


def end_after_leaving(rank, world_size):
    """The process of rank 1 ends after rank 1 has left, which does not fail the operation."""
    operation = begin()
    operation.gather("plan", b"")
    router = current_communicator().router
    if rank == 1:
        operation.close()
        router.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        assert router.wait_until(lambda: router.is_lost(operation._state, 1), time_limit(20))
        operation.check()
    if rank != 3:
        operation.broadcast("done", b"x" if rank == 0 else None)
    operation.close()
    return True


def leave_and_die(rank, world_size, waiting):
    """The process of rank 1 ends after rank 1 has left, while ``waiting`` still needs its part."""
    operation = begin()
    operation.gather("plan", b"")
    if rank == 1:
        operation.close()
        current_communicator().close()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        operation.gather("more", b"")
        operation.broadcast("done", b"x" if rank == waiting else None)
    except ControlError as error:
        return type(error).__name__, str(error)
    finally:
        operation.close()
    return None


def miss_an_operation(rank, world_size, absent):
    first = begin(deadline_s=SHORT_S)
    if rank == absent:
        # Enters after the others have raised.
        dist.barrier()
        seen = raised_by(lambda: first.barrier("written"))
    else:
        seen = raised_by(lambda: first.barrier("written"))
        dist.barrier()
    first.close()
    return seen, run_operation(rank, world_size)[2]


def root_waits_for_another(rank, world_size):
    operation = begin(deadline_s=1.5 if rank else 60)
    seen = None if rank == 2 else raised_by(lambda: operation.barrier("written"))
    operation.close()
    return seen


def operations_during_collectives(rank, world_size):
    communicator = current_communicator()

    def save(number):
        operation = communicator.operation("save", deadline_s=time_limit(30))
        try:
            return exchange(rank, world_size, operation)[2]
        finally:
            operation.close()

    with ThreadPoolExecutor(1) as executor:
        saves = [executor.submit(save, number) for number in range(20)]
        total = 0
        for number in range(200):
            tensor = torch.tensor([number])
            dist.all_reduce(tensor)
            total += int(tensor)
            dist.barrier()
            if number % 20 == 0:
                operation = communicator.operation("load", deadline_s=time_limit(30))
                exchange(rank, world_size, operation)
                operation.close()
        return total, [save.result() for save in saves]


def recreate_the_group(rank, world_size, folder):
    before = {*threading.enumerate()}
    first = current_communicator()
    run_operation(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    alone = type(current_communicator()).__name__
    assert threads_left("bytecheckpoint-control", before) == [], "the first is closed"
    store = dist.FileStore(f"{folder}/again", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    second = current_communicator()
    return alone, second is not first, run_operation(rank, world_size)[2]


def same_store_twice(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/shared", world_size)
    results = []
    for _ in range(2):
        communicator = SocketCommunicator.connect(store, rank, world_size, deadline_s=time_limit(20))
        operation = communicator.operation("save", deadline_s=time_limit(20))
        results.append(exchange(rank, world_size, operation)[2])
        operation.close()
        communicator.close()
    return results


def other_hosts(rank, world_size):
    """Ranks with identities of different hosts connect over a real address."""
    here = PeerIdentity(rank, f"host-{rank}", os.getpid(), 1, f"boot-{rank}", "pid", "net")
    store = dist.distributed_c10d._get_default_store()
    communicator = SocketCommunicator.connect(store, rank, world_size, deadline_s=20, identity=here)
    operation = communicator.operation("save", deadline_s=time_limit(20))
    result = exchange(rank, world_size, operation)[2]
    operation.close()
    communicator.close()
    return result


def connect_without(rank, world_size, absent):
    if rank == absent:
        dist.barrier()
        return None
    seen = raised_by(lambda: current_communicator(deadline_s=SHORT_S))
    dist.barrier()
    return seen


def misuse(rank, world_size):
    operation = begin()
    seen = []
    if rank == 0:
        seen += [raised_by(lambda: operation.scatter("x", [b""])), raised_by(lambda: operation.broadcast("y", None))]
    operation.close()
    operation.close()
    seen.append(raised_by(lambda: operation.barrier("late")))
    return seen


@pytest.mark.parametrize("world_size", WORLDS)
def test_messages_arrive(rank_pool, world_size):
    results = rank_pool.run(run_operation, world_size=world_size)
    assert results[0][0] == [b"from %d" % rank for rank in range(world_size)]
    assert [result[0] for result in results[1:]] == [None] * (world_size - 1)
    assert [result[1] for result in results] == [b"for %d" % rank for rank in range(world_size)]
    assert [result[2] for result in results] == [b"to all"] * world_size


def test_a_process_group_has_one_communicator(rank_pool):
    assert isinstance(current_communicator(), SingleProcess)
    assert rank_pool.run(kinds_of_communicator, world_size=1) == [("SingleProcess", False, 0, 1)]
    assert rank_pool.run(kinds_of_communicator, world_size=2) == [
        ("SocketCommunicator", True, rank, 2) for rank in range(2)
    ]


def test_a_recreated_group_gets_a_new_communicator(rank_pool, tmp_path):
    assert rank_pool.run(recreate_the_group, str(tmp_path), world_size=2) == [("SingleProcess", True, b"to all")] * 2


def test_a_store_with_registrations_of_an_earlier_communicator_can_be_used_again(rank_pool, tmp_path):
    assert rank_pool.run(same_store_twice, str(tmp_path), world_size=2, backend=None) == [[b"to all"] * 2] * 2


def test_ranks_on_several_hosts_connect(rank_pool):
    assert rank_pool.run(other_hosts, world_size=2) == [b"to all"] * 2


def test_a_rank_that_does_not_connect_is_named(rank_pool):
    results = rank_pool.run(connect_without, 2, world_size=3)
    assert results[0][0] == "DeadlineError"
    assert "rank(s) 2 to register" in results[0][1]
    assert results[1][0] == "DeadlineError"


def test_payloads_of_many_megabytes(rank_pool):
    assert rank_pool.run(large_payloads, world_size=2) == [(True, True, b"")] * 2


def test_a_thousand_operations_leave_no_state(rank_pool):
    assert rank_pool.run(many_operations, 500, world_size=2) == [0, 0]


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("kind", ["foreign", "unpicklable"])
@pytest.mark.sampled(6)
def test_every_rank_raises_the_same_cause(rank_pool, failing, kind):
    results = rank_pool.run(one_rank_raises, failing, kind, world_size=4)
    assert len({result[0][:2] for result in results}) == 1
    name, text, _cause = results[0][0]
    assert name == "RankFailedError"
    what = {"foreign": "ValueError: the disk is broken", "unpicklable": "Unpicklable: holds a lock"}[kind]
    assert text.startswith(f"rank {failing} on {os.uname().nodename} failed in write: {what}\n\n    Traceback")
    assert "raise make_error()" in text
    original = {"foreign": "ValueError", "unpicklable": "Unpicklable"}[kind]
    assert [result[0][2] == original for result in results] == [rank == failing for rank in range(4)]
    assert all(result[1][:2] == (name, text) for result in results), "the operation stays failed"
    assert all(result[2] == b"to all" for result in results), "the next one works"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_this_library_keeps_its_class_on_every_rank(rank_pool, failing):
    results = rank_pool.run(one_rank_raises, failing, "own", world_size=2)
    assert [result[0][:2] for result in results] == [("MismatchError", "does not fit")] * 2
    assert results[1 - failing][0][2] == "RankFailedError"


def test_every_rank_raises_the_first_of_several_failures(rank_pool):
    results = rank_pool.run(two_ranks_raise, world_size=4)
    assert len({result[1] for result in results}) == 1
    assert "of rank " in results[0][1]
    assert "ValueError" in {result[2] for result in results}


def test_an_interrupt_propagates_and_is_reported(rank_pool):
    results = rank_pool.run(interrupted, world_size=2)
    assert results == [("RankFailedError", "KeyboardInterrupt"), ("KeyboardInterrupt", "")]


def test_the_innermost_phase_is_named(rank_pool):
    results = rank_pool.run(nested_phases, world_size=2)
    assert results[0][1] == results[1][1]
    assert "failed in write: ValueError: inner" in results[0][1]


def test_every_rank_raises_a_disagreement(rank_pool):
    results = rank_pool.run(disagree, world_size=4)
    assert len({tuple(raised[:2] for raised in result[0]) for result in results}) == 1  # but for the cause
    name, text, _cause = results[0][0][0]
    assert name == DisagreementError.__name__
    assert "path: 'a' on ranks 0-2; 'b' on rank 3" in text
    assert "step" not in text
    assert results[0][0][1][0] == DisagreementError.__name__
    assert all(result[1] == b"to all" for result in results)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("dying", [1, 3])
def test_a_killed_rank_is_named_by_the_others(rank_pool, dying, when):
    results = rank_pool.run(die, dying, when, world_size=4, expect_death={dying: signal.SIGKILL})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    for first, second in survivors:
        assert first[0] == second[0] == RankFailedError.__name__
        assert f"rank {dying} on " in first[1]
        assert f"rank {dying} on " in second[1]
        assert "ended" in first[1]
    assert len({result[0][1].partition(" failed in ")[0] for result in survivors}) == 1


def test_the_death_of_rank_0_is_raised_by_the_others(rank_pool):
    results = rank_pool.run(die, 0, "inside", world_size=3, expect_death={0: signal.SIGKILL})
    for first, second in results[1:]:
        assert first[0] == second[0] == RankFailedError.__name__
        assert "rank 0 on " in first[1]
        assert "ProcessDied: its process" in first[1]


def test_a_rank_may_end_after_it_has_left(rank_pool):
    results = rank_pool.run(end_after_leaving, world_size=4, expect_death={1: signal.SIGKILL})
    assert results == [True, None, True, True]


def test_a_wait_for_a_rank_that_left_and_then_died_names_it(rank_pool):
    results = rank_pool.run(leave_and_die, 0, world_size=3, expect_death={1: signal.SIGKILL})
    for name, text in (results[0], results[2]):
        assert name in {RankFailedError.__name__, DeadlineError.__name__}
        assert "rank 1" in text or "rank(s) 1" in text


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_misses_an_operation_is_named_and_the_next_operation_works(rank_pool, absent):
    results = rank_pool.run(miss_an_operation, absent, world_size=3)
    assert len({result[0][:2] for result in results}) == 1, "the late rank raises the same"
    name, text, _cause = results[0][0]
    assert name == DeadlineError.__name__
    assert f"waited {SHORT_S:.4g} s in written/{'out' if absent == 0 else 'in'} for rank(s) {absent} of 3" in text
    assert all(result[1] == b"to all" for result in results)


def test_a_deadline_names_the_rank_that_rank_0_waits_for(rank_pool):
    results = rank_pool.run(root_waits_for_another, world_size=3)
    assert results[0][:2] == results[1][:2]
    assert "for rank(s) 0 of 3, which itself waits in written/in for rank(s) 2" in results[1][1]


def test_background_operations_run_during_collectives_of_the_main_thread(rank_pool):
    results = rank_pool.run(operations_during_collectives, world_size=2)
    assert results == [(sum(range(200)) * 2, [b"to all"] * 20)] * 2


def test_misuse_raises(rank_pool):
    root, other = rank_pool.run(misuse, world_size=2)
    assert [entry[0] for entry in root] == ["ValueError", "ValueError", ControlError.__name__]
    assert [entry[0] for entry in other] == [ControlError.__name__]
