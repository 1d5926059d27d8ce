"""Gradients reduced parameter by parameter."""

import tempfile

import torch
import torch.distributed


def reduce_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)  # LOSES: collectives-one-by-one


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
        for _ in range(2):
            model(torch.randn(4, 32)).square().mean().backward()
            reduce_gradients(model)
            model.zero_grad()
        torch.distributed.destroy_process_group()


main()
