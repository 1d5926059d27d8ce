"""diffusers: a UNet with cross-attention removes noise from latents under a text, in six steps."""

import hashlib

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=32,
    in_channels=4,
    out_channels=4,
    block_out_channels=(32, 64),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=64,
    attention_head_dim=8,
    norm_num_groups=8,
).eval()
scheduler = DDIMScheduler()
scheduler.set_timesteps(6)

text = torch.randn(2, 77, 64)
latents = torch.randn(1, 4, 32, 32)
with torch.no_grad():
    for step in scheduler.timesteps:
        both = scheduler.scale_model_input(torch.cat([latents, latents]), step)
        without, under_text = unet(both, step, encoder_hidden_states=text).sample.chunk(2)
        noise = without + 7.5 * (under_text - without)
        latents = scheduler.step(noise, step, latents).prev_sample
print(hashlib.sha256(latents.numpy().tobytes()).hexdigest())
