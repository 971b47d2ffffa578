"""Keys of stored dicts and sets that were chosen to have the same hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from ..errors import FormatError

_MOST_EQUAL = 100


def check_hashes(keys: Iterable[Hashable]) -> None:
    """Check keys before a dict or a set is made of them.

    To insert n keys with the same hash takes n² comparisons inside C, where not even Ctrl-C ends it. Such keys are easy
    to find among numbers and tuples of numbers; hashes of texts are random in each process.

    Raises ``FormatError``, and ``TypeError`` for a key that has no hash.
    """
    numbers = [hash(key) for key in keys if type(key) is not str]
    if len(numbers) > _MOST_EQUAL and max(Counter(numbers).values()) > _MOST_EQUAL:
        raise FormatError(f"more than {_MOST_EQUAL} keys of a dict, or items of a set, have the same hash")
