"""GCS's XML interface in front of an S3 server.

The two differ in some headers only: GCS names a version of an object by a number, its generation.
"""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import quote, unquote

from s3_faults import Exchange, FaultProxy

__all__ = ["GoogleFront"]

_CONDITION = re.compile(rb"(?i)\r\nx-goog-if-generation-match: (\d+)")
_ETAG = re.compile(rb'(?i)\r\netag: "([^"\r]*)"')
_SERVICE_ACCOUNT = re.compile(rb"(?i)\r\nauthorization: bearer ([^.\r]*)\.")
_AUTHORIZATION = re.compile(rb"(?i)\r\nauthorization: [^\r]*|\r\n\r\n$")
_SIGNED = (
    b"\r\nAuthorization: AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    b"Signature=unchecked"
)


def _condition_of(found: re.Match[bytes]) -> bytes:
    generation = int(found[1])
    if not generation:
        return b"\r\nIf-None-Match: *"
    return b'\r\nIf-Match: "%s"' % generation.to_bytes(-(-generation.bit_length() // 8), "big")


class GoogleFront(FaultProxy):
    """A proxy that translates the headers of GCS into those of S3, and back.

    The ``key`` of a request is the name of the key of the service account that signs it.
    """

    def _exchange(self, head: bytes) -> Exchange:
        exchange = super()._exchange(head)
        if found := _SERVICE_ACCOUNT.search(head):
            exchange.key = json.loads(base64.urlsafe_b64decode(found[1] + b"=="))["kid"]
        return exchange

    def _ask(self, head: bytes, body: bytes) -> bytes:
        method, target, rest = head.split(b" ", 2)
        path, mark, query = target.decode().partition("?")
        head = b" ".join([method, (quote(unquote(path)) + mark + query).encode(), rest])
        head = _CONDITION.sub(_condition_of, _AUTHORIZATION.sub(b"", head)).replace(b"x-goog-meta-", b"x-amz-meta-")
        head += _SIGNED + b"\r\n\r\n"
        reply = super()._ask(head, body)
        found = _ETAG.search(reply)
        generation = b"\r\nx-goog-generation: %d" % int.from_bytes(found[1], "big") if found else b""
        return reply.replace(b"\r\n", generation + b"\r\n", 1).replace(b"x-amz-meta-", b"x-goog-meta-")
