"""What programs did to the disk: the recorder, its hooks, the operations, and the trees that they give."""
