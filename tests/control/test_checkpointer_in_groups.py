"""Saves and loads of an FSDP-2 model with ranks in groups of two."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from layouts import build, differences

import bytecheckpoint as bcp
from bytecheckpoint.control.communicator import SocketCommunicator
from bytecheckpoint.errors import StateError

WORLD = 4


class FailsOnce:
    """A part of the state that fails once, on one rank."""

    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        if self.fails:
            self.fails = False
            raise ValueError("no state yet")
        return {"step": 7}

    def load_state_dict(self, state):
        assert state == {"step": 7}


def save_and_load(rank, world_size, folder, layout):
    store = dist.distributed_c10d._get_default_store()
    communicator = SocketCommunicator.connect(store, rank, world_size, group_size=2)
    assert communicator.router.tree.children(2) == [3]
    with bcp.Checkpointer(communicator=communicator) as checkpointer:
        saved = build("fsdp2-4", 1, steps=2)
        part = FailsOnce(rank == 3)
        with pytest.raises(StateError, match=r"^section part: .*ValueError: no state yet") as caught:
            checkpointer.save(f"{folder}/failed", {**saved.state, "part": part}, options=bcp.SaveOptions(layout=layout))
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError) if rank == 3 else "rank 3 on " in str(cause)
        assert not os.path.exists(f"{folder}/failed/manifest.msgpack")
        for number in range(3):
            # The second save reuses the plan of the first.
            checkpointer.save(
                f"{folder}/{number}", {**saved.state, "part": part}, options=bcp.SaveOptions(layout=layout)
            )
        handle = checkpointer.save(
            f"{folder}/async", {**saved.state, "part": part}, async_save=True, options=bcp.SaveOptions(layout=layout)
        )
        dist.barrier()
        handle.result()
        found = []
        for name in ("2", "async"):
            loaded = build("fsdp2-4", 2, steps=1)
            report = checkpointer.load(
                f"{folder}/{name}", {**loaded.state, "part": part}, options=bcp.LoadOptions(share_reads="always")
            )
            found += differences(loaded, saved)
            assert not report.missing
    communicator.close()
    return found


@pytest.mark.parametrize("layout", ["shards", "whole"])
@pytest.mark.sampled(2)
def test_an_fsdp2_model_is_saved_and_loaded(rank_pool, tmp_path, layout):
    assert rank_pool.run(save_and_load, str(tmp_path), layout, world_size=WORLD) == [[]] * WORLD
