"""The system-test room: real processes started, killed, proved dead, resumed, and held against an uninterrupted run."""
