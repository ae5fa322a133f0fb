"""Those who look on: what subscribes to telemetry, and turns it into logs and metrics."""
