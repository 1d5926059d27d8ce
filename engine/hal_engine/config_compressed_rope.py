"""The two rotary settings of compressed attention: of windows, and of compressed caches.

Released files have `rope_theta`, `compress_rope_theta` and one scaling, which holds for the
compressed caches only; transformers writes both under `rope_parameters` as `main` and `compress`.
"""

from __future__ import annotations

from dataclasses import replace

from hal_engine.config_parts import RopeConfig
from hal_engine.config_rope import DEFAULT_THETA, read_rope_block
from hal_engine.config_values import StrictValues

DEFAULT_COMPRESS_THETA = 160_000.0


def read_two_ropes(
    values: StrictValues, positions: int, rotated_share: float
) -> tuple[RopeConfig, RopeConfig]:
    """(of windows, of compressed caches). rotated_share: of a head. Raises ConfigError.

    The scaling never multiplies cosines and sines here, whatever its kind does elsewhere.
    """
    theta = values.number("rope_theta", above=1.0, default=DEFAULT_THETA)
    compress_theta = values.number("compress_rope_theta", above=1.0, default=DEFAULT_COMPRESS_THETA)
    parameters = values.mapping("rope_parameters")
    if parameters is not None and "main" in parameters:
        return _nested(parameters, positions, rotated_share)
    scaling = values.mapping("rope_scaling")
    if parameters is not None and scaling is not None:
        raise values.error("rope_scaling", "one of rope_parameters and rope_scaling", "both")
    block = parameters if parameters is not None else scaling
    if block is None:
        return RopeConfig(theta=theta), RopeConfig(theta=compress_theta)
    block.fixed("rope_theta", theta)
    _check_share(block, rotated_share)
    compress = read_rope_block(block, compress_theta, positions)
    return RopeConfig(theta=theta), replace(compress, attention_factor=1.0)


def _nested(
    parameters: StrictValues, positions: int, rotated_share: float
) -> tuple[RopeConfig, RopeConfig]:
    ropes: list[RopeConfig] = []
    for name in ("main", "compress"):
        block = parameters.mapping(name)
        if block is None:
            raise parameters.error(name, "an object", parameters.raw(name))
        _check_share(block, rotated_share)
        theta = block.number("rope_theta", above=1.0)
        ropes.append(replace(read_rope_block(block, theta, positions), attention_factor=1.0))
    for key in parameters.unread_keys():
        if key not in ("rope_type", "type"):
            raise parameters.error(key, "main and compress only", parameters.raw(key))
    return ropes[0], ropes[1]


def _check_share(block: StrictValues, rotated_share: float) -> None:
    share = block.number("partial_rotary_factor", most=1.0, default=rotated_share)
    if abs(share - rotated_share) > 1e-9:
        raise block.error("partial_rotary_factor", f"{rotated_share:g} as beside it", share)
