"""Candidates for a GPU: cheats with the names of their rejections, and honest ones."""

from judge_samples import read_samples

CHEATS, HONEST = read_samples("gpu_samples.toml")
