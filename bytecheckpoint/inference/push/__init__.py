"""Push weights from a training job or a checkpoint into running inference engines."""

from __future__ import annotations

from .checkpoint_engine import IpcEngine
from .engines.adapters import AdapterEngine, adapter_config, adapter_state
from .engines.base import DraftEngine, Engine
from .engines.rpc import LocalEngine, RpcEngine
from .engines.vllm import HttpEngine
from .pusher import Pusher
from .receiver import Receiver
from .report import PushReport, WorkerReport

__all__ = [
    "AdapterEngine",
    "DraftEngine",
    "Engine",
    "HttpEngine",
    "IpcEngine",
    "LocalEngine",
    "PushReport",
    "Pusher",
    "Receiver",
    "RpcEngine",
    "WorkerReport",
    "adapter_config",
    "adapter_state",
]
