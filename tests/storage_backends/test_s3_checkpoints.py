"""Whole checkpoints on a real S3 server process, through each transport of the client."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("s3fs")

from store_rows import CheckpointRows, HttpRows
from store_servers import Store

pytestmark = [pytest.mark.s3, pytest.mark.sampled(5, of=__name__)]


class TestDirectCheckpoints(HttpRows):
    """Threads send the requests."""

    @pytest.fixture
    def store(self, s3: dict[str, Any], bucket: str) -> Store:
        return Store(f"s3://{bucket}", s3, s3["endpoint_url"])

    def options_at(self, store: Store, endpoint: str) -> dict[str, Any]:
        return {**store.options, "endpoint_url": endpoint}


class TestAiohttpCheckpoints(CheckpointRows):
    """A client that needs options of aiohttp keeps its transport."""

    @pytest.fixture
    def store(self, s3: dict[str, Any], bucket: str) -> Store:
        options = {**s3, "config_kwargs": {"connector_args": {"use_dns_cache": False}}}
        return Store(f"s3://{bucket}", options, s3["endpoint_url"])
