"""Candidates for any device: cheats with the names of their rejections, and honest ones of unusual forms."""

from judge_samples import read_samples

CHEATS, HONEST = read_samples("cpu_samples.toml")
