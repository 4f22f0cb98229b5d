"""Local development: shells with a variant's toolchain or Torch, compile commands for editors, emulation."""
