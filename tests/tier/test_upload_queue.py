"""The uploads that wait in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bytecheckpoint.saving import upload_queue
from bytecheckpoint.saving.upload_queue import UploadQueue
from bytecheckpoint.testing import time_limit


class _Upload:
    def is_superfluous(self) -> bool:
        return False


def test_an_upload_is_taken_once_it_waits_or_has_failed() -> None:
    queue: UploadQueue[_Upload] = UploadQueue()
    one = _Upload()
    with ThreadPoolExecutor(2) as threads:
        taken, failed = threads.submit(queue.take, "a"), threads.submit(queue.take, "b")
        assert queue.add("a", one)
        queue.refuse("b")
        assert taken.result(time_limit(30)) is one
        assert failed.result(time_limit(30)) is None
    assert len(queue) == 0


def test_failed_saves_do_not_accumulate() -> None:
    queue: UploadQueue[_Upload] = UploadQueue()
    for number in range(3 * upload_queue._MOST_WITHOUT):
        queue.refuse(str(number))
    assert len(queue._without) == upload_queue._MOST_WITHOUT
    assert not queue.add(str(number), _Upload())
