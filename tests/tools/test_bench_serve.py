"""The benchmark against a small server made here: both loops, every dataset, slow networks, faults, and a line for each
bad input."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

from tools.bench_serve import main, prompts_of
from tools.openai_stream import Lane
from tools.serve_load import Target, open_loop
from tools.serve_options import Level, levels_of, parse, requests_of, rounds_of

TOKENS = 5


@dataclass
class Fake:
    """Answers /v1/models, /metrics and completions; cuts its bytes into pieces of `piece` bytes."""

    port: int = 0
    piece: int = 10_000
    fail: bool = False
    hold: int = 0  # nobody is answered before so many requests are open at once
    asked: list[str] = field(default_factory=list)
    open_now: int = 0
    open_max: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.split()[1].decode()
            length = 0
            while (header := await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            body = await reader.readexactly(length)
            self.asked.append(path)
            if path.endswith("/v1/models"):
                await self.whole(writer, b'{"data": [{"id": "tiny"}]}')
            elif path.endswith("/metrics"):
                await self.whole(writer, b"stepahead_gpu_steps_total 1\n")
            elif self.fail:
                await self.whole(writer, b'{"error": {"message": "no"}}', status=b"500 Oops")
            else:
                self.bodies.append(orjson.loads(body))
                await self.stream(writer)
        writer.close()

    async def whole(self, writer: asyncio.StreamWriter, body: bytes, status: bytes = b"200 OK") -> None:
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        self.open_now += 1
        self.open_max = max(self.open_max, self.open_now)
        while self.open_max < self.hold:
            await asyncio.sleep(0.005)
        events = [b'data: {"choices": [{"index": 0, "text": "\xc3\xa9"}]}\n\n'] * TOKENS
        events += [b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % TOKENS, b"data: [DONE]\n\n"]
        out = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        out += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in events) + b"0\r\n\r\n"
        for at in range(0, len(out), self.piece):
            writer.write(out[at : at + self.piece])
            await writer.drain()
            await asyncio.sleep(0)
        self.open_now -= 1


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("piece", [1, 3, 17, 10_000])
def test_a_stream_is_read_however_the_network_cuts_it(fake: Fake, piece: int) -> None:
    fake.piece = piece

    async def twice() -> list[int]:
        lane = Lane(fake.url)
        timings = [(await lane.ask("/v1/completions", {}, 10)).parsed() for _ in range(2)]
        lane.close()
        assert all(timing.error is None for timing in timings)
        assert all(len(timing.text_times_ns) == TOKENS for timing in timings)
        return [timing.tokens for timing in timings]

    assert asyncio.run(twice()) == [TOKENS, TOKENS]


def test_a_server_that_is_not_there_is_an_error_of_the_answer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        answer = asyncio.run(Lane(url).ask("/v1/completions", {}, 5))
    assert "Error" in (answer.error or "")


def test_two_servers_in_turn_with_json(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--server", f"a={fake.url}", "--server", f"b={fake.url}/v1", "--concurrency", "2,4", "--repeat", "2"]
    assert main([*arguments, "--requests", "6", "--output-tokens", "5", "--json", str(file)]) == 0
    figures = orjson.loads(file.read_bytes())
    assert [(one["concurrency"], one["requests"], one["failed"]) for one in figures["medians"]["a"]] == [
        (2, 6, 0),
        (4, 6, 0),
    ]
    assert len(figures["runs"]["b"]) == 4
    assert all(one["output_tokens"] == 6 * TOKENS for one in figures["runs"]["b"])
    assert fake.open_max <= 4
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 and body["model"] == "tiny" for body in fake.bodies)
    # Warm-up (4 a server), then the same 6 new prompts for each server in each of the 2 x 2 runs.
    measured = [body["prompt"] for body in fake.bodies[8:]]
    assert len(measured) == 48
    assert len(set(measured)) == 24
    assert "ratio" in capsys.readouterr().out


def test_nobody_is_always_the_first(fake: Fake) -> None:
    servers = ["--server", f"a={fake.url}/a", "--server", f"b={fake.url}/b/v1"]
    assert main([*servers, "--concurrency", "1", "--repeat", "3", "--requests", "1"]) == 0
    order = [path[1] for path in fake.asked if path.endswith("/completions")]
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"


def test_failed_requests_make_the_benchmark_fail(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fail = True
    assert main(["--server", fake.url, "--concurrency", "2", "--repeat", "1", "--requests", "2"]) == 1
    assert "status 500" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--server", "http://127.0.0.1:9"], "no list of models"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: not a jsonl file"),
        (["--prompt-chars-max", "0"], "no prompt of at most 0 characters"),
        (["--dataset", "random", "--endpoint", "chat"], "only --endpoint completions takes"),
        (["--dataset", "gsm8k"], "needs --prompts FILE"),
        (["--dataset", "gsm8k", "--prompts", "/nowhere"], "/nowhere: not a jsonl file of questions"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr().err.strip()
    assert told in captured and "\n" not in captured


def test_an_open_loop_sends_what_is_due_however_many_are_under_way(fake: Fake, tmp_path: Path) -> None:
    fake.hold = 6  # a closed loop with fewer lanes would never end
    file = tmp_path / "figures.json"
    arguments = ["--server", fake.url, "--rate", "300", "--repeat", "1", "--requests", "6", "--timeout", "20"]
    fake.open_max = 6  # not while it warms up
    assert main([*arguments, "--json", str(file)]) == 0
    fake.open_max = 0
    sent = asyncio.run(open_loop(Target(fake.url, "/v1/completions", None, 20), [{}] * 6, [0.0] * 6, lambda: None))
    assert (fake.open_max, sent.at_once, len(sent.answers), len(sent.late_s)) == (6, 6, 6, 6)
    assert min(sent.late_s) >= 0 and all(answer.parsed().error is None for answer in sent.answers)
    (one,) = orjson.loads(file.read_bytes())["medians"][fake.url]
    assert (one["rate"], one["requests"], one["failed"]) == (300, 6, 0) and one["late_ms_p99"] >= 0


def test_an_open_loop_waits_for_the_time_and_takes_connections_again(fake: Fake) -> None:
    at_s = [0.0, 0.3, 0.6]
    target = Target(fake.url, "/v1/completions", None, 20)
    sent = asyncio.run(open_loop(target, [{"n": n} for n in range(3)], at_s, lambda: None))
    assert min(sent.late_s) > -0.002, "no request leaves before its time"
    assert sent.at_once <= 3 and [body["n"] for body in fake.bodies] == [0, 1, 2]


@pytest.mark.parametrize("dataset", ["random", "prefix"])
def test_ids_are_the_same_for_every_server_and_of_the_seed(fake: Fake, dataset: str) -> None:
    arguments = ["--server", f"a={fake.url}", "--server", f"b={fake.url}", "--dataset", dataset, "--repeat", "2"]
    small = ["--concurrency", "2", "--requests", "4", "--input-tokens", "6", "--prefixes", "2", "--prefix-tokens", "5"]

    def measured(*more: str) -> list[list[int]]:
        fake.bodies.clear()
        assert main([*arguments, *small, "--id-range", "50,90", *more]) == 0
        return [body["prompt"] for body in fake.bodies[4:]]  # type: ignore[misc]

    prompts = measured()
    length = 6 if dataset == "random" else 11
    assert all(len(prompt) == length and 50 <= min(prompt) <= max(prompt) < 90 for prompt in prompts)
    kinds = [{tuple(prompt) for prompt in prompts[i : i + 4]} for i in (0, 4, 8, 12)]
    assert kinds[0] == kinds[1] and kinds[2] == kinds[3] and not kinds[0] & kinds[2], "new ones for every repeat"
    assert len({tuple(prompt[:5]) for prompt in prompts}) == (8 if dataset == "random" else 2)
    asked = parse(["--dataset", dataset, "--concurrency", "1,2", "--repeat", "2", "--requests", "50"])
    assert len({tuple(prompt) for prompt in prompts_of(asked)}) >= 200, "no prompt comes twice"
    again, other = (sorted(measured("--seed", seed)) for seed in ("0", "1"))
    assert again == sorted(prompts) and other != again


@pytest.mark.parametrize("prefixes", [3, 70])
def test_every_shared_prefix_has_been_asked_when_the_measurement_begins(fake: Fake, prefixes: int) -> None:
    arguments = ["--server", fake.url, "--dataset", "prefix", "--prefix-tokens", "9", "--prefixes", str(prefixes)]
    assert main([*arguments, "--concurrency", "1", "--requests", "1", "--repeat", "1"]) == 0
    warm = [tuple(body["prompt"][:9]) for body in fake.bodies[:prefixes]]  # type: ignore[index]
    assert len(set(warm)) == prefixes and len(fake.bodies) == prefixes + 1


def test_questions_with_examples_end_where_the_next_one_would_begin(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps({"question": f"q{i}", "answer": f"a{i}"}) for i in range(12)))
    arguments = ["--server", fake.url, "--dataset", "gsm8k", "--prompts", str(file), "--shots", "2", "--repeat", "1"]
    assert main([*arguments, "--concurrency", "1", "--requests", "2", "--natural-ends"]) == 0
    body = fake.bodies[1]
    assert body["prompt"] == "Question: q0\nAnswer: a0\n\nQuestion: q1\nAnswer: a1\n\nQuestion: q2\nAnswer:"
    assert body["stop"] == ["\n\nQuestion:"] and "ignore_eos" not in body


def test_the_models_name_may_be_given_and_the_key_is_not_written(fake: Fake, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "picture.svg")]
    arguments = ["--server", fake.url, "--model", "mine", "--api-key", "very-secret", "--repeat", "1", "--rounds", "1"]
    assert main([*arguments, "--concurrency", "2", *files]) == 0
    assert "/v1/models" not in fake.asked and {body["model"] for body in fake.bodies} == {"mine"}
    text = (tmp_path / "figures.json").read_text()
    assert "very-secret" not in text and orjson.loads(text)["about"]["concurrency"] == [2]
    ElementTree.parse(tmp_path / "picture.svg")


def test_levels_are_lanes_or_rates() -> None:
    options = parse(["--rate", "0.5,40", "--seconds", "10"])
    assert levels_of(options) == [Level(rate=0.5), Level(rate=40)]
    assert [requests_of(options, level) for level in levels_of(options)] == [8, 400]
    assert [str(level) for level in (Level(8), Level(rate=0.5))] == ["8 at once", "0.5 a second"]
    for bad in (["--rate", "0"], ["--rate", "inf"], ["--rate", "2", "--concurrency", "2"], ["--id-range", "9,9"]):
        with pytest.raises(SystemExit):
            parse(bad)


def test_a_run_is_full_rounds_of_the_lanes() -> None:
    options = parse(["--rounds", "3"])
    assert [rounds_of(options, level) for level in (1, 8, 32)] == [8, 24, 96]
    assert (options.concurrency, options.output_tokens) == ([1, 8, 32], 128)
