"""`python -m kernel_builder`: the command line where no script is installed for it."""

from kernel_builder.cli import main

main(prog_name="kernel-builder")
