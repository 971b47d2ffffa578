"""Memory of a worker's GPU, shared by CUDA IPC. Tested on one H100; between two GPUs it has never run.

Senders on the worker's host write into this memory from device to device. The IPC handle is stored in a small arena of
host memory, which only processes of the same user can open. A process that has the device memory open holds a lock on
that arena's descriptor, which the kernel releases when the process ends. CUDA memory must not be freed while another
process has it open, for example a sender that was stopped in the middle of a push; a thread waits for the lock.

The calls go to the CUDA runtime directly. Memory that torch shares may be part of a segment that cannot be shared, and
torch counts its references in files of ``/dev/shm``, which a killed process leaves behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import msgpack
import torch

from ....errors import EngineError, StateError
from .shared_memory import ArenaAddress, SharedArena, open_arena

GPU_PREFIX = "GPU-"

_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag
_OUT_OF_MEMORY = 2
_BLOCK_BYTES = 2 << 20  # CUDA shares complete blocks, with everything in them

_log = logging.getLogger(__name__)


def current_device_memory() -> DeviceMemory:
    """Return the memory of torch's current device. Raises ``StateError`` without a CUDA device."""
    if not torch.cuda.is_available():
        raise StateError(
            "this worker has no CUDA device, so senders cannot write into its memory; push without cuda_ipc"
        )
    return DeviceMemory(torch.cuda.current_device())


def device_memory_named(name: str) -> DeviceMemory | None:
    """Return the memory of a device by name; None when this process does not see the device."""
    gpu = visible_gpus().get(name)
    return None if gpu is None else DeviceMemory(gpu)


def visible_gpus() -> dict[str, int]:
    """Return the number of each visible GPU, by its name "GPU-<uuid>"."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {_name_of(gpu): gpu for gpu in range(count)}


def _name_of(gpu: int) -> str:
    return f"{GPU_PREFIX}{torch.cuda.get_device_properties(gpu).uuid}"


def compute_device() -> torch.device:
    """Return torch's current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work that this thread has queued on the tensors' devices. Other threads and processes use other
    streams, which do not wait for it."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


_own: WeakValueDictionary[str, DeviceArena] = WeakValueDictionary()  # CUDA cannot open memory of its own process


class DeviceArena:
    """``nbytes`` of shared memory of the worker's device.

    Raises ``StateError`` without a device, and ``EngineError`` when memory is short or cannot be shared.
    """

    def __init__(self, nbytes: int) -> None:
        self._device = current_device_memory()
        self.memory = self._device.allocate(nbytes)
        try:
            record = msgpack.packb([self._device.name, self._device.handle(self.memory), nbytes])
            self._record = SharedArena(len(record))
        except BaseException:
            self._device.free(self.memory)
            raise
        self._is_closed = False
        self._record.memory.copy_(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        _own[self._record.token] = self

    @property
    def address(self) -> ArenaAddress:
        """The address of the record with the IPC handle."""
        return self._record.address

    def close(self) -> None:
        """Free the memory now, or when no other process has it open any more. No view of it may be used after this."""
        if self._is_closed:
            return
        self._is_closed = True
        _own.pop(self._record.token, None)
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        try:
            fcntl.flock(self._record.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A daemon thread: the interpreter must be able to end while a sender is stopped.
            threading.Thread(target=self._free_later, args=(memory,), name="bcp-push-arena", daemon=True).start()
        else:
            self._free(memory)

    def _free_later(self, memory: torch.Tensor) -> None:
        fcntl.flock(self._record.descriptor, fcntl.LOCK_EX)
        self._free(memory)

    def _free(self, memory: torch.Tensor) -> None:
        """Free the memory; the caller holds the exclusive lock. A process that opens the record later finds zeros."""
        self._record.memory.zero_()
        self._record.close()
        try:
            self._device.free(memory)
        except (EngineError, RuntimeError):
            _log.warning("push: %d bytes of %s are lost", memory.numel(), self._device.name, exc_info=True)


class OpenArena:
    """Another process's device arena, opened until ``close``."""

    def __init__(self, descriptor: int, memory: torch.Tensor, device: DeviceMemory | None) -> None:
        self._descriptor, self._device = descriptor, device
        self.memory = memory

    def close(self) -> None:
        """No view of the memory may be used after this. Never raises."""
        if self._descriptor >= 0:
            memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
            try:
                if self._device is not None:
                    self._device.close(memory)
            except (EngineError, RuntimeError):
                _log.warning("push: the memory of a worker cannot be closed and stays open here", exc_info=True)
            finally:
                _unlock(self._descriptor)
                self._descriptor = -1


def attach_device(address: ArenaAddress) -> OpenArena | None:
    """Open another process's device arena.

    Returns None when this process cannot reach it (another host, user or container, or a device that it does not see),
    or the arena is gone.
    """
    descriptor = open_arena(address)
    if descriptor is None:
        return None
    with ExitStack() as stack:
        stack.callback(_unlock, descriptor)
        found = _open(address, descriptor)
        if found is not None:
            stack.pop_all()
        return found


def _open(address: ArenaAddress, descriptor: int) -> OpenArena | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    own = _own.get(address.token)
    if own is not None:
        return OpenArena(descriptor, own.memory, None)
    record = os.pread(descriptor, address.nbytes, 0)
    if not record.strip(b"\0"):
        return None  # freed
    name, handle, nbytes = msgpack.unpackb(record)
    device = device_memory_named(name)
    if device is None:
        _log.warning("push: %s is on this host, but not visible here (CUDA_VISIBLE_DEVICES); using TCP", name)
        return None
    try:
        return OpenArena(descriptor, device.open(handle, nbytes), device)
    except (EngineError, RuntimeError) as error:  # torch needs memory for a context on the device
        _log.warning("push: %s; using TCP", error)
        return None


def _unlock(descriptor: int) -> None:
    # Unlock explicitly: processes forked since then share the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class DeviceMemory:
    """Allocates and opens shared memory of one visible GPU. ``name`` identifies the device in all processes.
    Thread-safe."""

    def __init__(self, gpu: int) -> None:
        self._gpu, self.name = gpu, _name_of(gpu)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes that can be shared. Raises ``EngineError`` when memory is short."""
        pointer, size = ctypes.c_void_p(), -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        code = self._call("cudaMalloc", ctypes.byref(pointer), size)
        if code == _OUT_OF_MEMORY:
            _runtime().cudaGetLastError()
            torch.cuda.empty_cache()  # torch may cache unused memory
            code = self._call("cudaMalloc", ctypes.byref(pointer), size)
        _check(code, f"no memory for {nbytes:,} bytes on {self.name}; give Pusher less memory_bytes")
        return self._tensor(pointer, nbytes, "cudaFree")

    def free(self, memory: torch.Tensor) -> None:
        """Free the result of ``allocate``, which no other process may have open."""
        _check(self._call("cudaFree", memory.data_ptr()), f"memory of {self.name} cannot be freed")

    def handle(self, memory: torch.Tensor) -> bytes:
        """Return the handle by which other processes open the memory. Raises ``EngineError``."""
        found = _Handle()
        code = self._call("cudaIpcGetMemHandle", ctypes.byref(found), memory.data_ptr())
        _check(code, f"memory of {self.name} cannot be shared with other processes; push without cuda_ipc")
        return bytes(found)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Open another process's memory. Raises ``EngineError``."""
        pointer, given = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        code = self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, _PEER_ACCESS)
        _check(code, f"a worker's memory on {self.name} cannot be opened")
        return self._tensor(pointer, nbytes, "cudaIpcCloseMemHandle")

    def close(self, memory: torch.Tensor) -> None:
        """Close the result of ``open``. No view of it may be used after this."""
        _check(self._call("cudaIpcCloseMemHandle", memory.data_ptr()), f"memory of {self.name} cannot be closed")

    def _tensor(self, pointer: ctypes.c_void_p, nbytes: int, undo: str) -> torch.Tensor:
        assert pointer.value is not None
        try:
            with torch.inference_mode(False):  # other threads write into it
                return torch.as_tensor(_Bytes(pointer.value, nbytes), device=f"cuda:{self._gpu}")
        except BaseException:
            self._call(undo, pointer)
            raise

    def _call(self, function: str, *arguments: Any) -> int:
        """Call a function of the CUDA runtime on this device, and return its error code."""
        with torch.cuda.device(self._gpu):
            return int(getattr(_runtime(), function)(*arguments))


class _Bytes:
    """Device bytes from which torch makes a tensor without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def _check(code: int, text: str) -> None:
    if code:
        runtime = _runtime()
        runtime.cudaGetLastError()  # otherwise torch's next call reports this error
        raise EngineError(f"{text} ({runtime.cudaGetErrorString(code).decode()})")


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime that torch has loaded. Raises ``EngineError``."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        runtime = ctypes.CDLL(name)
    except OSError as error:
        raise EngineError(f"the CUDA runtime cannot be called ({error}); push without cuda_ipc") from error
    pointer, to_pointer = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    runtime.cudaMalloc.argtypes = [to_pointer, ctypes.c_size_t]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
    runtime.cudaIpcOpenMemHandle.argtypes = [to_pointer, _Handle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [pointer]
    runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
