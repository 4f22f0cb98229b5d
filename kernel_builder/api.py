"""The builder's public Python API: create a project, build it for the current device, and measure calls.

Programs that build and measure kernels, such as torch-kernel-judge, import this module and no other module of the
builder. It imports Torch.

| purpose | names |
| --- | --- |
| projects | `create_project`, `read_project`, `python_name`, `in_work_tree`, `Project` |
| builds | `build_for_device`, `require_built` |
| time | `clock`, `Clock`, `sets_needed`, `copies`, `estimate`, `Estimate` |
| accuracy | `deviation`, `Deviation`, `fault`, `ALLOWED_PEERS` |
| memory | `poisoned`, `POISON`, `size` |
"""

from __future__ import annotations

from kernel_builder.config.project import Project, python_name
from kernel_builder.config.project_files import in_work_tree, read_project
from kernel_builder.develop.choice import build_for_device, require_built
from kernel_builder.measure.accuracy import POISON, deviation, fault, poisoned
from kernel_builder.measure.case import ALLOWED_PEERS, copies, size
from kernel_builder.measure.results import Deviation, Estimate, estimate
from kernel_builder.measure.timing import Clock, clock, sets_needed
from kernel_builder.scaffold import create as create_project

__all__ = [
    "ALLOWED_PEERS",
    "POISON",
    "Clock",
    "Deviation",
    "Estimate",
    "Project",
    "build_for_device",
    "clock",
    "copies",
    "create_project",
    "deviation",
    "estimate",
    "fault",
    "in_work_tree",
    "poisoned",
    "python_name",
    "read_project",
    "require_built",
    "sets_needed",
    "size",
]
