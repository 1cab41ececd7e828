"""What the mtp drafter takes out of a pass, on the host: the token behind each place, and each row's newest place.

Owns loops over rows and tokens and nothing else. They run without the interpreter lock.
"""

from typing import Any

from gpu.kernels.native import host_kernel


@host_kernel
def next_tokens(
    tokens: Any, starts: Any, targets: Any, tails: Any, decode: Any, chunks: Any, window: Any, out: Any
) -> None:
    """out i32[T]: the token behind each token of a pass: for windows what the target said, for chunks what comes next.

    tails i32[chunks]: the prompt's next token behind each chunk, or -1 for the last one, behind which the target's
    token comes. A target below 0 is no token: its place says nothing that counts.
    """
    before = decode * window
    for t in range(before):
        out[t] = max(targets[t], 0)
    last = 0
    for c in range(chunks):
        begin, end = starts[decode + c], starts[decode + c + 1]
        for t in range(begin, end - 1):
            out[t] = tokens[t + 1]
        if tails[c] >= 0:
            out[end - 1] = tails[c]
        else:
            out[end - 1] = max(targets[before + last], 0)
            last += 1


@host_kernel
def newest_places(counts: Any, logit_rows: Any, decode: Any, lasts: Any, window: Any, out: Any) -> None:
    """out i32[gainers]: the token of the pass behind which each gaining row's newest one stands."""
    for i in range(decode):
        out[i] = i * window + counts[i] - 1
    for k in range(lasts):
        out[decode + k] = logit_rows[decode * window + k]
