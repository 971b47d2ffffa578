"""Memory of a device that several processes of a host have mapped: CUDA's inter-process communication.

By the calls of CUDA's runtime itself, as what torch shares of its own memory is counted in files of ``/dev/shm``, which
a killed process leaves behind, and as it may be cut out of segments that cannot be shared.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...errors import EngineError, StateError

__all__ = ["GPU_PREFIX", "DeviceMemory", "compute_device", "gpus_here", "memory_here", "memory_of", "settle"]

GPU_PREFIX = "GPU-"

_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: the only flag that there is
_OUT_OF_MEMORY = 2
_BLOCK = 2 << 20  # CUDA shares whole blocks, with whatever lies in them


class DeviceMemory(ABC):
    """Of one device that this process sees; ``name`` is what all processes call it. For several threads."""

    name: str

    @abstractmethod
    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes that can be shared. Raises ``EngineError`` where there are not so many."""

    @abstractmethod
    def give_back(self, memory: torch.Tensor) -> None:
        """Of ``take``. Nobody may have it open."""

    @abstractmethod
    def handle(self, memory: torch.Tensor) -> bytes:
        """By which other processes open what was taken. Raises ``EngineError``."""

    @abstractmethod
    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Another process's memory, until ``shut``. Raises ``EngineError``."""

    @abstractmethod
    def shut(self, memory: torch.Tensor) -> None:
        """Of ``open``. Nobody may use a view of it any more."""


def memory_here() -> DeviceMemory:
    """Of the device that is torch's current one in this thread. Raises ``StateError`` where there is none."""
    if not torch.cuda.is_available():
        raise StateError("this worker has no CUDA device, so nobody can write into its memory; push without cuda_ipc")
    return _Cuda(torch.cuda.current_device())


def memory_of(name: str) -> DeviceMemory | None:
    """None for a device that this process does not see."""
    gpu = gpus_here().get(name)
    return None if gpu is None else _Cuda(gpu)


def gpus_here() -> dict[str, int]:
    """The GPUs that this process sees, by the name that engines call them by."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {_name_of(gpu): gpu for gpu in range(count)}


def _name_of(gpu: int) -> str:
    return f"{GPU_PREFIX}{torch.cuda.get_device_properties(gpu).uuid}"


def compute_device() -> torch.device:
    """Where this thread's process has its weights, if it has a device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until what this thread has asked of their devices is done; streams of other threads, and of other
    processes, do not wait for it."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class _Cuda(DeviceMemory):
    def __init__(self, gpu: int) -> None:
        self._gpu, self.name = gpu, _name_of(gpu)

    def take(self, nbytes: int) -> torch.Tensor:
        pointer, taken = ctypes.c_void_p(), -(-nbytes // _BLOCK) * _BLOCK
        with torch.cuda.device(self._gpu):
            code = _cuda().cudaMalloc(ctypes.byref(pointer), taken)
            if code == _OUT_OF_MEMORY:
                _cuda().cudaGetLastError()
                torch.cuda.empty_cache()  # torch may keep memory that nobody uses
                code = _cuda().cudaMalloc(ctypes.byref(pointer), taken)
        _check(code, f"no memory for {nbytes:,} bytes on {self.name}; give Pusher less memory_bytes")
        return self._tensor(pointer, nbytes, _cuda().cudaFree)

    def give_back(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self._gpu):
            _check(_cuda().cudaFree(memory.data_ptr()), f"memory of {self.name} cannot be given back")

    def handle(self, memory: torch.Tensor) -> bytes:
        found = _Handle()
        with torch.cuda.device(self._gpu):
            code = _cuda().cudaIpcGetMemHandle(ctypes.byref(found), memory.data_ptr())
        _check(code, f"memory of {self.name} cannot be shared with other processes; push without cuda_ipc")
        return bytes(found)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        pointer = ctypes.c_void_p()
        with torch.cuda.device(self._gpu):
            given = _Handle.from_buffer_copy(handle)
            code = _cuda().cudaIpcOpenMemHandle(ctypes.byref(pointer), given, _PEER_ACCESS)
        _check(code, f"a worker's memory on {self.name} cannot be opened")
        return self._tensor(pointer, nbytes, _cuda().cudaIpcCloseMemHandle)

    def shut(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self._gpu):
            _check(_cuda().cudaIpcCloseMemHandle(memory.data_ptr()), f"memory of {self.name} cannot be closed")

    def _tensor(self, pointer: ctypes.c_void_p, nbytes: int, undo: Callable[[ctypes.c_void_p], int]) -> torch.Tensor:
        assert pointer.value is not None
        try:
            with torch.inference_mode(False):  # other threads write to it
                return torch.as_tensor(_Bytes(pointer.value, nbytes), device=f"cuda:{self._gpu}")
        except BaseException:
            with torch.cuda.device(self._gpu):
                undo(pointer)
            raise


class _Bytes:
    """What torch makes a tensor of, without copying."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def _check(code: int, what: str) -> None:
    if code:
        runtime = _cuda()
        runtime.cudaGetLastError()  # else torch's next call would be told of it
        raise EngineError(f"{what} ({runtime.cudaGetErrorString(code).decode()})")


@functools.cache
def _cuda() -> Any:
    """The runtime that torch has loaded, by the name that the loader knows it by. Raises ``EngineError``."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return _declared(ctypes.CDLL(name))
    except OSError as error:
        raise EngineError(f"the CUDA runtime cannot be called ({error}); push without cuda_ipc") from error


def _declared(runtime: Any) -> Any:
    """With its calls' types, as documented in CUDA's runtime API."""
    pointer, to_pointer = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    runtime.cudaMalloc.argtypes = [to_pointer, ctypes.c_size_t]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
    runtime.cudaIpcOpenMemHandle.argtypes = [to_pointer, _Handle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [pointer]
    runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
