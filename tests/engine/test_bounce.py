"""Bounce buffers: alignment, reuse, and the limit of the pool."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bytecheckpoint.engine.reading.bounce import BouncePool

PAGE = 4096


def test_a_buffer_is_aligned_and_reused() -> None:
    pool = BouncePool()
    with pool.lend((2 << 20) + 1) as bounce:
        assert bounce.address % (2 << 20) == 0
        assert len(bounce.view) == bounce.nbytes == (2 << 20) + PAGE
        bounce.view[-3:] = b"abc"
    with pool.lend(5) as again:
        assert again is bounce
    assert pool.nbytes == bounce.nbytes
    pool.trim()
    assert pool.nbytes == 0


def test_copies_stay_within_the_buffer() -> None:
    target = torch.zeros(4, dtype=torch.uint8)
    with BouncePool().lend(10) as bounce:
        bounce.view[PAGE - 4 :] = b"1234"
        bounce.copy_out(PAGE - 4, 4, target.data_ptr())
        assert bytes(target.tolist()) == b"1234"
        for start, nbytes in [(-1, 1), (PAGE, 1), (PAGE - 4, 5), (3, -1)]:
            with pytest.raises(IndexError):
                bounce.copy_out(start, nbytes, target.data_ptr())


def test_the_limit_holds_and_every_waiting_thread_gets_a_buffer() -> None:
    pool = BouncePool(3 * PAGE)
    most = 0
    lock = threading.Lock()
    lent = 0

    def borrow(index: int) -> None:
        nonlocal most, lent
        for round_ in range(50):
            with pool.lend(PAGE * (1 + (index + round_) % 3)) as bounce:
                with lock:
                    lent += bounce.nbytes
                    most = max(most, lent)
                assert pool.nbytes <= 3 * PAGE
                with lock:
                    lent -= bounce.nbytes

    with ThreadPoolExecutor(6) as threads:
        for _ in threads.map(borrow, range(6)):
            pass
    assert 0 < most <= 3 * PAGE


def test_a_buffer_over_the_limit_is_lent_alone_and_not_kept() -> None:
    pool = BouncePool(PAGE)
    with pool.lend(10 * PAGE) as bounce:
        assert bounce.nbytes == 10 * PAGE
    assert pool.nbytes == 0


def test_an_error_returns_the_buffer() -> None:
    pool = BouncePool(PAGE)
    with pytest.raises(ValueError, match="failed by test"), pool.lend(PAGE):
        raise ValueError("failed by test")
    with pool.lend(PAGE) as bounce:
        assert bounce.nbytes == PAGE
