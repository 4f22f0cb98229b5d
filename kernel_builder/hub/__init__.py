"""The client's side of a Hub: publishing, verifying, signing, exporting and importing kernels."""
