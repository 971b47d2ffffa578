"""Azure, through adlfs and through obstore, on Azurite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from leak_watch import held_now, left_since, median, memory_now
from s3_faults import Exchange, fault_proxy
from store_rows import HttpRows
from store_servers import Store, azure_options, store_for_tests

import bytecheckpoint as bcp
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.testing.storage import StorageConformance

server = store_for_tests("azure")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, to its client


class _ThroughAdlfs:
    client = "fsspec"

    @pytest.fixture
    def store(self, server: Store) -> Store:
        return replace(server, options={**server.options, "client": self.client})

    def options_at(self, store: Store, endpoint: str) -> dict[str, Any]:
        return {**azure_options(endpoint), "client": self.client}


class _ThroughObstore(_ThroughAdlfs):
    client = "obstore"


class _Conformance(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    sequences = 5

    @pytest.fixture
    def backend(self, store: Store) -> Iterator[StorageBackend]:
        backend = open_backend(f"{store.root}/{uuid.uuid4().hex}", **store.options)
        yield backend
        backend.close()


class TestAzure(_ThroughAdlfs, _Conformance):
    supports_if_version = False
    refused_characters = "?#"


class TestAzureThroughObstore(_ThroughObstore, _Conformance):
    pass


class TestAzureCheckpoints(_ThroughAdlfs, HttpRows):
    pass


class TestAzureCheckpointsThroughObstore(_ThroughObstore, HttpRows):
    def test_in_a_forked_child(self, store: Store, url: str) -> None:
        pytest.skip("obstore cannot be used there; tests/storage_backends checks what happens")

    def test_of_two_savers_one_replaces_the_other(self, store: Store, url: str) -> None:
        """A manifest that appears between the read of the old one and the put is not replaced unnoticed."""
        bcp.save(url, {"extra_state": {"step": 1}}, storage_options=dict(store.options))
        saved: list[str] = []
        with fault_proxy(store.endpoint) as proxy:

            def rule(exchange: Exchange) -> str | None:
                if exchange.kind == "put" and "manifest" in exchange.path and not saved:
                    saved.append("by another process")
                    other = bcp.Checkpointer()
                    other.save(url, {"extra_state": {"step": 2}}, storage_options=dict(store.options))
                return None

            proxy.rule = rule
            bcp.save(url, {"extra_state": {"step": 3}}, storage_options=self.options_at(store, proxy.url))
        assert saved
        checkpoint = bcp.open(url, storage_options=dict(store.options))
        assert checkpoint.tree("extra_state")["step"] == 3
        stored = {found.key for found in open_backend(url, **store.options).list()}
        assert stored == {"manifest.msgpack", *checkpoint.manifest.files.name}

    def test_twenty_saves_hold_what_two_held(self, store: Store, url: str) -> None:
        state = {"model": {"weight": torch.zeros(6 << 20)}, "extra_state": {"step": 0}}  # two parts
        memory = []
        with bcp.Checkpointer() as checkpointer:
            for step in range(20):
                state["extra_state"]["step"] = step
                options = dict(store.options)
                checkpointer.save(url, state, async_save=True, storage_options=options).result()
                memory.append(memory_now())
                if step == 1:
                    before = held_now()
            # Connections are kept for the next request, as many as were in use at once.
            assert left_since(before, turns=5) == []
        assert median(memory[-5:]) - median(memory[1:6]) < 10 << 20

    def test_both_clients_find_the_same_checkpoint(self, store: Store, url: str) -> None:
        state = {"extra_state": {"größe?": 1}}
        for client in ("obstore", "fsspec"):
            bcp.save(f"{url}/{client}", state, storage_options={**store.options, "client": client})
        for client in ("obstore", "fsspec"):
            backend = open_backend(url, **{**store.options, "client": client})
            assert [*backend.list_children()] == ["fsspec/", "obstore/"]
            for name in ("obstore", "fsspec"):
                checkpoint = bcp.open(f"{url}/{name}", storage_options={**store.options, "client": client})
                assert checkpoint.verify().ok
