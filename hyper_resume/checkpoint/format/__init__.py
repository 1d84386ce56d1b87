"""The files of a step directory: their names and contents, how each is encoded and decoded, and how its digest is checked."""
