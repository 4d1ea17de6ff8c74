"""Instruments: time, bytes, the trace of a profiler."""
