"""Means to see, on a machine without a GPU and with one process, what many GPUs would do.

`ranks` plays rank 0 of any number of ranks, `device` passes for an asynchronous device, and
`counting` lists host syncs and collectives with the line that causes each.
"""
