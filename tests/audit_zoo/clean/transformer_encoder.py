"""torch's own encoder layer in eval mode, on its fast path."""

import torch


def main() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 24, 64))


main()
