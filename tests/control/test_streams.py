from __future__ import annotations

import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
import torch.distributed as dist

from bytecheckpoint.control import SingleProcess, StoreCommunicator, current_communicator
from bytecheckpoint.control.introduction import Introduction, PartialIntroduction, introduce
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import BytecheckpointError, DeadlineError, RankFailedError

KEY = bytes(32)
SIZES = [1, 0, 3, 1 << 20, 0, (9 << 20) + 5, 17]


def content(size, *seed):
    return random.Random(repr(seed)).randbytes(size)


def begin(deadline_s=30.0):
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
            return bytes(got), streams.bytes_sent, streams.bytes_received
        # Cut in other places than it was sent.
        whole = b"".join(content(size, number) for number, size in enumerate(SIZES))
        got = bytearray(len(whole))
        cuts = sorted(random.Random(1).sample(range(len(whole)), 5))
        for start, stop in zip([0, *cuts], [*cuts, len(whole)]):
            streams.receive(0, "a", memoryview(got)[start:stop])
        assert got == whole
        streams.send(0, "a", b"end")
        return b"end", streams.bytes_sent, streams.bytes_received


def all_to_all(rank, world_size, channels, size):
    """Each channel and direction on a thread of its own."""
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
        return streams.bytes_sent == streams.bytes_received == len(peers) * channels * 3 * size


def beside_a_stranger(rank, world_size):
    with begin() as operation:
        streams = operation.streams()
        prefix = operation._prefix
        if rank == 0:
            operation.barrier("strangers are there")
            got = bytearray(4)
            streams.receive(1, "a", got)
            operation.barrier("received")
            return bytes(got)
        line = current_communicator().borrow_line()
        _addresses, port, key, _identity = msgpack.unpackb(line.read(f"{prefix}/streams/0")[0])
        current_communicator().return_line(line)
        greetings = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            introduce(KEY, prefix, 1, "a") + b"evil",
            introduce(key, "save/77", 1, "a") + b"evil",
            introduce(key, prefix, 9, "a") + b"evil",
            b"bcpstrm1\xff\xff" + bytes(1000),
        ]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in greetings]
        for stranger, greeting in zip(strangers, greetings):
            stranger.sendall(greeting)
        operation.barrier("strangers are there")
        streams.send(0, "a", b"good")
        operation.barrier("received")
        # A second one of the same name is turned away, too.
        refused = []
        for stranger, greeting in zip(strangers, greetings):
            stranger.settimeout(20)
            if greeting:
                try:
                    refused.append(stranger.recv(1))
                except ConnectionResetError:
                    refused.append(b"")
            stranger.close()
        return refused


def killed_in_the_middle(rank, world_size, dying, size):
    first = begin()
    first.barrier("alive")
    first.close()
    operation = begin()
    streams = operation.streams()
    into = bytearray(64 << 20)

    def pass_on():
        # Round a ring, so that all but two meet only the end of somebody who has met the end of somebody.
        with ThreadPoolExecutor(1) as executor, operation.phase("ring"):
            sending = executor.submit(streams.send, (rank + 1) % world_size, "ring", bytes(size))
            if rank == dying:
                streams.receive((rank - 1) % world_size, "ring", memoryview(into)[: size // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            streams.receive((rank - 1) % world_size, "ring", into)
            sending.result()

    seen = raised_by(pass_on)
    operation.close()
    return seen


def third_rank_fails(rank, world_size, sides):
    operation = begin()
    streams = operation.streams()
    operation.barrier("all have begun")

    def go():
        with operation.phase("exchange"):
            if rank == 2:
                # Both others are in the middle of their waits.
                streams.receive(0, "begun", bytearray(1))
                raise ValueError("the third")
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


def deadline(rank, world_size, what):
    operation = begin(deadline_s=30 if rank else 0.5)
    streams = operation.streams() if rank == 0 or what == "listens" else None
    if rank == 0:
        if what == "listens":
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(1)))
        else:
            seen = raised_by(lambda: streams.send(1, "a", b"x"))
        dist.barrier()
    else:
        dist.barrier()
        seen = raised_by(operation.check)
    operation.close()
    return seen


def leaves_early(rank, world_size):
    with begin() as operation:
        streams = operation.streams()
        if rank == 0:
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(10)))
            assert "5 bytes too early" in seen[1]
            return seen
        streams.send(0, "a", b"12345")


def flat(rank, world_size, number):
    counts = []
    for _ in range(2):
        for _ in range(number):
            with begin() as operation:
                streams = operation.streams()
                for channel in "ab":
                    streams.send((rank + 1) % world_size, channel, b"abc")
                    streams.receive((rank - 1) % world_size, channel, bytearray(3))
        dist.barrier()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count(), current_communicator().key_count()))
        dist.barrier()
    return counts


def other_hosts(rank, world_size):
    from bytecheckpoint.control.rendezvous import meet

    here = PeerIdentity(rank, f"host-{rank}", os.getpid(), 1, f"boot-{rank}", "pid", "net")
    communicator = StoreCommunicator(meet(dist.distributed_c10d._get_default_store(), here, world_size, 20), world_size)
    with communicator.operation("save", deadline_s=20) as operation:
        streams, got = operation.streams(), bytearray(1)
        streams.send((rank + 1) % world_size, "a", b"%d" % rank)
        streams.receive((rank - 1) % world_size, "a", got)
        if rank == 1:
            # Nobody sees the process of another host; what is seen is the connection.
            operation.close()
            seen = None
        else:
            seen = raised_by(lambda: streams.receive(1, "a", bytearray(1)))
    communicator.close()
    return bytes(got), seen


def nothing_opened(rank, world_size):
    with begin() as operation:
        operation.barrier("x")
        before = len(os.listdir("/proc/self/fd"))
        operation.streams()
        return before, len(os.listdir("/proc/self/fd"))


def test_bytes_come_in_order_whatever_the_pieces(rank_pool):
    total = sum(SIZES)
    assert rank_pool.run(in_order, world_size=2) == [(b"end", total, 3), (b"end", 3, total)]


@pytest.mark.parametrize(("channels", "size"), [(3, 1 << 10), (1, 5 << 20)])
def test_everyone_sends_to_everyone_from_several_threads(rank_pool, channels, size):
    assert rank_pool.run(all_to_all, channels, size, world_size=4) == [True] * 4


def test_strangers_are_refused(rank_pool):
    good, refused = rank_pool.run(beside_a_stranger, world_size=2)
    assert good == b"good"
    assert refused == [b""] * 5


@pytest.mark.parametrize("dying", [0, 2])
@pytest.mark.parametrize("size", [1 << 10, 48 << 20])
def test_a_rank_killed_in_the_middle_is_named_by_all(rank_pool, dying, size):
    results = rank_pool.run(killed_in_the_middle, dying, size, world_size=4, expect_death={dying: signal.SIGKILL})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    assert {name for name, _text in survivors} == {RankFailedError.__name__}
    assert all(f"rank {dying} on " in text and "ended" in text for _name, text in survivors)


@pytest.mark.parametrize("sides", ["receive", "send"])
def test_a_failure_elsewhere_ends_a_wait_with_its_cause(rank_pool, sides):
    results = rank_pool.run(third_rank_fails, sides, world_size=3)
    assert len({result[0] for result in results}) == 1
    assert "rank 2 on " in results[0][0][1]
    assert "ValueError: the third" in results[0][0][1]
    assert all(first == again for first, again in results), "the operation stays failed"


@pytest.mark.parametrize("what", ["listens", "absent"])
def test_a_wait_has_the_operations_deadline(rank_pool, what):
    results = rank_pool.run(deadline, what, world_size=2)
    assert results[0] == results[1]
    assert results[0][0] == DeadlineError.__name__
    assert "rank 0 on " in results[0][1]
    assert "for rank(s) 1 of 2" in results[0][1]


def test_a_stream_that_ends_too_early_is_that_ranks_failure(rank_pool):
    seen = rank_pool.run(leaves_early, world_size=2)[0]
    assert seen[0] == RankFailedError.__name__
    assert "rank 1 on " in seen[1]


def test_fifty_operations_leave_nothing(rank_pool):
    for first, second in rank_pool.run(flat, 25, world_size=3):
        assert first == second


def test_ranks_on_several_hosts_stream(rank_pool):
    results = rank_pool.run(other_hosts, world_size=2)
    assert [got for got, _seen in results] == [b"1", b"0"]
    assert "rank 1 on host-1" in results[0][1][1]


def test_an_operation_without_streams_opens_nothing(rank_pool):
    for before, after in rank_pool.run(nothing_opened, world_size=2):
        assert before < after


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


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_an_introduction_comes_in_any_pieces_and_nothing_more_is_read(step):
    words, data = PartialIntroduction(KEY, "save/1"), introduce(KEY, "save/1", 3, "ring") + b"the stream"
    at, known = 0, None
    while known is None:
        count = min(words.wanted, step)
        known = words.take(data[at : at + count])
        at += count
    assert known == Introduction(3, "ring")
    assert data[at:] == b"the stream"


def test_an_introduction_is_bounded():
    with pytest.raises(ValueError, match="too long"):
        introduce(KEY, "save/1", 0, "x" * 5000)
