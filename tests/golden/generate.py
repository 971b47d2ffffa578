"""Generate the golden checkpoints and their expectations: ``python tests/golden/generate.py [folder]``.

Run it only to add a case, or for a new format version. The committed files come from earlier releases, and must not
change.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import golden

from bytecheckpoint.format.manifest.envelope import encode
from bytecheckpoint.testing.ranks import RankPool


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else golden.ROOT
    root.mkdir(parents=True, exist_ok=True)
    with RankPool(4) as pool:
        for name in (*golden.CASES, *golden.ENCODED_CASES):
            golden.write_case(pool, name, root)
            print(name, sum(file.stat().st_size for file in (root / name).rglob("*.*")), "bytes")
    golden.write_incremental(root)
    (root / golden.EXAMPLE.name).write_bytes(encode(golden.example(), compress=False))


if __name__ == "__main__":
    main()
