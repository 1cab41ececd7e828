"""Every fixed limit of the server, with the relations between them asserted at import.

Owns numbers only. It may never import another module of the project, and no other file may repeat one of these numbers.
"""

# Layout
CACHE_LINE_BYTES = 64
PAGE_BYTES = 4096
HEADER_BYTES = 4096  # first part of every segment: magic, version, schema hash, cursors

# Stop conditions of one request
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
UTF8_BYTES_MAX = 4
STOP_BYTES = MAX_STOP_STRINGS * MAX_STOP_CHARS * UTF8_BYTES_MAX
MAX_STOP_TOKEN_IDS = 16

# Steps
STEPS_IN_FLIGHT = 2
STEP_RING_SLOTS = 8
RESULT_RING_SLOTS = 8
WINDOW_MAX = 16

# Rows between the processes
INTAKE_RING_SLOTS = 64
INTAKE_ROWS_MAX = 64  # rows in one record
PROGRESS_RING_SLOTS = 64
GENERATION_MAX = 2**31 - 1  # records carry the generation of a row as int32

# Configuration
MAX_RUNNING_MAX = 4096
MAX_QUEUED_MAX = 65536
PAGE_SIZE_MAX = 1024
CONTEXT_LEN_MAX = 2**24
KV_TOKENS_MAX = 2**31 - 1
PREFILL_CHUNK_MAX = 65536
THREADS_MAX = 1024
DRAIN_SECONDS_MAX = 3600.0
LOG_SECONDS_MAX = 86400.0

# HTTP
BODY_BYTES_MAX = 4 * 1024 * 1024

# Waiting
WAIT_MS_MAX = 50  # a waiter looks again at least this often, whatever happens to its doorbell

# Deaths
STABLE_SECONDS = 1.0  # a stage that has served for so long begins a new streak of deaths
DEATHS_IN_A_ROW = 5  # of one stage, in one streak, with the same request in hand: it is suspect whatever it got done

# Control segment
FAILURE_BYTES_MAX = 2048

# Trace
TRACE_LANES = 4  # writer threads of one stage
TRACE_SPANS = 4096  # spans kept per lane

assert RESULT_RING_SLOTS > STEPS_IN_FLIGHT, "a step is launched only with its result slot reserved"
assert STEP_RING_SLOTS > STEPS_IN_FLIGHT, "the scheduler pushes the next step while others run"
assert STOP_BYTES == MAX_STOP_STRINGS * MAX_STOP_CHARS * UTF8_BYTES_MAX
assert STOP_BYTES % CACHE_LINE_BYTES == 0
assert HEADER_BYTES % PAGE_BYTES == 0
assert min(STEP_RING_SLOTS, RESULT_RING_SLOTS, INTAKE_RING_SLOTS, PROGRESS_RING_SLOTS) >= 2, (
    "the last published slot must outlive the next write"
)
assert FAILURE_BYTES_MAX % 8 == 0
assert FAILURE_BYTES_MAX <= HEADER_BYTES - 1024
