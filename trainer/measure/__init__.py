"""Instruments: time, bytes, and traces of a profiler."""
