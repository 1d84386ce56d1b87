"""What the command line asks of a checkpoint directory: inspect, compare, verify, try out."""
