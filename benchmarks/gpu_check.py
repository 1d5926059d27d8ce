"""The Triton kernels on a GPU: builds them, checks their numbers, times them beside torch's.

    python benchmarks/gpu_check.py [--seconds 240] [--json FILE]
    python benchmarks/gpu_check.py --dry-run      on a CPU, interpreted, tiny, nothing timed

Each case compares our kernel with a float64 result on the same device and, where torch has the same
op, gives the ratio of the times (torch / ours: above 1 ours is faster), the two taking turns. Needs
torch, triton and pluggy, no installation (it finds the packages of this checkout), ends by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("hal", "kernels")]

if "--dry-run" in sys.argv:  # before a kernel is defined
    sys.path.append(str(ROOT / "tests" / "support"))
    import faithful_interpreter

    faithful_interpreter.install()

import torch  # noqa: E402 - after the path
import torch.nn.functional as functional  # noqa: E402
import triton  # noqa: E402

from hal.device import DeviceSpec  # noqa: E402
from hal.ops.attention import AttentionMetadata, AttentionRequest  # noqa: E402
from hal.ops.attention import reference as exact_attention  # noqa: E402
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight  # noqa: E402
from hal.ops.gemm import GemmRequest, GroupedGemmRequest  # noqa: E402
from hal.ops.low_precision import dequantize_groups, quantize_groups  # noqa: E402
from hal.ops.norm import RmsNormRequest  # noqa: E402

BF16 = torch.bfloat16
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One comparison. exact: the float64 result; theirs: torch's own op, None if it has none."""

    name: str
    ours: Call
    exact: Call
    tolerance: float  # of the largest value of a row
    theirs: Call | None = None


@dataclass(frozen=True)
class Outcome:
    name: str
    error: float
    is_right: bool
    ours_us: float | None = None
    theirs_us: float | None = None
    ratio: float | None = None
    failure: str = ""


class Bench:
    """The device, the sizes and how kernels are bound for it."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.spec = _spec(is_dry)

    def size(self, real: int, dry: int) -> int:
        return dry if self.is_dry else real

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)


def _spec(is_dry: bool) -> DeviceSpec:
    arch, name, warp = "sm_90", "interpreter", 32
    if not is_dry:
        major, minor = torch.cuda.get_device_capability()
        arch, name = f"sm_{major}{minor}", torch.cuda.get_device_name()
        if torch.version.hip:
            properties = torch.cuda.get_device_properties(0)
            arch, warp = properties.gcnArchName.split(":")[0], properties.warp_size
    return DeviceSpec(
        device_id="gpu:0", vendor="gpu", backend="gpu", name=name, arch=arch,
        torch_device="cuda", features=frozenset({"triton"}), attributes={"warp_size": warp},
    )  # fmt: skip


def cases(bench: Bench) -> Iterator[Callable[[], Case]]:
    """Makers, so that one that fails costs only itself."""
    for tokens in (1, 16, bench.size(4096, 20)):
        yield lambda tokens=tokens: dense_case(bench, tokens, "none")
        yield lambda tokens=tokens: dense_case(bench, tokens, "silu_gated")
    for name in ("fp8_block128_a8", "fp8_block32_ue8m0_a8"):
        for tokens in (1, bench.size(4096, 20)):
            yield lambda name=name, tokens=tokens: fp8_case(bench, tokens, name)
    for tokens in (1, bench.size(256, 20)):
        yield lambda tokens=tokens: int4_case(bench, tokens)
    for name in ("bfloat16", "fp8_block128_a8", "mxfp4_a8"):
        yield lambda name=name: grouped_case(bench, name)
    yield lambda: attention_case(bench, "prefill")
    yield lambda: attention_case(bench, "decode")
    yield lambda: norm_case(bench)


def dense_case(bench: Bench, tokens: int, epilogue: str) -> Case:
    from hal_kernels.gemm.triton import bind

    n, k = bench.size(8192, 64), bench.size(4096, 96)
    weight = (bench.randn(n, k) / k**0.5).to(BF16)
    x = bench.randn(tokens, k).to(BF16)
    request = GemmRequest(
        n=n, k=k, dtype="bfloat16", weight_format=FORMATS["bfloat16"], epilogue=epilogue
    )  # type: ignore[arg-type]
    kernel = bind(request, bench.spec, weight=weight)

    def product(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = functional.linear(a, w)
        if epilogue == "none":
            return y
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Case(
        f"gemm bf16 {epilogue} {tokens}x{n}x{k}",
        ours=lambda: kernel(x),
        exact=lambda: product(x.double(), weight.double()),
        tolerance=2.0**-6,
        theirs=lambda: product(x, weight),
    )


def fp8_case(bench: Bench, tokens: int, name: str) -> Case:
    from hal_kernels.gemm.triton import bind

    n, k = bench.size(7168, 128), bench.size(4096, 256)
    dense = bench.randn(n, k) / k**0.5
    weight = _on(quantize_weight(dense.cpu(), FORMATS[name]), bench)
    x = bench.randn(tokens, k).to(BF16)
    request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name])
    kernel = bind(request, bench.spec, weight=weight)
    exact_weight = weight.dequantize()
    wide = exact_weight.to(BF16)
    return Case(
        f"gemm {name} {tokens}x{n}x{k}, beside bf16",
        ours=lambda: kernel(x),
        exact=lambda: rounded(x, name).double() @ exact_weight.double().T,
        tolerance=2.0**-6,
        theirs=lambda: functional.linear(x, wide),
    )


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """x as the format's kernels see it: rounded to FP8 in groups along a row."""
    form = FORMATS[name]
    is_power_of_two = form.activation.startswith("mxfp8") or "ue8m0" in form.activation
    kind = "ue8m0" if is_power_of_two else "float32"
    group = 32 if form.activation.endswith("32") else 128
    values, scales = quantize_groups(x, group_size=group, element="fp8_e4m3fn", scale_kind=kind)
    return dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind=kind)


def int4_case(bench: Bench, tokens: int) -> Case:
    from hal_kernels.gemm.triton import bind

    n, k = bench.size(8192, 64), bench.size(4096, 128)
    form = FORMATS["int4_g32"]
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(n, k // 32) / 8 / k**0.5).half()
    weight = _on(QuantizedWeight(format=form, data=data, scale=scale), bench)
    x = bench.randn(tokens, k).to(BF16)
    request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=form)
    kernel = bind(request, bench.spec, weight=weight)
    exact_weight = weight.dequantize()
    wide = exact_weight.to(BF16)
    return Case(
        f"gemm int4_g32 {tokens}x{n}x{k}, beside bf16",
        ours=lambda: kernel(x),
        exact=lambda: x.double() @ exact_weight.double().T,
        tolerance=2.0**-5,
        theirs=lambda: functional.linear(x, wide),
    )


def grouped_case(bench: Bench, name: str) -> Case:
    from hal_kernels.grouped_gemm.triton import bind

    experts, n, k = bench.size(64, 4), bench.size(2048, 128), bench.size(4096, 256)
    rows = bench.size(4096, 12)
    offsets = torch.linspace(0, rows, experts + 1).long().to(bench.device)
    x = bench.randn(rows, k).to(BF16)
    dense = bench.randn(experts, n, k) / k**0.5
    form = FORMATS[name]
    request = GroupedGemmRequest(
        num_experts=experts, experts_per_token=1, n=n, k=k, dtype="bfloat16", weight_format=form
    )
    if form.is_dense:
        stored: Any = dense.to(BF16)
        exact_weight = stored.double()
    else:
        stored = [_on(quantize_weight(one.cpu(), form), bench) for one in dense]
        exact_weight = torch.stack([one.dequantize() for one in stored]).double()
    kernel = bind(request, bench.spec, weight=stored)

    def exact() -> torch.Tensor:
        bounds = offsets.tolist()
        seen = x if form.is_dense else rounded(x, name)
        return torch.cat(
            [
                seen[a:b].double() @ w.T
                for a, b, w in zip(bounds, bounds[1:], exact_weight, strict=False)
            ]
        )

    theirs = None
    if form.is_dense and hasattr(torch, "_grouped_mm") and not bench.is_dry:
        ends = offsets[1:].int()
        theirs = lambda: torch._grouped_mm(x, stored.transpose(1, 2), offs=ends)  # noqa: E731
    return Case(
        f"grouped gemm {name} {experts} experts {rows}x{n}x{k}",
        ours=lambda: kernel(x, offsets),
        exact=exact,
        tolerance=2.0**-6,
        theirs=theirs,
    )


def attention_case(bench: Bench, phase: str) -> Case:
    from hal_kernels.attention.triton import bind

    heads, kv_heads, dim, page = bench.size(32, 4), bench.size(8, 2), 128, 16
    is_decode = phase == "decode"
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(2048, 40)
    new = 1 if is_decode else context
    pages = -(-context // page)
    table = torch.randperm(sequences * pages, device=bench.device).view(sequences, pages).int()
    k = bench.randn(sequences * pages, page, kv_heads, dim).to(BF16)
    v = bench.randn(sequences * pages, page, kv_heads, dim).to(BF16)
    q = bench.randn(sequences * new, heads * dim).to(BF16)
    meta = AttentionMetadata(
        query_start_loc=torch.arange(sequences + 1, device=bench.device, dtype=torch.int32) * new,
        seq_lens=torch.full((sequences,), context, device=bench.device, dtype=torch.int32),
        block_table=table, max_query_len=new, max_seq_len=context,
    )  # fmt: skip
    request = AttentionRequest(
        phase=phase, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim,
        block_size=page, dtype="bfloat16", kv_dtype="bfloat16",
    )  # type: ignore[arg-type]  # fmt: skip
    scale = dim**-0.5
    kernel = bind(request, bench.spec, scale=scale)
    golden = exact_attention(request, scale=scale)

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        """What torch needs: contiguous keys of each sequence, copied each step."""
        return cache[table.long()].flatten(1, 2)[:, :context].transpose(1, 2)

    def theirs() -> torch.Tensor:
        rows = q.view(sequences, new, heads, dim).transpose(1, 2)
        return functional.scaled_dot_product_attention(
            rows, gathered(k), gathered(v), is_causal=not is_decode, enable_gqa=True
        )

    return Case(
        f"attention {phase} {sequences}x{new} of {context}, beside gather and SDPA",
        ours=lambda: kernel(q, k, v, meta),
        exact=lambda: golden(q.double(), k.double(), v.double(), meta),
        tolerance=2.0**-6,
        theirs=theirs,
    )


def norm_case(bench: Bench) -> Case:
    from hal_kernels.norm.triton import bind

    hidden, rows = bench.size(8192, 96), bench.size(4096, 5)
    weight, x = (bench.randn(hidden).abs() + 0.5).to(BF16), bench.randn(rows, hidden).to(BF16)
    request = RmsNormRequest(hidden_size=hidden, dtype="bfloat16")
    kernel = bind(request, bench.spec, weight=weight, eps=1e-6)
    return Case(
        f"rms norm {rows}x{hidden}",
        ours=lambda: kernel(x),
        exact=lambda: functional.rms_norm(x.double(), (hidden,), weight.double(), 1e-6),
        tolerance=2.0**-7,
        theirs=lambda: functional.rms_norm(x, (hidden,), weight, 1e-6),
    )


def _on(weight: QuantizedWeight, bench: Bench) -> QuantizedWeight:
    minimum = None if weight.minimum is None else weight.minimum.to(bench.device)
    return QuantizedWeight(
        format=weight.format, data=weight.data.to(bench.device),
        scale=weight.scale.to(bench.device), minimum=minimum,
    )  # fmt: skip


def run_case(case: Case, bench: Bench) -> Outcome:
    """Checks, then times; a case whose numbers are wrong is not timed."""
    found, exact = case.ours().double(), case.exact()
    peak = exact.abs().amax(dim=-1, keepdim=True)
    error = float(((found.view_as(exact) - exact).abs() / (peak + 1e-9)).max())
    is_right = bool(found.isfinite().all()) and error <= case.tolerance
    if bench.is_dry or not is_right:
        return Outcome(case.name, error, is_right)
    ours_us, theirs_us = time_in_turns(case.ours, case.theirs)
    ratio = None if theirs_us is None else theirs_us / ours_us
    return Outcome(case.name, error, is_right, ours_us, theirs_us, ratio)


def time_in_turns(ours: Call, theirs: Call | None) -> tuple[float, float | None]:
    """Median microseconds of each over seven turns of 20 calls."""
    calls = [ours] if theirs is None else [ours, theirs]
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    for _ in range(7):
        for number, call in enumerate(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                call()
            end.record()
            end.synchronize()
            times[number].append(begin.elapsed_time(end) * 1000 / 20)
    medians = [statistics.median(one) for one in times]
    return medians[0], medians[1] if theirs is not None else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins after (240)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, interpreted")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("required a GPU that torch sees, found none; --dry-run needs none")
    torch.manual_seed(0)
    bench, begin = Bench(options.dry_run), time.monotonic()
    outcomes: list[Outcome] = []
    for make in cases(bench):
        if time.monotonic() - begin > options.seconds:
            print("out of time: the remaining cases were not run")
            break
        try:
            outcome = run_case(make(), bench)
        except Exception as error:  # noqa: BLE001 - a kernel that fails is a result of this check
            message = str(error).strip().splitlines()
            failure = f"{type(error).__name__}: {message[-1] if message else ''}"[:300]
            outcome = Outcome("?", float("nan"), False, failure=failure)
        outcomes.append(outcome)
        print(line(outcome), flush=True)
    if options.json:
        options.json.write_text(json.dumps(document(bench, outcomes), indent=1) + "\n")
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    print(
        f"{len(outcomes) - len(wrong)} right, {len(wrong)} wrong, {time.monotonic() - begin:.0f} s"
    )
    return 1 if wrong else 0


def line(outcome: Outcome) -> str:
    if outcome.failure:
        return f"FAILED {outcome.failure}"
    verdict = "right" if outcome.is_right else "WRONG"
    text = f"{verdict}  error {outcome.error:.1e}  {outcome.name}"
    if outcome.ours_us is not None:
        text += f"  {outcome.ours_us:.1f} us"
    if outcome.ratio is not None:
        text += f", torch {outcome.theirs_us:.1f} us, ratio {outcome.ratio:.2f}"
    return text


def document(bench: Bench, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "device": bench.spec.name,
        "arch": bench.spec.arch,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "cases": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())
