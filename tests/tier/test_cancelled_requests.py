"""Requests of a process that is about to exit are cancelled after a time."""

from __future__ import annotations

from concurrent.futures import Future
from unittest import mock

import pytest

from bytecheckpoint.errors import ThreadError
from bytecheckpoint.runtime import waiting
from bytecheckpoint.runtime.waiting import cancelling_requests, track_request
from bytecheckpoint.testing import time_limit


def _request() -> Future[None]:
    request: Future[None] = Future()
    track_request(request)
    return request


def test_requests_of_earlier_and_of_the_block_are_cancelled() -> None:
    earlier = _request()
    with cancelling_requests(0.1):
        own = _request()
        for one in (earlier, own):
            with pytest.raises(Exception) as ended:
                one.result(time_limit(60))
            assert one.cancelled(), ended.value
    assert not {earlier, own} & waiting._requests.keys()


def test_the_block_gives_requests_of_earlier_their_time() -> None:
    earlier = _request()
    with cancelling_requests(0.1):
        pass
    assert earlier.cancelled()


def test_requests_that_end_in_time_are_not_cancelled() -> None:
    earlier = _request()
    with cancelling_requests(60.0):
        earlier.set_result(None)
    assert not earlier.cancelled()


def test_requests_of_a_slow_store_are_not_cancelled() -> None:
    with cancelling_requests(0.0, silent_s=60.0):
        own = _request()
        with pytest.raises(TimeoutError):
            own.result(1.0)
        own.set_result(None)


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_process_that_can_start_no_thread_goes_on(*, is_ending: bool) -> None:
    earlier = _request()
    with (
        mock.patch.object(waiting, "is_ending", return_value=is_ending),
        mock.patch.object(waiting, "run_daemon", side_effect=ThreadError("no more threads")) as started,
        cancelling_requests(0.01),
    ):
        assert started.called != is_ending
    earlier.set_result(None)
