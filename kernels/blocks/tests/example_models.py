"""A small random model of diffusers and one of transformers, with inputs for them, on the device of the kernels."""

import copy

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from model_cases import randomized
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config, T5EncoderModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES, HEIGHT, WIDTH = 2, 3, 4


def ltx(dtype=torch.float32, layers=2, batch=1):
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=layers,
        caption_channels=16,
    )
    inputs = {
        "hidden_states": torch.randn(batch, FRAMES * HEIGHT * WIDTH, 8, dtype=dtype),
        "encoder_hidden_states": torch.randn(batch, 5, 16, dtype=dtype),
        "timestep": torch.linspace(900.0, 100.0, batch),
        "encoder_attention_mask": torch.ones(batch, 5),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "return_dict": False,
    }
    return nn.Module.to(randomized(model), DEVICE, dtype).eval(), on_device(inputs)


def qwen3(dtype=torch.float32, layers=2, batch=1):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    inputs = {"input_ids": torch.arange(7 * batch).view(batch, 7) % 61, "use_cache": False}
    return randomized(Qwen3ForCausalLM(config)).to(DEVICE, dtype).eval(), on_device(inputs)


class Layer(nn.Module):
    """A layer of a user's own: a norm, heads with a rotary embedding, and a gated MLP. Torch traces it in 0.2 s."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(width, eps=1e-6), nn.LayerNorm(width)
        self.heads, self.gated, self.down = (nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(32, width))
        angles = torch.arange(6.0)[:, None] / 10 ** (torch.arange(8) / 4)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x):
        heads = self.heads(self.norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2)
        first, second = heads.chunk(2, -1)
        heads = heads * self.cos + torch.cat((-second, first), -1) * self.sin
        x = x + heads.transpose(1, 2).flatten(2)
        gate, up = self.gated(self.last(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


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
    """Return a pipeline and a function that runs it for a video, with classifier-free guidance."""
    stages = 4
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8,) * stages,
        decoder_block_out_channels=(8,) * stages,
        layers_per_block=(1,) * (stages + 1),
        decoder_layers_per_block=(1,) * (stages + 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * (stages + 1),
        upsample_residual=(False,) * stages,
        upsample_factor=(1,) * stages,
        patch_size=1,
    )
    encoder = T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=encoder, tokenizer=None, transformer=ltx()[0]
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
            height=32,
            width=32,
            num_frames=9,
            num_inference_steps=2,
            generator=torch.Generator(DEVICE).manual_seed(0),
            output_type="pt",
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


def difference(x, y):
    """Return the norm of x - y, divided by that of y."""
    assert x.shape == y.shape and x.dtype == y.dtype
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# float32: rounding in another order of the sums.
ROUNDING = 2e-5
