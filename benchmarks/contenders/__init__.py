"""The contenders: this library and others (their synchronous and asynchronous saves), the hardware's limits, states to save."""
