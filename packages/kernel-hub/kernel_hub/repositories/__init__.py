"""All repositories, what lists need of them, and how much they may store."""
