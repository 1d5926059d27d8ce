"""diffusers: a DiT draws two images of given classes in eight steps, with guidance."""

import hashlib

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

torch.manual_seed(0)
transformer = DiTTransformer2DModel(
    num_attention_heads=4,
    attention_head_dim=32,
    in_channels=4,
    out_channels=8,
    num_layers=2,
    sample_size=16,
    patch_size=2,
    num_embeds_ada_norm=1000,
)
vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=16)
pipeline = DiTPipeline(transformer.eval(), vae.eval(), DDIMScheduler())
pipeline.set_progress_bar_config(disable=True)

images = pipeline(
    class_labels=[7, 42],
    num_inference_steps=8,
    generator=torch.Generator().manual_seed(1),
    output_type="np",
).images
print(hashlib.sha256(images.tobytes()).hexdigest())
