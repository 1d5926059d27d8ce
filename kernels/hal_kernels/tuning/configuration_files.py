"""Files of configurations, "halstack.kernel-configurations/1": one per device and kernel.

A file holds every trial of every shape class, so it is both the result that a launch reads and the
state from which an interrupted tuning goes on. A class counts once it is complete. Its trials hold
for one source of the kernel and one version of Triton.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SCHEMA: Literal["halstack.kernel-configurations/1"] = "halstack.kernel-configurations/1"
Basis = Literal["measured", "modelled"]
Tier = Literal["native", "spilled", "emulated", "scalar", "error"]
_ORDER: tuple[Tier, ...] = ("native", "spilled", "emulated", "scalar", "error")
_LAUNCH = ("num_warps", "num_stages")
MAX_WARPS = 32
MAX_STAGES = 16
_FLAGS = ("IS_", "HAS_", "RELOADS_")
_MOST = 1 << 14  # of a tile's side and of what is counted in tiles
MODELLED_GAIN = 0.1
"""A model does not tell smaller shares of a time apart: below it a default stays."""


def _checked(configuration: dict[str, int]) -> dict[str, int]:
    missing = [name for name in _LAUNCH if name not in configuration]
    if missing:
        raise ValueError(f"required {', '.join(missing)} too")
    for name, value in configuration.items():
        if name not in _LAUNCH and not name.isupper():
            raise ValueError(f"required names of constants in capitals, found {name!r}")
        least = 0 if name.startswith(_FLAGS) else 1
        if not least <= value <= _MOST:
            raise ValueError(f"required {name} of {least} to {_MOST}, found {value}")
        if name.startswith("BLOCK_") and value & (value - 1):
            raise ValueError(f"required a power of two of {name}, found {value}")
    if configuration["num_stages"] > MAX_STAGES:
        raise ValueError(
            f"required 1 to {MAX_STAGES} num_stages, found {configuration['num_stages']}"
        )
    if configuration["num_warps"] not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"required a power of two of warps, found {configuration['num_warps']}")
    return configuration


Configuration = Annotated[dict[str, int], AfterValidator(_checked)]
Text = Annotated[str, Field(max_length=400)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Trial(_Part):
    """One configuration of one class: what its machine code is, and how long a call takes.

    us: measured or by the model; None where it does not compile, does not launch or is not worth a
    measurement, and then `error` says why.
    """

    configuration: Configuration
    tier: Tier
    us: Annotated[float, Field(gt=0, le=1e12)] | None = None
    instruction: Text = ""
    instruction_count: Count = 0
    registers: Count = 0
    spills: Count = 0
    shared_bytes: Count = 0
    error: Text = ""

    @model_validator(mode="after")
    def _judge(self) -> Trial:
        if self.tier == "native" and self.spills:
            raise ValueError(f"required no spills of a native trial, found {self.spills}")
        if self.tier == "error" and self.us is not None:
            raise ValueError("required no time of what does not compile")
        return self


class ShapeEntry(_Part):
    """Trials of one class. shape: text of the class. code: 16 digits over the kernel's source.
    made: date of the last trial. trials: the default's first; of modelled ones those that could not
    win by the model, whatever their machine code, are left out."""

    shape: Annotated[str, Field(min_length=1, max_length=400)]
    basis: Basis
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    triton: Annotated[str, Field(min_length=1, max_length=60)]
    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    is_complete: bool = False
    trials: list[Trial] = Field(default_factory=list)

    @model_validator(mode="after")
    def _judge(self) -> ShapeEntry:
        keys = [tuple(sorted(trial.configuration.items())) for trial in self.trials]
        if len(set(keys)) != len(keys):
            raise ValueError("required each configuration once")
        return self

    def best(self) -> Trial | None:
        """The fastest of the best tier that there is; None while nothing can be launched. By the
        model the default stays where it is of that tier and nearly as fast."""
        done = [trial for trial in self.trials if trial.us is not None]
        fastest = min(done, key=lambda t: (_ORDER.index(t.tier), t.us or 0.0), default=None)
        if fastest is None or self.basis == "measured" or self.trials[0].us is None:
            return fastest
        default = self.trials[0]
        is_near = (fastest.us or 0.0) > (1.0 - MODELLED_GAIN) * (default.us or 0.0)
        return default if default.tier == fastest.tier and is_near else fastest

    def us_to_beat(self) -> float | None:
        """The time that another configuration has to be below to be taken, whatever its tier is;
        None while any could be."""
        best = self.best()
        if best is None or best.us is None or best.tier != _ORDER[0]:
            return None
        is_default = self.basis == "modelled" and best is self.trials[0]
        return best.us * (1.0 - MODELLED_GAIN) if is_default else best.us

    def loss(self) -> float:
        """The share of the best one's time that the fastest of its tier would save."""
        best = self.best()
        if best is None or not best.us:
            return 0.0
        times = [t.us for t in self.trials if t.us is not None and t.tier == best.tier]
        return 1.0 - min(times) / best.us


class ConfigurationFile(_Part):
    """device: id of its profile in the database, or its name. arch: as Triton's targets."""

    schema_: Literal["halstack.kernel-configurations/1"] = Field(alias="schema", default=SCHEMA)
    device: Annotated[str, Field(min_length=1, max_length=200)]
    arch: Annotated[str, Field(pattern=r"^[a-z0-9_]{3,20}$")]
    kernel: Annotated[str, Field(pattern=r"^[a-z0-9_.]{3,80}$")]
    entries: list[ShapeEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _judge(self) -> ConfigurationFile:
        keys = [(entry.shape, entry.basis) for entry in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError("required each shape class once per basis")
        return self

    def find(self, shape: str, basis: Basis) -> ShapeEntry | None:
        """The entry of a class, complete or not."""
        return next((e for e in self.entries if (e.shape, e.basis) == (shape, basis)), None)

    def with_entry(self, entry: ShapeEntry) -> ConfigurationFile:
        """With this entry in place of the class's older one."""
        key = (entry.shape, entry.basis)
        kept = [e for e in self.entries if (e.shape, e.basis) != key]
        return self.model_copy(update={"entries": [*kept, entry]})
