"""Which tensors engines want quantised, and what their loaders see instead: weights of 8 bits, and scales.

No engine says so. Its loader is run on the tensors as the senders have them, and where it would put elements of a wide
one into a parameter of 8 bits, it means one that is quantised, as its own checkpoints are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import MismatchError
from ...metadata import BasicMeta
from ..parts import Part
from .engines import Budget, Engine, ask
from .messages import Table, unpack_parts
from .narrowing import is_narrow, is_wide
from .planning import check_taken_whole
from .quantizing import QUANTIZED, SCALE, Blocks, grid_of, scale_name

__all__ = ["Wish", "blocks_by_name", "wish_of"]

_Faults = list[tuple[str, str, str]]


@dataclass(frozen=True)
class Wish:
    """What an engine wants: ``parts`` by worker of the tensors of ``table``, which are the senders' but for those that
    are quantised, in these ``blocks``. ``answers`` are its workers'."""

    answers: list[dict[str, Any]]
    parts: list[list[Part]]
    table: Table
    blocks: dict[str, Blocks]


def wish_of(engine: Engine, table: Table, strict: bool, budget: Budget) -> Wish:
    """Ask an engine. Raises ``MismatchError`` where its model and ``table`` do not fit."""
    answers, parts = _describe(engine, table, strict, budget)
    names = _narrowed(table, parts)
    blocks: dict[str, Blocks] = {}
    if names:
        _check_quantized_everywhere(engine, names, parts)
        rows, columns = next(answer["blocks"] for answer in answers if answer["blocks"])
        blocks = dict.fromkeys(names, (rows, columns))
        table = _quantized(table, blocks)
        answers, parts = _describe(engine, table, strict, budget)
        _check_scales_taken(engine, blocks, parts)
    if strict:
        check_taken_whole(engine.name, table, parts)
    return Wish(answers, parts, table, blocks)


def blocks_by_name(wishes: Iterable[Wish]) -> dict[str, Blocks]:
    """Of all tensors that any engine wants quantised. Raises ``MismatchError`` where two want the same in different
    blocks."""
    found: dict[str, Blocks] = {}
    for wish in wishes:
        for name, blocks in wish.blocks.items():
            if found.setdefault(name, blocks) != blocks:
                text = f"{name} in blocks of {_text(found[name])}, and others in blocks of {_text(blocks)}"
                raise MismatchError(
                    f"some engines want {text}; nothing was sent, push to them one after the other",
                    [("dtype", name, text)],
                )
    return found


def _describe(
    engine: Engine, table: Table, strict: bool, budget: Budget
) -> tuple[list[dict[str, Any]], list[list[Part]]]:
    answers = ask(engine, "describe", {"table": table.packed, "strict": strict}, budget.left)
    parts = [unpack_parts(answer["parts"]) for answer in answers]
    if not any(parts):  # a pipeline stage may
        raise MismatchError(f"{engine.name} takes nothing of the tensors; nothing was sent")
    return answers, parts


def _narrowed(table: Table, parts: Sequence[Sequence[Part]]) -> list[str]:
    narrow = {part.name for of_worker in parts for part in of_worker if is_narrow(part.dtype)}
    return [name for name, meta in table.rows if name in narrow and is_wide(meta.dtype)]


def _quantized(table: Table, blocks: Mapping[str, Blocks]) -> Table:
    """As a checkpoint of the quantised model has it: each weight, and its scales behind it."""
    rows: list[tuple[str, BasicMeta]] = []
    for name, meta in table.rows:
        if name in blocks:
            rows.append((name, BasicMeta(QUANTIZED, meta.shape)))
            rows.append((scale_name(name), BasicMeta(SCALE, grid_of(meta.shape, blocks[name]))))
        else:
            rows.append((name, meta))
    there = {name for name, _ in table.rows}
    faults: _Faults = [
        ("dtype", name, f"it would be quantised, but the senders have {scale_name(name)} as well")
        for name in blocks
        if scale_name(name) in there
    ]
    _raise("the senders have scales of tensors that are not quantised", faults)
    return Table(tuple(rows))


def _check_quantized_everywhere(engine: Engine, names: Iterable[str], parts: Sequence[Sequence[Part]]) -> None:
    """A parameter that is not quantised would get values without their scale."""
    wanted = set(names)
    wide = {
        part.name: part
        for of_worker in parts
        for part in of_worker
        if part.name in wanted and not is_narrow(part.dtype)
    }
    _raise(
        f"{engine.name} wants tensors both quantised and not",
        [("dtype", name, f"it is wanted as {QUANTIZED} and as {part.dtype}") for name, part in wide.items()],
    )


def _check_scales_taken(engine: Engine, blocks: Mapping[str, Blocks], parts: Sequence[Sequence[Part]]) -> None:
    taken = {part.name for of_worker in parts for part in of_worker}
    missing = [scale_name(name) for name in blocks if scale_name(name) not in taken]
    _raise(
        f"{engine.name} wants tensors quantised and does not take their scales",
        [("missing", name, "its loader does not want it") for name in missing],
    )


def _raise(what: str, faults: _Faults) -> None:
    if faults:
        listed = "\n  ".join(f"{name}: {text}" for _, name, text in faults[:20])
        raise MismatchError(f"{what}; nothing was sent:\n  {listed}", faults)


def _text(blocks: Blocks) -> str:
    return f"{blocks[0]}x{blocks[1]}"
