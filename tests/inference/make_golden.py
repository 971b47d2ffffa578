"""Generate the golden layouts with vLLM: run this script, inspect the differences, and commit them.

    python tests/inference/make_golden.py [MODEL ...]     in an environment with vLLM; a large model takes minutes

A file contains the packed layouts of all ranks of one engine. ``index.json`` contains the version of vLLM, and digests
and figures for comparison by eye.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import msgpack
import vllm

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from golden_layouts import ENGINES, GOLDEN, MODELS, file_of

from benchmarks.layout_files import digest, pack
from benchmarks.vllm_layout import EngineRank, layout_of


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    index_path = GOLDEN / "index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {}
    for model in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
            for engine in ENGINES[model]:
                path = file_of(model, engine)
                ranks = range(engine["tp"] * engine["pp"])
                layouts = [layout_of(folder, EngineRank(**engine, rank=rank)) for rank in ranks]
                path.write_bytes(msgpack.packb([pack(layout) for layout in layouts]))
                index[path.name] = {
                    "vllm": vllm.__version__,
                    "ranks": [{"digest": digest(one), **asdict(one.sizes())} for one in layouts],
                }
                index_path.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
                print(path.name, path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
