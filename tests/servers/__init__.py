"""Real servers for the tests: private ones on free ports, or those that environment variables name."""
