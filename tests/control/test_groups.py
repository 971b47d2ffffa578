"""Six ranks in groups: 0 leads 1, 2 leads 3, 4 leads 5; or 0 leads 1 and 2, 3 leads 4 and 5."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from bytecheckpoint.control.communicator import SocketCommunicator, current_communicator
from bytecheckpoint.errors import DeadlineError, RankFailedError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(12, of=__name__)

WORLD = 6
LARGE = 9 << 20
DEADLINE_S = time_limit(1)


@pytest.fixture(scope="module")
def pool():
    with RankPool(WORLD) as made:
        yield made


def connect(rank, world_size, group_size, deadline_s=time_limit(30)):
    store = dist.distributed_c10d._get_default_store()
    return SocketCommunicator.connect(store, rank, world_size, group_size=group_size, deadline_s=deadline_s)


def raised_by(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def exchange(communicator, size=0):
    """Run one exchange of each type and check every payload."""
    rank, world_size = communicator.rank, communicator.world_size
    pad = bytes(size)
    with communicator.operation("save", deadline_s=time_limit(30)) as operation:
        gathered = operation.gather("plan", b"from %d" % rank + pad)
        assert gathered == ([b"from %d" % r + pad for r in range(world_size)] if rank == 0 else None)
        scattered = operation.scatter("plan", [b"for %d" % r + pad for r in range(world_size)] if rank == 0 else None)
        assert scattered == b"for %d" % rank + pad
        assert operation.broadcast("plan", b"to all" + pad if rank == 0 else None) == b"to all" + pad
        operation.agree("arguments", {"path": "p"})
        operation.barrier("done")
        assert operation.gather("empty", b"") == ([b""] * world_size if rank == 0 else None)
    return True


def has_no_unfinished_operations(communicator):
    """Check once all ranks have left; a leader informs rank 0 a moment after its group has left."""
    dist.barrier()
    give_up = time.monotonic() + time_limit(20)
    while communicator.router.unfinished_operations() and time.monotonic() < give_up:
        time.sleep(0.005)
    finished = not communicator.router.unfinished_operations()
    dist.barrier()
    return finished


def messages(rank, world_size, group_size, size):
    communicator = connect(rank, world_size, group_size)
    done = exchange(communicator, size)
    communicator.close()
    return done


def connected_peers(rank, world_size, group_size):
    communicator = connect(rank, world_size, group_size)
    exchange(communicator)
    peers = communicator._network.connected_peers()
    dist.barrier()
    communicator.close()
    return peers


def raise_in_write(operation, failing):
    with operation.phase("write"):
        if operation.rank == failing:
            raise ValueError("the disk is broken")
        operation.barrier("written")


def one_raises(rank, world_size, group_size, failing):
    communicator = connect(rank, world_size, group_size)
    operation = communicator.operation("save", deadline_s=time_limit(30))
    seen = raised_by(lambda: raise_in_write(operation, failing))
    again = raised_by(lambda: operation.barrier("later"))
    operation.close()
    works = exchange(communicator)
    communicator.close()
    return seen, again, works


def all_raise(rank, world_size, group_size):
    communicator = connect(rank, world_size, group_size)

    def fail(operation):
        with operation.phase("write"):
            operation.barrier("together")
            raise ValueError(f"of rank {rank}")

    with communicator.operation("save", deadline_s=time_limit(30)) as operation:
        seen = raised_by(lambda: fail(operation))
    works = exchange(communicator)
    communicator.close()
    return seen, works


def busy_leader(rank, world_size, failing):
    """Leader 2 does not enter an exchange until all others have raised."""
    communicator, store = connect(rank, world_size, 2), dist.distributed_c10d._get_default_store()
    operation = communicator.operation("save", deadline_s=time_limit(30))
    operation.barrier("begun")
    dist.barrier()  # or a rank still in the first barrier would raise the failure there
    if rank == 2:
        store.wait([f"raised/{other}" for other in range(world_size) if other != 2])
    seen = raised_by(lambda: raise_in_write(operation, failing))
    store.set(f"raised/{rank}", "")
    operation.close()
    works = exchange(communicator)
    communicator.close()
    return seen, works


def many_operations(rank, world_size, group_size):
    communicator = connect(rank, world_size, group_size)
    for number in range(20):
        exchange(communicator)
        with communicator.operation("save", deadline_s=time_limit(30)) as operation:
            raised_by(lambda: raise_in_write(operation, number % world_size))  # noqa: B023 - called at once
    finished = has_no_unfinished_operations(communicator)
    communicator.close()
    return finished


def die(rank, world_size, group_size, dying, when):
    communicator = connect(rank, world_size, group_size)
    exchange(communicator)
    operation = communicator.operation("save", deadline_s=time_limit(40))
    if rank == dying:
        if when == "inside":
            operation.barrier("alive")
        os.kill(os.getpid(), signal.SIGKILL)
    first = raised_by(lambda: [operation.barrier("alive"), operation.barrier("written")])
    operation.close()
    with communicator.operation("save", deadline_s=time_limit(40)) as following:
        second = raised_by(lambda: following.barrier("written"))
    communicator.close()
    return first, second


def stop(rank, world_size, group_size, stopped, when, is_patient=False):
    """One rank is stopped until all others have raised; then all continue."""
    communicator, store = connect(rank, world_size, group_size), dist.distributed_c10d._get_default_store()
    operation = communicator.operation("save", deadline_s=DEADLINE_S)
    operation.barrier("begun")
    if is_patient:
        with operation:
            operation = operation.follow("upload", deadline_s=DEADLINE_S, is_patient=True)
    store.set(f"begun/{rank}", "")
    waker = (stopped + 1) % world_size
    if rank == stopped:
        store.wait([f"begun/{other}" for other in range(world_size)])
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        stopped_pid = int(store.get("pid"))
        while when == "before" and not is_stopped(stopped_pid):
            time.sleep(0.001)
    seen = raised_by(lambda: operation.barrier("written"))
    if rank != stopped:
        store.set(f"raised/{rank}", "")
    if rank == waker:
        store.wait([f"raised/{other}" for other in range(world_size) if other != stopped])
        os.kill(stopped_pid, signal.SIGCONT)
    operation.close()
    works = exchange(communicator)
    finished = has_no_unfinished_operations(communicator)
    communicator.close()
    return seen, works, finished


def one_is_busy(rank, world_size, group_size, busy):
    """One rank comes to an exchange long after the deadline of the others."""
    communicator, store = connect(rank, world_size, group_size), dist.distributed_c10d._get_default_store()
    with communicator.operation("save", deadline_s=DEADLINE_S) as save:
        save.barrier("begun")
        operation = save.follow("upload", deadline_s=DEADLINE_S, is_patient=True)
    waiting = (busy + 1) % world_size
    if rank == waiting:
        timer = threading.Timer(2 * DEADLINE_S, store.set, ("is late", ""))
        timer.start()
    if rank == busy:
        store.wait(["is late"])
    seen = raised_by(lambda: operation.barrier("transferred"))
    if rank == waiting:
        timer.join()
    operation.close()
    works = exchange(communicator)
    communicator.close()
    return seen, works


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def leader_ends_first(rank, world_size):
    """The process of leader 2 ends before its member has read the last broadcast."""
    communicator, store = connect(rank, world_size, 2), dist.distributed_c10d._get_default_store()
    operation = communicator.operation("save", deadline_s=time_limit(30))
    operation.gather("plan", b"")
    if rank == 3:
        store.wait(["leader has left"])
    got = operation.broadcast("done", b"x" if rank == 0 else None)
    operation.close()
    if rank == 2:
        store.set("leader has left", "")
    communicator.close()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return got


def connect_without(rank, world_size, absent):
    if rank == absent:
        dist.barrier()
        return None
    seen = raised_by(lambda: connect(rank, world_size, 2, deadline_s=1.5))
    dist.barrier()
    return seen


def wait_for_others_to_leave(rank, world_size):
    """Rank 0 returns only when the members of other groups have left, too."""
    communicator, store = connect(rank, world_size, 2), dist.distributed_c10d._get_default_store()
    operation = communicator.operation("save", deadline_s=time_limit(30))
    operation.barrier("x")
    if rank == 0:
        store.set("waiting", "")
        operation.wait_for_others_to_leave(30)
        seen = store.check(["member leaves"])
        operation.close()
    else:
        if rank == 5:
            store.wait(["waiting"])
            store.set("member leaves", "")
        operation.close()
        seen = None
    communicator.close()
    return seen


def environment(rank, world_size):
    communicator = current_communicator()
    return communicator.router.tree.group_size, exchange(communicator)


@pytest.mark.parametrize("group_size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [0, LARGE])
@pytest.mark.sampled(4)
def test_messages_arrive_in_order(pool, group_size, size):
    assert pool.run(messages, group_size, size, world_size=WORLD) == [True] * WORLD


def test_ranks_connect_to_their_parent_and_children_only(pool):
    peers = pool.run(connected_peers, 2, world_size=WORLD)
    assert peers == [{1, 2, 4}, {0}, {0, 3}, {2}, {0, 5}, {4}]


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("failing", range(WORLD))
@pytest.mark.sampled(5)
def test_every_rank_raises_the_same_cause(pool, group_size, failing):
    results = pool.run(one_raises, group_size, failing, world_size=WORLD)
    assert len({seen for seen, _, _ in results}) == 1
    name, text = results[0][0]
    assert name == RankFailedError.__name__
    assert text.startswith(f"rank {failing} on {os.uname().nodename} failed in write: ValueError: the disk is broken\n")
    assert 'raise ValueError("the disk is broken")' in text
    assert all(again == seen for seen, again, _ in results), "the operation stays failed"
    assert all(works for _, _, works in results)


def test_every_rank_raises_the_first_of_six_failures(pool):
    results = pool.run(all_raise, 2, world_size=WORLD)
    assert len({seen for seen, _ in results}) == 1
    assert "of rank " in results[0][0][1]
    assert all(works for _, works in results)


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_failures_pass_through_a_busy_leader(pool, failing):
    results = pool.run(busy_leader, failing, world_size=WORLD)
    assert len({seen for seen, _ in results}) == 1
    assert f"rank {failing} on " in results[0][0][1]
    assert all(works for _, works in results)


@pytest.mark.parametrize("group_size", [2, 3])
def test_operations_leave_no_state(pool, group_size):
    assert pool.run(many_operations, group_size, world_size=WORLD) == [True] * WORLD


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("dying", [1, 2, 3, 4])
@pytest.mark.sampled(4)
def test_a_killed_rank_is_named_by_all_others(pool, dying, when):
    results = pool.run(die, 2, dying, when, world_size=WORLD, expect_death={dying: signal.SIGKILL})
    for first, second in (result for result in results if result is not None):
        for name, text in (first, second):
            assert name == RankFailedError.__name__
            assert f"rank {dying} on {os.uname().nodename} failed in " in text
            assert "ProcessDied: its process" in text


@pytest.mark.parametrize("when", ["before", "inside"])
def test_every_group_raises_the_death_of_rank_0(pool, when):
    results = pool.run(die, 2, 0, when, world_size=WORLD, expect_death={0: signal.SIGKILL})
    for first, second in results[1:]:
        for name, text in (first, second):
            assert name == RankFailedError.__name__
            assert "rank 0 on " in text
            assert "ProcessDied: its process" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group_size", "stopped", "when"),
    [
        *((2, stopped, "before") for stopped in range(5)),
        *((2, stopped, "during") for stopped in (0, 2, 3)),
        (3, 4, "before"),
        (6, 0, "during"),
        (6, 3, "before"),
    ],
)
@pytest.mark.sampled(2)
def test_a_stopped_rank_is_named_by_all_others_by_the_deadline(pool, group_size, stopped, when):
    results = pool.run(stop, group_size, stopped, when, world_size=WORLD)
    survivors = [result for rank, result in enumerate(results) if rank != stopped]
    for (name, text), _, _ in survivors:
        assert name == DeadlineError.__name__
        assert f"for rank(s) {stopped} of {WORLD}" in text or f"rank {stopped} on " in text
    if stopped:
        assert len({seen for seen, _, _ in results}) == 1, "the stopped rank raises the same"
    assert all(works for _, works, _ in results), "the next operation works"
    assert all(finished for _, _, finished in results), "no state is left"


@pytest.mark.parametrize(("group_size", "stopped"), [(2, 0), (2, 2), (2, 3), (6, 3)])
@pytest.mark.sampled(2)
def test_a_patient_operation_names_a_stopped_rank(pool, group_size, stopped):
    results = pool.run(stop, group_size, stopped, "before", True, world_size=WORLD)
    for rank, (seen, works, finished) in enumerate(results):
        if rank != stopped:
            assert seen[0] == DeadlineError.__name__
            assert f"for rank(s) {stopped} of {WORLD}, whose process does not answer at all" in seen[1]
        assert works
        assert finished


@pytest.mark.parametrize(("group_size", "busy"), [(2, 0), (2, 2), (6, 3)])
@pytest.mark.sampled(1)
def test_a_patient_operation_waits_for_a_busy_rank(pool, group_size, busy):
    assert pool.run(one_is_busy, group_size, busy, world_size=WORLD) == [(None, True)] * WORLD


def test_a_leader_may_end_after_its_group_has_left(pool):
    results = pool.run(leader_ends_first, world_size=WORLD, expect_death={2: signal.SIGKILL})
    assert results == [b"x", b"x", None, b"x", b"x", b"x"]


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_a_rank_that_does_not_connect_is_named(pool, absent):
    results = pool.run(connect_without, absent, world_size=WORLD)
    assert {result[0] for rank, result in enumerate(results) if rank != absent} == {DeadlineError.__name__}
    assert f"waited for rank(s) {absent} to register" in results[0][1]


def test_rank_0_waits_for_the_members_of_other_groups(pool):
    assert pool.run(wait_for_others_to_leave, world_size=WORLD) == [True] + [None] * 5


def test_the_environment_sets_the_group_size(pool):
    env = {"BYTECHECKPOINT_CONTROL_GROUP_SIZE": "3"}
    assert pool.run(environment, world_size=WORLD, env=env) == [(3, True)] * WORLD
    assert pool.run(environment, world_size=WORLD) == [(6, True)] * WORLD


def test_two_operations_at_once(pool):
    assert pool.run(two_at_once, world_size=WORLD) == [True] * WORLD


def two_at_once(rank, world_size):
    communicator = connect(rank, world_size, 2)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(communicator.operation(kind, deadline_s=time_limit(30))) for kind in ("save", "load")
        )
        first.gather("plan", b"")
        # Some ranks fail before others enter.
        raised = raised_by(lambda: [second.gather("plan", b""), raise_in_write(second, 3)])
        assert "rank 3 on " in raised[1]
        first.barrier("goes on")
    communicator.close()
    return True
