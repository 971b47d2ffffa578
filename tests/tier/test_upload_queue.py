"""The uploads that wait in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bytecheckpoint.saving import upload_queue
from bytecheckpoint.saving.upload_queue import UploadQueue
from bytecheckpoint.testing import time_limit


def test_an_upload_is_taken_once_it_waits_or_has_failed() -> None:
    queue: UploadQueue[object] = UploadQueue()
    one = object()
    with ThreadPoolExecutor(2) as threads:
        taken, failed = threads.submit(queue.take, "a"), threads.submit(queue.take, "b")
        assert queue.add("a", one)
        queue.refuse("b")
        assert taken.result(time_limit(30)) is one
        assert failed.result(time_limit(30)) is None
    assert len(queue) == 0


def test_failed_saves_do_not_accumulate() -> None:
    queue: UploadQueue[object] = UploadQueue()
    for number in range(3 * upload_queue._MOST_WITHOUT):
        queue.refuse(str(number))
    assert len(queue._without) == upload_queue._MOST_WITHOUT
    assert not queue.add(str(number), object())


def test_what_is_left_out_is_not_chosen() -> None:
    queue: UploadQueue[object] = UploadQueue()
    for attempt in "abc":
        queue.add(attempt, object())
    assert queue.choose(["c", "earlier"]) == ["b", "c", "earlier"]
    assert queue.choose(["a", "b", "c"]) == ["", "a", "b", "c"]
    assert queue.leave_out("earlier") is None
    queue.refuse("failed")
    assert queue.is_left_out("earlier")
    assert not queue.is_left_out("failed")
