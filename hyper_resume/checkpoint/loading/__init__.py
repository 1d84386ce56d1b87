"""A load on its way: files verified, entries read into buffers, the live state filled last."""
