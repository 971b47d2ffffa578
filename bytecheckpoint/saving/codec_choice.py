"""Choose the codec of a save: by name, or by comparing the rates of the store, the codec and the processors.

The rate of a store is that of the last save to it. The rate of the codec, and its ratio, are measured once per process
on random weights, which compress about as well as real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np

from ..codecs import ZstdPlanesCodec, find_codec
from ..engine.files import FileLayout
from ..engine.writing import WrittenFile
from ..storage_backends.base import StorageBackend
from .engine import SaveEngine
from .options import AUTO, SaveRequest

_AUTO_CODEC = ZstdPlanesCodec.name
_MIN_GAIN = 1.1  # a smaller gain is not worth the processor time
_MIN_BYTES = 64 << 20  # the rate of a small save is that of its requests
_SAMPLES, _SAMPLE_BYTES = 8, 256 << 10

_log = logging.getLogger(__name__)


def choose_codec(engine: SaveEngine, backend: StorageBackend, options: SaveRequest, files: Sequence[FileLayout]) -> str:
    """Return the codec of this rank's tensor files, "raw" for none."""
    if options.codec != AUTO:
        return options.codec or "raw"
    store = engine.store_rates.get(_store(backend)) if backend.is_remote and options.layout == "shards" else None
    if store is None:
        return "raw"
    total = encoded = seconds = 0.0
    for file in files:
        for width, size in zip(file.widths, file.nbytes, strict=True):
            rate, ratio = _measure(2 if width == 2 else 4)
            total += size
            encoded += size * (ratio if width > 1 else 1.0)  # it is unknown how integers compress
            seconds += size / rate
    raw_s, encoded_s = total / store, max(encoded / store, seconds / engine.cores)
    _log.debug("%s: about %.2f s raw, %.2f s encoded", backend.display_url, raw_s, encoded_s)
    return _AUTO_CODEC if raw_s > _MIN_GAIN * encoded_s else "raw"


def note_rate(engine: SaveEngine, backend: StorageBackend, written: Sequence[WrittenFile], seconds: float) -> None:
    """Record how fast this rank wrote these files, for the next choice."""
    nbytes = sum(file.size for file in written)
    if nbytes < _MIN_BYTES or not seconds > 0:
        return
    rate, store = nbytes / seconds, _store(backend)
    if any(file.frames is not None for file in written):
        rate = max(rate, engine.store_rates.get(store, 0.0))  # the codec may have been the slower one
    engine.store_rates[store] = rate


def _store(backend: StorageBackend) -> str:
    parts = urlsplit(backend.display_url)
    return f"{parts.scheme}://{parts.netloc}"


@cache
def _measure(width: int) -> tuple[float, float]:
    """Return bytes per second and core, and encoded bytes per byte."""
    codec = find_codec(_AUTO_CODEC)
    weights = np.random.default_rng(0).standard_normal(_SAMPLES * _SAMPLE_BYTES // width, np.float32)
    data = np.ascontiguousarray(weights.view(np.uint8).reshape(-1, 4)[:, 4 - width :]).data.cast("B")
    begun = perf_counter()
    frames = [codec.encode(data[at : at + _SAMPLE_BYTES], width) for at in range(0, len(data), _SAMPLE_BYTES)]
    return len(data) / (perf_counter() - begun), sum(map(len, frames)) / len(data)
