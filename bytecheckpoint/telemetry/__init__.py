"""Observe the steps of saves and loads, measure them, and write them to trace files.

Every save and load runs named steps (``SAVE_STEPS``, ``LOAD_STEPS``). The same names appear in logs, in ``Timings``, in
trace files and in the calls of observers. ``observe`` adds a function that is called when a step begins and ends;
``record`` adds one that receives a ``Span`` for each finished step and for the work that threads do inside steps;
``TraceFiles`` writes these spans to files that Perfetto opens.

Example:
    Stop a process in the middle of a save, to test how a job recovers::

        from bytecheckpoint import telemetry

        def stop(name: str, event: str) -> None:
            if (name, event) == ("save.write", "enter"):
                os._exit(1)

        telemetry.observe(stop)
"""

from __future__ import annotations

from .trace import LOAD_STEPS, SAVE_STEPS, Observer, Recorder, Span, Timings, Work, observe, record
from .trace_files import TraceFiles, merge_traces

__all__ = [
    "LOAD_STEPS",
    "SAVE_STEPS",
    "Observer",
    "Recorder",
    "Span",
    "Timings",
    "TraceFiles",
    "Work",
    "merge_traces",
    "observe",
    "record",
]
