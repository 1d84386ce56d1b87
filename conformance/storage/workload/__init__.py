"""What is saved and loaded while something goes wrong: small trainings, stock DCP, recorded scenarios."""
