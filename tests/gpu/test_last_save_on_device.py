"""A last save on an exception does not begin while this rank's device is busy."""

from __future__ import annotations

import pytest
import torch

from bytecheckpoint.control.base import SingleOperation
from bytecheckpoint.errors import DeadlineError
from bytecheckpoint.manager.coordinator import agree_on_last_save

pytestmark = pytest.mark.gpu


def test_a_busy_device_does_not_join() -> None:
    torch.ones(1, device="cuda")
    torch.cuda._sleep(4_000_000_000)  # cycles; about two seconds
    with pytest.raises(DeadlineError, match="cuda:0 is still busy"):
        agree_on_last_save(SingleOperation(), 1, ValueError("x"), deadline_s=0.05)
    torch.cuda.synchronize()
    assert agree_on_last_save(SingleOperation(), 1, ValueError("x"), deadline_s=0.05)["steps"] == [1, 1]
