"""What touches real models: loading them, moving them, watching memory while they run."""
