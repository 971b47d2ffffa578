"""Weights from a training job, or from a checkpoint, into running inference engines: each worker gets its own part."""

from __future__ import annotations

from .adapters import AdapterEngine, adapter_config, adapter_state
from .engines import Engine, HttpEngine, LocalEngine
from .ipc_engine import IpcEngine
from .native import NativeEngine
from .pusher import Pusher
from .receiver import Receiver
from .report import PushReport, WorkerReport
from .targets import DraftEngine

__all__ = [
    "AdapterEngine",
    "DraftEngine",
    "Engine",
    "HttpEngine",
    "IpcEngine",
    "LocalEngine",
    "NativeEngine",
    "PushReport",
    "Pusher",
    "Receiver",
    "WorkerReport",
    "adapter_config",
    "adapter_state",
]
