"""One folder a paper: its configuration, its programs and its conclusions."""
