"""The conformance room: what a right resume is, told as records and pure checks on them."""
