"""Storage classes with which ``torch.distributed.checkpoint`` (DCP) writes and reads checkpoints of this library.

``Writer`` and ``Reader`` replace ``FileSystemWriter`` and ``FileSystemReader``; nothing else in a program changes. DCP
plans what each rank writes and carries the messages between the ranks. The files, the checksums and the one atomic
commit are this library's, so ``bytecheckpoint.load`` and ``bytecheckpoint.open`` read these checkpoints, and ``Reader``
reads what ``bytecheckpoint.save`` wrote.

The package imports ``torch.distributed.checkpoint``; ``import bytecheckpoint`` alone does not import it.
"""

from __future__ import annotations

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
