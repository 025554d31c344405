"""The report of run folders: numbers, tables, plots. Reads results only; knows nothing of decoding."""
