"""Every limit that more than one module knows, with its reason. All are upper bounds unless the name says otherwise."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

PAGE_BYTES = 4096
"""Alignment of slots and of a shard's data: what direct I/O and page tables want."""

# Format: a hostile or broken object is refused before it costs more than this.

HEADER_BYTES_MAX = 100_000_000
"""The safetensors limit on a header; longer ones are refused by every reader."""
RECEIPT_BYTES_MAX = 512 * MIB
MANIFEST_BYTES_MAX = 64 * MIB
INDEX_INLINE_BYTES_MAX = 256 * KIB
"""Up to here the index lies inside the manifest; above, in objects of its own."""
INDEX_PART_BYTES_TARGET = 4 * MIB
RECEIPTS_INLINE_MAX = 256
"""Up to so many ranks the manifest lists the receipts itself; above, so many lie in each object beside it."""
SMALL_RECORD_BYTES_MAX = MIB
"""run.json, generations, marks, leases, tombstones."""
TREE_DEPTH_MAX = 64
TENSOR_DIMS_MAX = 64
NAME_BYTES_MAX = 4096
INTEGER_MAX = 2**63 - 1
"""Sizes and offsets are 64-bit everywhere."""

BLOCK_BYTES_MAX = MIB
"""A digest covers at most this much, and never crosses a tensor. So long are the blocks of receipts that do not say."""
BLOCK_BYTES_MIN = 64 * KIB
"""A receipt with shorter blocks is refused: it would be mostly digests."""
BLOCK_BYTES_WRITTEN = 128 * KIB
"""The blocks of shards written now. Either end of a range that is read costs up to a block, so short ones are better;
at 64 KiB xxhash keeps the GIL, and digesting would hold up the daemon's loop."""

# Incremental saves

REFERENCED_SHARE_MIN = 0.25
"""An older shard is referred to only where at least so much of it is needed: all of its checkpoint stays for that."""
BASES_KEPT_BYTES = 256 * MIB
"""Of receipts that a daemon keeps to compare the next saves with; beyond, they are read again."""

# Shared memory

SLOTS_MAX = 16
SLOT_SLACK_FRACTION = 0.02
"""Room for plain values that grow, so that a longer log list does not mean a new arena."""
SLOT_SLACK_BYTES_MIN = MIB

# Wire

MESSAGE_BYTES_MAX = 128 * KIB
"""One datagram on the socket; bulk lies in the arena, never in messages."""
CLIENTS_MAX = 1024
OFFERS_MAX = 256
"""Snapshots in memory that are offered for a restore, newest first: those of a node fit into one message."""
SEND_QUEUE_MAX = 1024
"""Messages that wait for a client that does not read; then it is disconnected."""

# Health

HEALTH_SECONDS = 10.0
"""How often a daemon looks at its machine."""
SIGHTINGS_MAX = 64
"""Things noticed about a machine that are kept, the newest."""

# Tiers

TIERS_MAX = 8
"""Of one run; their numbers are one digit in keys."""
TIER_ANSWER_SECONDS = 10.0
"""How long a start waits for a tier, where it can do without: it may be down for days."""
COPIES_AT_ONCE = 2
"""Shards of one node on their way to one further tier. Each holds the parts in flight and no more."""
COPY_READS_AT_ONCE = 2
"""Reads of the nearer tier for all copies to one further tier: a save that is being written there goes on."""
EXCHANGED_KEPT = 16
"""Of checkpoints that are not committed, so many, the newest, keep their exchanged receipts; as many as there may be
snapshots in memory."""

# Budgets of a daemon

DIGEST_THREADS_MAX = 4
"""Unless more are asked for. One digests faster than a disk writes; more than a few would take the trainer's cores."""
IO_THREADS_PER_PROCESSOR = 4
"""For each store, unless another number is asked for: they mostly wait for a disk or a network."""
OTHER_THREADS_MIN, OTHER_THREADS_MAX = 4, 32
"""For all else that blocks: so many and one for each processor, up to so many."""
REQUESTS_INFLIGHT = 32
"""Operations on one store at the same time; its backend may allow fewer."""

# Waits

CONNECT_SECONDS = 30.0
AGREEMENT_SECONDS = 300.0
COMMIT_SECONDS = 1800.0
"""How long a commit waits for the receipts of other ranks before the save is given up and reported."""
COMMIT_TAKEOVER_SECONDS = 15.0
"""How long the daemons of other ranks wait for rank 0's to commit before they do it, plus jitter, and plus a tenth of a
second for each MB of receipts."""
IDLE_EXIT_SECONDS = 3600.0
"""A daemon that a client started ends itself after so long without clients and without work."""
TOMBSTONE_SECONDS = 2 * COMMIT_SECONDS
"""A deletion stays announced for so long after it, by the store's clock, so that a daemon that is late to commit the
checkpoint learns of it."""
RETENTION_GRACE_SECONDS = 10.0
"""Between the announcement of a deletion and the deletion: a lease that was taken just before may be listed late."""
ORPHAN_SECONDS = 86_400.0
"""What was never committed is cleared up after so long without a new object, by the store's clock."""
BESIDE_SECONDS = 7 * 86_400.0
"""What is no longer on the line stays for so long, unless :class:`ckptd.checkpoint.keep.Keep` says otherwise."""
TRIAL_SECONDS = 1800.0
"""How long a checkpoint may take to be loaded for a trial."""
VERIFY_DELAY_SECONDS = 5.0
"""After a commit, before it is read again: the training may be about to read its next data."""
VERIFY_READS_AT_ONCE = 2
"""What is written meanwhile goes on."""
VERIFY_BYTES_PER_SECOND = 64 * MIB
"""How fast a daemon reads commits again, all runs together."""
COPY_RETRY_SECONDS = 5.0
"""After a failed copy to a further tier; doubled for each further failure, with jitter."""
COPY_RETRY_SECONDS_MAX = 120.0
COPY_POLL_SECONDS_MAX = 15.0
"""How seldom a daemon without rank 0 may look for what rank 0's has chosen to copy."""
COPY_LINGER_SECONDS = 60.0
"""So long after the last news of a run whose trainers here have ended, its further tiers are served; as long as
:data:`COMMIT_SECONDS` where they fail."""
LEASE_SECONDS = 60.0
"""A writer's lease that is older than this, by the store's clock, has expired."""

# Watching over trainers

HANG_FLOOR_SECONDS = 120.0
"""A step is never called a hang before."""
HANG_FACTOR = 5.0
"""Times the duration that one step in a hundred exceeds."""
HANG_FIRST_SECONDS = 3600.0
"""For the start, the first steps, compiling, restoring and evaluation, where the trainer names no limit."""
HANG_SAVE_SECONDS = 900.0
"""For the trainer's part in a save: memory, a free slot, the copy. What the daemon does of it has its own deadlines."""
HANG_GRACE_SECONDS = 60.0
"""From the report of a hang to the end of the trainer, where that is wanted."""
STRAGGLER_RATIO = 1.5
STACKS_BYTES_MAX = 128 * KIB
"""Of one process in a report; the rest is left out."""
DUMP_SECONDS = 5.0
"""How long a process may take to answer with its stacks."""
CHILDREN_MAX = 32
"""Processes below one trainer that a report lists."""
HANG_SIGHTINGS_SECONDS = 600.0
"""What was noticed about the machine within so long before a hang is in its report."""
HANG_REPORTS_KEPT = 32
ALERTS_KEPT = 64
ALERT_QUIET_SECONDS = 300.0
"""Between two alerts of what comes again and again, such as failed saves of one run."""
LIVES_KEPT = 1024
"""Trainers that have ended of which a daemon can tell how far they came."""
LEARNED_RUNS_KEPT = 256
"""Runs whose learned limits a daemon keeps; the oldest go."""

# The training log

LOG_COLUMNS_MAX = 64
"""Named figures of one trainer; further names are dropped, counted, and warned of once."""
LOG_NAME_BYTES_MAX = 63
"""Of a column, in UTF-8."""
LOG_RING_ROWS = 4096
"""Rows that a trainer's memory holds, for a daemon that is slow or away."""
LOG_READ_SECONDS = 1.0
"""How often a daemon takes new rows out of a trainer's memory."""
LOG_WRITE_SECONDS = 30.0
"""So long may rows wait before they are stored; a commit, the end of a trainer and a drain store them at once."""
LOG_SEGMENT_ROWS_MAX = 1024
LOG_SEGMENT_BYTES_MAX = 4 * MIB
"""Of an encoded segment: with all columns, each figure as long as can be, it has less than half of that."""
LOG_WAITING_ROWS_MAX = 16_384
"""Of one trainer that a daemon holds while a store does not take them; beyond, the oldest are lost, and counted."""
LATE_ROWS_MAX = 8
"""Rows that wait for figures from a GPU; with more, the training waits for the oldest."""
LOSS_WINDOW_MAX = 10_000
"""Steps that a rule about the loss may look back: they are sorted for each step."""
BAD_LOSS_PINS_MAX = 5
"""Checkpoints of one run that a bad loss may have pinned, as far as a daemon remembers: pins are for good."""
GO_BACKS_MAX = 3
"""A bad loss makes one run go back so often, as far as a daemon remembers; after that, people are told."""
