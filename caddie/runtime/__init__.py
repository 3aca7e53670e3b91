"""The machine: processes, threads, memory."""
