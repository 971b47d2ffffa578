"""What ranks send rank 0 before it plans."""

from __future__ import annotations

import msgpack
import pytest
import zstandard

from bytecheckpoint.errors import PlanError
from bytecheckpoint.saving.agreement import pack_parts, unpack_parts

NAMES = "".join(f"optimizer.state.decoder.layers.{row}.mlp.linear_fc1.weight.exp_avg" for row in range(2000)).encode()


def test_repeated_names_take_a_small_part_of_their_size():
    sent = [pack_parts([NAMES, b"", rank]) for rank in range(3)]
    assert unpack_parts(sent) == [[NAMES, b"", rank] for rank in range(3)]
    assert max(map(len, sent)) < len(NAMES) / 10


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        pack_parts([NAMES])[:-3],
        zstandard.compress(b"\xc1"),
        zstandard.compress(msgpack.packb([1])[:0]),
        zstandard.ZstdCompressor(write_content_size=False).compress(msgpack.packb([1])),
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little"),
    ],
    ids=["empty", "no frame", "truncated", "no msgpack", "no content", "no size", "a size of 1 TiB"],
)
def test_malformed_messages_are_refused(data: bytes):
    with pytest.raises(PlanError, match=r"malformed message .* same version"):
        unpack_parts([pack_parts([1]), data])
