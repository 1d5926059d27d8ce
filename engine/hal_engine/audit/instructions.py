"""Machine instructions in code that is loaded: read from memory, not from the source or a file.

The ELF object that was linked says how long the code is and which function stands where; the bytes
are those at the address that is called. A disassembler of binutils or LLVM reads them.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hal.loaded_code import LoadedCode

_DISASSEMBLER_DEADLINE_S = 30.0
_PROBE_BYTES = 16  # of a function's start, that tell which one is at an address
_SHT_SYMTAB, _STT_FUNC, _SHF_EXECUTABLE = 2, 2, 4


@dataclass(frozen=True, slots=True)
class FoundInstruction:
    """count: how often it stands in the code; 0 with the reason in `how`."""

    count: int
    mnemonic: str
    how: str


@dataclass(frozen=True, slots=True)
class _Text:
    """A code section and its functions: name -> offset."""

    data: bytes
    functions: dict[str, int]


def find_instruction(name: str, codes: Iterable[LoadedCode]) -> FoundInstruction:
    """Looks for an instruction in the memory of `codes`.

    name: a mnemonic or its beginning ("vfmadd"); "|" stands between alternatives.
    """
    codes = list(codes)
    if not codes:
        return FoundInstruction(0, name, "no machine code was seen to be entered")
    wanted = tuple(name.split("|"))
    reasons = []
    count, mnemonic, read = 0, "", 0
    for code in codes:
        found = _mnemonics(code)
        if isinstance(found, str):
            reasons.append(found)
            continue
        read += 1
        for word in found:
            if word.startswith(wanted):
                count, mnemonic = count + 1, mnemonic or word
    if count:
        return FoundInstruction(count, mnemonic, f"in the memory of {read} functions that ran")
    if reasons:
        return FoundInstruction(0, name, reasons[0])
    symbols = ", ".join(code.symbol for code in codes)
    return FoundInstruction(0, name, f"not in the memory of {symbols}")


def _mnemonics(code: LoadedCode) -> tuple[str, ...] | str:
    """Of all instructions of the code's section, or why they cannot be read."""
    data = code.object_code()
    if not data:
        return "the object of the code was not kept, so its size is unknown"
    text = _text_section(data)
    if text is None:
        return "the object of the code is no ELF file of 64 bits"
    memory = _memory_of(text, code.address)
    if memory is None:
        return "the object is not what is at the code's address"
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        return "no disassembler: install binutils (objdump) or LLVM (llvm-objdump)"
    return _disassemble(memory, tool)


def _text_section(data: bytes) -> _Text | None:
    """The largest section of code of an ELF object and the functions in it."""
    if data[:5] != b"\x7fELF\x02" or len(data) < 64:
        return None
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    code = [i for i, s in enumerate(sections) if s[2] & _SHF_EXECUTABLE and s[5]]
    if not code:
        return None
    index = max(code, key=lambda i: sections[i][5])
    functions = {}
    for section in sections:
        if section[1] != _SHT_SYMTAB:
            continue
        strings = data[sections[section[6]][4] :]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, where, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            if where == index and info & 15 == _STT_FUNC:
                functions[_string(strings, name)] = value
    start, length = sections[index][4], sections[index][5]
    return _Text(data[start : start + length], functions)


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode("utf-8", "replace")


def _memory_of(text: _Text, address: int) -> bytes | None:
    """The section as it is in memory, if one of its functions is at the address."""
    for offset in text.functions.values():
        start = address - offset
        if not _is_readable(start, len(text.data)):
            continue
        memory = ctypes.string_at(start, len(text.data))
        probe = slice(offset, offset + _PROBE_BYTES)
        # Linking fills in addresses, which are the only bytes that may differ.
        same = sum(a == b for a, b in zip(memory, text.data, strict=True))
        if memory[probe] == text.data[probe] and same >= 0.8 * len(memory):
            return memory
    return None


def _is_readable(start: int, length: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        low, high = (int(part, 16) for part in line.split(None, 1)[0].split("-"))
        if low <= start and start + length <= high:
            return line.split(None, 2)[1].startswith("r")
    return False


@functools.lru_cache(maxsize=256)
def _disassemble(memory: bytes, tool: str) -> tuple[str, ...] | str:
    with tempfile.NamedTemporaryFile(prefix="hal-code-") as file:
        file.write(memory)
        file.flush()
        if Path(tool).name == "objdump":
            command = [tool, "-D", "-b", "binary", "-m", "i386:x86-64", file.name]
        else:
            return "llvm-objdump reads no raw memory: install binutils (objdump)"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DISASSEMBLER_DEADLINE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{tool} did not read the code: {error}"
    if done.returncode:
        return f"{tool} did not read the code: {done.stderr.strip()[:200]}"
    return tuple(re.findall(r"^\s*[0-9a-f]+:\t[0-9a-f ]+\t(\w+)", done.stdout, re.MULTILINE))
