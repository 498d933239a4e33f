"""Text from language models: a tool of the command line, and the same from Python."""
