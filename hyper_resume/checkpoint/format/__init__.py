"""The files and directories of a root: names, staging and commit, content, digests."""
