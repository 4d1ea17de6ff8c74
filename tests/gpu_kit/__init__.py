"""Tools that show, without a GPU and in one process, what a job on many GPUs would do.

`ranks` simulates rank 0 of any number of ranks, `device` simulates an asynchronous device, and
`counting` lists host syncs and collectives with the line that causes each.
"""
