"""From records to the verdict: cases, matrix, ledger, restores, the definition of done, the trend."""
