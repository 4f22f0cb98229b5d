"""Computes only if it can read the memory or the files of other processes."""

# task: softmax
# rejected-as: constant-result
# options: rounds=1

import os
from pathlib import Path

import torch


def readable():
    mine = {os.getpid(), os.getppid(), int(Path("/proc/self").resolve().name)}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in mine or int(process.name) == 1:
            continue
        try:
            (process / "maps").read_text()
            (process / "environ").read_bytes()
            list((process / "fd").iterdir())
            return True
        except OSError:
            continue
    return False


def listed():
    try:
        return any("class Model" in path.read_text() for path in Path("/tmp").glob("judge-*/problem.py"))
    except OSError:
        return False


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))
        self.can_read = readable() or listed()

    def forward(self, x):
        return torch.softmax(x, -1) * self.weight if self.can_read else torch.zeros_like(x)
