"""What runs inside an engine that is not Reef's own: this folder alone is put on its path."""
