"""Prints the directory of the headers and sources: `python -m kernel_emulator`."""

from kernel_emulator import DIRECTORY

print(DIRECTORY)
