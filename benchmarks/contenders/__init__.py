"""The contenders: this library, other libraries, the limits of the hardware, and the states that all of them save and load."""
