"""`hal serve` as a user runs it: a process, the real model, the openai client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from hal_process import ServerProcess, run_hal, serving

MODEL = "SmolLM2-135M-Instruct.Q4_1"
BLOCKS = ("--set", "engine.num_blocks=512")  # a test needs no gigabytes
CHAT = [{"role": "user", "content": "Name three primary colours."}]
PROMPTS = [
    text + " and then" * (i % 3)
    for i, text in enumerate(
        (
            "The capital of France is",
            "Once upon a time",
            "1, 2, 3, 4,",
            "def add(a, b):",
            "Water boils at",
            "The opposite of hot is",
            "My favourite book",
            "In the year 1969",
        )
    )
]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    with serving(smollm2_gguf, *BLOCKS) as running:
        yield running


def _wait(condition: Callable[[], bool], deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


def _at_rest(server: ServerProcess) -> bool:
    samples = server.metrics()
    names = ("hal_kv_blocks_used", "hal_sequences_running", "hal_sequences_waiting")
    return all(samples[name] == 0 for name in names)


def test_chat_streaming_and_not(server: ServerProcess) -> None:
    client = server.openai()
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 24
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_completions_streaming_and_not(server: ServerProcess) -> None:
    client = server.openai()
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 16}
    whole = client.completions.create(**options, temperature=0, logprobs=2)
    assert whole.choices[0].text.startswith(" Paris")
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or ()) == 16
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(**options, temperature=0, stream=True)
    ]
    assert "".join(pieces) == whole.choices[0].text
    sampled = [
        client.completions.create(**options, temperature=0.9, top_p=0.9, seed=11).choices[0].text
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]


def test_the_plan_is_the_one_of_hal_plan(server: ServerProcess, smollm2_gguf: Path) -> None:
    planned = json.loads(run_hal("plan", smollm2_gguf, *BLOCKS, "--json", "-").stdout)
    with server.http() as client:
        response = client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}
        )
        assert response.headers["x-hal-plan"] == planned["hash"]
        served = client.get("/v1/hal/plan").json()
    raw = server.openai().chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT, max_tokens=1
    )
    assert raw.headers["x-hal-plan"] == planned["hash"]
    assert served["hash"] == planned["hash"]
    choices = [(op["site"], op["phase"], op["choice"]) for op in served["ops"]]
    assert choices == [(op["site"], op["phase"], op["choice"]) for op in planned["ops"]]


def test_metrics_count_calls_of_each_op_and_implementation(server: ServerProcess) -> None:
    def calls() -> dict[str, float]:
        return {k: v for k, v in server.metrics().items() if k.startswith("hal_op_calls_total")}

    before = calls()
    server.openai().completions.create(
        model=MODEL,
        prompt=PROMPTS[1],
        max_tokens=5,
        temperature=0.8,
        top_p=0.5,
        extra_body={"ignore_eos": True},
    )
    grown = {k: v - before[k] for k, v in calls().items()}
    with server.http() as client:
        planned = client.get("/v1/hal/plan").json()["ops"]
    for op in {(op["op"], op["phase"], op["choice"]) for op in planned}:
        labels = [f'op="{op[0]}"', f'phase="{op[1]}"', f'implementation="{op[2]}"']
        series = [v for k, v in grown.items() if all(label in k for label in labels)]
        assert series, op
        assert sum(series) > 0, op
    one = {k: v for k, v in grown.items() if 'op="rope_kv_write"' in k}
    assert sum(one.values()) == 30 * 5  # a prefill and four decode steps through thirty layers


def test_ready_and_models(server: ServerProcess) -> None:
    assert server.ready_line.startswith("ready")
    with server.http() as client:
        assert client.get("/ready").json()["status"] == "ready"
        assert client.get("/health").status_code == 200
    assert [m.id for m in server.openai().models.list()] == [MODEL]


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_its_blocks(server: ServerProcess, is_stream: bool) -> None:
    _wait(lambda: _at_rest(server))
    generated = server.metrics()["hal_generated_tokens_total"]
    body = {
        "model": MODEL,
        "prompt": PROMPTS[2],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": is_stream,
    }
    with server.http() as client:
        if is_stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # a loop over it would hang up as it is left
                for _ in range(8):
                    next(lines)
                assert server.metrics()["hal_kv_blocks_used"] > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1.5)
    _wait(lambda: _at_rest(server))
    assert server.metrics()["hal_generated_tokens_total"] - generated < 1000


# ---- a server with little room ----


@pytest.fixture(scope="module")
def small_server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    """A KV pool for two sequences of the tests, and a short queue."""
    settings = ("engine.num_blocks=8", "engine.max_waiting=16", "engine.max_num_seqs=8")
    with serving(smollm2_gguf, *(x for text in settings for x in ("--set", text))) as running:
        yield running


def _complete_all(server: ServerProcess, prompts: list[str]) -> list[str]:
    """Greedy texts of prompts sent at the same time."""
    texts: list[str | None] = [None] * len(prompts)
    client = server.openai()

    def ask(number: int) -> None:
        answer = client.completions.create(
            model=MODEL, prompt=prompts[number], max_tokens=48, temperature=0
        )
        texts[number] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in texts
    return [text for text in texts if text is not None]


def test_a_quarter_of_the_blocks_gives_the_same_tokens(
    server: ServerProcess, small_server: ServerProcess
) -> None:
    """Eight sequences of up to 64 tokens want 32 blocks; there are 8."""
    wanted = _complete_all(server, PROMPTS)
    for _ in range(4):  # on a machine that stands still at times they may come one by one
        assert _complete_all(small_server, PROMPTS) == wanted
        preemptions = small_server.metrics()["hal_preemptions_total"]
        if preemptions:
            break
    assert preemptions > 0
    _wait(lambda: _at_rest(small_server))


def test_overload_is_refused_with_a_time_to_come_back(small_server: ServerProcess) -> None:
    async def main() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=small_server.url, timeout=240, limits=limits, trust_env=False, verify=False
        ) as client:

            async def ask(number: int) -> httpx.Response:
                body = {"model": MODEL, "prompt": PROMPTS[number % 8], "max_tokens": 8}
                return await client.post("/v1/completions", json=body)

            return list(await asyncio.gather(*(ask(i) for i in range(200))))

    memory = psutil.Process(small_server.process.pid).memory_info().rss
    responses = asyncio.run(main())
    by_status: dict[int, list[httpx.Response]] = {}
    for response in responses:
        by_status.setdefault(response.status_code, []).append(response)
    assert set(by_status) == {200, 429}
    assert len(by_status[200]) >= 16
    for response in by_status[200]:
        assert response.json()["usage"]["completion_tokens"] > 0
    for response in by_status[429]:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["message"]
    _wait(lambda: _at_rest(small_server))
    grown = psutil.Process(small_server.process.pid).memory_info().rss - memory
    assert grown < 200 * 2**20
    assert small_server.openai().completions.create(model=MODEL, prompt="a", max_tokens=1)


def test_sigterm_lets_streams_finish(smollm2_gguf: Path) -> None:
    with serving(smollm2_gguf, *BLOCKS) as server:
        stream = server.openai().completions.create(
            model=MODEL, prompt=PROMPTS[3], max_tokens=120, stream=True, temperature=0
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        _wait(lambda: _is_refused(server))
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason in ("length", "stop")
        assert server.process.wait(60) == 0


def _is_refused(server: ServerProcess) -> bool:
    with server.http() as client:
        try:
            answer = client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}
            )
        except httpx.TransportError:
            return True
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
        return True
    return False


# ---- several ranks, and models that cannot be served ----


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.make_tiny_model("llama", folder, seed=torch.seed() % 2**31)
    return folder


@pytest.mark.parametrize("pause_s", [0.05, 0.4])
def test_a_second_signal_at_any_time_ends_with_a_stated_status(
    tiny_folder: Path, pause_s: float
) -> None:
    """During the drain, while the engine closes, or when only the process has to end."""
    with serving(tiny_folder, "--set", "engine.num_blocks=64") as server:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(pause_s)
        server.process.send_signal(signal.SIGTERM)  # nothing, if it has ended
        assert server.process.wait(60) in (0, 128 + signal.SIGTERM)


def test_a_killed_rank_is_an_error_at_the_client(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--tp", "2", "--set", "engine.num_blocks=64") as server:
        workers = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "hal_engine.worker" in " ".join(child.cmdline())
        ]
        assert len(workers) == 1
        stream = server.openai().completions.create(
            model=tiny_folder.name,
            prompt=[5, 6, 7],
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        workers[0].kill()
        killed = time.monotonic()
        with pytest.raises(openai.APIError):
            list(chunks)
        assert time.monotonic() - killed < 15
        with server.http() as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        server.stop()
    assert not psutil.pid_exists(workers[0].pid)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def _one_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")


def _no_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.input_layernorm.weight"]


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "model.safetensors"),
    "nan": (_edit_tensors(_one_nan), "model.layers.1.mlp.down_proj.weight"),
    "missing": (_edit_tensors(_no_norm), "model.layers.2.input_layernorm.weight"),
    "config": (
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        "config.json",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_model_is_refused_before_ready(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    corrupt, culprit = CORRUPTIONS[name]
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    corrupt(folder)
    result = run_hal("serve", folder, "--port", "0")
    assert result.returncode == 2
    assert culprit in result.stderr
    assert "Traceback" not in result.stderr
    assert ": serving " not in result.stdout
