"""Skills for coding agents: the texts that come with the builder, their installation, and how much they help."""
