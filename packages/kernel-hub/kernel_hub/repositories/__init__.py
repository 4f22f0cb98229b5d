"""All repositories, their index, and the space that they may use."""
