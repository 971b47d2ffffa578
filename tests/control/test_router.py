"""The routers of several ranks in one process, with messages that the test delivers."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace

import pytest

from bytecheckpoint.control.failure import FailureRecord
from bytecheckpoint.control.messages import WaitStep
from bytecheckpoint.control.operation import ParentTimeLimit, PatientTimeLimit, SocketOperation
from bytecheckpoint.control.outcome import Outcome
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.control.router import Router
from bytecheckpoint.control.timings import PROBE_ANSWER_S, ROOT_GRACE_S
from bytecheckpoint.control.tree import Tree
from bytecheckpoint.errors import DeadlineError, RankFailedError


class Ranks:
    """Ranks 0 to 5 in groups of two: 0 leads 1, 2 leads 3, 4 leads 5."""

    def __init__(self):
        self._pending = deque()
        self._dead = set()
        self.restored = []
        tree = Tree.of(6, 2)
        self.routers = [Router(identity(rank), tree, _Sender(self, rank)) for rank in range(6)]

    def send(self, sender, receiver, data):
        self._pending.append((sender, receiver, data))

    def deliver(self):
        while self._pending:
            sender, receiver, data = self._pending.popleft()
            if not self._dead & {sender, receiver}:
                self.routers[receiver].receive(sender, data)

    def kill(self, rank):
        self._dead.add(rank)
        tree = self.routers[rank].tree
        for peer in {tree.parent(rank), *tree.children(rank)} - {rank}:
            self.routers[peer].lose_peer(rank, "it was closed")
        self.deliver()

    def begin(self, *ranks, prefix="save/0"):
        return {rank: self.routers[rank].begin(prefix) for rank in ranks or range(6)}

    def leave(self, states, *ranks):
        for rank in ranks:
            self.routers[rank].leave(states[rank])
        self.deliver()


class _Sender:
    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank

    def send(self, peer, message):
        self._ranks.send(self._rank, peer, message)

    def flush(self):
        pass

    def restore(self, peer):
        self._ranks.restored.append((self._rank, peer))

    def disconnect(self, peer):
        self._ranks.routers[self._rank].lose_peer(peer, "it did not answer")


def identity(rank):
    return PeerIdentity(rank, f"host-{rank}", 100 + rank, 0, "", "", "")


def failure_of(rank):
    return FailureRecord(rank, f"host-{rank}", 100 + rank, "write", "ValueError", f"of rank {rank}")


def failures(states):
    return {rank: state.failure and state.failure.rank for rank, state in states.items()}


@pytest.fixture
def ranks():
    return Ranks()


def test_a_failure_reaches_every_rank(ranks):
    states = ranks.begin()
    ranks.routers[5].report(states[5], failure_of(5))
    ranks.deliver()
    assert failures(states) == dict.fromkeys(range(6), 5)


def test_the_first_failure_at_rank_0_holds_everywhere(ranks):
    states = ranks.begin()
    for rank in (3, 5, 0, 1):
        ranks.routers[rank].report(states[rank], failure_of(rank))
    ranks.deliver()
    assert failures(states) == dict.fromkeys(range(6), 0)


def test_a_rank_that_begins_late_learns_of_the_failure(ranks):
    states = ranks.begin(0, 1, 3)
    ranks.routers[3].report(states[3], failure_of(3))
    ranks.deliver()
    ranks.leave(states, 0, 1, 3)
    assert failures(ranks.begin(2, 4, 5)) == dict.fromkeys((2, 4, 5), 3)


def test_operations_do_not_share_failures(ranks):
    states, others = ranks.begin(), ranks.begin(prefix="save/1")
    ranks.routers[1].report(states[1], failure_of(1))
    ranks.deliver()
    assert set(failures(others).values()) == {None}


def test_an_operation_is_kept_until_all_ranks_below_have_left(ranks):
    states = ranks.begin()
    ranks.leave(states, 0, 1, 2, 4, 5)
    assert [router.unfinished_operations() for router in ranks.routers] == [1, 0, 1, 0, 0, 0]
    ranks.leave(states, 3)
    assert [router.unfinished_operations() for router in ranks.routers] == [0] * 6


def test_messages_of_an_operation_that_is_over_are_dropped(ranks):
    states = ranks.begin()
    ranks.routers[0].send_payload(1, states[0], "plan", b"late")
    ranks.leave(states, *range(6))
    assert all(router.unfinished_operations() == 0 for router in ranks.routers)
    assert not ranks.routers[1]._states


def test_operations_that_a_rank_never_begins_are_bounded(ranks):
    for number in range(1000):
        state = ranks.routers[0].begin(f"save/{number}")
        ranks.routers[0].send_payload(1, state, "plan", b"unread")
        ranks.routers[0].leave(state)
        ranks.deliver()
    assert len(ranks.routers[1]._states) < 300
    assert len(ranks.routers[0]._states) < 300


def test_the_ranks_below_a_lost_leader_report_to_rank_0(ranks):
    states = ranks.begin()
    ranks.kill(2)
    record = ranks.routers[3].loss_record(states[3], 2, "write")
    assert "rank 3 on host-3 was lost" in record.message
    assert record.error_type == "ConnectionLost", "the process may live"
    ranks.routers[3].report(states[3], record)
    ranks.deliver()
    assert failures({rank: states[rank] for rank in (0, 1, 3, 4, 5)}) == dict.fromkeys((0, 1, 3, 4, 5), 2)
    ranks.leave(states, 0, 1, 4, 5)
    assert ranks.routers[0].unfinished_operations() == 1
    ranks.leave(states, 3)
    assert ranks.routers[0].unfinished_operations() == 0


def test_a_rank_below_a_lost_leader_learns_the_failure_of_an_operation_that_is_over(ranks):
    states = ranks.begin()
    ranks.routers[0].report(states[0], failure_of(1))
    ranks._dead.add(2)
    ranks.deliver()
    ranks.kill(2)
    ranks.routers[0].lose_peer(3, "for this test")
    ranks.leave(states, 0, 1, 4, 5)
    assert ranks.routers[0].unfinished_operations() == 0
    ranks.routers[3].report(states[3], failure_of(3))
    ranks.deliver()
    assert failures(states)[3] == 1


def test_the_loss_of_rank_0_reaches_the_groups_of_busy_leaders(ranks):
    states = ranks.begin(1, 3, 5)
    ranks.routers[3].send_payload(2, states[3], "plan", b"")
    ranks.deliver()
    ranks.kill(0)
    assert failures({rank: states[rank] for rank in (1, 3)}) == {1: 0, 3: 0}
    later = ranks.begin(2, 3, prefix="save/1")
    ranks.deliver()
    assert failures(later) == {2: None, 3: None}, "it may have connected again"
    assert (2, 0) in ranks.restored
    ranks.routers[2].lose_peer(0, "refused")
    ranks.deliver()
    assert failures(later) == {2: 0, 3: 0}


def test_a_lost_connection_ends_the_operations_in_progress_only(ranks):
    """A rank on another host may live."""
    states = ranks.begin()
    ranks.routers[0].lose_peer(2, "reset")
    assert ranks.routers[0].is_lost(states[0], 2)
    following = ranks.begin(prefix="save/1")
    assert ranks.restored == [(0, 2)]
    assert not ranks.routers[0].is_lost(following[0], 2)
    ranks.routers[0].add_peer(2)
    assert ranks.routers[0].is_lost(states[0], 2), "messages of it may be lost"
    assert "(reset)" in ranks.routers[0].loss_record(states[0], 2, "write").message
    ranks.routers[0].lose_peer(2, "refused")
    assert ranks.routers[0].is_lost(following[0], 2)


def test_another_connection_ends_the_operations_that_the_peer_was_in(ranks):
    states = ranks.begin()
    ranks.routers[2].send_payload(0, states[2], "plan", b"")
    ranks.deliver()
    following = ranks.begin(0, prefix="save/1")
    ranks.routers[0].replace_peer(2)
    assert ranks.routers[0].is_lost(states[0], 2)
    assert not ranks.routers[0].is_lost(following[0], 2)


def test_a_cut_network_is_described_by_the_hosts_that_do_not_answer(ranks):
    router = ranks.routers[0]
    router.hosts = {rank: f"host-{rank}" for rank in range(6)}
    states = ranks.begin()
    for peer in (1, 2, 4):
        router.probe(peer)
    ranks.deliver()
    assert router.describe_silence([1, 2, 4]) == ""
    for peer in (2, 4):
        router.probe(peer)
    text = router.describe_silence([1, 2, 4])
    assert "Nothing arrives on host-0 from rank(s) 2,4 on host-2, host-4" in text
    assert [peer for peer in (1, 2, 4) if router.is_lost(states[0], peer)] == [2, 4], "for new connections"


def test_a_rank_that_closes_its_communicator_is_not_reported_as_killed(ranks):
    states = ranks.begin()
    ranks.routers[2].announce_closing()
    ranks.deliver()
    ranks.kill(2)
    assert "closed its communicator" in ranks.routers[0].loss_record(states[0], 2, "write").message


def test_a_note_is_replaced_by_the_next_payload_and_expires(ranks):
    states = ranks.begin()
    leader, root = ranks.routers[2], ranks.routers[0]
    leader.send_note(states[2], "plan", [WaitStep(2, "plan", [3])], to_parent=True)
    ranks.deliver()
    assert root.note(states[0], 2, 60) == [WaitStep(2, "plan", [3])]
    assert ranks.routers[3].note(states[3], 2, 60) == [WaitStep(2, "plan", [3])]
    assert root.note(states[0], 2, 0) == []
    leader.send_payload(0, states[2], "plan", b"")
    ranks.deliver()
    assert root.note(states[0], 2, 60) == []


def test_a_peer_is_silent_until_its_next_message(ranks):
    states = ranks.begin()
    router = ranks.routers[1]
    router.probe(0)
    assert router.is_silent(0)
    assert not router.is_silent(2)
    ranks.deliver()
    assert not router.is_silent(0), "the network thread of rank 0 answers"
    router.probe(0)
    ranks.routers[0].send_payload(1, states[0], "plan", b"")
    ranks.deliver()
    assert not router.is_silent(0)


def test_a_rank_waits_beyond_its_deadline_only_for_a_parent_that_answers(ranks):
    router = ranks.routers[1]
    limit = ParentTimeLimit(60, router)
    assert limit.seconds(1) == 60 + ROOT_GRACE_S
    assert limit.seconds(31) == 60, "a probe has been sent"
    ranks.deliver()
    assert limit.seconds(61) == 60 + ROOT_GRACE_S
    router.probe(0)
    next_limit = ParentTimeLimit(60, router)
    assert next_limit.seconds(0) == PROBE_ANSWER_S
    ranks.deliver()
    assert next_limit.seconds(0.1) == 60 + ROOT_GRACE_S


def test_a_patient_rank_waits_while_the_others_answer(ranks):
    ranks.begin()
    router = ranks.routers[0]
    limit = PatientTimeLimit(60, router, lambda: [1, 2])
    for waited_s in (0, 59, 1000):
        assert limit.seconds(waited_s) == math.inf
        assert router.is_silent(1)
        assert router.is_silent(2)
        ranks.deliver()
        assert not router.is_silent(2)
    limit = PatientTimeLimit(0, router, lambda: [1, 2])
    assert limit.seconds(1) == math.inf, "no rank has been asked"
    assert limit.seconds(2) == 0, "no answer has arrived"
    ranks.deliver()
    assert limit.seconds(3) == math.inf


def test_only_the_first_late_report_waits_for_a_peer_that_does_not_answer(ranks, monkeypatch):
    router, waits = ranks.routers[1], []
    wait_until = router.wait_until
    monkeypatch.setattr(router, "wait_until", lambda *arguments: waits.append(0) or wait_until(*arguments))

    def report_late(prefix):
        """Report to rank 0, which is stopped: nothing is delivered."""
        outcome = Outcome(router, router.begin(prefix), deadline_s=60)
        with pytest.raises(RankFailedError, match="of rank 1"):
            outcome.raise_record(failure_of(1), is_late=True)

    report_late("save/0")
    assert len(waits) == 1
    report_late("save/1")
    assert len(waits) == 1
    states = ranks.begin(0, prefix="save/2")
    ranks.routers[0].send_payload(1, states[0], "plan", b"")
    ranks.deliver()  # rank 0 answers again
    report_late("save/3")
    assert len(waits) == 2


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_whose_peers_stop_raises_within_two_seconds_of_its_deadline(ranks, monkeypatch, rank):
    """The parent has just answered a probe, so this rank waits longest; then nothing is delivered any more."""
    router, waits = ranks.routers[rank], []
    monkeypatch.setattr(router, "wait_until", lambda condition, timeout_s: waits.append(timeout_s))
    limit_s = ParentTimeLimit(60, router).seconds(0)
    with pytest.raises(RankFailedError):
        Outcome(router, router.begin("save/0"), deadline_s=60).raise_record(failure_of(rank), is_late=True)
    assert waits, "it waits for the verdict of rank 0"
    assert limit_s + sum(waits) <= 62


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    for module in ("router", "operation"):
        monkeypatch.setattr(f"bytecheckpoint.control.{module}.time", clock)
    return clock


def deadline_error(ranks, clock, rank, begin, messages_until_s, send):
    """Return the error of ``rank``, to which ``send`` sends messages for a while. Time passes only while it waits."""
    router, start = ranks.routers[rank], clock.now

    def wait_until(condition, timeout_s):
        clock.now += timeout_s
        if clock.now - start < messages_until_s:
            send()
        ranks.deliver()
        return condition()

    router.wait_until = wait_until
    with pytest.raises(DeadlineError) as caught:
        begin(SocketOperation(router, None, "save/0", 60))
    return str(caught.value)


@pytest.mark.parametrize(("notes_until_s", "late"), [(60, "3,5"), (58, "3,5"), (56, "2,4"), (0, "2,4")])
def test_a_deadline_of_rank_0_names_ranks_two_levels_below_while_their_leaders_report(
    ranks, clock, notes_until_s, late
):
    """After the last note of a leader has expired, the leader itself is late."""
    states = ranks.begin(1, 2, 4)
    ranks.routers[1].send_payload(0, states[1], "plan", b"")

    def send_notes():
        for leader in (2, 4):
            steps = [WaitStep(leader, "plan", [leader + 1])]
            ranks.routers[leader].send_note(states[leader], "plan", steps, to_parent=True)

    text = deadline_error(ranks, clock, 0, lambda operation: operation.gather("plan", b""), notes_until_s, send_notes)
    assert f"rank 0 on host-0 waited 60 s in plan for rank(s) {late} of 6. " in text


def test_a_leader_that_has_reported_once_and_sent_its_payload_is_not_late(ranks, clock):
    states = ranks.begin(1, 2, 4)
    ranks.routers[1].send_payload(0, states[1], "plan", b"")
    ranks.routers[4].send_payload(0, states[4], "plan", b"")
    ranks.routers[4].send_note(states[4], "next", [WaitStep(4, "next", [5])], to_parent=True)
    text = deadline_error(ranks, clock, 0, lambda operation: operation.gather("plan", b""), 0, lambda: None)
    assert "for rank(s) 2 of 6. " in text


@pytest.mark.parametrize(
    ("notes_until_s", "context"),
    [
        (100, ", which itself waits in plan for rank(s) 0, which itself waits in written for rank(s) 5. "),
        (30, ". "),
    ],
)
def test_a_deadline_below_a_leader_names_what_the_leader_and_rank_0_wait_for(ranks, clock, notes_until_s, context):
    states = ranks.begin(2)

    def send_notes():
        steps = [WaitStep(2, "plan", [0]), WaitStep(0, "written", [5])]
        ranks.routers[2].send_note(states[2], "plan", steps, to_parent=False)

    def receive(operation):
        operation.broadcast("plan", None)

    text = deadline_error(ranks, clock, 3, receive, notes_until_s, send_notes)
    assert f"rank 3 on host-3 waited 60 s in plan for rank(s) 2 of 6{context}" in text
