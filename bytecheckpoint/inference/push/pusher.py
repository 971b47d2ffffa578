"""The public entry point of a training job: ``Pusher``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.renaming import Rename
from ...control.base import Communicator
from ...control.communicator import current_communicator
from ...errors import StateError, UsageError
from ...runtime import DEFAULT_DEADLINE_S
from ...runtime.arguments import check_arguments
from ...runtime.gc_pause import paused
from .coordinator import PushCoordinator
from .engines.base import Budget, Engine
from .engines.colocated import ColocatedEngines
from .joins import EngineSource
from .plan import CHUNK_BYTES
from .protocol import ENGINE_SHARE, Push
from .report import Progress, ProgressReporter, PushReport
from .sender import Sender
from .sources import source_of
from .transports.group import GroupBackend, check_backend


class Pusher:
    """Pushes weights into running inference engines.

    Every rank of the training job creates one and calls the same methods in the same order. What engines request, the
    plan, and what workers hold are kept from push to push; a restarted worker is asked again.

    Args:
        engines: The engines to push to. Only rank 0 needs them, because only rank 0 sends them requests. Other ranks
            may pass the same ones. Or each rank passes one engine of its own process (colocated trainers): then all of
            them take each version together, from memory for two versions.
        deadline_s: The limit of each wait, in seconds.
        quorum: The number of engines that must take a version, by default all. Others that fail, at the beginning of a
            push or in *apply*, are left out; ``PushReport.failed`` names them, and the next push includes them again.
        memory_bytes: The host memory that a worker may use in addition to its model; by default four fifths of the free
            memory, divided among the workers of the host. With twice the size of its weights, a worker can roll back
            from a version that cannot be applied; with the size of its weights, it cannot. With less, weights are
            streamed: the engine is paused, and the worker loads them while they arrive. With ``group="nccl"`` or
            ``cuda_ipc``, it is memory of the device.
        chunk_bytes: The size limit of a chunk, the unit of planning and of checksums.
        tcp_only: Do not use shared memory with workers on the same host.
        group: Form a process group of senders and workers with this backend, "gloo" or "nccl". A chunk that several
            workers request leaves its sender once, and its replica set broadcasts it. Weights are streamed.
            ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` sets the network. With nccl, each sender and worker needs a
            separate GPU; it has never run between devices.
        cuda_ipc: Write into the GPU memory of workers on the sender's host. A sender must see that GPU, be of the same
            user, and share the worker's pid namespace; other workers are reached by TCP. Weights are streamed. This ran
            on one GPU, and never between two.
        communicator: The ranks of the job; by default those of the default process group.

    Raises:
        UsageError: ``group`` and ``cuda_ipc`` are both given, the backend is unknown, or ``quorum`` is not positive.
        StateError: This process cannot use the backend.

    Example:
        >>> engines = [HttpEngine("http://127.0.0.1:8000")] if rank == 0 else None
        >>> with Pusher(engines) as pusher:
        ...     for step in range(steps):
        ...         train(model)
        ...         report = pusher.push(model, version=step)
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine] | None = None,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        quorum: int | None = None,
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
                raise UsageError("a group receives into its own memory; use group or cuda_ipc, not both")
        if quorum is not None and quorum < 1:
            raise UsageError(f"quorum is a number of engines, not {quorum}")
        self._deadline_s, self._communicator = deadline_s, communicator
        # Rank 0's wait for an engine ends before the other ranks' wait for rank 0, so that all raise the same cause.
        self._coordinator = PushCoordinator(
            chunk_bytes=chunk_bytes,
            memory_bytes=memory_bytes,
            deadline_s=ENGINE_SHARE * deadline_s,
            quorum=quorum,
            group=group,
            cuda_ipc=cuda_ipc,
        )
        self.set_engines([engines] if isinstance(engines, Engine) else list(engines or ()))
        self._uses_devices = group is not None or cuda_ipc
        self._sender = Sender(ENGINE_SHARE * deadline_s, tcp_only=tcp_only)
        self._version: int | str | None = None

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """Push to these engines from now on. Ranks that do not pass engines need not call it.

        Args:
            engines: All engines, also those that stay. The ones that are left out are not closed.
        """
        self._coordinator.set_engines(engines)
        self._engines = [engine.identity for engine in engines]
        is_own = len(engines) == 1 and engines[0].address is None
        self._own = ColocatedEngines(engines[0]) if is_own else None

    def push(
        self,
        what: Any,
        *,
        version: int | str | None = None,
        section: str = "model",
        framework: str | None = None,
        rename: Rename | None = None,
        exclude: Sequence[str] = (),
        strict: bool = True,
        check_finite: bool = True,
        progress: Progress | None = None,
    ) -> PushReport:
        """Make every engine serve new weights. Returns when all of them do.

        If this raises, on any rank, every engine serves the previous version, and the next push works. If an engine
        cannot serve that version (as when weights are streamed), it is left paused, which the error states.

        Args:
            what: A module, a state as for ``bytecheckpoint.save``, an open checkpoint, or another ``Engine`` that was
                pushed to, whose version rank 0 then reads and sends.
            version: The engines' name for these weights. By default a checkpoint's step, the version of the other
                engine, or one more than the last version.
            section: The section of the state or checkpoint to push.
            framework: Name of the adapter to use for ``what``; by default it is inferred.
            rename: From full names of the state or checkpoint to those that the engine's model loads, after the name of
                the section; a mapping or a function, as in ``bytecheckpoint.load``.
            exclude: Shell patterns of full names, after ``rename``, of tensors that the engines lack, such as
                ``model.value_head.*``.
            strict: Require that every element of every engine parameter is filled, that an engine uses a tensor
                completely or not at all, and that an engine that sends has the exact values.
            check_finite: Refuse values that are NaN or infinite, as senders would send them (after a cast). They are
                found before any weight changes, except where a checkpoint is streamed. Without this check, workers of
                vLLM overwrite the KV cache when they load the next version: kernels read unused parts of it.
            progress: Called by this thread when a stage begins and while this rank writes, with the stage, the bytes
                written, and their total.

        Returns:
            The report, the same on every rank.

        Raises:
            MismatchError: The engine's model and the state do not fit. Nothing was sent.
            PlanError: An engine requests elements that no sender holds. Nothing was sent.
            CorruptionError: Bytes did not arrive as they were sent.
            EngineError: An engine failed.
            DeadlineError: An engine did not answer in time.
            ControlError: Another rank failed.
            UsageError: An argument is invalid.
            StateError: A value is not finite, or another rank passed an engine that rank 0 did not pass.
        """
        ranks = self._communicator or current_communicator(deadline_s=self._deadline_s)
        op = ranks.operation("push", deadline_s=self._deadline_s)
        try:
            coordinator = self._coordinator if op.rank == 0 else None
            with op.phase("push.begin"):
                if op.rank == 0 and not self._engines:
                    raise UsageError("rank 0 has no engine to push to; pass the engines to Pusher on rank 0")
                if self._uses_devices and isinstance(what, Engine):
                    raise StateError("engines cannot send to others over a group or by CUDA IPC; create another Pusher")
                if (rename is not None or exclude) and isinstance(what, Engine):
                    raise UsageError("rename= and exclude= apply to tensors; an engine sends what it received")
                check_arguments({"rename": rename})
                if version is not None or not isinstance(what, Engine):
                    version = self._named(version, what)
                    op.set_description(f"push of version {version!r}")
            self._sender.finite = self._coordinator.finite = check_finite
            reporter = ProgressReporter(progress)
            common = (op, coordinator, self._sender, version, strict, reporter, self._engines, self._own)
            if isinstance(what, Engine):
                holder = what if op.rank == 0 else None
                make = partial(EngineSource, holder, self._sender.deadline_s, tcp_only=self._sender.tcp_only)
                named = "" if version is None else f", as {version!r}"
                push = Push(*common, make, f"what an engine serves{named}")
            else:
                of_rank = partial(source_of, what, section, rank=op.rank, world_size=op.world_size)
                make_own = partial(of_rank, framework=framework, rename=rename, exclude=exclude)
                push = Push(*common, make_own, repr(version))
            with paused():
                report = push.run()
            self._version = report.version
            return report
        except BaseException as error:
            op.fail("push", error)  # of an interrupt between two phases, the other ranks know nothing
            raise
        finally:
            op.close()

    def state(self) -> list[list[dict[str, Any]]]:
        """Return the state of every worker, by engine and worker; with a ``quorum``, none of an engine that fails. On
        rank 0 only; with colocated engines on any rank, for its own one, as the methods below.

        Returns:
            For each worker a map of ``version`` (None for what it has loaded without a push, unless it started from a
            checkpoint with a step), ``pushed`` (whether a push applied it), ``inconsistent_reason`` (empty when it
            serves one consistent version), ``intact`` (whether it can roll back to what it serves), ``digest`` of the
            version, ``bytes`` of host memory in use, and ``set_aside``, the bytes that the last stream copied out of
            the way because the engine read them in another order than recorded.

        Raises:
            EngineError: An engine failed.
            DeadlineError: An engine did not answer in time.
        """
        answers = self._coordinator.states(Budget(self._deadline_s))
        kept = ("version", "inconsistent_reason", "intact", "digest", "bytes", "set_aside")
        return [
            [{**{key: answer[key] for key in kept}, "pushed": bool(answer["applied_by"])} for answer in of_engine]
            for of_engine in answers
        ]

    def release(self) -> None:
        """Make the workers free the memory of pushes. On rank 0 only.

        The engines keep serving; the next push sends everything.

        Raises:
            EngineError: An engine failed.
            DeadlineError: An engine did not answer in time.
        """
        self._coordinator.ask_engines("release", Budget(self._deadline_s))

    def rollback(self) -> int | str:
        """Make every engine serve the version before the one that it serves, from its memory. On rank 0 only.

        It needs the mode ``double`` (see ``memory_bytes``). It goes back by one version, and not after another push has
        begun. Nothing is sent; the engines pause and resume together, as in a push.

        Returns:
            The name of the version that all engines serve now.

        Raises:
            StateError: A worker does not hold the version before. Nothing was changed.
            EngineError: An engine failed.
            DeadlineError: An engine did not answer in time.
        """
        self._version = self._coordinator.rollback(Budget(self._deadline_s))
        return self._version

    def resume(self) -> list[int | str | None]:
        """End a push whose sender was killed, and resume the engines that it left paused. On rank 0 only.

        An engine does that by itself if its first worker can reach it at the address that the sender used.

        Returns:
            The version that each engine serves; None for what it started with.

        Raises:
            EngineError: An engine failed, or serves no complete version and is left paused; push again.
            StateError: A push is in progress, and its sender is alive.
            DeadlineError: An engine did not answer in time.
        """
        return self._coordinator.resume(Budget(self._deadline_s))

    def close(self) -> None:
        """Free this rank's memory and connections. The engines keep serving."""
        self._sender.close()
        self._coordinator.close()

    def _named(self, version: int | str | None, what: Any) -> int | str:
        if isinstance(version, int) and not -(2**63) <= version < 2**64:
            raise UsageError(f"version must fit into 64 bits, unlike {version}; a str may be longer")
        if isinstance(version, (int, str)):
            return version
        if version is not None:
            raise UsageError(f"version must be an int or a str, not {version!r}")
        if isinstance(what, Checkpoint) and what.step is not None:
            return what.step
        if isinstance(self._version, str):
            raise UsageError(f"there is no default version after {self._version!r}; pass version=")
        return 0 if self._version is None else self._version + 1

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
