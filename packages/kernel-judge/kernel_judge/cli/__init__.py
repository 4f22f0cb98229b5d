"""Commands that `kernel-builder` has when this package is installed."""
