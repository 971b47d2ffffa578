"""Fifty saves to S3 hold the same memory, sockets and threads as two, and a large one only what is in flight."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from leak_watch import held_now, left_since, median, memory_now
from warm_python import warm_python

pytest.importorskip("s3fs")

import bytecheckpoint as bcp
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.remote import backend, parts
from bytecheckpoint.storage_backends.remote.parts import PARTS_IN_FLIGHT
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.sampled(2, of="long searches")]

SAVES = 50
WINDOW = 10
PART = 5 << 20  # the smallest that S3 accepts
GROWTH = 10 << 20
"""Bytes. A part for each save would be 240 MiB. The measured growth is 0.5 MB."""


def test_fifty_saves_hold_what_two_held(bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is of two parts, the smallest that S3 accepts, so that the server receives 250 MB."""
    monkeypatch.setattr(backend, "SINGLE_PUT_BYTES", PART)
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    state = {"model": {"weight": torch.zeros(PART // 4 + 1000)}, "extra_state": {"step": 0}}
    early: list[int] = []
    late: list[int] = []
    with bcp.Checkpointer() as checkpointer:
        checkpointer.warmup(state)
        for step in range(1, SAVES + 1):
            state["extra_state"]["step"] = step
            checkpointer.save(
                f"s3://{bucket}/step",
                state,
                async_save=True,
                storage_options=s3,
                options=bcp.SaveOptions(deadline_s=time_limit(60)),
            ).result()
            if step == 2:
                before = held_now()
            if 2 <= step < 2 + WINDOW:
                early.append(memory_now())
            if step > SAVES - WINDOW:
                late.append(memory_now())
        # Connections are kept for the next request, as many as were in use at once.
        assert left_since(before, turns=5) == []
        loaded: dict[str, Any] = {"extra_state": {"step": 0}}
        checkpointer.load(f"s3://{bucket}/step", loaded, strict=False, storage_options=s3)
    assert loaded["extra_state"]["step"] == SAVES
    growth = median(late) - median(early)
    print(f"{growth} bytes")
    assert growth < GROWTH


_UPLOAD = """
import json, sys
from pathlib import Path
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.remote import parts

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name + ":"))

root, options, size, piece, parts.PART_BYTES = json.loads(sys.argv[1])
backend = open_backend(root, **options)
data = bytearray(piece)

def upload(key, size):
    with backend.create(key, size) as writer:
        for start in range(0, size, piece):
            writer.write(start, data)
        writer.complete()

upload("small", 4 * piece)  # the client's own memory
Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from now on
before = status("VmRSS")
upload("large", size)
print(status("VmHWM") - before)
"""


def test_an_upload_holds_only_the_parts_in_flight(bucket: str, s3: dict[str, Any]) -> None:
    """Eight parts in flight, two that are being filled, and 32 MiB: not the object, nor copies of its pieces."""
    size, piece, limit = 192 << 20, 8 << 20, PARTS_IN_FLIGHT * PART + (64 << 20)
    arguments = json.dumps([f"s3://{bucket}/root", s3, size, piece, PART])
    found = warm_python().run(["-c", _UPLOAD, arguments], check=True, timeout=time_limit(120))
    assert PARTS_IN_FLIGHT * PART // 2 < int(found.stdout) < limit
    assert open_backend(f"s3://{bucket}/root", **s3).stat("large").size == size
