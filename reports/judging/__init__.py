"""From records to the verdict and the sentence that explains it: cases, matrix, sample ledger, restores, criteria, trend."""
