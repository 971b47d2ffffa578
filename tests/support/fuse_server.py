"""The server process of ``fuse_disk``: ``fuse_server.py <mount point> <directory> <rules file> <seconds>``.

One thread serves one request at a time. The kernel caches names, absent ones too, and attributes for some seconds. Like
sshfs, the server opens a cached name by its path, and so another file if that was replaced elsewhere. It implements
only the calls of the library: regular files, directories and hard links, without extended attributes. The kernel
handles locks.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import stat
import struct
import sys
from fnmatch import fnmatchcase
from typing import Any

_HEADER = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_DIRENT = struct.Struct("<QQII")
_MAX_WRITE = 1 << 20
_MINUS_ONE = (1 << 64) - 1
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_MS_NOSUID_NODEV = 6
_PR_SET_PDEATHSIG = 1
_SETATTR_SIZE, _GETATTR_FH = 1 << 3, 1
_NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET


class Server:
    """Serves the kernel's requests from the files in ``below``."""

    def __init__(self, below: str, control: str, cache_s: int) -> None:
        self._below, self._control, self._cache_s = below, control, cache_s
        self._paths = {1: ""}
        self._nodes = {"": 1}
        self._next = 2
        self._calls = {
            1: self._lookup,
            3: self._getattr,
            4: self._setattr,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            12: self._rename,
            13: self._link,
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._fsync,
            25: self._flush,
            26: self._init,
            27: self._opendir,
            28: self._readdir,
            29: lambda node, body: b"",
            30: lambda node, body: b"",
            35: self._create,
            43: self._fallocate,
            45: self._rename2,
        }

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, _MAX_WRITE + (1 << 16))
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, code, unique, node, *_ = _HEADER.unpack_from(request)
            if code in _NO_REPLY:
                continue
            failed, answer = 0, b""
            try:
                answer = self._calls[code](node, request[_HEADER.size :])
            except KeyError:
                failed = errno.ENOSYS
            except OSError as error:
                failed = error.errno or errno.EIO
            try:
                os.write(device, _REPLY.pack(_REPLY.size + len(answer), -failed, unique) + answer)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the caller has been killed
                    raise

    def _rules(self, operation: str) -> list[dict[str, Any]]:
        with open(self._control) as opened:
            return [rule for rule in json.load(opened) if rule["operation"] == operation]

    def _check(self, operation: str, path: str, begin: int = 0, end: int = 1) -> None:
        for rule in self._rules(operation):
            if fnmatchcase(path, rule["name"]) and end > rule["begin"]:
                raise OSError(rule["errno"], "injected")

    def _check_access(self, flags: int, path: str) -> None:
        self._check("open", path)
        if flags & os.O_ACCMODE == os.O_RDWR:
            self._check("read and write", path)

    def _full(self, path: str) -> str:
        return os.path.join(self._below, path) if path else self._below

    def _child(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.rstrip(b"\0")))

    def _node(self, path: str) -> int:
        if path not in self._nodes:
            self._nodes[path], self._paths[self._next] = self._next, path
            self._next += 1
        return self._nodes[path]

    def _forget_path(self, path: str) -> None:
        self._nodes.pop(path, None)

    def _moved(self, old: str, new: str) -> None:
        self._forget_path(new)
        node = self._nodes.pop(old, None)
        if node is not None:
            self._nodes[new], self._paths[node] = node, new

    def _attr(self, found: os.stat_result) -> bytes:
        times = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        parts = [ns % 1_000_000_000 for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        ids = [found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0]
        return _ATTR.pack(found.st_ino, found.st_size, found.st_blocks, *times, *parts, *ids)

    def _entry(self, path: str) -> bytes:
        found = os.lstat(self._full(path))
        head = struct.pack("<4Q2I", self._node(path), 0, self._cache_s, self._cache_s, 0, 0)
        return head + self._attr(found)

    def _lookup(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        self._check("lookup", path)
        try:
            return self._entry(path)
        except FileNotFoundError:
            return struct.pack("<4Q2I", 0, 0, self._cache_s, 0, 0, 0) + bytes(_ATTR.size)

    def _getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        found = os.fstat(handle) if flags & _GETATTR_FH else os.lstat(self._full(self._paths[node]))
        return struct.pack("<Q8x", self._cache_s) + self._attr(found)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        path = self._full(self._paths[node])
        if valid & _SETATTR_SIZE:
            os.truncate(path, size)
        return bytes(16) + self._attr(os.lstat(path))

    def _mkdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        self._check("mkdir", path)
        os.mkdir(self._full(path))
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        self._check("unlink", path)
        os.unlink(self._full(path))
        self._forget_path(path)
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        os.rmdir(self._full(path))
        self._forget_path(path)
        return b""

    def _rename(self, node: int, body: bytes, head: int = 8) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old_name, new_name = body[head:].split(b"\0")[:2]
        old, new = self._child(node, old_name), self._child(target, new_name)
        self._check("rename", new)
        os.rename(self._full(old), self._full(new))
        self._moved(old, new)
        return b""

    def _rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "no flags")
        return self._rename(node, body, 16)

    def _link(self, node: int, body: bytes) -> bytes:
        (source,) = struct.unpack_from("<Q", body)
        path = self._child(node, body[8:])
        self._check("link", path)
        os.link(self._full(self._paths[source]), self._full(path))
        return self._entry(path)

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        self._check_access(flags, self._paths[node])
        # Direct I/O ends here: the file system below need not support it.
        handle = os.open(self._full(self._paths[node]), flags & ~(os.O_DIRECT | os.O_NOFOLLOW))
        return struct.pack("<QIi", handle, 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        self._check("create", path)
        self._check_access(flags, path)
        handle = os.open(self._full(path), (flags | os.O_CREAT) & ~os.O_DIRECT, stat.S_IMODE(mode))
        return self._entry(path) + struct.pack("<QIi", handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._check("read", self._paths[node], offset, offset + size)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._check("write", self._paths[node], offset, offset + size)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _flush(self, node: int, body: bytes) -> bytes:
        self._check("flush", self._paths[node])
        return b""

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        self._check("fsync", self._paths[node])
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _fallocate(self, node: int, body: bytes) -> bytes:
        handle, offset, length = struct.unpack_from("<QQQ", body)
        self._check("fallocate", self._paths[node])
        os.posix_fallocate(handle, offset, length)
        return b""

    def _opendir(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QIi", 0, 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        listed = b""
        below, hidden = self._paths[node], [rule["name"] for rule in self._rules("readdir")]
        names = [
            name
            for name in sorted(os.listdir(self._full(below)))
            if not any(fnmatchcase(os.path.join(below, name), pattern) for pattern in hidden)
        ]
        for number, name in enumerate(names[offset:], int(offset) + 1):
            raw = os.fsencode(name)
            mode = os.lstat(self._full(os.path.join(self._paths[node], name))).st_mode
            entry = _DIRENT.pack(1, number, len(raw), stat.S_IFMT(mode) >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def _statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self._below)
        blocks, free = found.f_blocks, found.f_bavail
        for rule in self._rules("statfs"):
            blocks, free = {"nothing": (0, 0), "-1": (blocks, _MINUS_ONE), "unlimited": (_MINUS_ONE, _MINUS_ONE)}[
                rule["name"]
            ]
        counts = (blocks, free, free, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    def _init(self, node: int, body: bytes) -> bytes:
        _, _, readahead = struct.unpack_from("<III", body)
        flags = _BIG_WRITES | _MAX_PAGES
        return struct.pack("<4I2H2I2HI28x", 7, 31, readahead, flags, 16, 12, _MAX_WRITE, 1, _MAX_WRITE >> 12, 0, 0)


def main() -> None:
    at, below, control, cache_s = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if libc.mount(b"bcp-faults", os.fsencode(at), b"fuse", _MS_NOSUID_NODEV, options.encode()) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    Server(below, control, int(cache_s)).serve(device)


if __name__ == "__main__":
    main()
