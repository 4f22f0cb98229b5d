"""From project directories to packages: `selection` chooses, `run` builds, `summary` reports."""

from kernel_builder.pipeline.run import build, exclusive
from kernel_builder.pipeline.selection import BuildRequest
from kernel_builder.pipeline.summary import BuildSummary

__all__ = ["BuildRequest", "BuildSummary", "build", "exclusive"]
