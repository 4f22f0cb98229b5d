"""Local development: shells with a variant's toolchain or Torch, builds by pip, emulation."""
