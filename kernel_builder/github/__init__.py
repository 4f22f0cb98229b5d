"""What the workflows in `.github/` ask GitHub, and what they tell it."""
