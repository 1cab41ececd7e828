"""Prompts whose answers repeat much of them: `python -m tools.repeating_prompts FILE.jsonl`.

Two kinds, in turn: edits of code, with functions of this project in which a name shall be changed, and summaries with
quotes, of what people asked in the benchmark's prompts. The file is the same for the same source. For measuring drafts
that are looked up: nobody should take the figures for those of ordinary chats.
"""

import argparse
import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shm", "procs")
LINES = range(8, 22)  # of a function that is taken
QUOTED = range(300, 700)  # characters of a text that is taken
PROMPTS = 40
EDIT = "Here is a Python function:\n\n{code}\n\nHere is the same function with `{old}` renamed to `{new}`:\n\n{first}\n"
QUOTE = 'Text:\n"{text}"\n\nThe text again, word by word, in quotes:\n"'


def edits() -> list[str]:
    """Functions of this project, each to be written again with one name changed."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.args.args and node.end_lineno is not None:
                code = ast.get_source_segment(text, node) or ""
                names = [argument.arg for argument in node.args.args if argument.arg != "self"]
                if len(code.splitlines()) not in LINES or not names:
                    continue
                first, places = re.subn(rf"\b{names[0]}\b", f"{names[0]}_", code.splitlines()[0])
                if places:
                    found.append(EDIT.format(code=code, old=names[0], new=f"{names[0]}_", first=first))
    return found


def quotes(prompts: Path) -> list[str]:
    """Texts of the benchmark's prompts, each to be quoted."""
    texts = [" ".join(json.loads(line)["prompt"].split()) for line in prompts.read_text().splitlines()]
    return [QUOTE.format(text=text.replace('"', "'")) for text in texts if len(text) in QUOTED]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    wanted = parser.parse_args().file
    some, others = edits(), quotes(ROOT / "tools" / "data" / "sharegpt_prompts.jsonl")
    half = PROMPTS // 2
    pairs = zip(some[:: len(some) // half][:half], others[:: max(1, len(others) // half)][:half], strict=True)
    lines = [json.dumps({"prompt": prompt}) for pair in pairs for prompt in pair]
    wanted.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts in {wanted}")


if __name__ == "__main__":
    main()
