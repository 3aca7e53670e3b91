"""The machine: processes, threads, memory, and the progress of long work."""
