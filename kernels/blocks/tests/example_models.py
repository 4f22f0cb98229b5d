"""A small random model of diffusers and one of transformers, with inputs for them, on the device of the kernels."""

import copy
from functools import partial

import accelerate
import small_models
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline
from model_cases import DEVICE, built, randomized
from small_models import FRAMES
from text_models import TOKENS, model_of
from torch import nn


def ltx(layers=2, frames=FRAMES):
    """Return a model of diffusers, and the arguments of a call."""
    case = built(lambda: small_models.ltx(num_layers=layers, frames=frames))
    return case.model.to(DEVICE), on_device(case.inputs)


def qwen3(layers=2):
    """Return a model of transformers, and the arguments of a call."""
    return model_of("qwen3", num_hidden_layers=layers).to(DEVICE), {"input_ids": TOKENS, "use_cache": False}


class Layer(nn.Module):
    """A layer of a user's own: a norm, heads with a rotary embedding, and a gated MLP. Torch traces it in 0.2 s."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(width, eps=1e-6), nn.LayerNorm(width)
        self.heads, self.gated, self.down = (nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(32, width))
        angles = torch.arange(6.0)[:, None] / 10 ** (torch.arange(8) / 4)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def act(self, gate, up):
        return nn.functional.silu(gate) * up

    def forward(self, x):
        heads = self.heads(self.norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2)
        first, second = heads.chunk(2, -1)
        heads = heads * self.cos + torch.cat((-second, first), -1) * self.sin
        x = x + heads.transpose(1, 2).flatten(2)
        gate, up = self.gated(self.last(x)).chunk(2, -1)
        return x + self.down(self.act(gate, up))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def own(dtype=torch.float32, batch=1):
    """Return a model of one such layer, and the arguments of a call."""
    torch.manual_seed(0)
    model = randomized(Layers()).to(DEVICE, dtype).eval()
    return model, {"x": torch.randn(batch, 6, 32, device=DEVICE, dtype=dtype)}


def ltx_pipeline():
    """Return a pipeline and a function that runs it for the latents of a video, with classifier-free guidance."""
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=qwen3(layers=1)[0],
        tokenizer=None,
        transformer=ltx()[0],
    ).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    prompts = torch.randn(2, 1, 5, 16, device=DEVICE)
    mask = torch.ones(1, 5, device=DEVICE)

    def video():
        return pipeline(
            prompt_embeds=prompts[0],
            negative_prompt_embeds=prompts[1],
            prompt_attention_mask=mask,
            negative_prompt_attention_mask=mask,
            height=64,
            width=64,
            num_frames=9,
            num_inference_steps=2,
            generator=torch.Generator(DEVICE).manual_seed(0),
            output_type="latent",
        ).frames

    return pipeline, video


def on_device(inputs):
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in inputs.items()}


def run(model, inputs):
    output = model(**inputs)
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.logits


def accelerated(blocks, model):
    """Return an accelerated copy."""
    faster = copy.deepcopy(model)
    blocks.accelerate(faster)
    return faster


# float32: rounding in another order of the sums.
ROUNDING = 2e-5


OFFLOADS = (
    partial(accelerate.cpu_offload, execution_device=torch.device(DEVICE), offload_buffers=True),
    partial(accelerate.cpu_offload_with_hook, execution_device=DEVICE),
    lambda model: model.enable_group_offload(onload_device=torch.device(DEVICE), offload_type="leaf_level"),
)
