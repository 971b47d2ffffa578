"""Torch's modes of the calling thread, which the caller has set for its own computations and not for this library.

In inference mode, new tensors can never be trained; a default device moves what is meant for host memory; autocast and
modes that intercept operations change results. Threads of this library begin without any of them. The default dtype is
one of the process, so code that allocates states the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C import (
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def default_modes() -> Iterator[None]:
    """Run the block, or each call of the decorated function, in the modes in which a thread begins."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            stack.enter_context(torch.inference_mode(False))  # which enables gradients, too
        accelerator = torch.accelerator.current_accelerator()
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        for _ in range(_len_torch_function_stack()):  # a default device is one of these
            stack.callback(_push_on_torch_function_stack, _pop_torch_function_stack())
        yield
