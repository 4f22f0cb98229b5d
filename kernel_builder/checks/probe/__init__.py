"""The program that loads packages in an interpreter of its own; see `__main__`."""
