"""From records to the verdict: cases, matrix, sample ledger, restores, acceptance criteria, trend."""
