"""Files that must be refused, each with its file, line, key, what was required and what found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from database_files import CARD, HEAD, SOURCES, place_of, write
from hal_capability_db import DatabaseError, load_database
from hal_capability_db.loader import draft_database
from hal_capability_db.located import MAX_DEPTH, MAX_FILE_BYTES, MAX_VALUES

GOOD = HEAD + SOURCES + CARD


def refuse(path: Path) -> DatabaseError:
    with pytest.raises(DatabaseError) as caught:
        load_database((path,))
    assert caught.value.exit_code == 2
    return caught.value


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_unbroken_file_is_accepted(tmp_path: Path) -> None:
    assert "my-card" in load_database((write(tmp_path, GOOD),)).devices


@pytest.mark.parametrize(
    ("old", "new", "key", "required", "found", "remedy"),
    [
        ("fp8: 200", "fp8: 1000000000", "values.fp8", "TFLOPS", "1e+09 TFLOPS", ""),
        ("fp8: 200", "fp8: -200", "values.fp8", "TFLOPS", "-200 TFLOPS", ""),
        ("fp8: 200", "fp8: .nan", "values.fp8", "number", "'.nan'", ""),
        ("fp8: 200", "fp8: true", "values.fp8", "number", "true", ""),
        ("fp8: 200", "fp8: '200'", "values.fp8", "number", "'200'", ""),
        ("fp8: 200", "fp8: 1e400", "values.fp8", "finite number", "inf", ""),
        ("fp8: 200", "fp9: 200", "values.fp9", "float16", "fp9", ""),
        ("fp8: 200", "int8: 200", "values.int8", "TFLOPS", "int8", ""),
        ("fp8: 200", "bfloat16: 200", "bfloat16", "one value", "a second one", "remove"),
        ("unit: TFLOPS", "unit: TFLOP", "unit", "TFLOPS", "'TFLOP'", "TFLOPS"),
        ("value: 48, unit: GB,", "value: 48, unit: GB/s,", "memory.unit", "GiB", "GB/s", ""),
        ("value: 48", "value: 0", "memory.value", "GB", "0 GB", ""),
        ("value: 48", "value: 4.8e9", "memory.value", "GB", "4.8e+09 GB", ""),
        ("value: 48", "value: forty-eight", "memory.value", "number", "'forty-eight'", ""),
        ("confidence: measured}", "confidence: mesured}", "confidence", "measured", "mesured", ""),
        ("memory: {", "memroy: {", "memroy", "known key", "'memroy'", "'memory'"),
        ("    arch: sm_120\n", "", "my-card.arch", "the key 'arch'", "nothing", "add it"),
        ("arch: sm_120", "arch: sm_12o", "arch", "known arch", "'sm_12o'", "'sm_12"),
        ("arch: sm_120", "arch: gfx942", "arch", "family 'nvidia'", "gfx942", "shared_with"),
        ("arch: sm_120", "arch: 120", "arch", "string", "120", ""),
        ("family: nvidia", "family: nvida", "family", "known family", "'nvida'", "'nvidia'"),
        ("family: nvidia", "family: biren", "arch", "family 'biren'", "sm_120", ""),
        ("source: [lab]", "source: [lba]", "source", "known source", "'lba'", "'lab'"),
        ("source: [lab]", "source: []", "source", "at least 1", "0 items", ""),
        ("source: [lab]", "source: lab", "source", "list", "'lab'", ""),
        ('id: "0x1234"', 'id: "1234"', "pci_devices.0.id", "0x", "'1234'", ""),
        ('id: "0x1234"', 'id: "0x2bb5"', "pci_devices", "one device", "0x2bb5", "told apart"),
        ('[{id: "0x1234"}]', "3", "pci_devices", "list", "3", ""),
        ("id: my-card", "id: rtx-4090", "devices.rtx-4090", "no other", "nvidia.yaml", "overrides"),
        ("id: my-card", "id: My Card", "id", "pattern", "'My Card'", ""),
        ("id: my-card", "id: 7", "id", "a text", "7", ""),
        ("name: My Card", "name: no", "", "", "", None),  # YAML 1.2: a text, and fine
        ("schema: halstack.capability_db/1", "schema: 2", "schema", "capability_db/1", "2", ""),
        ("schema: halstack.capability_db/1\n", "", "schema", "capability_db/1", "nothing", ""),
        ("devices:", "devises:", "devises", "known key", "'devises'", "'devices'"),
        ("sources: {lab: our own measurements}", "sources: [lab]", "sources", "mapping", "1", ""),
        ("lab: our own measurements", "lab: 3", "sources.lab", "text", "3", ""),
        ("lab: our own measurements", "pciids: other", "sources.pciids", "one meaning", "", ""),
        ("  - id: my-card", "  - {id: my-card, overrides: true}\n  - id: my-card", "", "", "", ""),
        ("name: My Card", "name: *other", "", "written out", "alias *other", ""),
        ("name: My Card", "name: &card My Card", "", "without anchors", "&card", ""),
        ("name: My Card", "name: !!python/name:os.system My", "", "without tags", "", ""),
        ("name: My Card", "name: [a, b", "", "YAML", "", "syntax"),
        ("name: My Card", "name: My\tCard: x", "", "YAML", "", "syntax"),
        ("memory: {", "? [a]\n    : {", "", "a text as key", "list", ""),
        ("memory: {", "<<: {", "<<", "known key", "'<<'", ""),
        ("devices:\n", "---\ndevices:\n", "", "one document", "second one", ""),
    ],
)
def test_refused_with_its_place(
    tmp_path: Path, old: str, new: str, key: str, required: str, found: str, remedy: str | None
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    path = write(tmp_path, text)
    if remedy is None:
        load_database((path,))
        return
    error = refuse(path)
    file, line, where = place_of(error)
    assert file == str(path)
    assert key in where, error
    assert required in error.required, error
    assert found in error.found, error
    assert remedy in error.remedy, error
    first_changed = GOOD[: GOOD.index(old)].count("\n") + 1
    added = new.count("\n")
    assert first_changed - 8 <= line <= first_changed + added + 2, error


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    text = GOOD.replace("value: 48", "value: -48")
    _, line, key = place_of(refuse(write(tmp_path, text)))
    assert line == line_of(text, "value: -48")
    assert key == "devices.my-card.memory.value"


def test_every_problem_is_found_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("fp8: 200", "fp8: -1").replace("value: 48", "value: no")
    text = text.replace("schema: halstack.capability_db/1", "schema: 9")
    path = write(tmp_path, text)
    problems = draft_database((path,)).problems
    assert {place_of(problem)[1] for problem in problems} == {
        line_of(text, part) for part in ("schema: 9", "fp8: -1", "value: no")
    }
    assert "2 more: see `hal db validate`" in refuse(path).found


def test_two_devices_of_one_overlay_cannot_share_an_id(tmp_path: Path) -> None:
    twin = CARD.removeprefix("devices:\n").replace("0x1234", "0x1235")
    error = refuse(write(tmp_path, GOOD + twin))
    assert "my-card" in error.who
    assert "overrides" not in error.remedy  # it would not help within one overlay


def test_a_pci_id_twice_in_one_device(tmp_path: Path) -> None:
    text = GOOD.replace('[{id: "0x1234"}]', '[{id: "0x1234"}, {id: "0x1234"}]')
    assert "twice" in refuse(write(tmp_path, text)).found


def test_pci_ids_need_a_vendor(tmp_path: Path) -> None:
    text = GOOD.replace("family: nvidia", "family: biren").replace("arch: sm_120", "arch: br1xx")
    assert "pci_vendor" in refuse(write(tmp_path, text)).required


def test_a_bomb_of_aliases(tmp_path: Path) -> None:
    rows = ['a0: &a0 ["lol", "lol"]']
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    error = refuse(write(tmp_path, HEAD + "\n".join(rows)))
    assert "anchors" in error.required


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting(tmp_path: Path, opening: str) -> None:
    error = refuse(write(tmp_path, HEAD + "devices: \n  " + opening * 200_000))
    assert "levels" in error.required or error.required == "YAML"
    assert place_of(error)[1] <= 4


def test_a_little_too_deep(tmp_path: Path) -> None:
    text = HEAD + "devices: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert f"{MAX_DEPTH} levels" in refuse(write(tmp_path, text)).required


def test_a_huge_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "#" * MAX_FILE_BYTES)
    error = refuse(path)
    assert error.who == str(path)
    assert "4 MiB" in error.required


def test_too_many_values(tmp_path: Path) -> None:
    error = refuse(write(tmp_path, HEAD + "devices: [" + "1," * MAX_VALUES + "1]"))
    assert f"{MAX_VALUES} values" in error.required


def test_a_number_without_end(tmp_path: Path) -> None:
    error = refuse(write(tmp_path, GOOD.replace("value: 48", f"value: {'9' * 5000}")))
    assert "characters" in error.required
    assert len(error.found) < 100


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (GOOD.encode().replace(b"My Card\n", b"My C\xe4rd\n", 1), 7),
        (GOOD.encode("utf-16"), 1),
        (b"\xff\xfe\x00", 1),
    ],
)
def test_not_utf_8(tmp_path: Path, data: bytes, line: int) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    error = refuse(path)
    assert error.required == "UTF-8"
    assert place_of(error)[1] in (line, line - 1)


def test_unprintable_characters(tmp_path: Path) -> None:
    text = GOOD.replace("name: My Card", "name: My\x00Card", 1)
    error = refuse(write(tmp_path, text))
    assert error.required == "printable text"
    assert place_of(error)[1] == line_of(text, "My\x00Card")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "a text", "3", "null"])
def test_no_mapping(tmp_path: Path, text: str) -> None:
    assert refuse(write(tmp_path, text)).required == "a mapping"


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert refuse(tmp_path / "nowhere.yaml").who == str(tmp_path / "nowhere.yaml")
    assert "1 to" in refuse(tmp_path).required  # an empty folder
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert refuse(pipe).required == "a regular file"
    assert refuse(Path("/dev/zero")).required == "a regular file"
    assert refuse(Path("\x00")).required
    (tmp_path / "folder.yaml").mkdir()
    pipe.unlink()
    assert refuse(tmp_path).required == "a regular file"


def test_an_unreadable_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert refuse(loop).required == "a readable file"
