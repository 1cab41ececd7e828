"""Prompts that no drafter has learnt from: `python -m tools.held_out_prompts --sharegpt FILE.json OUT.jsonl`.

First questions of ShareGPT's conversations, of the split that `tools.train_drafter` keeps for the test. The file is the
same for the same source.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from tools.drafter_data import questions_of

CHARS_MAX = 1200


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser("held_out_prompts", description=__doc__)
    parser.add_argument("--sharegpt", type=Path, required=True, help="ShareGPT's conversations, JSON")
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    chosen = (question for question in questions_of(options.sharegpt, "test") if len(question) <= CHARS_MAX)
    lines = [json.dumps({"prompt": question}) for question in itertools.islice(chosen, options.count)]
    options.file.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts in {options.file}")


if __name__ == "__main__":
    main()
