"""Runs one crash test and prints what it found, as JSON: `random KILLS SEED` or `bytecodes ROLE STRIDE`."""

from __future__ import annotations

import json
import sys

from tests.shm.crash import broken, pipeline

ROLES = {**vars(pipeline), **vars(broken)}


def main(how: str, first: str, second: str) -> None:
    records_after = 0
    if how == "random":
        checker, kills, records_after = pipeline.kill_at_random(int(first), int(second))
    else:
        checker, kills = pipeline.kill_at_every_bytecode(ROLES[first], int(second))
    found = {
        "errors": dict(checker.errors),
        "kills": kills,
        "records": checker.records,
        "records_after": records_after,
        "epochs": len(checker.epochs),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
