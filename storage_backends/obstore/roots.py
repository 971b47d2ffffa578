"""Which URLs and options obstore serves, and what they are for it.

The options are those of gcsfs and adlfs. Each is translated exactly or has no effect on objects. Otherwise obstore
does not serve the URL, and fsspec does: so an option means the same with both clients. A caller who insists on obstore
may also pass its own options.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..keys import is_object_key

SCHEMES = frozenset({"gs", "gcs", "az", "abfs", "abfss"})

_LEAST_VERSION = (0, 12, 1)  # earlier ones encode some characters of keys, or copy the parts of an upload
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>[^/?#]+)(?P<path>/[^?#]*)?", re.IGNORECASE)
_AZURE_HOST = re.compile(r"(?P<container>[^@]+)@(?P<account>[^@.]+)\.(?:dfs|blob)\.core\.windows\.net")
_UNUSUAL_FORM = "the URL has a form that only fsspec interprets"
_WITHOUT_EFFECT = frozenset({"project", "use_listings_cache", "skip_instance_cache"})

_GOOGLE_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
_GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
_GOOGLE_TYPES = ("service_account", "authorized_user")
_GOOGLE_OVERRIDES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")

_AZURE_VARIABLES = ("account_name", "account_key", "connection_string", "sas_token", "client_id", "client_secret",
                    "tenant_id", "anon")  # fmt: skip
_AZURE_PARTS = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_token",
    "BlobEndpoint": "endpoint",
    "DefaultEndpointsProtocol": "protocol",
    "EndpointSuffix": "suffix",
}
_SERVICE_PRINCIPAL = ("client_id", "client_secret", "tenant_id")


@dataclass(frozen=True)
class StoreRoot:
    """A root in a store.

    Attributes:
        store: The name of the class of ``obstore.store``.
        container: The bucket or container.
        prefix: The key of the root in it; empty for all of it.
        config: Arguments of the class: endpoint and credentials.
        client_options: How it speaks HTTP.
    """

    store: str
    container: str
    prefix: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class NotServedError(Exception):
    """obstore does not serve a URL. The text is a clause that says why, without the value of any option."""


def store_root_of(url: str, options: Mapping[str, Any], *, is_chosen: bool = False) -> StoreRoot:
    """Return where obstore finds a root.

    If the caller has chosen obstore (``is_chosen``), it gets options that it may know itself, and looks for credentials
    that were not passed.

    Raises:
        NotServedError: It does not serve the URL, or not with these options.
    """
    from importlib.metadata import version  # not above: it takes a tenth of the time of `bcp ls --help`

    installed = version("obstore")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:3]) < _LEAST_VERSION:
        raise NotServedError(f"obstore {installed} is too old")
    found = _URL.fullmatch(url)
    path = (found["path"] or "").strip("/") if found else ""
    if found is None or (path and not is_object_key(path)):
        raise NotServedError(_UNUSUAL_FORM)
    rest = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
    client_options = rest.pop("client_options", {})
    if found["scheme"].lower() in ("gs", "gcs"):
        store, container, config = "GCSStore", found["host"], _google(rest, is_chosen=is_chosen)
    else:
        store, (container, config) = "AzureStore", _azure(found["host"], rest, is_chosen=is_chosen)
    if rest and not is_chosen:
        raise NotServedError(f"it has no option {', '.join(map(repr, sorted(rest)))} of fsspec")
    config |= rest
    if str(config.get("base_url") or config.get("endpoint")).startswith("http://"):
        client_options = {"allow_http": True, **client_options}
    return StoreRoot(store, container, path, config, client_options)


def _google(rest: dict[str, Any], *, is_chosen: bool) -> dict[str, Any]:
    """Take the options of gcsfs out of ``rest``."""
    config: dict[str, Any] = {}
    endpoint = rest.pop("endpoint_url", None) or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint:
        config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    token = rest.pop("token", "google_default")
    if token == "anon":
        # obstore looks for credentials for a put even if it shall not sign, unless it has a token.
        return {**config, "skip_signature": True, "bearer_token": "anonymous"}
    if token == "google_default":
        file = os.environ.get(_GOOGLE_CREDENTIALS, os.path.expanduser(_GOOGLE_FILE))
        if os.path.exists(file) and _type_of(file) not in _GOOGLE_TYPES and not is_chosen:
            raise NotServedError(f"it cannot use the credentials in {file}")
        return config
    overrides = [name for name in _GOOGLE_OVERRIDES if name in os.environ]
    if overrides:
        raise NotServedError(f"it would prefer {overrides[0]} of the environment to 'token'")
    if isinstance(token, dict) and token.get("type") == "service_account":
        return {**config, "service_account_key": json.dumps(token)}
    if isinstance(token, str) and os.path.exists(token) and _type_of(token) in _GOOGLE_TYPES:
        return {**config, "application_credentials": token}
    if not isinstance(token, str) or os.path.exists(token) or token in ("cache", "cloud", "browser"):
        raise NotServedError("it has no credentials like this 'token'")
    return {**config, "bearer_token": token}


def _type_of(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            return str(json.load(stream)["type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _azure(host: str, rest: dict[str, Any], *, is_chosen: bool) -> tuple[str, dict[str, Any]]:
    """Take the options of adlfs out of ``rest``. Returns the container, too."""
    qualified = _AZURE_HOST.fullmatch(host)
    if "@" in host and not qualified:
        raise NotServedError(_UNUSUAL_FORM)
    if qualified and rest.setdefault("account_name", qualified["account"]) != qualified["account"]:
        raise NotServedError("the account of the URL is not 'account_name'")
    given = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _AZURE_VARIABLES}
    given |= {name: rest.pop(name) for name in (*_AZURE_VARIABLES, "account_host") if name in rest}
    if given["connection_string"]:
        given = {**dict.fromkeys(given), **_parts_of(given["connection_string"])}
    account = given["account_name"]
    if not account:
        raise NotServedError("no account is given")
    host_name = given.get("account_host") or f"{account}.blob.{given.get('suffix') or 'core.windows.net'}"
    endpoint = given.get("endpoint") or f"{given.get('protocol') or 'https'}://{host_name}"
    config = {"account_name": account, "endpoint": rest.pop("endpoint", endpoint), "use_emulator": False}
    # In the order in which adlfs tries them. The type keeps obstore from preferring others of the environment.
    if given["account_key"]:
        config |= {"account_key": given["account_key"], "credential_type": "access_key"}
    elif given["sas_token"]:
        config |= {"sas_key": given["sas_token"].lstrip("?"), "credential_type": "sas_token"}
    elif all(given[name] for name in _SERVICE_PRINCIPAL):
        config |= {name: given[name] for name in _SERVICE_PRINCIPAL} | {"credential_type": "client_secret"}
    elif given["anon"] and str(given["anon"]).lower() not in ("false", "0", "f"):
        config["skip_signature"] = True
    elif not is_chosen:
        raise NotServedError("it looks for credentials in other places than adlfs, unless you pass some")
    return qualified["container"] if qualified else host, config


def _parts_of(connection_string: str) -> dict[str, Any]:
    parts = dict(part.partition("=")[::2] for part in connection_string.split(";") if part)
    unknown = {name for name in parts if not name.endswith("Endpoint")} - _AZURE_PARTS.keys()
    if unknown:
        raise NotServedError("it has no connection strings like this one")
    return {_AZURE_PARTS[name]: value for name, value in parts.items() if name in _AZURE_PARTS}
