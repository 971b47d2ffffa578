"""What a training job keeps from push to push."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ...checkpoint import Checkpoint
from ...checkpointer import DEADLINE_S
from ...control import current_communicator
from ...control.base import Communicator
from ...errors import StateError
from .engines import Budget, Engine
from .group import GroupBackend, check_backend
from .joining import Join
from .lead import Lead
from .planning import CHUNK_BYTES
from .progress import Progress
from .pushing import SHARE, Push
from .report import PushReport
from .sender import Sender
from .sources import Rename

__all__ = ["Pusher"]


class Pusher:
    """Pushes weights into running inference engines. Made on every rank of the training job, used by all in step.

    ``engines`` matters on rank 0 only, which alone talks to them. ``deadline_s`` bounds each wait. ``memory_bytes`` is
    what a worker may hold in host memory beside its model; by default what is free there. Twice its weights is best,
    once its weights means that there is no way back from a version that cannot be put in, and with less weights are
    streamed: put in as they come, while the engine is paused. ``tcp_only`` keeps senders from using shared memory with
    workers of their host.

    Two ways go from device to device; both stream, and ``memory_bytes`` is of the device then. With ``cuda_ipc``,
    senders write into the memory of workers' devices that are on their host, and that they see; to others they write by
    TCP. With a ``group``, senders and workers form one of that backend (NCCL, or gloo between hosts' memories): what
    several workers want leaves its sender once, and they pass it on.

    What engines want, the plan, and what workers hold are remembered from push to push; where anything changes, or a
    worker was restarted, it is found out anew.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        tcp_only: bool = False,
        group: GroupBackend | None = None,
        cuda_ipc: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        if group is not None:
            check_backend(group)
            if cuda_ipc:
                raise StateError("a group receives into memory of its own; take group or cuda_ipc, not both")
        given = [engines] if isinstance(engines, Engine) else list(engines or ())
        self._deadline_s, self._communicator = deadline_s, communicator
        # An engine is given up before the other ranks give up rank 0, so that all raise what it is about.
        self._lead = Lead(given, chunk_bytes, memory_bytes, SHARE * deadline_s, group, cuda_ipc)
        self._has_engines, self._to_devices = bool(given), group is not None or cuda_ipc
        self._sender = Sender(SHARE * deadline_s, tcp_only)
        self._version: int | str | None = None

    def push(
        self,
        what: Any,
        *,
        version: int | str | None = None,
        section: str = "model",
        framework: str | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        progress: Progress | None = None,
    ) -> PushReport:
        """Make every engine serve ``what``: a module, a state as for ``bytecheckpoint.save``, an opened checkpoint, or
        another ``Engine`` that was pushed to, whose workers then give what it serves. Rank 0 alone talks to that one.

        ``version`` is what engines call it: by default a checkpoint's step, what the other engine calls it, else one
        more than the last. ``rename`` turns the names of the state into those that the engine's model loads. With
        ``strict``, every element of every parameter of an engine must get something, an engine must take all of a
        tensor or nothing, and one that gives must have the exact values. ``progress`` is called
        by this thread when a stage begins and as this rank writes (or on rank 0, as another engine gives); what it
        raises is logged, and it is called no more. Returns when every engine serves it.

        Where it raises, on any rank, every engine serves the version before, and the next push works; where one cannot
        (as when weights are streamed), the error says so, and the engine is left paused. Raises ``MismatchError`` or
        ``PlanError`` where the engine's model and the state do not fit, ``CorruptionError`` for bytes that did not
        arrive, ``EngineError`` for an engine that fails, ``DeadlineError`` for one that does not answer,
        ``ControlError`` for ranks that fail.
        """
        ranks = self._communicator or current_communicator(deadline_s=self._deadline_s)
        op = ranks.operation("push", deadline_s=self._deadline_s)
        try:
            lead = self._lead if op.rank == 0 else None
            with op.phase("push.begin"):
                if op.rank == 0 and not self._has_engines:
                    raise StateError("rank 0 has no engine to push to; give Pusher its engines there")
                if self._to_devices and isinstance(what, Engine):
                    raise StateError("engines give to others by no group, and not by CUDA IPC; make another Pusher")
                if version is not None or not isinstance(what, Engine):
                    version = self._named(version, what)
                    op.is_about(f"push of version {version!r}")
            if isinstance(what, Engine):
                report = Join(op, lead, self._sender, strict, what, progress).join(version, rename)
            else:
                assert version is not None
                report = Push(op, lead, self._sender, strict, progress).run(what, version, section, framework, rename)
            self._version = report.version
            return report
        finally:
            op.close()

    def state(self) -> list[list[dict[str, Any]]]:
        """By engine and worker: ``version`` served (None: what it started with), ``torn`` where that is none, whether
        the way back is ``intact``, ``digest`` of the version, ``bytes`` of memory, and how many bytes more the last
        stream has ``set_aside`` because the engine wanted them in another order than it was seen to. On rank 0 only."""
        answers = self._lead.tell("state", Budget(self._deadline_s))
        kept = ("version", "torn", "intact", "digest", "bytes", "set_aside")
        return [[{key: answer[key] for key in kept} for answer in of_engine] for of_engine in answers]

    def release(self) -> None:
        """Have the workers give back the memory of pushes. They go on serving; the next push sends everything. On rank
        0 only."""
        self._lead.tell("release", Budget(self._deadline_s))

    def close(self) -> None:
        """Give this rank's memory back. Engines go on serving what they serve."""
        self._sender.close()
        self._lead.close()

    def _named(self, version: int | str | None, what: Any) -> int | str:
        if isinstance(version, (int, str)):
            return version
        if version is not None:
            raise StateError(f"a version is a number or a text, not {version!r}")
        if isinstance(what, Checkpoint) and what.step is not None:
            return what.step
        if isinstance(self._version, str):
            raise StateError(f"after version {self._version!r} the next one needs a name; give version=")
        return 0 if self._version is None else self._version + 1

    def __enter__(self) -> Pusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
