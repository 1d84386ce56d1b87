"""System tests: real processes are started, killed, verified dead, resumed, and compared with an uninterrupted run."""
