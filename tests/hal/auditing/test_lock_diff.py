"""Diffs of plans and locks: one change shows up as exactly that, whatever else there is."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fresh_draws import fresh_seeds
from hal.auditing.changes import Change, ChangeKind, Diff, parse_change_kinds
from hal.auditing.lock import profile_hash
from hal.auditing.lock_diff import diff_locks, diff_plans
from hal.auditing.plan_documents import lock_from, plan_from, read_lock
from hal.cli.diff import diff_files
from hal.errors import DocumentError, UsageError

TIERS = ("reference", "portable", "tuned", "native")
Document = dict[str, Any]


def op(rng: random.Random, site: str, layers: list[int], tokens: tuple[int, int]) -> Document:
    name = rng.choice(["gemm", "attention", "norm.rms"])
    return {
        "site": site,
        "layers": layers,
        "ranks": [0],
        "op": name,
        "phase": rng.choice(["any", "decode", "prefill"]),
        "tokens": list(tokens),
        "arguments": {"dtype": "bfloat16", "n": rng.randrange(1, 9999), "head_dim": 128},
        "choice": f"acme.{name}.{rng.randrange(3)}",
        "tier": rng.choice(TIERS[1:3]),
        "distribution": "halstack",
        "is_explicit": False,
        "estimate_us": rng.choice([None, 100.0 + 900 * rng.random()]),
        "roofline_us": rng.choice([None, 50.0]),
        "roofline_by": "memory",
        "leaf": [{"kind": "kernel", "name": f"_{name}_kernel"}],
        "semantic_notes": [],
        "lost": None,
        "waiver": None,
        "rejected": [
            {
                "name": "acme.better",
                "tier": "native",
                "reasons": [
                    {"what": "head_dim", "required": "64", "found": "128", "kind": "argument"}
                ],
            }
        ],
    }


def plan(rng: random.Random) -> Document:
    ops = []
    for number in range(rng.randrange(2, 7)):
        layers = sorted(rng.sample(range(12), rng.randrange(1, 6)))
        site = f"layers.*.part{number}" if number % 2 else f"part{number}"
        first = op(rng, site, layers if number % 2 else [], (1, 64))
        ops.append(first)
        if rng.random() < 0.5:
            ops.append({**copy.deepcopy(first), "tokens": [65, 512], "choice": "acme.large"})
    device = {
        "device_id": "acme:0",
        "vendor": "Acme",
        "backend": "acme",
        "name": "Acme One",
        "arch": "a1",
        "torch_device": "cpu",
        "features": ["fast", "int4", "wide"],
        "memory_bytes": 2**34,
        "memory_bandwidth": 1e11,
        "peak_flops": {"float32": 1e12},
        "attributes": {"num_sockets": 1},
        "software": {"acme-runtime": "1.2"},
        "evidence": {"memory_bandwidth": {"source": "x", "found": "y", "confidence": "measured"}},
    }
    return {
        "schema": "halstack.plan/1",
        "model": {"source": "tiny", "num_layers": 12},
        "device": "Acme One (acme:0)",
        "devices": [device],
        "settings": {"precision": "auto", "tp": 1},
        "versions": {"python": "3.11.7", "torch": "2.11.0", "numpy": "2.0.0"},
        "policy": {"forced_features": {}, "disabled": {"acme.old*": "wrong results"}},
        "notes": [],
        "ops": ops,
        "hash": "0" * 16,
    }


def lock(rng: random.Random) -> Document:
    planned = plan(rng)
    names = {item["choice"] for item in planned["ops"]}
    return {
        "schema": "halstack.lock/1",
        "model": "tiny",
        "plan_hash": planned["hash"],
        "versions": {**planned["versions"], "acme-plugin": "3.0"},
        "environment": {"OMP_NUM_THREADS": "4", "HAL_ENGINE_TP": "1"},
        "devices": {"acme:0": profile_hash(planned["devices"][0])},
        "kernels": {
            name: {
                "distribution": "halstack",
                "modules": ["acme.kernels"],
                "source": f"{number:016x}",
                "evidence": "e" * 16,
                "record": "",
            }
            for number, name in enumerate(sorted(names))
        },
        "settings": planned["settings"],
        "plan": planned,
    }


def between_locks(old: Document, new: Document) -> Diff:
    for document in (old, new):  # as it would be written
        document["devices"] = {
            device["device_id"]: profile_hash(device) for device in document["plan"]["devices"]
        }
        document["settings"] = document["plan"]["settings"]
    return diff_locks(lock_from(old, Path("old")), lock_from(new, Path("new")))


def facts(changes: tuple[Change, ...]) -> list[tuple[str, str, str, str]]:
    return [(change.kind.value, change.what, change.old, change.new) for change in changes]


Edit = Callable[[Document], object]


def edited(edit: Edit, seed: int) -> Diff:
    old = lock(random.Random(seed))
    new = copy.deepcopy(old)
    edit(new)
    new["plan"]["hash"] = new["plan_hash"] = "1" * 16
    return between_locks(old, new)


def device(document: Document) -> Document:
    found: Document = document["plan"]["devices"][0]
    return found


def set_version(document: Document) -> None:
    document["versions"]["torch"] = document["plan"]["versions"]["torch"] = "2.12.0"


@pytest.mark.parametrize("seed", fresh_seeds(5))
@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (lambda d: d["environment"].update(OMP_NUM_THREADS="8"),
         ("environment", "OMP_NUM_THREADS", "4", "8")),
        (lambda d: d["environment"].pop("OMP_NUM_THREADS"),
         ("environment", "OMP_NUM_THREADS", "4", "unset")),
        (lambda d: d["environment"].update(NCCL_P2P_DISABLE="1"),
         ("environment", "NCCL_P2P_DISABLE", "unset", "1")),
        (set_version, ("version", "torch", "2.11.0", "2.12.0")),
        (lambda d: d["versions"].update({"acme-plugin": "3.1"}),
         ("version", "acme-plugin", "3.0", "3.1")),
        (lambda d: d["versions"].update(triton="3.9.0"), ("version", "triton", "unset", "3.9.0")),
        (lambda d: device(d)["software"].update({"acme-runtime": "1.3"}),
         ("version", "acme-runtime", "1.2", "1.3")),
        (lambda d: device(d).update(memory_bytes=2**35),
         ("profile", "memory_bytes", str(2**34), str(2**35))),
        (lambda d: device(d)["features"].append("fp8"), ("profile", "features", "", "fp8")),
        (lambda d: device(d)["features"].remove("int4"), ("profile", "features", "int4", "")),
        (lambda d: device(d)["attributes"].update(num_sockets=2),
         ("profile", "attributes.num_sockets", "1", "2")),
        (lambda d: device(d)["peak_flops"].update(float32=2e12),
         ("profile", "peak_flops.float32", str(1e12), str(2e12))),
        (lambda d: d["plan"]["policy"]["disabled"].pop("acme.old*"),
         ("profile", "policy disabled acme.old*", "wrong results", "unset")),
        (lambda d: d["plan"]["settings"].update(precision="w8"),
         ("setting", "precision", "auto", "w8")),
        (lambda d: d["plan"]["model"].update(num_layers=13), ("model", "num_layers", "12", "13")),
    ],
)  # fmt: skip
def test_one_change_shows_up_as_exactly_that(
    edit: Edit, change: tuple[str, str, str, str], seed: int
) -> None:
    found = edited(edit, seed)
    assert facts(found.changes) == [change]
    assert found.exit_code() == ChangeKind(change[0]).exit_code
    assert found.exit_code(frozenset({ChangeKind(change[0])})) == 1
    assert found.exit_code(frozenset(ChangeKind) - {ChangeKind(change[0])}) == 0


def test_what_two_runs_measure_is_no_change() -> None:
    for edit in (
        lambda d: device(d).update(memory_bandwidth=2e11),
        lambda d: device(d)["evidence"].pop("memory_bandwidth") and device(d).update(
            memory_bandwidth=1e11, evidence={"memory_bandwidth": {"confidence": "measured"}}
        ),
        lambda d: [item.update(roofline_us=7.0) for item in d["plan"]["ops"]],
        lambda d: d["plan"].update(notes=["a remark"], kv_bytes_per_token=3),
    ):  # fmt: skip
        old = lock(random.Random(3))
        new = copy.deepcopy(old)
        edit(new)
        assert between_locks(old, new).changes == ()


def test_a_rate_of_a_database_is_part_of_the_profile() -> None:
    old = lock(random.Random(3))
    device(old)["evidence"]["memory_bandwidth"]["confidence"] = "database"
    new = copy.deepcopy(old)
    device(new)["memory_bandwidth"] = 2e11
    assert [c.what for c in between_locks(old, new).changes] == ["memory_bandwidth"]


def test_a_kernel_that_kept_its_name() -> None:
    def edit(document: Document) -> None:
        name = sorted(document["kernels"])[0]
        document["kernels"][name].update(source="f" * 16, modules=["acme.kernels", "acme.more"])

    (found,) = edited(edit, 5).changes
    assert (found.kind, found.detail) == (ChangeKind.KERNEL_SOURCE, "with acme.more")

    def evidence(document: Document) -> None:
        name = sorted(document["kernels"])[0]
        document["kernels"][name]["evidence"] = "f" * 16

    (found,) = edited(evidence, 5).changes
    assert found.what.startswith("evidence of acme.")

    def another_wheel(document: Document) -> None:
        name = sorted(document["kernels"])[0]
        document["kernels"][name].update(source="f" * 16, record="f" * 16)
        document["versions"]["acme-plugin"] = "3.1"

    old = lock(random.Random(5))
    old["kernels"][sorted(old["kernels"])[0]]["distribution"] = "acme-plugin"
    new = copy.deepcopy(old)
    another_wheel(new)
    assert [c.what for c in between_locks(old, new).changes] == ["acme-plugin"]


def plans(edit: Edit, seed: int = 1) -> tuple[Change, ...]:
    old = plan(random.Random(seed))
    new = copy.deepcopy(old)
    edit(new)
    return diff_plans(plan_from(old, Path("old")), plan_from(new, Path("new"))).changes


@pytest.mark.parametrize("seed", fresh_seeds(10))
def test_every_tier_of_every_call(seed: int) -> None:
    for before in TIERS:
        for after in TIERS:
            old = plan(random.Random(seed))
            for item in old["ops"]:
                item["tier"] = before
            new = copy.deepcopy(old)
            for item in new["ops"]:
                item.update(tier=after, choice=item["choice"] + ".other")
            changes = diff_plans(plan_from(old, Path("o")), plan_from(new, Path("n"))).changes
            kinds = {change.kind for change in changes}
            if before == after:
                assert kinds == {ChangeKind.RENAMED}
            else:
                is_better = TIERS.index(after) > TIERS.index(before)
                assert kinds == {ChangeKind.FASTER if is_better else ChangeKind.SLOWER}
            sites = {site for change in changes for site in change.where}
            names = {
                item["site"].replace("*", str(layer))
                for item in old["ops"]
                for layer in item["layers"] or [0]
            }
            assert sites == names


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (100.0, 101.0, None),
        (100.0, 150.0, ChangeKind.SLOWER),
        (100.0, 50.0, ChangeKind.FASTER),
        (None, 50.0, None),
    ],
)
def test_within_a_tier_the_estimate_decides(
    before: float | None, after: float, kind: ChangeKind | None
) -> None:
    old = plan(random.Random(2))
    old["ops"] = old["ops"][:1]
    old["ops"][0]["estimate_us"] = before
    new = copy.deepcopy(old)
    new["ops"][0]["estimate_us"] = after
    found = diff_plans(plan_from(old, Path("o")), plan_from(new, Path("n")))
    assert found.worst is kind


def test_another_one_of_the_same_tier_and_no_estimate() -> None:
    def edit(document: Document) -> None:
        document["ops"][0].update(
            choice="acme.other", leaf=[{"kind": "kernel", "name": "_other"}], estimate_us=None,
            roofline_us=None,
        )  # fmt: skip

    old = plan(random.Random(2))
    assert {change.kind for change in plans(edit, 2)} == {ChangeKind.IMPLEMENTATION}
    assert old["ops"][0]["choice"] in plans(edit, 2)[0].old


def test_other_numbers_are_the_worst() -> None:
    changes = plans(lambda d: d["ops"][0]["arguments"].update(dtype="float8"))
    assert changes[0].kind is ChangeKind.SEMANTICS
    note = {"name": "dense_for_sparse", "text": "attends to all keys"}
    changes = plans(lambda d: d["ops"][0]["semantic_notes"].append(note))
    assert changes[0].kind is ChangeKind.SEMANTICS
    assert changes[0].detail == "attends to all keys"
    changes = plans(lambda d: d["ops"][0]["arguments"].update(n=1))
    assert {change.kind for change in changes} == {ChangeKind.MODEL}


def test_call_sites_that_come_go_and_are_renamed() -> None:
    added = plans(lambda d: d["ops"].append(op(random.Random(9), "extra", [], (1, 9))))
    assert [(c.kind, c.where) for c in added] == [(ChangeKind.SITE_ADDED, ("extra",))]
    old = plan(random.Random(4))
    site = old["ops"][0]["site"]
    gone = plans(lambda d: d.update(ops=[o for o in d["ops"] if o["site"] != site]), 4)
    assert {change.kind for change in gone} == {ChangeKind.SITE_REMOVED}

    def rename(document: Document) -> None:
        for item in document["ops"]:
            if item["site"] == site:
                item["site"] = f"new_{site}"

    renamed = plans(rename, 4)
    assert {change.kind for change in renamed} == {ChangeKind.RENAMED}


def test_ranges_that_move_and_layers_that_regroup_are_compared_where_both_are() -> None:
    old = plan(random.Random(6))
    first = {**old["ops"][0], "site": "layers.*.x", "layers": [0, 1, 2, 3], "phase": "any"}
    old["ops"] = [
        {**first, "tokens": [1, 64], "choice": "acme.small", "tier": "native"},
        {**first, "tokens": [65, 512], "choice": "acme.large", "tier": "tuned"},
    ]
    new = copy.deepcopy(old)
    new["ops"] = [{**item, "layers": layers} for layers in ([0, 2], [1, 3]) for item in old["ops"]]
    same = diff_plans(plan_from(old, Path("o")), plan_from(new, Path("n")))
    assert same.changes == ()
    new["ops"][0]["tokens"], new["ops"][1]["tokens"] = [1, 32], [33, 512]
    (change,) = diff_plans(plan_from(old, Path("o")), plan_from(new, Path("n"))).changes
    assert change.kind is ChangeKind.SLOWER
    assert change.where == ("layers.0.x", "layers.2.x")


def test_a_waiver_and_reasons() -> None:
    (change,) = plans(lambda d: d["ops"][0].update(waiver="tier waiver for gemm"))[:1]
    assert change.kind is ChangeKind.SETTING
    reason = {"what": "head_dim", "required": "32", "found": "128", "kind": "argument"}
    changes = plans(lambda d: d["ops"][0]["rejected"][0].update(reasons=[reason]))
    assert {change.kind for change in changes} == {ChangeKind.REASONS}
    assert "acme.better" in changes[0].detail
    unexplained = plans(lambda d: d.update(hash="7" * 16))
    assert [change.what for change in unexplained] == ["plan hash"]


def test_another_device_is_that_and_not_a_list_of_features() -> None:
    def edit(document: Document) -> None:
        document["devices"][0].update(
            name="Acme Two", arch="a2", features=["quite", "other"], memory_bytes=1
        )

    kinds = [change.kind for change in plans(edit)]
    assert kinds == [ChangeKind.DEVICE]
    more = plans(lambda d: d["devices"].append(copy.deepcopy(d["devices"][0])))
    assert [(c.kind, c.what, c.old, c.new) for c in more] == [
        (ChangeKind.DEVICE, "number of devices", "1", "2")
    ]


def test_words_of_fail_on_and_codes() -> None:
    assert parse_change_kinds(None) is None
    assert parse_change_kinds("none") == frozenset()
    assert parse_change_kinds("slower, semantics") == {ChangeKind.SLOWER, ChangeKind.SEMANTICS}
    for text, word in (("slow", "'slower'"), ("", "an empty word"), ("none,slower", "'none'")):
        with pytest.raises(UsageError, match=word):
            parse_change_kinds(text)
    codes = [kind.exit_code for kind in ChangeKind]
    assert codes == list(range(10, 10 + len(codes)))
    assert ChangeKind.SEMANTICS.exit_code == 24


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, ["key schema", "no schema"]),
        ({"schema": "halstack.host/1"}, ["halstack.host/1"]),
        ({"schema": "halstack.lock/1"}, ["key model", "nothing"]),
        ({"schema": "halstack.plan/1", "ops": [{"site": 3}]}, ["ops[0].site"]),
        ({"schema": "halstack.plan/1", "ops": [{**op(random.Random(1), "a", [], (1, 2)),
                                               "tier": "fastest"}]}, ["ops[0].tier"]),
        ({**lock(random.Random(1)), "plan": {"schema": "halstack.plan/2"}}, ["plan.schema"]),
        ({**lock(random.Random(1)), "more": 1}, ["key more", "unknown key"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_located(
    document: Document, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DocumentError) as raised:
        diff_files(path, path)
    for word in (str(path), *words):
        assert word in str(raised.value)


def test_two_kinds_of_files_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(plan(random.Random(1))))
    (tmp_path / "b").write_text(json.dumps(lock(random.Random(1))))
    with pytest.raises(DocumentError, match=r"a is a plan, .*b a lock"):
        diff_files(tmp_path / "a", tmp_path / "b")
    assert diff_files(tmp_path / "b", tmp_path / "b").changes == ()
    assert read_lock(tmp_path / "b").model == "tiny"
    with pytest.raises(DocumentError, match="hal lock"):
        read_lock(tmp_path / "a")


def test_the_document_has_every_kind_with_its_code() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "audit.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", text, re.MULTILINE)
    assert [(kind.value, str(kind.exit_code)) for kind in ChangeKind] == rows


def test_a_reason_of_no_kind_is_compared_as_any_other() -> None:
    def strange(document: Document) -> None:
        for found in document["plan"]["ops"]:
            found["rejected"][0]["reasons"][0]["kind"] = ["capture", {}]

    assert isinstance(edited(strange, 1), Diff)
