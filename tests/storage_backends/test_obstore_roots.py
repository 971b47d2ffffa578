"""Which client serves a URL of GCS or Azure, and what its options are for obstore."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from bytecheckpoint.errors import UnsupportedURLError
from bytecheckpoint.storage_backends import open_backend, registry
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend
from bytecheckpoint.storage_backends.obstore import roots
from bytecheckpoint.storage_backends.obstore.backend import ObstoreBackend
from bytecheckpoint.storage_backends.obstore.roots import NotServedError, StoreRoot, store_root_of

_SERVICE = {"type": "service_account", "client_email": "a@b", "private_key": "-", "private_key_id": "-"}
_KEY = "c2VjcmV0LWtleQ=="
_AZURE = {"account_name": "me", "account_key": _KEY}
_ENDPOINT = "https://me.blob.core.windows.net"
_WITH_KEY = {"account_name": "me", "endpoint": _ENDPOINT, "use_emulator": False, "account_key": _KEY,
             "credential_type": "access_key"}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # for the files of gcloud


@pytest.mark.parametrize(
    ("url", "container", "prefix"),
    [
        ("gs://bucket", "bucket", ""),
        ("gs://bucket/", "bucket", ""),
        ("gcs://bucket/a/b c", "bucket", "a/b c"),
        ("GS://bucket/größe/Ω/", "bucket", "größe/Ω"),
        ("az://container/a%20b", "container", "a%20b"),
        ("abfs://container/a", "container", "a"),
        ("abfss://container@me.dfs.core.windows.net/a", "container", "a"),
        ("abfs://container@me.blob.core.windows.net", "container", ""),
    ],
)
def test_urls(url: str, container: str, prefix: str) -> None:
    options = {} if url[0] in "gG" else _AZURE
    place = store_root_of(url, options)
    assert (place.container, place.prefix) == (container, prefix)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/a//b", {}),
        ("gs://bucket/a/../b", {}),
        ("gs://bucket/a?b", {}),
        ("gs://bucket/a#b", {}),
        ("az://container@me.elsewhere.net/a", _AZURE),
        ("az://container@other.dfs.core.windows.net/a", _AZURE),
        ("az://container/a?versionid=1", _AZURE),
    ],
)
def test_urls_that_fsspec_interprets(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(NotServedError):
        store_root_of(url, options)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"project": "p", "token": None, "use_listings_cache": False}, {}),
        ({"token": "google_default"}, {}),
        ({"token": "anon"}, {"skip_signature": True, "bearer_token": "anonymous"}),
        ({"token": "ya29.raw"}, {"bearer_token": "ya29.raw"}),
        ({"token": _SERVICE}, {"service_account_key": json.dumps(_SERVICE)}),
        ({"endpoint_url": "http://localhost:1"}, {"base_url": "http://localhost:1"}),
    ],
)
def test_options_of_gcsfs(options: dict[str, Any], config: dict[str, Any]) -> None:
    found = store_root_of("gs://bucket/a", options)
    assert (found.store, found.config) == ("GCSStore", config)
    assert found.client_options == ({"allow_http": True} if "endpoint_url" in options else {})


def test_files_of_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials.json"
    for kind in ("service_account", "authorized_user"):
        file.write_text(json.dumps({"type": kind}))
        assert store_root_of("gs://b/a", {"token": str(file)}).config == {"application_credentials": str(file)}
    for text in (json.dumps({"type": "external_account"}), "no json", "[]"):
        file.write_text(text)
        with pytest.raises(NotServedError, match="token"):
            store_root_of("gs://b/a", {"token": str(file)})
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        with pytest.raises(NotServedError, match=r"credentials\.json"):
            store_root_of("gs://b/a", {})
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "x.json")
    with pytest.raises(NotServedError, match="GOOGLE_SERVICE_ACCOUNT"):
        store_root_of("gs://b/a", {"token": "raw"})


@pytest.mark.parametrize("token", ["cloud", "cache", "browser", {"type": "external_account"}, object()])
def test_tokens_that_only_gcsfs_has(token: object) -> None:
    with pytest.raises(NotServedError, match="token"):
        store_root_of("gs://bucket/a", {"token": token})


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (_AZURE, _WITH_KEY),
        ({**_AZURE, "sas_token": "sig", "client_id": "c"}, _WITH_KEY),
        ({**_AZURE, "account_host": "host"}, {**_WITH_KEY, "endpoint": "https://host"}),
        ({"connection_string": f"AccountName=me;AccountKey={_KEY}"}, _WITH_KEY),
        (
            {
                "connection_string": f"DefaultEndpointsProtocol=http;AccountName=me;AccountKey={_KEY};"
                "BlobEndpoint=http://localhost:1/me;QueueEndpoint=http://localhost:2/me;",
                "account_name": "other",
            },
            {**_WITH_KEY, "endpoint": "http://localhost:1/me"},
        ),
        (
            {"connection_string": f"AccountName=me;AccountKey={_KEY};EndpointSuffix=core.chinacloudapi.cn"},
            {**_WITH_KEY, "endpoint": "https://me.blob.core.chinacloudapi.cn"},
        ),
    ],
)
def test_keys_of_azure(options: dict[str, Any], config: dict[str, Any]) -> None:
    found = store_root_of("az://container/a", options)
    assert (found.store, found.config) == ("AzureStore", config)


def test_other_credentials_of_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    principal = {"client_id": "c", "client_secret": "s", "tenant_id": "t"}
    for given, config in (
        ({"sas_token": "?sv=1&sig=x"}, {"sas_key": "sv=1&sig=x", "credential_type": "sas_token"}),
        (principal, {**principal, "credential_type": "client_secret"}),
        ({"anon": True}, {"skip_signature": True}),
    ):
        expected = {"account_name": "me", "endpoint": _ENDPOINT, "use_emulator": False, **config}
        assert store_root_of("az://container/a", {"account_name": "me", **given}).config == expected
        with monkeypatch.context() as environment:
            environment.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
            for name, value in given.items():
                environment.setenv(f"AZURE_STORAGE_{name.upper()}", str(value))
            assert store_root_of("az://container/a", {}).config == expected


@pytest.mark.parametrize(
    "options",
    [
        {"account_name": "me"},
        {"account_name": "me", "anon": False},
        {"account_name": "me", "client_id": "c"},
        {**_AZURE, "credential": object()},
        {**_AZURE, "max_concurrency": 4},
        {"account_key": _KEY},
        {"connection_string": f"AccountName=me;AccountKey={_KEY};DevelopmentStorageProxyUri=x"},
    ],
)
def test_options_that_only_adlfs_has(options: dict[str, Any]) -> None:
    with pytest.raises(NotServedError) as caught:
        store_root_of("az://container/a", options)
    assert _KEY not in str(caught.value)


def test_endpoints() -> None:
    """A container of one name exists in each account."""
    assert open_backend("gs://bucket/a", token="anon").endpoint() == ""
    assert (
        open_backend("gs://bucket/a", token="anon", endpoint_url="http://a:b@host:1").endpoint() == "http://***@host:1"
    )
    assert open_backend("az://container/a", **_AZURE).endpoint() == _ENDPOINT


def test_options_of_obstore() -> None:
    """obstore gets its own options, and looks for credentials, only if the caller has chosen it."""
    options = {"account_name": "me", "msi_endpoint": "http://x", "client_options": {"proxy_url": "http://p"}}
    with pytest.raises(NotServedError):
        store_root_of("az://container/a", options)
    place = store_root_of("az://container/a", options, is_chosen=True)
    assert place.config["msi_endpoint"] == "http://x"
    assert place.client_options == {"proxy_url": "http://p"}


def test_secrets_are_not_shown() -> None:
    assert _KEY not in repr(store_root_of("az://container/a", _AZURE))
    assert repr(StoreRoot("GCSStore", "bucket")) == "StoreRoot(store='GCSStore', container='bucket', prefix='')"


# The choice


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of what was opened with fsspec."""
    found: list[dict[str, Any]] = []

    def record(scheme: str, url: str, options: dict[str, Any], **_: str) -> FsspecBackend:
        found.append(options)
        return FsspecBackend(url, **options)

    monkeypatch.setattr(registry, "_open_with_fsspec", record)
    return found


def test_the_choice_of_a_client(caplog: pytest.LogCaptureFixture, opened: list[dict[str, Any]]) -> None:
    registry._log_choice.cache_clear()
    caplog.set_level(logging.INFO, "bytecheckpoint")
    for options in ({}, {"client": "obstore"}):
        backend = open_backend("gs://bucket/a", token="anon", **options)
        assert isinstance(backend, ObstoreBackend)
        assert backend.options == {"token": "anon", **options}
    assert not opened
    open_backend("gs://bucket/a", token="anon", client="fsspec")
    assert opened.pop() == {"token": "anon"}
    assert not caplog.records
    for _ in range(2):
        open_backend("gs://bucket/a", consistency="md5")
        assert opened.pop() == {"consistency": "md5"}
    (record,) = caplog.records
    assert "'consistency'" in record.getMessage()
    with pytest.raises(UnsupportedURLError, match="'nosuch'"):
        open_backend("gs://bucket/a", client="nosuch")
    with pytest.raises(UnsupportedURLError, match="token"):
        open_backend("gs://bucket/a", client="obstore", token="cloud")


def test_without_obstore(monkeypatch: pytest.MonkeyPatch, opened: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(roots, "_LEAST_VERSION", (10**6,))
    with pytest.raises(UnsupportedURLError, match="too old"):
        open_backend("gs://bucket/a", client="obstore")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    open_backend("gs://bucket/a", token="anon")
    assert opened == [{"token": "anon"}]


def test_without_the_package_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UnsupportedURLError, match=r"gcsfs.*obstore is installed, .*'consistency'"):
        open_backend("gs://bucket/a", consistency="md5")
