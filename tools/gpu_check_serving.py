"""Parts of the check that run the real scheduler and gpu processes: the greedy file, and the speed.

Owns configurations, prompts and the reading of the counters. Tokens go in and out by id, without HTTP. Speed is
reported, never asserted, except that every request must get all of its tokens.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from shm.config import ModelInfo, ServerConfig
from tools.gpu_check import Options
from tools.gpu_check_engine import Answer, Engine, Prompt, running
from tools.gpu_check_part import Figures, run
from tools.random_qwen3 import QWEN3_06B, QWEN3_TINY, write_random_qwen3

READY_S = 50  # what a stage said last is worth more than waiting longer
PROMPT_TOKENS = 64


def describe(path: str) -> ModelInfo:
    """The model at `path`, without a look at its tokenizer: no text is read or written here."""
    from procs import model_info

    vars(model_info)["check_tokenizer"] = lambda *_: None
    return model_info.read_model_info(path)


def configure(info: ModelInfo, options: Options, dtype: str, **changes: Any) -> ServerConfig:
    """A server of `info` on the device that is checked."""
    given: dict[str, Any] = {
        "model": info,
        "served_model_name": info.name,
        "host": "127.0.0.1",
        "port": 0,
        "device": options.device,
        "dtype": dtype,
        "kv_tokens": 32768,
        "max_len": min(1024, info.context_len),
        "max_running": 64,
        "threads": 2,
    }
    return ServerConfig(**(given | changes))


def greedy(options: Options, figures: Figures) -> None:
    """Every id of the greedy file in float32: alone and together, overlap on and off."""
    assert options.model is not None
    info = describe(options.model)
    lines = [json.loads(line) for line in Path(options.greedy).read_text().splitlines()][: options.lines]
    prompts = [Prompt(line["prompt_ids"], 64) for line in lines]
    for overlap in (True, False):
        with running(configure(info, options, "float32", overlap=overlap), READY_S) as engine:
            right, total, first = compare(engine.generate(prompts, 32, 120), lines)
        name = "overlap" if overlap else "no overlap"
        figures.add(f"{name}: equal ids", f"{right} of {total}")
        if first:
            figures.add(f"{name}: first differing line", first)
        assert right == total, f"{name}: {right} of {total} ids, first at {first}"


def compare(answers: list[Answer], lines: list[dict[str, Any]]) -> tuple[int, int, str]:
    """Equal ids, all ids, and where the first difference is. Ids behind a difference do not count."""
    right = total = 0
    first = ""
    for number, (answer, line) in enumerate(zip(answers, lines, strict=True)):
        wanted = line["token_ids"]
        same = next((i for i, (a, b) in enumerate(zip(answer.ids, wanted, strict=False)) if a != b), len(wanted))
        same = min(same, len(answer.ids))
        right, total = right + same, total + len(wanted)
        if same < len(wanted) and not first:
            first = f"line {number}, token {same}, margin {line['margin'][same]:.4f}"
        elif len(answer.ids) != len(wanted) and not first:
            first = f"line {number} ends after {len(answer.ids)} tokens ({answer.finish})"
    return right, total, first


def speed(options: Options, figures: Figures) -> None:
    """Tokens per second and gaps of the default model."""
    assert options.model is not None
    measure(describe(options.model), options, figures)


def speed_qwen3(options: Options, figures: Figures) -> None:
    """The same for random weights of Qwen3's shape."""
    shape = QWEN3_TINY if options.quick or options.device == "host" else QWEN3_06B
    with tempfile.TemporaryDirectory() as folder:
        write_random_qwen3(Path(folder), shape, options.device)
        figures.add("parameters_million", round(shape.parameters / 1e6, 1))
        measure(describe(folder), options, figures)


def measure(info: ModelInfo, options: Options, figures: Figures) -> None:
    """One line of figures for each batch size, overlap on and off. No two bursts have prompts in common: no prefix is
    found in the cache.
    """
    sizes, tokens = ((1, 4), 16) if options.quick else ((1, 8, 32, 64), 128)
    dtype = "bfloat16" if options.device == "cuda" else "int8"
    choose = random.Random(1)

    def prompts(count: int, length: int) -> list[Prompt]:
        drawn = [[choose.randrange(info.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        return [Prompt(ids, length, ignore_eos=True) for ids in drawn]

    for overlap in (True, False):
        with running(configure(info, options, dtype, overlap=overlap), READY_S) as engine:
            for size in sizes:
                burst(engine, prompts(size, tokens // 8), size)  # discarded: what a size needs first may still compile
                name = f"{size} at once, {'overlap' if overlap else 'no overlap'}"
                figures.add(name, burst(engine, prompts(size, tokens), size))


def burst(engine: Engine, prompts: list[Prompt], size: int) -> dict[str, Any]:
    """Send all prompts at once; what came of it. Gaps are between the end of a step and the begin of the next."""
    before = engine.gpu_stats()
    answers = engine.generate(prompts, size, 120)
    after = engine.gpu_stats()
    assert all(len(answer.ids) == prompt.max_new for answer, prompt in zip(answers, prompts, strict=True))

    def gained(name: str) -> float:
        return float(after[name]) - float(before[name])

    decoded = sum(len(answer.ids) - 1 for answer in answers)
    seconds = max(a.last_s for a in answers) - min(a.first_s for a in answers)
    busy, idle, gaps = gained("device_busy_ns_total"), gained("device_idle_ns_total"), max(1.0, gained("gaps_total"))
    return {
        "tokens_per_s": round(decoded / seconds, 1),
        "first_token_ms": round(1e3 * max(a.first_s for a in answers), 1),
        "step_ms": round(busy / max(1.0, gained("steps_total")) / 1e6, 3),
        "gap_us": round(idle / gaps / 1e3, 1),
        "idle_percent": round(100 * idle / max(1.0, busy + idle), 2),
        "starved_steps": int(gained("starved_total")),
        "launch_us": round(gained("launch_ns_total") / max(1.0, gained("steps_total")) / 1e3, 1),
    }


if __name__ == "__main__":
    run({"greedy": greedy, "speed": speed, "speed-qwen3": speed_qwen3})
