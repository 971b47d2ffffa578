"""The trainer's side of vLLM's own weight transfer API. Needs vLLM.

Code that is written for ``WeightTransferTrainerFactory`` pushes with this library when it makes a
``BcpTrainerInitInfo`` instead of an ``NCCLTrainerInitInfo``, and the engine was started with
``--weight-transfer-config '{"backend": "bcp"}'``. Importing this module registers the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...control import SingleProcess
from ...errors import UsageError
from ...runtime import DEFAULT_DEADLINE_S
from ..push.engines.rpc import RpcEngine
from ..push.engines.vllm import NativeEngine
from ..push.pusher import Pusher
from .private import check_part

check_part("trainer")

from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory


@dataclass
class BcpTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's options: ``rank`` (in the default process group), ``deadline_s`` and ``memory_bytes`` as for
    ``Pusher``."""

    backend: ClassVar[str] = "bcp"

    deadline_s: float = DEFAULT_DEADLINE_S
    memory_bytes: int | None = None


class _ClientEngine(RpcEngine):
    """An engine behind a ``VLLMWeightSyncClient``. Its owner pauses and resumes it, as with vLLM's own backends."""

    def __init__(self, client: Any) -> None:
        def set_version(version: str) -> None:
            client.start_weight_update()
            client.finish_weight_update(version)

        methods = {"set version": set_version, "init transfer": client.init_weight_transfer_engine}
        super().__init__(
            lambda method, *arguments: methods[method](*arguments),
            name=getattr(client, "base_url", type(client).__name__),
        )

    def init_transfer(self, info: Mapping[str, Any], timeout_s: float) -> None:
        self._run("init transfer", timeout_s, info)

    def pause(self, timeout_s: float) -> None:
        return

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and version is not None:
            # Both steps in one thread: an interrupt must not leave vLLM's session open.
            self._run("set version", timeout_s, str(version))


class BcpTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Pushes the weights of a ``WeightSource`` to the engine of a client.

    Of a ``ModuleSource``, every rank sends its own shards, and nothing is gathered. Other sources yield complete
    tensors, which rank 0 keeps until they are sent.
    """

    init_info_cls = BcpTrainerInitInfo

    def __init__(self, init_info: BcpTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._module = source._module if type(source) is ModuleSource else None
        self._pusher = Pusher(
            NativeEngine(_ClientEngine(client)) if self.is_sender else None,
            deadline_s=init_info.deadline_s,
            memory_bytes=init_info.memory_bytes,
            communicator=None if self._module is not None else SingleProcess(),
        )

    @classmethod
    def trainer_init(cls, init_info: BcpTrainerInitInfo, *, client: Any, source: Any = None) -> BcpTrainerEngine:
        """Return an engine. Every rank of the trainer calls this.

        Args:
            init_info: The options.
            client: vLLM's client of the inference engine.
            source: The weights.

        Raises:
            UsageError: There is no source.
        """
        if source is None:
            raise UsageError("the backend bcp needs a WeightSource, such as ModuleSource(model)")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({})  # fails for an engine without a backend
        return engine

    def send_weights(self, version: int | str | None = None) -> None:
        """Push the source's weights. Every rank of the trainer calls this; pause the engine around it.

        Args:
            version: vLLM's version of these weights, by default one more than the last.

        Raises:
            BytecheckpointError: As of ``Pusher.push``.
        """
        if self._module is not None:
            self._pusher.push(self._module, version=version)
            return
        # Every rank iterates, because each tensor may be gathered on the way.
        tensors = {name: tensor for name, tensor in self.source if self.is_sender}
        if self.is_sender:
            self._pusher.push({"model": tensors}, version=version)

    def shutdown(self) -> None:
        self._pusher.close()


with contextlib.suppress(ValueError):  # it is registered already
    WeightTransferTrainerFactory.register_engine(BcpTrainerInitInfo.backend, BcpTrainerEngine)
