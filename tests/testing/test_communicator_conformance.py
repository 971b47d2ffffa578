"""The built-in communicators pass the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from communicator_tests import CommunicatorConformance

from bytecheckpoint.control.base import Communicator, SingleProcess
from bytecheckpoint.control.communicator import SocketCommunicator
from bytecheckpoint.testing import time_limit


def _connect(world_size: int, group_size: int | None = None) -> Iterator[Sequence[Communicator]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        futures = [
            pool.submit(
                SocketCommunicator.connect,
                store,
                rank,
                world_size,
                deadline_s=time_limit(30),
                group_size=group_size,
            )
            for rank in range(world_size)
        ]
        communicators = [future.result() for future in futures]
        yield communicators
        for closed in [pool.submit(one.close) for one in communicators]:
            closed.result()


class TestSingleProcess(CommunicatorConformance):
    @pytest.fixture
    def communicators(self) -> Sequence[Communicator]:
        return [SingleProcess()]


class TestSocketCommunicator(CommunicatorConformance):
    @pytest.fixture(params=[2, 4])
    def communicators(self, request: pytest.FixtureRequest) -> Iterator[Sequence[Communicator]]:
        yield from _connect(request.param)


class TestSocketCommunicatorInGroups(CommunicatorConformance):
    """Ranks in groups of two, as large jobs form them."""

    @pytest.fixture
    def communicators(self) -> Iterator[Sequence[Communicator]]:
        yield from _connect(4, group_size=2)
