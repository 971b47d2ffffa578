from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from leak_watch import held_now, left_since

from bytecheckpoint.control.base import SingleProcess
from bytecheckpoint.control.communicator import SocketCommunicator, current_communicator
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import BytecheckpointError, DeadlineError, RankFailedError
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(11, of=__name__)

SIZES = [1, 0, 3, 1 << 20, 0, (9 << 20) + 5, 17]


def content(size, *seed):
    return random.Random(repr(seed)).randbytes(size)


def begin(deadline_s=time_limit(30)):
    return current_communicator().operation("save", deadline_s=deadline_s)


def raised_by(call):
    try:
        call()
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    return None


def in_order(rank, world_size):
    with begin() as operation:
        streams = operation.streams()
        assert streams is operation.streams()
        if rank == 0:
            for number, size in enumerate(SIZES):
                streams.send(1, "a", content(size, number))
            got = bytearray(3)
            streams.receive(1, "a", got)
            return bytes(got)
        # Received in pieces of other sizes than they were sent.
        whole = b"".join(content(size, number) for number, size in enumerate(SIZES))
        got = bytearray(len(whole))
        cuts = sorted(random.Random(1).sample(range(len(whole)), 5))
        for start, stop in zip([0, *cuts], [*cuts, len(whole)]):
            streams.receive(0, "a", memoryview(got)[start:stop])
        assert got == whole
        streams.send(0, "a", b"end")
        return b"end"


def all_to_all(rank, world_size, channels, size):
    """Run each channel and direction on its own thread."""
    peers = [peer for peer in range(world_size) if peer != rank]
    with begin() as operation, ThreadPoolExecutor(2 * channels * len(peers)) as executor:
        streams = operation.streams()

        def send(peer, channel):
            for number in range(3):
                streams.send(peer, channel, content(size, rank, peer, channel, number))

        def receive(peer, channel):
            got = bytearray(3 * size)
            streams.receive(peer, channel, got)
            return got == b"".join(content(size, peer, rank, channel, number) for number in range(3))

        names = [f"channel-{number}" for number in range(channels)]
        sent = [executor.submit(send, peer, name) for peer in peers for name in names]
        received = [executor.submit(receive, peer, name) for peer in peers for name in names]
        assert [one.result() for one in received] == [True] * len(received)
        for one in sent:
            one.result()
        operation.barrier("done")


def killed_during_transfer(rank, world_size, dying, size):
    first = begin()
    first.barrier("alive")
    first.close()
    operation = begin()
    into = bytearray(64 << 20)

    def pass_around():
        streams = operation.streams()  # raises if the rank has died by now
        # In a ring, most ranks see only a consequence of the death: a neighbour that stops sending.
        with ThreadPoolExecutor(1) as executor, operation.phase("ring"):
            sending = executor.submit(streams.send, (rank + 1) % world_size, "ring", bytes(size))
            if rank == dying:
                streams.receive((rank - 1) % world_size, "ring", memoryview(into)[: size // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            streams.receive((rank - 1) % world_size, "ring", into)
            sending.result()

    seen = raised_by(pass_around)
    operation.close()
    return seen


def third_rank_fails(rank, world_size, sides):
    operation = begin()
    streams = operation.streams()
    operation.barrier("all have begun")
    dist.barrier()  # or a rank still in the first barrier would raise the failure there

    def go():
        with operation.phase("exchange"):
            if rank == 2:
                # By now, both others wait.
                streams.receive(0, "begun", bytearray(1))
                raise ValueError("of rank 2")
            if rank == 0:
                streams.send(2, "begun", b"x")
            if sides == "receive":
                streams.receive(1 - rank, "a", bytearray(1))
            else:
                streams.send(1 - rank, "a", bytes(64 << 20))

    seen = raised_by(go)
    again = raised_by(lambda: streams.receive((rank + 1) % 3, "b", bytearray(1)))
    operation.close()
    following = begin()
    following.barrier("works")
    following.close()
    return seen, again


def deadline(rank, world_size, direction):
    operation = begin(deadline_s=time_limit(30) if rank else 0.5)
    if rank == 0:
        streams = operation.streams()
        if direction == "receive":
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(1)))
        else:
            seen = raised_by(lambda: streams.send(1, "a", bytes(64 << 20)))
        dist.barrier()
    else:
        dist.barrier()
        seen = raised_by(lambda: operation.barrier("raises"))
    operation.close()
    return seen


def send_too_little(rank, world_size):
    with begin() as operation:
        streams = operation.streams()
        if rank == 0:
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(10)))
            assert "5 bytes too early" in seen[1]
            return seen
        streams.send(0, "a", b"12345")


def count_resources(rank, world_size, number):
    for turn in range(number + 1):
        with begin() as operation:
            streams = operation.streams()
            for channel in "ab":
                streams.send((rank + 1) % world_size, channel, b"abc")
                streams.receive((rank - 1) % world_size, channel, bytearray(3))
        if turn == 0:
            before = held_now()
    return left_since(before, turns=number)


def other_hosts(rank, world_size):
    here = PeerIdentity(rank, f"host-{rank}", os.getpid(), 1, f"boot-{rank}", "pid", "net")
    store = dist.distributed_c10d._get_default_store()
    communicator = SocketCommunicator.connect(store, rank, world_size, deadline_s=20, identity=here)
    with communicator.operation("save", deadline_s=time_limit(20)) as operation:
        streams, got = operation.streams(), bytearray(1)
        streams.send((rank + 1) % world_size, "a", b"%d" % rank)
        streams.receive((rank - 1) % world_size, "a", got)
        if rank == 1:
            # Rank 0 cannot see the process of another host, only that the connection closes.
            operation.close()
            seen = None
        else:
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(1)))
    communicator.close()
    return bytes(got), seen


def open_descriptors(rank, world_size):
    with begin() as operation:
        operation.barrier("begun")
        before = held_now()
        streams = operation.streams()
        unused = left_since(before)
        operation.barrier("unused")
        streams.send(1 - rank, "a", b"x")
        streams.receive(1 - rank, "a", bytearray(1))
        used = held_now().descriptors - before.descriptors
        operation.barrier("used")
    return unused, dict(used), left_since(before)


def test_bytes_arrive_in_order_for_any_sizes(rank_pool):
    assert rank_pool.run(in_order, world_size=2) == [b"end", b"end"]


@pytest.mark.parametrize(("channels", "size"), [(3, 1 << 10), (1, 5 << 20)])
def test_all_ranks_send_to_all_from_several_threads(rank_pool, channels, size):
    assert rank_pool.run(all_to_all, channels, size, world_size=4) == [None] * 4


@pytest.mark.parametrize("dying", [0, 2])
@pytest.mark.parametrize("size", [1 << 10, 48 << 20])
def test_a_rank_killed_during_a_transfer_is_named_by_all(rank_pool, dying, size):
    results = rank_pool.run(killed_during_transfer, dying, size, world_size=4, expect_death={dying: signal.SIGKILL})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    assert {name for name, _text in survivors} == {RankFailedError.__name__}
    assert all(f"rank {dying} on " in text and "ended" in text for _name, text in survivors)


@pytest.mark.parametrize("sides", ["receive", "send"])
def test_a_failure_of_another_rank_ends_a_wait_with_its_cause(rank_pool, sides):
    results = rank_pool.run(third_rank_fails, sides, world_size=3)
    assert len({result[0] for result in results}) == 1
    assert "rank 2 on " in results[0][0][1]
    assert "ValueError: of rank 2" in results[0][0][1]
    assert all(first == again for first, again in results), "the operation stays failed"


@pytest.mark.parametrize("direction", ["receive", "send"])
def test_a_stream_has_the_deadline_of_its_operation(rank_pool, direction):
    results = rank_pool.run(deadline, direction, world_size=2)
    assert results[0] == results[1]
    assert results[0][0] == DeadlineError.__name__
    assert "rank 0 on " in results[0][1]
    assert "for rank(s) 1 of 2" in results[0][1]


def test_a_stream_that_ends_too_early_is_a_failure_of_its_sender(rank_pool):
    seen = rank_pool.run(send_too_little, world_size=2)[0]
    assert seen[0] == RankFailedError.__name__
    assert "rank 1 on " in seen[1]


def test_fifty_operations_leave_nothing(rank_pool):
    assert rank_pool.run(count_resources, 50, world_size=3) == [[]] * 3


def test_ranks_on_several_hosts_stream(rank_pool):
    results = rank_pool.run(other_hosts, world_size=2)
    assert [got for got, _seen in results] == [b"1", b"0"]
    assert "rank 1 on host-1" in results[0][1][1]


def test_only_streams_that_are_used_open_descriptors(rank_pool):
    assert rank_pool.run(open_descriptors, world_size=2) == [([], {"socket:": 2}, [])] * 2


def test_one_process_has_no_streams():
    streams = SingleProcess().operation("save", deadline_s=1).streams()
    with pytest.raises(ValueError, match="one process"):
        streams.send(0, "a", b"")
    with pytest.raises(ValueError, match="one process"):
        streams.receive(0, "a", bytearray())


def test_wrong_peers(rank_pool):
    assert rank_pool.run(wrong_peers, world_size=2) == [True] * 2


def wrong_peers(rank, world_size):
    with begin() as operation:
        streams = operation.streams()
        for peer in (rank, -1, world_size):
            with pytest.raises(ValueError, match="this is rank"):
                streams.send(peer, "a", b"x")
            with pytest.raises(ValueError, match="this is rank"):
                streams.receive(peer, "a", bytearray(1))
    return True
