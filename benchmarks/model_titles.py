"""The names of the cases of `models.py` in tables, in their order."""

TITLES = {
    "ltx-2464": "LTX-Video, 2,464 tokens",
    "ltx-7056": "LTX-Video, 7,056 tokens",
    "wan-7800": "Wan 2.1 1.3B, 7,800 tokens",
    "wan-32760": "Wan 2.1 1.3B, 32,760 tokens",
    "qwen3-128": "Qwen3-8B, prefill of 128",
    "qwen3-8192": "Qwen3-8B, prefill of 8,192",
    "qwen3-decode": "Qwen3-8B, one token, cache of 1,024",
    "flux-4608": "Flux.1, 1024x1024",
    "qwen-image-4352": "Qwen-Image, 1024x1024",
    "qwen3-moe-1024": "Qwen3-MoE with 8 layers, prefill of 1,024",
    "qwen3-vl-1152": "Qwen3-VL-4B, an image of 1024x1024 and text",
    "gemma3n-1024": "Gemma 3n E2B, prefill of 1,024",
    "z-image-4096": "Z-Image, 1024x1024",
}
