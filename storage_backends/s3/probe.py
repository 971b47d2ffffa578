"""Find out which conditions of a put an endpoint obeys, and how it writes versions."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..base import Conditions
from .replies import code_of, describe, is_denied

__all__ = ["REFUSED_CODES", "PutRules", "is_known_endpoint", "probe"]

REFUSED_CODES = frozenset({"412", "PreconditionFailed", "404", "NoSuchKey"})
"""The codes of a put whose condition is not met."""

_UNKNOWN_CODES = frozenset({"400", "501", "InvalidArgument", "InvalidRequest", "NotImplemented"})
_KNOWN_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
_OTHER_VERSION = f'"{hashlib.md5(b"another object", usedforsecurity=False).hexdigest()}"'

_REMAINS = (
    ". Every checkpoint is still complete or absent. But if two jobs save to one path at the same moment, the second "
    "one replaces the first one's checkpoint unnoticed, and files may remain; let one job save below a root"
)

_log = logging.getLogger(__name__)

Send = Callable[..., Awaitable[Any]]
"""Sends a request: the name of the client's method, and its arguments."""


@dataclass(frozen=True)
class PutRules:
    """What an endpoint makes of conditions.

    Attributes:
        conditions: Those that it obeys.
        has_quotes: ``If-Match`` contains the quotes of the ETag, as in RFC 9110. Ceph refuses them.
    """

    conditions: Conditions
    has_quotes: bool = True

    def if_match(self, version: str) -> str:
        return version if self.has_quotes else version.strip('"')


def is_known_endpoint(url: str) -> bool:
    """Whether this is S3 itself, which obeys conditions."""
    return (urlsplit(url).hostname or "").endswith(_KNOWN_HOSTS)


async def probe(send: Send, address: dict[str, str], endpoint: str) -> PutRules:
    """Put an empty object at ``address`` several times, and remove it.

    Args:
        send: Sends a request, repeatedly if need be.
        address: A bucket and a key that nothing else uses.
        endpoint: For messages.

    Returns:
        The rules. A warning is logged if the endpoint ignores or refuses conditions.
    """

    async def is_stored(**condition: str) -> bool | None:
        """Whether the condition was met; None if the endpoint does not know it."""
        try:
            await send("put_object", **address, Body=b"", **condition)
        except Exception as error:
            if code_of(error) not in REFUSED_CODES | _UNKNOWN_CODES:
                raise
            return False if code_of(error) in REFUSED_CODES else None
        return True

    try:
        version = str((await send("put_object", **address, Body=b"")).get("ETag", ""))
    except Exception as error:
        if not is_denied(error):
            raise
        _log.warning("%s: cannot find out whether it obeys conditions: %s%s", endpoint, describe(error), _REMAINS)
        return PutRules(Conditions())
    try:
        if_absent = await is_stored(IfNoneMatch="*") is False
        quoted = unquoted = False
        if version and await is_stored(IfMatch=_OTHER_VERSION) is False:
            quoted = bool(await is_stored(IfMatch=version))
            unquoted = not quoted and bool(await is_stored(IfMatch=version.strip('"')))
    finally:
        with suppress(Exception):  # an empty object, which is never listed
            await send("delete_object", **address)
    obeyed = {"If-None-Match": if_absent, "If-Match": quoted or unquoted}
    if ignored := [name for name, is_obeyed in obeyed.items() if not is_obeyed]:
        _log.warning("%s ignores %s on puts%s", endpoint, " and ".join(ignored), _REMAINS)
    return PutRules(Conditions(*obeyed.values()), has_quotes=not unquoted)
