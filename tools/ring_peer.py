"""The other process of `stepahead bench ring`: answers every message, or takes them all and counts.

Opens the end of a wire that its one argument describes, then does what the lines on its standard input say. It checks
the number of every message: one that is lost, doubled or out of turn ends it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

import numpy as np
import orjson

from tools.ring_wires import Message, Wire, WireError, open_end

END = -1  # the number of the message that ends a job


def number_of(message: Message, wanted: int) -> int:
    """The number of a message: `wanted` or END. Raises WireError for any other."""
    number = int(message[0])
    if number not in (wanted, END):
        raise WireError(f"message {number} came where {wanted} was due")
    return number


def echo(wire: Wire) -> int:
    """Send every message back until END; return how many there were."""
    count = 0
    while number_of(message := wire.receive(), count) != END:
        wire.send(message)
        count += 1
    return count


def take(wire: Wire) -> int:
    """Take messages until END, say how many they were over the wire as well, and return it."""
    count = 0
    while number_of(message := wire.receive(), count) != END:
        count += 1
    wire.send(np.array([count, *message[1:]], np.int32))
    return count


JOBS = {"echo": echo, "take": take}


def main(argv: Sequence[str] | None = None) -> int:
    """Do the jobs that come in, a line each; say `ready` before each, what it cost behind it. Ends with the input."""
    (there,) = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this is interrupted, and ends it
    wire = open_end(orjson.loads(there))
    for line in sys.stdin:
        print("ready", flush=True)
        began_s = time.process_time()
        count = JOBS[line.strip()](wire)
        print(orjson.dumps({"messages": count, "cpu_s": time.process_time() - began_s}).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
