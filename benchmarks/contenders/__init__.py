"""What is measured: this library, its peers, the limits of the hardware, and the states that they all work on."""
