"""Ask engines which tensors they request, and find out which of them must be quantized.

No engine states that it is quantized. Its loader first runs on the senders' tensors. A wide tensor that would go into
an 8-bit parameter is replaced by its quantized weight and the scales of its blocks, and the loader runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import MismatchError
from ...tensors.metadata import BasicMeta
from ..layouts.hub_names import scale_name
from ..layouts.parts import TensorBox
from .block_quantization import QUANTIZED, SCALE, Blocks, grid_of, is_narrow
from .engines.base import Budget, Engine, ask
from .messages import Table, check_faults, unpack_parts
from .plan import check_taken_whole


@dataclass(frozen=True)
class TensorRequest:
    """What an engine requests: ``parts`` of the tensors of ``table``, by worker.

    The table is the senders', with quantized tensors and their scales in place of those in ``blocks``. ``answers`` are
    the workers' responses.
    """

    answers: list[dict[str, Any]]
    parts: list[list[TensorBox]]
    table: Table
    blocks: dict[str, Blocks]


def request_tensors(engine: Engine, table: Table, budget: Budget, *, strict: bool) -> TensorRequest:
    """Ask an engine. Raises ``MismatchError`` when its model and ``table`` do not fit."""
    answers, parts = _describe(engine, table, budget, strict=strict)
    found = (one for answer in answers for one in answer["blocks"].items())
    blocks: dict[str, Blocks] = {name: (rows, columns) for name, (rows, columns) in found}
    if blocks:
        _check_quantized_everywhere(engine, blocks, parts)
        table = _quantized(table, blocks)
        answers, parts = _describe(engine, table, budget, strict=strict)
        _check_scales_requested(engine, blocks, parts)
    if strict:
        check_taken_whole(engine.name, table, parts)
    return TensorRequest(answers, parts, table, blocks)


def blocks_by_name(requests: Iterable[TensorRequest]) -> dict[str, Blocks]:
    """Return the blocks of all tensors that any engine requests quantized. Raises ``MismatchError`` when two engines
    request one tensor in different blocks."""
    found: dict[str, Blocks] = {}
    for request in requests:
        for name, blocks in request.blocks.items():
            if found.setdefault(name, blocks) != blocks:
                one, other = ("x".join(map(str, size)) for size in (found[name], blocks))
                text = f"{name} in blocks of {one}, and others in blocks of {other}"
                raise MismatchError(
                    f"some engines request {text}; nothing was sent, push to them one after the other",
                    [("dtype", name, text)],
                )
    return found


def _describe(
    engine: Engine, table: Table, budget: Budget, *, strict: bool
) -> tuple[list[dict[str, Any]], list[list[TensorBox]]]:
    answers = ask(engine, "describe", {"table": table.packed, "strict": strict}, budget.left)
    parts = [unpack_parts(answer["parts"]) for answer in answers]
    if not any(parts):  # a single pipeline stage may request nothing
        raise MismatchError(f"{engine.name} requests none of the tensors; nothing was sent")
    return answers, parts


def _quantized(table: Table, blocks: Mapping[str, Blocks]) -> Table:
    """Return the table of a checkpoint of the quantized model, where scales follow their weight."""
    rows: list[tuple[str, BasicMeta]] = []
    for name, meta in table.rows:
        if name in blocks:
            rows.append((name, BasicMeta(QUANTIZED, meta.shape)))
            rows.append((scale_name(name), BasicMeta(SCALE, grid_of(meta.shape, blocks[name]))))
        else:
            rows.append((name, meta))
    names = {name for name, _ in table.rows}
    scaled = [name for name in blocks if scale_name(name) in names]
    check_faults(
        "the senders have scales of tensors that are not quantized; nothing was sent",
        [("dtype", name, f"it would be quantized, but the senders have {scale_name(name)} as well") for name in scaled],
    )
    return Table(tuple(rows))


def _check_quantized_everywhere(
    engine: Engine, blocks: Mapping[str, Blocks], parts: Sequence[Sequence[TensorBox]]
) -> None:
    """Refuse a tensor that is requested both ways: an unquantized parameter would get values without their scale."""
    distinct = (part for of_worker in parts for part in of_worker if part.name in blocks)
    wide = {part.name: part for part in distinct if not is_narrow(part.dtype)}
    check_faults(
        f"{engine.name} requests tensors both quantized and not; nothing was sent",
        [("dtype", name, f"it is requested as {QUANTIZED} and as {part.dtype}") for name, part in wide.items()],
    )


def _check_scales_requested(engine: Engine, blocks: Mapping[str, Blocks], parts: Sequence[Sequence[TensorBox]]) -> None:
    requested = {part.name for of_worker in parts for part in of_worker}
    missing = [scale_name(name) for name in blocks if scale_name(name) not in requested]
    check_faults(
        f"{engine.name} requests quantized tensors without their scales; nothing was sent",
        [("missing", name, "its loader does not request it") for name in missing],
    )
