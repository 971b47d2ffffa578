"""Imports what many ranks use of the library and of other packages, for the process from which ranks are forked.

An import of a client of S3 takes most of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in ("psutil", "bytecheckpoint.inference.push", "bytecheckpoint.storage_backends.s3", "s3fs", "obstore"):
        with contextlib.suppress(ImportError):  # the environment of vLLM has no client
            importlib.import_module(_name)
