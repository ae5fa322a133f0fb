"""What a process answers over HTTP: how it is."""
