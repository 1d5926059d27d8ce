"""The problems without peers: what is compiled where only ours changed since an earlier result."""

from __future__ import annotations

import dataclasses

from kernel_peers.problems import PROBLEMS as WITH_PEERS

PROBLEMS = tuple(dataclasses.replace(problem, peers=()) for problem in WITH_PEERS)
