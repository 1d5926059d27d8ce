"""Two ranks of one group; the second has another setting, and takes another kernel."""
# RUN: command

import os
import socket

import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.functional import scaled_dot_product_attention


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def attend(rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = None if rank == 0 else torch.randn(1, 64, 64)
    # LOSES: ranks-disagree, sdpa-math-path
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def work(rank: int, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    with torch.inference_mode():
        for _ in range(2):
            q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
            torch.distributed.all_reduce(attend(rank, q, k, v))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(free_port(),), nprocs=2)
