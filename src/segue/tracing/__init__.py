"""OpenTelemetry's spans: which trace a request belongs to, and how spans reach a collector."""
