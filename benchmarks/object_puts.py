"""Compare ways to write one large object to GCS, Azure or S3: through obstore, whole and in parts, and through fsspec.

    pip install -c requirements/benchmarks.txt obstore
    python -m benchmarks.object_puts --url az://container/bench -o connection_string=... [--mb 320] [--rounds 7]
    python -m benchmarks.object_puts --url s3://bucket/bench -o endpoint_url=... -o key=... -o secret=...

*whole* is obstore's put of one buffer, and *iterated* that of an iterator of parts: the bytes of both are in memory.
The backends get them in blocks of 8 MiB, as from a save. Each form runs in a new process, and they take turns. The
second of two objects is measured, because the first one takes memory from the system. Rates are shares of *whole* in
the same round. Memory is the growth of the process, which has the content already. S3 serves as the fastest server
that one can run: this library's own client is not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.measure import Meter, Sample
from benchmarks.peers.base import Contestant
from benchmarks.tables import Grid, show
from bytecheckpoint.storage_backends import StorageBackend
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend

__all__ = ["FORMS", "main", "measure", "table"]

_PART, _PARTS_IN_FLIGHT = 16 << 20, 8
_BLOCK, _THREADS = 8 << 20, 2


def _through_obstore(url: str, options: dict[str, Any]) -> Any:
    from bytecheckpoint.storage_backends.obstore.backend import ObstoreBackend
    from bytecheckpoint.storage_backends.obstore.roots import StoreRoot, store_root_of

    if not url.startswith("s3://"):
        return ObstoreBackend(url, store_root_of(url, options))
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    config = {"endpoint": options["endpoint_url"], "region": "us-east-1", "unsigned_payload": True}
    config |= {"access_key_id": options["key"], "secret_access_key": options["secret"]}
    return ObstoreBackend(url, StoreRoot("S3Store", bucket, prefix, config, {"allow_http": True}))


def _put(url: str, options: dict[str, Any], *, whole: bool) -> tuple[StorageBackend, Callable[[str, Any], object]]:
    import obstore

    backend = _through_obstore(url, options)
    client, _ = backend._client("opening")

    def put(key: str, data: Any) -> object:
        parts = (data[at : at + _PART] for at in range(0, len(data), _PART))
        path = f"{backend._root}{key}"
        content = data if whole else parts
        return obstore.put(client.store, path, content, chunk_size=_PART, max_concurrency=_PARTS_IN_FLIGHT)

    return backend, put


def _create(backend: StorageBackend) -> tuple[StorageBackend, Callable[[str, Any], object]]:
    def put(key: str, data: Any) -> None:
        with backend.create(key, len(data)) as writer, ThreadPoolExecutor(_THREADS) as threads:
            blocks = range(0, len(data), _BLOCK)
            list(threads.map(lambda at: writer.write(at, data[at : at + _BLOCK]), blocks))
            writer.complete()

    return backend, put


FORMS: dict[str, Callable[[str, dict[str, Any]], tuple[StorageBackend, Callable[[str, Any], object]]]] = {
    "obstore, whole": lambda url, options: _put(url, options, whole=True),
    "obstore, iterated": lambda url, options: _put(url, options, whole=False),
    "backend on obstore": lambda url, options: _create(_through_obstore(url, options)),
    "backend on fsspec": lambda url, options: _create(FsspecBackend(url, **options)),
}
"""By name; the first is the floor."""


class _Form(Contestant):
    """Puts one object."""

    durable = True

    def __init__(self, put: Callable[[str, Any], object]) -> None:
        self._put = put

    def save(self, path: str, state: Any) -> None:
        self._put(path, state)

    def load(self, path: str, state: Any) -> None:
        raise NotImplementedError


def _turn(name: str, url: str, options: dict[str, Any], nbytes: int) -> Sample:
    warnings.simplefilter("ignore")
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    backend, put = FORMS[name](url, options)
    first, key = uuid.uuid4().hex, uuid.uuid4().hex
    put(first, data)
    sample = Meter(_Form(put)).save(key, data)
    if bytes(backend.get(key)) != data.tobytes():
        raise AssertionError("the object has other bytes")
    backend.delete([first, key])
    return sample


def measure(
    url: str, options: dict[str, Any], nbytes: int, rounds: int, *, say: Callable[[str], None] = print
) -> dict[str, list[Sample]]:
    """Return the samples of each form, one for each round."""
    found: dict[str, list[Sample]] = {name: [] for name in FORMS}
    for number in range(rounds):
        for name, samples in found.items():
            say(f"round {number + 1} of {rounds}, {name}")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                samples.append(process.submit(_turn, name, url, options, nbytes).result())
    return found


def table(found: dict[str, list[Sample]], nbytes: int) -> Grid:
    """Return medians."""
    (floor, base), *_ = found.items()
    rows: list[tuple[str, ...]] = []
    for name, samples in found.items():
        shares = [one["durable_s"] / other["durable_s"] for one, other in zip(base, samples)]
        rows.append(
            (
                name,
                f"{nbytes / 1e6 / statistics.median(one['durable_s'] for one in samples):.0f}",
                f"{statistics.median(shares):.2f}",
                f"{min(shares):.2f} to {max(shares):.2f}",
                f"{statistics.median(one['cpu_s'] for one in samples) / nbytes * 1e9:.2f}",
                f"{statistics.median(one['peak_bytes'] for one in samples) / 1e6:.0f}",
            )
        )
    columns = ("", "MB/s", f"of {floor}", "least to most", "CPU s/GB", "memory, MB")
    return Grid(f"one object of {nbytes / 1e6:.0f} MB", columns, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--mb", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    options = dict(one.partition("=")[::2] for one in given.options)
    nbytes = given.mb << 20
    show(table(measure(given.url, options, nbytes, given.rounds), nbytes), Console(width=120))


if __name__ == "__main__":
    main()
