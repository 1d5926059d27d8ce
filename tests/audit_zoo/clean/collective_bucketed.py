"""Gradients reduced in one flat bucket."""

import tempfile

import torch
import torch.distributed


def reduce_gradients(model: torch.nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(bucket)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, bucket.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


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
