"""One thread trains with collectives while another runs operations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sampling
import torch
import torch.distributed as dist

from bytecheckpoint.control.communicator import current_communicator
from bytecheckpoint.errors import RankFailedError
from bytecheckpoint.testing import time_limit

WORLD = 4
STEPS = sampling.examples(1000, 300)
FAILING = 3


def one_save(communicator, number, rank, world_size):
    """Run the exchanges of a save; in every tenth save, one rank fails."""
    with communicator.operation("save", deadline_s=time_limit(60)) as operation:
        try:
            gathered = operation.gather("agree", b"%d of %d" % (rank, number))
            if rank == 0:
                assert gathered == [b"%d of %d" % (other, number) for other in range(world_size)]
            assert operation.broadcast("verdict", b"%d" % number if rank == 0 else None) == b"%d" % number
            plans = [b"for %d" % other for other in range(world_size)] if rank == 0 else None
            assert operation.scatter("plan", plans) == b"for %d" % rank
            with operation.phase("write"):
                if number % 10 == 9 and rank == FAILING:
                    raise ValueError(f"of {number}")
                operation.barrier("written")
        except RankFailedError as error:
            return error.rank, error.error_type, error.phase
        return "saved"


def train(rank, world_size):
    communicator = current_communicator()
    trained = threading.Event()

    def save_repeatedly():
        """Save until no rank trains any more, so that all ranks make the same number of saves."""
        done = []
        while True:
            with communicator.operation("go on", deadline_s=time_limit(60)) as operation:
                flags = operation.gather("trained", b"y" if trained.is_set() else b"n")
                over = operation.broadcast("over", None if flags is None else b"y" if b"n" not in flags else b"n")
            if over == b"y":
                return done
            done.append(one_save(communicator, len(done), rank, world_size))

    with ThreadPoolExecutor(1) as executor:
        saves = executor.submit(save_repeatedly)
        try:
            total = 0
            for step in range(STEPS):
                tensor = torch.full((1000,), step + rank)
                dist.all_reduce(tensor)
                assert tensor.eq(step * world_size + sum(range(world_size))).all()
                total += int(tensor[0])
                if step % 10 == 0:
                    dist.barrier()
        finally:
            trained.set()
        return total, saves.result()


@pytest.mark.sampled(1)
def test_operations_run_during_many_collectives(rank_pool):
    results = rank_pool.run(train, world_size=WORLD)
    total = sum(step * WORLD + sum(range(WORLD)) for step in range(STEPS))
    saves = results[0][1]
    assert results == [(total, saves)] * WORLD
    assert len(saves) > 10, "saves and training ran at the same time"
    expected = ["saved"] * 9 + [(FAILING, "ValueError", "write")]
    assert saves == (expected * len(saves))[: len(saves)]
