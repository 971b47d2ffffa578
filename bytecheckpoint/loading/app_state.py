"""``AppState``: the state of a whole training job, some of which is restored late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..checkpoint.selection import Selection
from ..errors import StateError, UsageError
from .options import LoadRequest
from .report import LoadReport

Sections: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class LoadPart:
    """Sections, and how to load them."""

    request: LoadRequest
    sections: Mapping[str, Any]


class AppState(Mapping[str, Any]):
    """The state of a training job: named sections, some of them restored late, some of them optional.

    It stands for a state wherever one is accepted. A save stores every section. ``load`` and
    ``CheckpointManager.resume`` fill all sections but the late ones, which ``load_late`` then fills from the same
    checkpoint. Late is what the job itself changes while it resumes, such as random states: data loaders draw numbers
    as they skip the batches that were consumed before, and until they return the first one.

    Args:
        sections: Maps section names to objects, or a function that returns such a mapping. Every save and load calls
            the function, so the objects may be created or wrapped after this.
        late: Names of sections that a load leaves to ``load_late``.
        optional: Names of sections that stay unchanged if the checkpoint does not have them.

    Raises:
        UsageError: A name is given twice, or is not that of a section.

    Example:
        >>> app = bcp.AppState({"model": model, "optimizer": optimizer, "rng": bcp.RNGState()}, late=["rng"])
        >>> bcp.load("runs/7b/step-1000", app)
        >>> for batch in skip_consumed(data_loader):
        ...     app.load_late()  # does nothing from the second time on
        ...     train_step(batch)
    """

    def __init__(self, sections: Sections, *, late: Collection[str] = (), optional: Collection[str] = ()) -> None:
        if not callable(sections) and not isinstance(sections, Mapping):
            raise UsageError(f"sections must be a mapping or a function that returns one, not {sections!r:.80}")
        for what, names in (("late", late), ("optional", optional)):
            if isinstance(names, str):
                raise UsageError(f"{what} must be a list of section names, not {names!r}")
            unknown = set() if callable(sections) else {*names} - sections.keys()
            if unknown:
                raise UsageError(f"{what} names sections that do not exist: {sorted(unknown)}")
        self._sections, self._late, self._optional = sections, frozenset(late), frozenset(optional)
        self._load_late: Callable[[], LoadReport | None] | None = None

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def load_late(self) -> LoadReport | None:
        """Fill the late sections from the checkpoint of the last load. Call it on every rank.

        Returns:
            The report; None if nothing was loaded since the last call, or if the state has no late sections.

        Raises:
            BytecheckpointError: What ``bytecheckpoint.load`` raises. The next call tries again.
        """
        if self._load_late is None:
            return None
        report = self._load_late()
        self._load_late = None
        return report

    def _part(self, request: LoadRequest, *, is_late: bool) -> LoadPart:
        sections = {name: one for name, one in self._all().items() if (name in self._late) == is_late}
        strict = request.strict
        if isinstance(strict, Mapping):
            strict = {name: rule for name, rule in strict.items() if name in sections}
        return LoadPart(replace(request, strict=strict, optional=self._optional), sections)

    def _all(self) -> Mapping[str, Any]:
        return self._sections() if callable(self._sections) else self._sections


def first_part(state: Mapping[str, Any], request: LoadRequest) -> LoadPart:
    """Return all of a state; of an ``AppState`` what is not late, to which alone patterns and renames apply."""
    if not isinstance(state, AppState):
        return LoadPart(request, state)
    request.check(state)
    part = state._part(request, is_late=False)
    if not part.sections:
        raise StateError("every section of the AppState is late; load_late follows a load of the others")
    return part


def keep_late_part(state: Mapping[str, Any], request: LoadRequest, load: Callable[[LoadPart], LoadReport]) -> None:
    """Let ``load_late`` of an ``AppState`` load the late sections from the checkpoint that ``request`` names."""
    if not isinstance(state, AppState):
        return
    request = replace(request, selection=Selection(), rename=None)

    def load_late() -> LoadReport | None:
        part = state._part(request, is_late=True)
        return load(part) if part.sections else None

    state._load_late = load_late
