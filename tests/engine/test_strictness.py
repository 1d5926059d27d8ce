"""A lost fast path is an error before a weight is read, unless a waiver names it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import gguf
import pytest

from hal_process import hal_without, run_hal, serving

INT4 = ("cpu.gemm.jit", "cpu.gemm.int4pack")
SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def poisoned(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real header; every byte of every tensor is 0xFF, which makes the scales NaN."""
    offset = gguf.GGUFReader(smollm2_gguf).data_offset
    path = tmp_path_factory.mktemp("poisoned") / "poisoned.gguf"
    size = smollm2_gguf.stat().st_size
    with smollm2_gguf.open("rb") as source, path.open("wb") as target:
        target.write(source.read(offset))
        target.write(b"\xff" * (size - offset))
    return path


def test_the_weights_of_the_poisoned_model_are_refused(poisoned: Path) -> None:
    """What an engine that got as far as the weights would say: the tests below rely on it."""
    result = run_hal("serve", poisoned, "--port", "0")
    assert result.returncode == 2
    assert "CheckpointError" in result.stderr
    assert "finite" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("removed", "why"),
    [
        (INT4, "at least tuned is required and no candidate of that tier can serve here: "),
        (INT4[:1], "cpu.gemm.int4pack (semantics (bfloat16_activations)"),
    ],
    ids=["all", "the-exact-one"],
)
@pytest.mark.parametrize("command", ["plan", "serve"])
def test_without_int4_candidates(
    poisoned: Path, command: str, removed: tuple[str, ...], why: str
) -> None:
    """The plan's error comes, and not that of the weights: nothing of them was looked at."""
    port = ("--port", "0") if command == "serve" else ()
    result = run_hal(command, poisoned, *port, command=hal_without(*removed))
    assert result.returncode == 2
    assert "PlanError" in result.stderr
    assert "CheckpointError" not in result.stderr
    assert "Traceback" not in result.stderr
    assert why in result.stderr
    lost = "(gemm, 1-512 tokens): reference.gemm is reference"
    (line,) = [line for line in result.stderr.splitlines() if lost in line and "qkv_proj" in line]
    for site in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        assert f"layers.*.{site}" in line.partition(lost)[0]
        assert f'component = "layers.*.{site}"' in result.stderr
    assert "[[waiver]]" in result.stderr
    assert 'kind = "tier"' in result.stderr


def _waiver_text(stderr: str) -> str:
    """The waivers that the error proposes, from its first to its last line."""
    lines = stderr[stderr.index("[[waiver]]") :].splitlines()
    kept = [line for line in lines if line == "[[waiver]]" or " = " in line or not line.strip()]
    return "\n".join(kept)


def test_the_proposed_waiver_allows_it(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Refused as printed; accepted once a person has signed it; visible wherever one looks."""
    command = hal_without(*INT4)
    refusal = run_hal("plan", smollm2_gguf, command=command)
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(_waiver_text(refusal.stderr))
    unsigned = run_hal("plan", smollm2_gguf, "--waivers", waivers, command=command)
    assert unsigned.returncode == 2
    assert "must be filled in" in unsigned.stderr
    signed = waivers.read_text()
    signed = signed.replace("<why this is acceptable, and until what happens>", "slow is fine here")
    signed = signed.replace("<who answers for it>", "the test suite")
    waivers.write_text(signed)
    plan = run_hal("plan", smollm2_gguf, "--waivers", waivers, command=command)
    assert plan.returncode == 0, plan.stderr
    assert "slow is fine here" in plan.stdout
    assert "degraded" in plan.stdout
    few_blocks = ("--set", "engine.num_blocks=64")
    with serving(smollm2_gguf, "--waivers", waivers, *few_blocks, command=command) as server:
        assert server.ready_line.startswith("degraded")
        with server.http() as client:
            ready = client.get("/ready")
            assert ready.status_code == 200
            assert ready.json()["status"] == "degraded"
            reasons = " ".join(ready.json()["reasons"])
            assert "slow is fine here" in reasons
            assert "the test suite" in reasons
        completion = server.openai().completions.create(
            model=smollm2_gguf.stem, prompt="The capital of France is", max_tokens=1, temperature=0
        )
        assert completion.choices[0].text == " Paris"
        calls = {k: v for k, v in server.metrics().items() if k.startswith("hal_op_calls_total")}
        assert sum(v for k, v in calls.items() if "reference.gemm" in k) > 0
        assert sum(v for k, v in calls.items() if "cpu.gemm" in k) == 0
    needless = run_hal("plan", smollm2_gguf, "--waivers", waivers)
    assert needless.returncode == 2
    assert "WaiverError" in needless.stderr


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config-only")
    (folder / "config.json").write_text(json.dumps(SMOLLM2_CONFIG))
    return folder


def test_plan_from_config_alone_in_time(config_folder: Path) -> None:
    """Ten seconds of processor time, its own and its children's: others share the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_hal("plan", config_folder, "--losers")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    assert used < 10, used
    assert sorted(path.name for path in config_folder.iterdir()) == ["config.json"]
    for text in ("attention.decode", "attention.prefill", "norm.rms", "rope", "kv_write", "gemm"):
        assert text in result.stdout
    assert "reference.gemm (reference): tier: required native, found reference" in result.stdout


@pytest.mark.parametrize("tp", [1, 3])
def test_every_op_of_the_plan_explains_itself(config_folder: Path, tp: int) -> None:
    result = run_hal("plan", config_folder, "--tp", tp, "--json", "-")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert {"schema", "hash", "device", "kv_bytes_per_token", "ops"} <= plan.keys()
    assert plan["kv_bytes_per_token"] % (2 * 3 * 64 * 30) == 0
    ranks_of_tier = {"native": 3, "tuned": 2, "portable": 1, "reference": 0}
    seen = set()
    for op in plan["ops"]:
        seen.add((op["site"].rpartition(".")[2], op["phase"]))
        assert op["choice"]
        assert ranks_of_tier[op["tier"]] >= ranks_of_tier["tuned"], op["site"]
        assert op["rejected"], f"{op['site']}: at least the reference lost"
        for loser in op["rejected"]:
            assert loser["name"] != op["choice"]
            assert loser["tier"] in ranks_of_tier
            assert loser["reasons"], loser
            for reason in loser["reasons"]:
                assert reason["what"]
                assert reason["required"] != reason["found"]
    wanted = {"embed", "input_norm", "qkv_proj", "rope_kv_write", "attention", "o_proj"}
    wanted |= {"post_norm", "gate_up_proj", "down_proj", "final_norm", "lm_head", "top_k_top_p"}
    if tp > 1:
        wanted |= {"o_all_reduce", "down_all_reduce", "lm_head_all_gather"}
    assert {name for name, _ in seen} == wanted
    assert {phase for name, phase in seen if name == "attention"} == {"prefill", "decode"}
