from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from leak_watch import until_empty

from bytecheckpoint.testing import RankPool, RanksFailed, ranks, time_limit

pytestmark = pytest.mark.sampled(7, of=__name__)


@dataclass
class Message:
    """A class of a test file that is sent to ranks and back."""

    number: int


def total_of_ranks(rank, world_size, offset):
    tensor = torch.tensor([rank + offset])
    dist.all_reduce(tensor)
    return int(tensor)


def identity(rank, world_size):
    return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized(), torch.get_num_threads()


def double(rank, world_size, message):
    return Message(message.number * 2 + rank)


def raise_on(rank, world_size, ranks):
    print(f"printed by {rank}")
    if rank in ranks:
        raise ValueError(f"fault of rank {rank}")


def raise_while_others_wait(rank, world_size):
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def die_while_others_wait(rank, world_size):
    dist.barrier()  # gloo notices a death only on a connection
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank, world_size, hanging):
    if rank == hanging:
        time.sleep(1000)  # the line that hangs


def die_on(rank, world_size, dying, number):
    if rank == dying:
        os.kill(os.getpid(), number)
    return rank


def start_a_child_and_hang(rank, world_size):
    child = subprocess.Popen(["sleep", "1000"])
    print("child", child.pid, flush=True)
    time.sleep(1000)


def warn(rank, world_size):
    warnings.warn("something is odd", UserWarning, stacklevel=1)


def change_surroundings(rank, world_size, folder):
    os.chdir(folder)
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return os.environ["GIVEN"]


def surroundings(rank, world_size):
    return os.getcwd(), os.environ.get("LEFT_BEHIND"), os.environ.get("GIVEN"), torch.get_default_dtype(), torch.rand(1)


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # no one may wait for it
    return False


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


def test_runs_a_collective_and_returns_by_rank(pool):
    assert pool.run(total_of_ranks, 10) == [46] * 4


def test_processes_are_reused_and_a_smaller_world_uses_the_first(pool):
    first = pool.run(identity)
    second = pool.run(identity, world_size=2)
    assert [entry[0] for entry in second] == [entry[0] for entry in first[:2]]
    assert [entry[1:] for entry in second] == [("0", "2", True, 1), ("1", "2", True, 1)]
    assert pool.run(total_of_ranks, 0, world_size=3) == [3] * 3


def test_without_a_process_group(pool):
    assert [entry[3] for entry in pool.run(identity, backend=None)] == [False] * 4


def test_ranks_receive_and_return_classes_of_a_test_file(pool):
    assert pool.run(double, Message(4)) == [Message(8), Message(9), Message(10), Message(11)]


def test_each_call_starts_in_the_same_state(pool, tmp_path):
    before = pool.run(surroundings)
    assert pool.run(change_surroundings, str(tmp_path), env={"GIVEN": "x"}) == ["x"] * 4
    assert pool.run(surroundings) == before
    assert before[0][1:4] == (None, None, torch.float32)


def test_tracebacks_of_all_failing_ranks_and_their_output(pool):
    with pytest.raises(RanksFailed, match=r"fault of rank [13]") as failed:
        pool.run(raise_on, [1, 3])
    assert sorted(failed.value.tracebacks) == [1, 3]
    assert "raise ValueError(f" in failed.value.tracebacks[3]
    assert "fault of rank 1" in str(failed.value)
    assert "fault of rank 3" in str(failed.value)
    assert failed.value.outputs[2] == "printed by 2\n"
    assert pool.run(total_of_ranks, 0) == [6] * 4


def connect_late(rank, world_size):
    """Let the last rank still connect for a moment when the others are connected."""
    real = dist.init_process_group

    def connect(*arguments, **options):
        real(*arguments, **options)
        time.sleep(0.3)
        os.environ["CONNECTED"] = str(time.monotonic())

    if rank == world_size - 1:
        dist.init_process_group = connect


def begin(rank, world_size):
    return time.monotonic(), float(os.environ.get("CONNECTED", 0))


def test_no_rank_begins_before_all_are_connected():
    """A regression: where a rank failed at once, others failed because they could not connect to it."""
    with RankPool(2) as pool:
        pool.run(connect_late)
        (first, _), (_, connected) = pool.run(begin)
        assert first >= connected > 0


def failures_in_order(failed):
    found = re.findall(r"^--- rank (\d) (?:raised|was killed)", str(failed.value), re.MULTILINE)
    return [int(number) for number in found]


def test_the_cause_comes_before_its_consequences(pool):
    with pytest.raises(RanksFailed) as failed:
        pool.run(raise_while_others_wait)
    assert "the cause" in failed.value.tracebacks[1]
    order = failures_in_order(failed)
    assert order[0] == 1
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", [raise_while_others_wait, die_while_others_wait])
def test_the_cause_comes_first_even_if_all_messages_arrive_together(pool, fault, monkeypatch):
    def wait_for_all(pipes, timeout):
        for pipe in pipes:
            assert connection.wait([pipe], timeout)
        return connection.wait(pipes, timeout)

    monkeypatch.setattr(ranks, "connections", SimpleNamespace(wait=wait_for_all))
    with pytest.raises(RanksFailed) as failed:
        pool.run(fault)
    order = failures_in_order(failed)
    assert order[0] == 1
    assert sorted(order) == [0, 1, 2, 3]


def test_a_hang_shows_the_line_that_hangs(pool):
    with pytest.raises(RanksFailed, match=r"rank 1 was still running after [0-9.]+ s") as failed:
        pool.run(hang_on, 1, world_size=2, timeout_s=2)
    assert list(failed.value.stacks) == [1]
    assert "time.sleep(1000)  # the line that hangs" in failed.value.stacks[1]
    assert "in hang_on" in str(failed.value)


def test_a_killed_rank_is_named(pool):
    with pytest.raises(RanksFailed, match="rank 2 was killed by SIGKILL") as failed:
        pool.run(die_on, 2, int(signal.SIGKILL), backend=None)
    assert failed.value.deaths == {2: "was killed by SIGKILL"}


def test_a_crash_shows_its_stack(pool):
    with pytest.raises(RanksFailed, match="rank 0 was killed by SIGSEGV") as failed:
        pool.run(die_on, 0, int(signal.SIGSEGV), world_size=1)
    assert "os.kill(os.getpid(), number)" in failed.value.stacks[0]


def test_an_expected_death_leaves_the_others_results(pool):
    # Without a process group: the others might still be connecting to the one that dies.
    died = pool.run(die_on, 0, int(signal.SIGKILL), expect_death={0: signal.SIGKILL}, backend=None)
    assert died == [None, 1, 2, 3]
    assert pool.run(total_of_ranks, 0) == [6] * 4


def test_an_expected_death_must_happen(pool):
    with pytest.raises(RanksFailed, match="rank 1 returned, but should have been killed by SIGKILL"):
        pool.run(die_on, 0, 0, world_size=2, expect_death={1: signal.SIGKILL})


def test_a_rank_killed_between_calls_is_replaced(pool):
    pids = [entry[0] for entry in pool.run(identity)]
    os.kill(pids[3], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pids[3])] if psutil.pid_exists(pids[3]) else [], timeout=time_limit(10))
    assert pool.run(total_of_ranks, 0) == [6] * 4


def warn_in_torch(rank, world_size):
    warnings.warn_explicit("something is old", FutureWarning, "_api.py", 1, module="torch.distributed.tensor._api")


def test_warnings_that_torch_causes_itself_are_not_errors(pool):
    pool.run(warn_in_torch, world_size=1)


def test_warnings_are_errors_in_ranks_too(pool):
    with pytest.raises(RanksFailed, match="UserWarning: something is odd"):
        pool.run(warn, world_size=1)


def test_nothing_is_left_running():
    with RankPool(2) as pool:
        pids = [entry[0] for entry in pool.run(identity)]
        with pytest.raises(RanksFailed) as failed:
            pool.run(start_a_child_and_hang, timeout_s=2)
        pids += [int(text.split()[1]) for text in failed.value.outputs.values()]
        pids += [entry[0] for entry in pool.run(identity)]
    assert len(pids) == 6
    assert not [pid for pid in pids if is_running(pid)]


def test_functions_that_ranks_cannot_find_are_refused(pool):
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda rank, world_size: None)


def test_ranks_end_with_a_test_process_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from bytecheckpoint.testing import RankPool

            def start(rank, world_size):
                return os.getpid()

            if __name__ == "__main__":
                pool = RankPool(2)
                print(*pool.run(start), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=time_limit(120), check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert until_empty(lambda: [pid for pid in done.stdout.split() if is_running(int(pid))]) == []
