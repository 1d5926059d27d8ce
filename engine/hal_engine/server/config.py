"""Settings of the HTTP server: where it listens, who may call it, and every limit it enforces.

All limits are on by default. `ServerConfig` refuses unknown keys, so a misspelt limit is an error
and not a limit that is silently off.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ServerConfig(BaseModel):
    """One field a setting; sizes in bytes, times in seconds.

    Raises pydantic.ValidationError for unknown keys, values out of range, and for a listening
    address other than loopback without an API key, unless `allow_unauthenticated` is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Where and for whom
    host: str = Field("127.0.0.1", min_length=1, max_length=255)
    port: int = Field(8000, ge=0, le=65_535)  # 0 lets the system choose
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    allow_unauthenticated: bool = False  # serve other machines without an API key
    metrics_require_api_key: bool = True
    ready_requires_api_key: bool = True
    cors_allowed_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    served_model_names: tuple[str, ...] = ()  # beside the engine's own model id

    # Defaults of sampling, for requests that leave them out
    default_temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    default_top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)

    # Connections
    max_connections: Count = 512
    max_header_bytes: int = Field(16_384, ge=1024, le=1_048_576)
    max_header_count: Count = 64
    max_path_bytes: Count = 2048
    header_timeout_s: Seconds = 10.0  # from the first wait for a request until its head is read
    body_timeout_s: Seconds = 30.0  # for the whole body
    keep_alive_timeout_s: Seconds = 15.0  # idle between two requests
    write_timeout_s: Seconds = 30.0  # a client that reads nothing for so long is cut off

    # Bodies
    max_body_bytes: Count = 4 * 2**20
    max_total_body_bytes: Count = 64 * 2**20  # all request bodies held at one time
    max_json_depth: int = Field(64, ge=4, le=500)

    # Requests
    max_prompts: Count = 64  # prompts in one completion or embedding request
    max_messages: Count = 1024
    max_n: Count = 16
    max_best_of: Count = 16
    max_sequences: Count = 128  # prompts × max(n, best_of) of one request
    max_logprobs: int = Field(20, ge=0, le=1000)
    max_stop_strings: Count = 16
    max_stop_length: Count = 256  # characters of one stop string
    max_stop_token_ids: Count = 64
    max_logit_bias_entries: Count = 1024
    max_schema_bytes: Count = 65_536
    max_regex_length: Count = 4096
    max_choices: Count = 256
    request_deadline_s: Seconds = 600.0

    # Operation
    ready_deadline_s: Seconds = 5.0
    ready_cache_s: float = Field(1.0, ge=0, le=60, allow_inf_nan=False)
    drain_deadline_s: Seconds = 60.0  # running streams may finish within it
    abort_deadline_s: Seconds = 3.0  # for an orderly end after the second signal
    event_buffer: Count = 64  # token events held for a client that reads slowly

    @model_validator(mode="after")
    def _authentication_fits_address(self) -> Self:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("give either api_key or api_key_file, not both")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the listening address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may resolve to anything
