"""Tuned times of the control plane, in seconds."""

from __future__ import annotations

# Waits for other ranks.

WAIT_CHECK_S = 0.1
"""Interval at which a waiting rank checks processes of its host. Messages and lost connections end a wait at once."""

STREAM_POLL_S = 0.1
"""Interval at which a thread blocked on a stream checks for failures."""

ROOT_GRACE_S = 1.0
"""How much longer than rank 0 its children wait: rank 0 has the best view of which rank is late."""

STEP_GRACE_S = 0.2
"""How much longer each further level of the tree waits, for the same reason."""

PROBE_ANSWER_S = 0.5
"""How long a peer whose process has answered nothing since an earlier wait may take to answer at last."""

PROBES_PER_DEADLINE = 8
"""How often a rank that waits for busy ranks asks whether their processes still answer."""

LONGEST_NOTE_INTERVAL_S = 1.0
NOTES_PER_DEADLINE = 8
"""A waiting rank reports which ranks it waits for at this interval, and several times before a short deadline."""

NOTE_LIFETIME_INTERVALS = 3
"""A note that is older than this many intervals comes from a rank that no longer runs."""

PROCESS_CHECK_S = 0.05
"""Shortest interval between two checks of the processes of this host: a death is noticed fast enough, and /proc is read
at most 20 times a second."""

# Failure reports. All survivors raise within two seconds after a deadline, which bounds the sum of the late ones.

REPORT_THROUGH_LEADER_S = 2.0
"""How long a member waits for an answer through its leader before it contacts rank 0 itself."""

DIRECT_REPORT_S = 5.0
"""How long a member waits for rank 0, including the time to connect."""

LATE_REPORT_THROUGH_LEADER_S = 0.25
LATE_REPORT_S = 0.5
"""The same once a deadline has passed, when the leader or rank 0 is likely to be the rank that does not answer."""

END_CONFIRMATION_S = 5.0
"""The connections of a killed process close before the process is seen to end; on a busy host, long before."""

END_CHECK_S = 0.01
"""Interval of the checks during that time."""

UNREAD_MESSAGES_S = 0.5
"""How long the last messages of an ended process may take to be read. A forked child can keep its connections open."""

# Connections.

CONNECT_S = 3.0
"""Limit for one address of a peer while there are others to try. The caller's deadline limits the last one."""

HANDSHAKE_S = 10.0
"""Limit for a new connection to authenticate."""

REPLACE_S = 2.0
"""How long a connected rank has to answer before another connection in its name takes its place."""

CROWD_S = 2.0
"""How long each of too many strangers may take to authenticate before it is disconnected."""

ACCEPT_RETRY_S = 0.1
"""Pause after a connection could not be accepted, for example because too many files are open."""

LINGER_S = 5.0
"""How long closing waits for ranks that are still in an operation and need this rank to forward messages."""

FLUSH_S = 1.0
"""How long a rank waits until the operating system has accepted its messages, which takes no time on an idle host."""

# The first meeting, through a store that belongs to the job and can only be polled.

REGISTRATION_POLL_S = 0.005
REGISTRATION_POLL_PER_RANK_S = 25e-6
"""The longest interval between two polls; it grows with the job, so that polls do not overload the store."""
