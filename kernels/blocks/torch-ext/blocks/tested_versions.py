"""The releases of libraries whose modules the replacements were tested with, oldest and newest."""

TESTED = {
    "diffusers": ("0.41", "0.42"),
    "transformers": ("5.22", "5.24"),
}
