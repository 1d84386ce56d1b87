"""What saving, loading and skipping cost, measured beside what the hardware allows and what people use today."""
