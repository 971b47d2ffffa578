"""Weights from a training job, or from a checkpoint, into running inference engines: each worker gets its own part."""

from __future__ import annotations

from .engines import Engine, HttpEngine, LocalEngine
from .native import NativeEngine
from .pusher import Pusher
from .receiver import Receiver
from .report import PushReport, WorkerReport

__all__ = ["Engine", "HttpEngine", "LocalEngine", "NativeEngine", "PushReport", "Pusher", "Receiver", "WorkerReport"]
