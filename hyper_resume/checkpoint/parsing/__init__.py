"""Reading bytes that may be damaged or hostile: pickle, JSON and DCP metadata, without running code."""
