"""Rules over metric logs: anomalies, phases, health."""
