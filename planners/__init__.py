"""Plan saves and loads: which rank writes which bytes, and which stored bytes a load reads.

Planners are pure: no torch, no I/O, no collectives. They work on tables of integers (``tensors.tables``), so that a
plan for thousands of ranks and millions of shards takes about a second.

- ``save``: from the ``LocalPlan`` of every rank to a ``SavePlan``, and from that to an ``Assignment`` for each rank.
- ``gather``: which tensors are stored whole although several ranks hold parts of them.
- ``load``: ``plan_load`` intersects requested boxes with stored boxes. Resharding needs nothing else.
- ``share``: which ranks read the same boxes, so that one of them reads and forwards them.

All functions raise ``PlanError`` for inconsistent input.
"""
