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

    Raises pydantic.ValidationError for unknown keys, values out of range, and an API key given
    both directly and as a file.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # the input holds the API key
    )

    # Where and for whom
    host: str = Field("127.0.0.1", min_length=1, max_length=255)
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65_535)
    """Port to listen on; 0 lets the system choose."""
    api_key: SecretStr | None = None
    """Key that clients must send as `Authorization: Bearer KEY`."""
    api_key_file: Path | None = None
    """File that holds the key."""
    allow_unauthenticated: bool = False
    """Serve other machines without a key; refused otherwise."""
    metrics_require_api_key: bool = True
    """Whether /metrics needs the key, if there is one."""
    ready_requires_api_key: bool = True
    """Whether /ready needs the key, if there is one. /health never does."""
    cors_allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; none by default."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides this machine's own under which a server without a key may be called."""
    served_model_names: tuple[str, ...] = ()
    """Further names of the model, beside its own."""

    # Defaults of sampling
    default_temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    """Temperature of requests that name none; 0 is greedy."""
    default_top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    """`top_p` of requests that name none."""

    # Connections
    max_connections: Count = 512
    """Open connections; one more is answered with 503 and closed."""
    max_header_bytes: int = Field(16_384, ge=1024, le=1_048_576)
    """Bytes of a request's head."""
    max_header_count: Count = 64
    """Headers of a request."""
    max_path_bytes: Count = 2048
    """Bytes of a request's path and query."""
    header_timeout_s: Seconds = 10.0
    """Until a request's head has arrived."""
    body_timeout_s: Seconds = 30.0
    """Until a request's body has arrived."""
    keep_alive_timeout_s: Seconds = 15.0
    """Idle time of a connection between two requests."""
    write_timeout_s: Seconds = 30.0
    """A client that reads nothing for so long is cut off."""

    # Bodies
    max_body_bytes: Count = 4 * 2**20
    """Bytes of one request's body."""
    max_total_body_bytes: Count = 64 * 2**20
    """Bytes of all bodies of the requests in progress."""
    max_json_depth: int = Field(64, ge=4, le=500)
    """Nesting of a body's JSON."""

    # Requests
    max_prompts: Count = 64
    """Prompts in one completion or embedding request."""
    max_messages: Count = 1024
    """Messages of one chat."""
    max_n: Count = 16
    """Choices per prompt."""
    max_best_of: Count = 16
    """Sequences from which the best choices are taken."""
    max_sequences: Count = 128
    """Sequences of one request: prompts times `n` or `best_of`."""
    max_logprobs: int = Field(20, ge=0, le=1000)
    """Alternatives per token with log-probabilities."""
    max_stop_strings: Count = 16
    """Stop strings of one request."""
    max_stop_length: Count = 256
    """Characters of a stop string."""
    max_stop_token_ids: Count = 64
    """Stop token ids of one request."""
    max_logit_bias_entries: Count = 1024
    """Entries of `logit_bias`."""
    max_schema_bytes: Count = 65_536
    """Bytes of a JSON schema or of all choices of `guided_choice`."""
    max_regex_length: Count = 4096
    """Characters of `guided_regex`."""
    max_choices: Count = 256
    """Strings of `guided_choice`."""
    request_deadline_s: Seconds = 600.0
    """From a request's arrival to its end."""

    # Operation
    ready_deadline_s: Seconds = 5.0
    """Time for the forward pass of /ready."""
    ready_cache_s: float = Field(1.0, ge=0, le=60, allow_inf_nan=False)
    """How long a result of /ready serves further probes."""
    drain_deadline_s: Seconds = 60.0
    """Time that running requests get after the first signal."""
    abort_deadline_s: Seconds = 3.0
    """Time for an orderly end after the second signal."""
    close_deadline_s: Seconds = 30.0
    """Time for the engine to close after the drain; the process ends then in any case."""
    audit_every: int = Field(0, ge=0, le=1_000_000)
    """Steps of which at most one is timed and one watched for `/v1/hal/audit`; 0 is off."""
    event_buffer: Count = 64
    """Token events held for a client that reads slowly."""

    @model_validator(mode="after")
    def _one_source_of_the_key(self) -> Self:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("give either api_key or api_key_file, not both")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the listening address."""
        return is_loopback_name(self.host)


def is_loopback_name(host: str) -> bool:
    """Whether `host` means this machine only; another name may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
