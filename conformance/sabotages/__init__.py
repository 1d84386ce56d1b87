"""The sabotages: defects put into hyper_resume on purpose, one module per area that they break, and their catalogue."""
