"""Step -> Executable; see manifest.py for the list."""
