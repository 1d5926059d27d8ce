"""numpy reads the data, torch computes, numpy takes the result at the end."""

import numpy as np
import torch


def main() -> None:
    data = torch.from_numpy(np.random.default_rng().random((256, 64), dtype=np.float32))
    weight = torch.randn(64, 64)
    results = []
    with torch.inference_mode():
        for start in range(0, 256, 64):
            results.append(torch.relu(data[start : start + 64] @ weight))
    assert torch.cat(results).numpy().shape == (256, 64)


main()
