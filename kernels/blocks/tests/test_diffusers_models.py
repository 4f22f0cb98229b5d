"""All models of diffusers: results and gradients as close to float32 as those of their own forwards."""

import pytest
import small_image_models
import small_video_models
from model_cases import (
    check_bfloat16_gradients,
    check_bfloat16_output,
    check_float32_gradients,
    check_float32_output,
)

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")

CASES = {**small_image_models.CASES, **small_video_models.CASES}
GRADIENTS = (
    *("Flux.1", "Flux.2", "Qwen-Image", "Qwen-Image, edited", "SD 3.5", "PixArt", "SDXL"),
    *("LTX-Video", "Wan", "Wan, time per token", "HunyuanVideo", "CogVideoX"),
)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_output_is_as_close_to_float32_as_the_models_own(blocks, name):
    check_bfloat16_output(blocks, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_float32_output_is_that_of_the_model(blocks, name):
    check_float32_output(blocks, CASES[name])


@pytest.mark.parametrize("name", GRADIENTS)
def test_bfloat16_gradients_are_as_close_to_float32_as_the_models_own(blocks, name):
    check_bfloat16_gradients(blocks, CASES[name])


@pytest.mark.parametrize("name", GRADIENTS)
def test_float32_gradients_are_those_of_the_model(blocks, name):
    check_float32_gradients(blocks, CASES[name])
