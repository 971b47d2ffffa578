"""What the backends of all remote stores share: deadlines, retries, the meaning of errors, parts in flight, HTTP."""

from __future__ import annotations
